"""Rules per primitive, one file per family.

Read `registry` first: what a rule is. Importing this package fills the table there. The rules are
in `elementwise`, `shape`, `reshape`, `generated`, `placement`, `windowed`, `contraction`, `gather`,
`matrices`, `updates`, `clamp`, `chain` and `reductions`; those of `custom_jvp`, `custom_vjp` and
`cond` in `jaxtile._derivatives`. The other files have none. `traits` says what else is known of a
primitive, and `accumulation` what a reduction over tiles is. `convolve` (with `planes`, `products`,
`transposes` and `dimension_order`) and `max_pool` have gradients that are faster than JAX's; these
are stated by `derivative`, `late` lets them wait, and `plainly` says where they are not used.
`guard` is an identity that refuses to be differentiated, and `manual` is for arrays in a
`jax.shard_map`.
"""

from . import chain as chain
from . import clamp as clamp
from . import contraction as contraction
from . import elementwise as elementwise
from . import gather as gather
from . import generated as generated
from . import matrices as matrices
from . import placement as placement
from . import reductions as reductions
from . import reshape as reshape
from . import shape as shape
from . import updates as updates
from . import windowed as windowed
from .accumulation import Masks as Masks
from .accumulation import Reduction as Reduction
from .accumulation import Share as Share
from .accumulation import State as State
from .registry import Axes as Axes
from .registry import Equation as Equation
from .registry import Need as Need
from .registry import Rule as Rule
from .registry import Step as Step
from .registry import Windows as Windows
from .registry import find as find
from .registry import names as names
from .registry import register as register
from .registry import tiled as tiled
from .registry import traits as traits
from .registry import untiled as untiled
from .traits import Traits as Traits
