"""Flax NNX models, faithful to published graphs, on jaxtile's ops and layers.

Images are `NHWC`. Every model names its activations with `checkpoint_name`, in the words of the
graph it reproduces; a policy is a choice of those names. Models know no policy.
"""

from ._create import create as create
from ._create import maker as maker
from ._create import names as names
from ._names import call as call
from ._names import check_options as check_options
from ._names import find as find
from ._names import line_of as line_of
from ._network import Network as Network
from ._network import network as network
from ._weights import SUFFIXES as SUFFIXES
from ._weights import load_weights as load_weights
from .alexnet import AlexNet as AlexNet
from .local_cnn import LocalCNN as LocalCNN
from .resnet50 import ResNet50 as ResNet50
from .resnet50 import fold_batch_norm as fold_batch_norm
from .unet import UNet as UNet
from .vgg16 import VGG16 as VGG16
