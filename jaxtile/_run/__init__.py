"""Running a schedule, forwards and backwards.

Read `execute` (all regions in order; a call comes in here), `recompute` (the function that joins
the passes: what it keeps of a region is its inputs, and of reductions what cannot be computed
again), `tile` (one tile) and `loop` (tiles one after the other; `kinds` says which are in one loop,
`in_place` which cotangents lie where others lay, `alike` which tiles are skipped). Beside `loop`
there are `sharded` (the same on each device of a mesh), `whole` (regions in one piece, and groups
of them) and `again` (the backward pass runs something else). `arrays`, `slots` and `ordering` (what
exists when, and in which memory) are small tools.
"""
