"""Functions with derivative rules of their own: `custom_jvp` and `custom_vjp`; and branches.

Importing this room enters their rules into the table of `jaxtile._rules`, as the rules' own files
do. It is a room apart because these rules look inside a function, and so stand on the graph and on
the tile. Read `calls` (the rules), `graphs` (what they are traced to), `call_tile` (what a tile
computes), `proof` with `linear` (a backward rule may run on a tile's share), `branches` (`cond`)
and `scanned` (loops over layers before jax 0.12). `_rules/guard.py` is around what must not be
differentiated.
"""

from . import branches as branches
from . import calls as calls
