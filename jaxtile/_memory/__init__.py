"""How many bytes a function needs: compiled, estimated, observed.

Read `compiled` (the compiler's answer), `estimate` (a guess in milliseconds), `hlo`
(what a compiled program holds) and `report` (all of them side by side).
"""
