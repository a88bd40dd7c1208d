"""Models by name, as configs and command lines write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._names import check_options, find
from .alexnet import AlexNet
from .local_cnn import LocalCNN
from .resnet50 import ResNet50
from .unet import UNet
from .vgg16 import VGG16

_MODELS: dict[str, Callable[..., Any]] = {
    "unet": UNet,
    "resnet50": ResNet50,
    "alexnet": AlexNet,
    "local_cnn": LocalCNN,
    "vgg16": VGG16,
}


def names() -> list[str]:
    """The models that are built in."""
    return list(_MODELS)


def maker(name: str) -> Callable[..., Any]:
    """The class or function behind a name, as `"unet"` or `"my_package.nets:MyNet"`."""
    return find(name, _MODELS, "model")


def create(name: str, *args: Any, **options: Any) -> Any:
    """A model by name; the options are those of its class or function.

    >>> import models
    >>> from flax import nnx
    >>> type(models.create("unet", channels=4, depth=1, rngs=nnx.Rngs(0))).__name__
    'UNet'
    """
    make = maker(name)
    check_options(make, f"the model {name!r}", options)
    return make(*args, **options)
