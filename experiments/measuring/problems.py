"""The models at their reference sizes, as functions to plan, tile and measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import models

from .third_party import NETWORKS, Network


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
    "haiku_resnet50": Reference((1, 2048, 2048, 3), 1000),
    "convnext": Reference((1, 2048, 2048, 3), 1000),
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
    if name in NETWORKS:
        return classifier(NETWORKS[name](dtype), shape, dtype, reference.classes, abstract=abstract)

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


def classifier(
    network: Network, shape: tuple[int, ...], dtype: Any, classes: int, *, abstract: bool = False
) -> Problem:
    """A network of another library, with the mean cross-entropy of one label per image.

    Its first weights would not do: those of Haiku's last layer are zero, and so are all gradients
    before it. Arithmetic with zeros takes a GPU less power, and with it less time.
    """

    def loss(params: Any, state: Any, image: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        scores, state = network.apply(params, state, image)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), state

    def arguments() -> tuple[Any, ...]:
        image = jax.random.normal(jax.random.key(0), shape, dtype)
        labels = jax.random.randint(jax.random.key(1), shape[:1], 0, classes)
        # To initialise runs the network once; a compiler sees that nothing needs its scores.
        return *jax.jit(network.init)(jax.random.key(2), image), image, labels

    if abstract:
        found = jax.eval_shape(arguments)
    else:
        params, *others = arguments()
        found = (_moved(params), *others)
    return Problem(loss, found, (None, None, (1, 2), None))


def _moved(params: Any) -> Any:
    """Weights a little away from where they were, as after some steps of training."""
    random = np.random.default_rng(0)

    def moved(w: jax.Array) -> jax.Array:
        step = 0.02 * random.standard_normal(w.shape)
        return jnp.asarray(np.asarray(w) + step.astype(w.dtype))

    return jax.tree.map(moved, params)
