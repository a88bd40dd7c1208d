"""Train convolutional networks on images larger than the accelerator's memory, exactly.

`checkpoint` is to space what `jax.checkpoint` is to depth. Read the idea in file order: `_geometry`
(intervals), `_rules` (what each primitive needs), `_trace`, `_values` and `_graph` (which
dimensions are tiled), `_tile` (one tile), `_calls` (custom derivatives), `_targets` and `_regions`
(where to cut), `_recompute` and `_loop` (regions and their derivatives), `_mesh`, `_collectives`
and `_sharded` (the same on many devices), `_checkpoint` (the public face), `_stream` (the same from
disk to disk), `_cost` and `_explain`, `_operations` and `_liveness` (work and live bytes of any
function), `_outline` (what a planner sees); `_compiled`, `_estimate`, `_hlo` and `_memory` (true
and estimated bytes). `ops` are operations on arrays; `jaxtile.nn`, which imports Flax, has layers.
"""

from . import ops as ops
from ._checkpoint import checkpoint as checkpoint
from ._compiled import Bytes as Bytes
from ._compiled import compiled_bytes as compiled_bytes
from ._errors import TilingError as TilingError
from ._estimate import Estimate as Estimate
from ._estimate import estimate_memory as estimate_memory
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._liveness import replay as replay
from ._memory import Memory as Memory
from ._memory import memory as memory
from ._operations import Operation as Operation
from ._operations import Operations as Operations
from ._operations import operations as operations
from ._outline import Choice as Choice
from ._outline import Outline as Outline
from ._outline import outline as outline
from ._stream import stream as stream
from ._version import __version__ as __version__
