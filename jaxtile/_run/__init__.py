"""Running a schedule, forwards and backwards.

Read `recompute` (what is kept between the passes: nothing but inputs), `loop` (tiles one after the
other), `sharded` (the same on each device of a mesh) and `execute` (all regions in order).
"""
