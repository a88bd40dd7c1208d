"""Train convolutional networks on images larger than the accelerator's memory, exactly.

`checkpoint` is to space what `jax.checkpoint` is to depth. Read the idea in this order: `_geometry`
(intervals), `_rules` (what each primitive needs of its inputs), `_graph` (which dimensions are
tiled), `_mesh` (who owns what, on many devices), `_regions` (where to cut, and what one tile
computes), `_derivatives` (functions with rules of their own), `_run` (loops and their derivatives),
`_layered` (scans over layers), `_schedule` (all of it put together), `_checkpoint` (the public
face). Beside that: `_explain`, `_stream` (from disk to disk), `_memory` (bytes), `policy` and
`_plan` (what is stored, by a budget). `ops` are operations on arrays; `jaxtile.nn`, which imports
Flax, has layers.
"""

from . import ops as ops
from . import policy as policy
from ._checkpoint import checkpoint as checkpoint
from ._checkpoint import explain as explain
from ._errors import TilingError as TilingError
from ._explanation import Explanation as Explanation
from ._graph.operations import Operations as Operations
from ._graph.operations import operations as operations
from ._memory.compiled import Bytes as Bytes
from ._memory.compiled import compiled_bytes as compiled_bytes
from ._memory.estimate import estimate_memory as estimate_memory
from ._memory.report import memory as memory
from ._plan.plan import Plan as Plan
from ._plan.planner import plan as plan
from ._plan.search import BudgetError as BudgetError
from ._stream.masked import masked as masked
from ._stream.streaming import stream as stream
from ._version import __version__ as __version__
