"""Operations of convolutional networks, as functions of arrays.

Images are channels-last (`NHWC`, `NDHWC`, `NWC`), kernels `HWIO`. Every function is plain JAX, and
transparent to `jaxtile.checkpoint`. With `tiles=(rows, columns)` it runs tile by tile by itself,
with a workspace of one tile, forwards and backwards (`center_crop` needs none).
"""

from ._conv import conv as conv
from ._conv import conv_transpose as conv_transpose
from ._conv import depthwise_conv as depthwise_conv
from ._dropout import coordinate_dropout as coordinate_dropout
from ._local import local_conv as local_conv
from ._loss import softmax_cross_entropy as softmax_cross_entropy
from ._norm import batch_norm as batch_norm
from ._norm import batch_statistics as batch_statistics
from ._norm import local_response_norm as local_response_norm
from ._pool import avg_pool as avg_pool
from ._pool import max_pool as max_pool
from ._resample import center_crop as center_crop
from ._resample import crop_concat as crop_concat
from ._resample import upsample as upsample
