"""For Flax NNX: `checkpoint`, and layers: Flax's own with `tiles=`, and those it does not have.

With `tiles=(rows, columns)` a layer runs tile by tile by itself; inside `jaxtile.checkpoint` the
outer schedule wins.
"""

from ._checkpoint import checkpoint as checkpoint
from ._checkpoint import explain as explain
from ._checkpoint import operations as operations
from ._layers import BatchNorm as BatchNorm
from ._layers import Conv as Conv
from ._layers import ConvTranspose as ConvTranspose
from ._layers import Dropout as Dropout
from ._layers import LocalConv as LocalConv
