"""From a function to a graph whose values know which of their dimensions are tiled.

Read `trace` (the function and its tiled arguments), `inline` (calls), `values` (the graph's parts),
`build` (a call comes in here), `walk` (over the jaxpr), `nodes` (what the walk makes) and `alike`
(which equations repeat others); then `work` and `operations`, which count what a graph costs.
"""
