"""From a function to a graph whose values know which of their dimensions are tiled.

Read `trace` (the function and its tiled arguments), `inline` (calls), `values` (the graph's parts),
`build` (the walk over the jaxpr) and `alike` (which equations repeat others); then `work` and
`operations`, which count what a graph costs.
"""
