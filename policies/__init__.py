"""What to store, recompute or offload: decisions on top of `jaxtile`."""

from ._frameworks import chainer as chainer
from ._frameworks import retained as retained
from ._frameworks import tensorflow as tensorflow
from ._frameworks import training_steps as training_steps
from ._frameworks import untied as untied
