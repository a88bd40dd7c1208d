"""Rules per primitive, one file per family.

Importing this package fills the table in `_registry`.
"""

from . import _contraction as _contraction
from . import _elementwise as _elementwise
from . import _gather as _gather
from . import _generated as _generated
from . import _reductions as _reductions
from . import _reshape as _reshape
from . import _shape as _shape
from . import _windowed as _windowed
from ._registry import Axes as Axes
from ._registry import Equation as Equation
from ._registry import Need as Need
from ._registry import Reduction as Reduction
from ._registry import Rule as Rule
from ._registry import Step as Step
from ._registry import Windows as Windows
from ._registry import find as find
from ._registry import names as names
from ._registry import register as register
from ._registry import tiled as tiled
from ._registry import untiled as untiled
