"""Where a graph is cut, and what one tile computes.

Read `targets` (what must exist as a whole array, and on which grid), `regions` (what is computed
together, in which order) and `tile` (the windows and instructions of one tile).
"""
