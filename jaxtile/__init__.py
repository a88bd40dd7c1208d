"""Train convolutional networks on images larger than the accelerator's memory, exactly."""

from ._checkpoint import checkpoint as checkpoint
from ._errors import TilingError as TilingError
