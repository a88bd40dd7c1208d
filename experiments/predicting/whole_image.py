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
from .pixels import Pixels, Unbatched, check_image, writing

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
    check_image(image)
    area = Map.of(network, image.shape)
    height, width = area.size
    classes = np.uint8 if len(network.classes) <= 256 else np.uint16

    def result(weights: Any, images: jax.Array) -> jax.Array:
        scores = network.scores(weights, images)[:, :height, :width]
        if probabilities:
            return jax.nn.softmax(scores).astype(probabilities)
        return scores.argmax(-1).astype(classes)

    shape = (*area.size, len(network.classes)) if probabilities else area.size
    tiles = tuple(math.ceil(n / tile) for n in area.size)
    run = jaxtile.stream(result, in_axes=(None, (1, 2)), tiles=tiles)
    with writing(out):
        created = create_image(out, shape, probabilities or classes)
    with created as written, undone(written.abandon):
        source = Pixels(image, area.padded, network.channels, network.scale)
        run(network.weights, source, out=Unbatched(written), progress=progress)
    return area


def classify(
    network: Network, image: Image, *, tile: int, progress: Progress | None = None
) -> np.ndarray:
    """The probability of each class, of the whole image."""
    check_image(image)
    size = image.shape[:2]
    if error := network.size_error(*size):
        raise PredictionError(error)
    run = jaxtile.stream(
        lambda weights, images: jax.nn.softmax(network.scores(weights, images))[0],
        in_axes=(None, (1, 2)),
        tiles=tuple(math.ceil(n / tile) for n in size),
    )
    source = Pixels(image, size, network.channels, network.scale)
    return np.asarray(run(network.weights, source, progress=progress))
