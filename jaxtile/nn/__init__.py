"""For Flax NNX: `checkpoint` for functions of modules, and layers.

The layers are Flax's own with an option more, and some that Flax does not have. With
`tiles=(rows, columns)` a layer runs tile by tile by itself; inside `jaxtile.checkpoint` the option
is ignored, because the schedule of the whole function decides.
"""

from ._checkpoint import checkpoint as checkpoint
from ._checkpoint import explain as explain
from ._checkpoint import operations as operations
from ._layers import BatchNorm as BatchNorm
from ._layers import Conv as Conv
from ._layers import ConvTranspose as ConvTranspose
from ._layers import Dropout as Dropout
from ._layers import LocalConv as LocalConv
