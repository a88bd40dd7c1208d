"""Loops that run on the host, over arrays that stay on disk: `jaxtile.stream`.

Read `streaming` (the public face), `program` (the schedule, and its passes in order), `passes` (the
tiles of one region, forwards and backwards), `batches` (tiles that are computed at once),
`pipeline` (tiles one after the other), `held` (what is there between passes), `ends` (what is read,
written and stored) and `masked` (a part of what is read).
"""
