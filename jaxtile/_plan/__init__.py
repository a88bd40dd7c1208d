"""The budget planner: the fastest schedule whose compiled step fits a number of bytes.

Read `planner` (the public face), `stage`, `plan` and `picture` (what a plan is), `costs` (rates of
a device; of an H200 in `h200.json`), `measuring` (how they are found out) and `absent` (a device
that is not there). One way to a schedule: `kernels` and `model` (time and bytes of every stretch
between two cuts), `solver` (the best stretches). The other way decides about each result by itself:
`states` (what can be decided), `facts` (the network as numbers), `regions` (what is computed
together), `assignment` (time and bytes; of one region in `region_costs`, to and from the host in
`traffic`), `descent` (good ones of these, deciding about `groups` at once; `found` is what it has
seen), `spans` (good ones of parts of a network, put together). Then `candidates` (both in one form)
and `search` (solve, compile, correct).
"""
