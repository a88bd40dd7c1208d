"""The result of a network on a whole image: a map of classes, or one class."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxtile

from ..images import Image, create_image
from ..program.ending import undone
from .network import Map, Network, PredictionError
from .pixels import Pixels, Unbatched, table, writing

Progress = Callable[[int, int], Any]


def segment(
    network: Network,
    image: Image,
    out: str | os.PathLike,
    *,
    tile: int,
    probabilities: str | None = None,
    progress: Progress | None = None,
) -> Map:
    """Write the class of each pixel, or the probabilities of all classes in the given type."""
    area = Map.of(network, image.shape)
    task, space = network.learned.task, tuple(range(1, 1 + len(area.size)))

    def result(weights: Any, images: jax.Array) -> jax.Array:
        scores = network.scores(weights, images)
        scores = scores[(slice(None), *(slice(n) for n in area.size))]
        if probabilities:
            return task.probabilities(scores).astype(probabilities)
        return task.predict(scores)

    source = _pixels(network, image, area.padded)
    shapes = jax.ShapeDtypeStruct(source.shape, source.dtype)
    made = jax.eval_shape(result, network.weights, shapes)
    tiles = tuple(math.ceil(n / tile) for n in area.size)
    run = jaxtile.stream(result, in_axes=(None, space), tiles=tiles)
    with writing(out):
        values = None if probabilities or not network.values else table(network.values)
        dtype = made.dtype if values is None else values.dtype
        created = create_image(out, made.shape[1:], dtype, dimensions=len(area.size))
    with created as written, undone(written.abandon):
        run(network.weights, source, out=Unbatched(written, values), progress=progress)
    return area


def classify(
    network: Network, image: Image, *, tile: int, progress: Progress | None = None
) -> np.ndarray:
    """The probability of each class, of the whole image; or what else its task predicts."""
    size, task = image.shape[:-1], network.learned.task
    if error := network.size_error(*size):
        raise PredictionError(error)

    def result(weights: Any, images: jax.Array) -> jax.Array:
        scores = network.scores(weights, images)
        return (task.probabilities(scores) if task.has_probabilities else task.predict(scores))[0]

    run = jaxtile.stream(
        result,
        in_axes=(None, tuple(range(1, 1 + len(size)))),
        tiles=tuple(math.ceil(n / tile) for n in size),
    )
    source = _pixels(network, image, size)
    return np.asarray(run(network.weights, source, progress=progress))


def _pixels(network: Network, image: Image, size: tuple[int, ...]) -> Pixels:
    given = network.channels, network.scale, network.learned.pixels, network.nodata
    return Pixels(image, size, *given)
