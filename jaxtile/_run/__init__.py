"""Running a schedule, forwards and backwards.

Read `recompute` (the function that joins the passes: what it keeps of a region is its inputs, and
of reductions what cannot be computed again), `loop` (tiles one after the other; `in_place` says
which cotangents lie where others lay), `sharded` (the same on each device of a mesh), `grouped`
(several regions, run again together) and `execute` (all regions in order; a call comes in here).
"""
