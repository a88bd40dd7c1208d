"""Tiled arrays on many devices.

Read `halos` (who owns which positions, and who sends which to whom), `devices` (the mesh as the
user gives it) and `collectives` (reductions over devices).
"""
