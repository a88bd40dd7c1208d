"""Models by name, as configs and command lines write them."""

from __future__ import annotations

import difflib
from typing import Any

from flax import nnx

from .alexnet import AlexNet
from .local_cnn import LocalCNN
from .resnet50 import ResNet50
from .unet import UNet
from .vgg16 import VGG16

_MODELS: dict[str, type[nnx.Module]] = {
    "unet": UNet,
    "resnet50": ResNet50,
    "alexnet": AlexNet,
    "local_cnn": LocalCNN,
    "vgg16": VGG16,
}


def names() -> list[str]:
    """The models that `create` makes."""
    return list(_MODELS)


def create(name: str, *args: Any, **options: Any) -> nnx.Module:
    """A model by name; the options are those of its class.

    >>> import models
    >>> from flax import nnx
    >>> type(models.create("unet", channels=4, depth=1, rngs=nnx.Rngs(0))).__name__
    'UNet'
    """
    if name not in _MODELS:
        near = difflib.get_close_matches(name, _MODELS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no model {name!r}{hint} The models are {', '.join(_MODELS)}")
    return _MODELS[name](*args, **options)
