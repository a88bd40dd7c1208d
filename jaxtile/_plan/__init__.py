"""The budget planner: the fastest schedule whose compiled step fits a number of bytes.

Read `planner` (the public face), `stage`, `plan` and `picture` (what a plan is), `kernels` and
`model` (time and bytes of every stretch between two cuts), `solver` (the best stretches),
`assignment` (time and bytes if each result is decided about by itself; of one region in
`region_costs`), `descent` (good ones of these), `spans` (good ones of parts of a network, put
together), `search` (solve, compile, correct); `costs` (rates of a device) and `absent` (a device
that is not there).
"""
