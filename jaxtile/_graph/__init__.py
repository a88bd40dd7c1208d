"""From a function to a graph whose values know which of their dimensions are tiled.

Read `trace` (the function and its tiled arguments; `static` are those that are not arrays),
`inline` (calls), `values` (the graph's parts), `build` (a call comes in here), `walk` (over the
jaxpr), `nodes` (what the walk makes) and `refusal` (what cannot be made). The walk meets things
that are not one equation at one place: `branches`, `layers` and `unrolled` (loops), `lookup`, and
dimensions that were merged (`joint`, with `merged_calls`, `merged_windows` and `restated`). What is
known of a finished graph is in `alike` (which equations repeat others), `clamps`, `chains` and
`loss`; what it costs is counted by `work`, `operations` and `sample`.
"""
