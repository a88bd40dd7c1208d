"""Networks of other libraries, as they are: no operation, layer or name of jaxtile is in them.

`haiku_resnet50` is Haiku's, which must be installed, and uses and updates batch statistics.
`convnext` is ConvNeXt-T in Linen.

`jax.checkpoint` needs names to save blocks by. Both libraries can call a function around each
method of a module, which gives names to the inputs of blocks without a change of the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from .convnext import Block, ConvNeXt

BLOCK = "block"
"""The name of blocks' inputs in `with_named_blocks`."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network as two functions, and how its library finds the blocks."""

    init: Callable[[jax.Array, jax.Array], tuple[Any, Any]]
    """A key and an image to weights, and to the rest of the state."""
    apply: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    """Weights, state and an image to scores, and to the new state."""
    block: type
    intercept_methods: Callable[..., Any]


def haiku_resnet50(dtype: Any) -> Network:
    del dtype  # Haiku's layers take that of the image.
    hk = _haiku()
    return of_haiku(lambda: hk.nets.ResNet50(1000))


def convnext(dtype: Any) -> Network:
    return of_linen(ConvNeXt(dtype=dtype), Block)


NETWORKS: dict[str, Callable[[Any], Network]] = {
    "haiku_resnet50": haiku_resnet50,
    "convnext": convnext,
}
"""By name, as functions of the type of weights and activations."""


def of_haiku(make: Callable[[], Any]) -> Network:
    """A ResNet of Haiku in training mode, made anew whenever it is called."""
    hk = _haiku()
    model = hk.transform_with_state(lambda image: make()(image, is_training=True))

    def apply(params: Any, state: Any, image: jax.Array) -> tuple[jax.Array, Any]:
        return model.apply(params, state, None, image)

    return Network(model.init, apply, hk.nets.ResNet.BlockV1, hk.intercept_methods)


def of_linen(module: nn.Module, block: type) -> Network:
    """A module of Linen that has weights only."""

    def init(key: jax.Array, image: jax.Array) -> tuple[Any, Any]:
        return module.init(key, image)["params"], {}

    def apply(params: Any, state: Any, image: jax.Array) -> tuple[jax.Array, Any]:
        return module.apply({"params": params}, image), state

    return Network(init, apply, block, nn.intercept_methods)


def with_named_blocks(network: Network, loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of a network, with a name for the input of each block."""

    def intercept(method: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, network.block) and context.method_name == "__call__":
            args = (checkpoint_name(args[0], BLOCK), *args[1:])
        return method(*args, **options)

    def named(*args: Any) -> Any:
        with network.intercept_methods(intercept):
            return loss(*args)

    return named


def _haiku() -> Any:
    try:
        import haiku
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "haiku_resnet50 needs the package dm-haiku: pip install dm-haiku"
        ) from error
    return haiku
