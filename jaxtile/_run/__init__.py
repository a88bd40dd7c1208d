"""Running a schedule, forwards and backwards.

Read `execute` (all regions in order; a call comes in here), `recompute` (the function that joins
the passes: what it keeps of a region is mostly its inputs, and of reductions what cannot be
computed again), `tile` (one tile) and `loop` (tiles one after the other; `in_place` says which
cotangents lie where others lay). What a loop does for a tile is in `forwards` and `backwards`, in
the steps of `work`; `scans` has the loops themselves, and three ways to order their tiles: `kinds`
(those that are shifted alike in a loop of their own), `beside` (transfers from and to host memory
while other tiles are computed) and `alike` (some are skipped). Beside `loop` there are `at_once`
(both passes in one loop, which does for a tile what `both` says), `sharded` (the same on each
device of a mesh), `whole` (regions in one piece, and groups of them) and `again` (the backward pass
runs something else). `arrays`, `slots`, `host_windows` and `ordering` (what exists when, and in
which memory) are small tools; `repeats` tells beforehand how many tiles will be skipped.
"""
