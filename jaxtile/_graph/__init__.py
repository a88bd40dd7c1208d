"""From a function to a graph whose values know which of their dimensions are tiled.

Read `trace` (the function and its tiled arguments), `inline` (calls), `values` (the graph's parts)
and `build` (the walk over the jaxpr); then `work` and `operations`, which count what a graph costs.
"""
