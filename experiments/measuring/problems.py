"""The models at their reference sizes, as functions to plan, tile and measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import models


@dataclasses.dataclass(frozen=True)
class Reference:
    shape: tuple[int, ...]
    classes: int | None
    """None: the loss takes no labels."""
    batch_is_tiled: bool = False


REFERENCES = {
    "vgg16": Reference((1, 4096, 4096, 3), None),
    "unet": Reference((8, 572, 572, 1), 2, batch_is_tiled=True),
    "resnet50": Reference((1, 4096, 4096, 3), 1000),
    "alexnet": Reference((128, 224, 224, 3), None, batch_is_tiled=True),
    "local_cnn": Reference((256, 41, 41, 1), 3034),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The loss of a model, with new batch statistics beside it, and its arguments."""

    loss: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Weights, the rest of the model's state, the image, and labels if there are any."""
    in_axes: tuple[Any, ...]


def shape_of(name: str, batch: int | None = None, size: int | None = None) -> tuple[int, ...]:
    """The shape of the image; by default the reference's."""
    b, n, _, channels = REFERENCES[name].shape
    return (batch or b, size or n, size or n, channels)


def problem(name: str, shape: tuple[int, ...], dtype: Any, *, abstract: bool = False) -> Problem:
    """A model on an image of this shape; `abstract`: only shapes, no numbers."""
    reference = REFERENCES[name]

    def make() -> nnx.Module:
        return models.create(name, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))

    model = nnx.eval_shape(make) if abstract else make()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, *data: jax.Array) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return merged.loss(*data), nnx.state(merged, nnx.BatchStat)

    def data() -> list[jax.Array]:
        image = jax.random.normal(jax.random.key(0), shape, dtype)
        if reference.classes is None:
            return [image]
        labels = jax.random.randint(jax.random.key(1), score[:-1], 0, reference.classes)
        return [image, labels]

    image = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    score = nnx.eval_shape(lambda model, x: model(x), model, image).shape
    arrays = jax.eval_shape(data) if abstract else data()
    spatial = (0, 1, 2) if reference.batch_is_tiled else (1, 2)
    axes = [spatial, spatial if len(score) == len(shape) else None][: len(arrays)]
    return Problem(loss, (params, rest, *arrays), (None, None, *axes))
