"""Where a graph is cut, and what one tile computes.

Read `grid` (in tiles or in one piece), `targets` (what must exist as a whole array, and on which
grid), `region` (what runs in one go), `regions` (what is computed together, in which order),
`again` (what the backward pass computes again, and from what), `tile` (what one tile is, and how it
is evaluated), `demands` (which windows it needs) and `stages` (what of it is traced once). A call
comes in at `regions.schedule_of`.
"""
