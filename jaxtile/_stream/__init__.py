"""Evaluation from disk to disk: `jaxtile.stream`.

Read `streaming` (the public face, and the schedule that stores nothing), `passes` (the loops over
tiles, which run on the host) and `ends` (what is read from and written to).
"""
