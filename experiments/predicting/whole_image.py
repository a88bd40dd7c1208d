"""The result of a network on a whole image: a map of classes, or one class."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

import jaxtile

from ..devices.memory import memory_of_device
from ..images import Image, Meaning, create_image, shifted
from ..program.ending import undone
from ..tasks import Segmentation, class_colours
from .network import Map, Network, PredictionError
from .pixels import Pixels, Unbatched, table, writing


class Progress(Protocol):
    """Who wants to know how far it is."""

    def go_on(self, there: int) -> None:
        """So many tiles are there already."""

    def __call__(self, done: int, total: int) -> None: ...

    def finish(self) -> None:
        """All tiles are computed, and the file is finished."""


_ON_CPU = 64 * 2**20
_PART = 16  # of an accelerator's memory
_BUSY = 0.8  # of the time: what is busy for longer is what the others wait for


def segment(
    network: Network,
    image: Image,
    out: str | os.PathLike,
    *,
    tile: int,
    probabilities: str | None = None,
    progress: Progress,
) -> tuple[Map, str]:
    """Write the class of each pixel, or the probabilities of all classes in the given type.

    Returns where the result lies in the image, and what was the limit.
    """
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
    limit = batch_bytes()
    run = jaxtile.stream(result, in_axes=(None, space), tiles=tiles, batch_bytes=limit)
    values = None if probabilities or not network.values else table(network.values)
    with writing(out):
        written = create_image(
            out,
            made.shape[1:],
            made.dtype if values is None else values.dtype,
            dimensions=len(area.size),
            meaning=_meaning(network, image, area, probabilities),
            job=_job(network, image, (*tiles, limit), probabilities),
        )
    sink = Unbatched(written, values)
    clocks: list[tuple[float, ...]] = []  # after the first tile, which is compiled, and at the end

    def told(done: int, total: int) -> None:
        progress(done, total)
        if done > written.there:
            clocks.append((time.perf_counter(), source.seconds, sink.seconds))

    with written, undone(written.stop):
        progress.go_on(written.there)
        run(network.weights, source, out=sink, progress=told)
        progress.finish()
    return area, _limit(clocks)


def batch_bytes() -> int:
    """What tiles that are computed at once may need: small ones would not keep a device busy."""
    there = memory_of_device().get("bytes_limit")
    return _ON_CPU if there is None else there // _PART


def _limit(clocks: Sequence[tuple[float, ...]]) -> str:
    """What the others waited for: reading, computing and writing go on at the same time.

    `clocks` are the time, and the seconds of reading and of writing, after each tile.
    """
    if len(clocks) < 2:
        return "one tile, so nothing waited"
    seconds, *busy = (b - a for a, b in zip(clocks[0], clocks[-1], strict=True))
    reading, writing = (min(n / seconds, 1.0) for n in busy)  # one is read ahead
    shares = f"reading took {reading:.0%} of the time, writing {writing:.0%}"
    if max(reading, writing) < _BUSY:
        return f"the limit was the device: {shares}"
    return f"the limit was {'reading' if reading > writing else 'writing'}: {shares}"


def _meaning(network: Network, image: Image, area: Map, probabilities: str | None) -> Meaning:
    """What the file says: the names and colours of classes, and where on Earth its pixels lie."""
    tags = shifted(image.tags, area.offset)
    task = network.learned.task
    if probabilities or not isinstance(task, Segmentation):
        return Meaning(tags=tags)
    values = network.values or range(task.classes)
    names = network.classes or [str(i) for i in range(task.classes)]
    return Meaning(list(zip(values, names, class_colours(task.classes), strict=True)), tags)


def _job(network: Network, image: Image, tiles: Sequence[int], probabilities: str | None) -> str:
    """All that the result depends on: what another program may go on with."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(network.weights):
        found.update(np.asarray(leaf).tobytes())
    file: Any = str(image.path)
    if image.path.exists():  # and is not at an address
        about = image.path.stat()
        file = str(image.path.resolve()), about.st_size, about.st_mtime_ns
    device = jax.__version__, jaxtile.__version__, jax.devices()[0].device_kind
    given = network.values, network.nodata, network.resize, str(network.scale)
    return repr((found.hexdigest(), file, image.shape, tuple(tiles), probabilities, given, device))


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
        batch_bytes=batch_bytes(),
    )
    source = _pixels(network, image, size)
    return np.asarray(run(network.weights, source, progress=progress))


def _pixels(network: Network, image: Image, size: tuple[int, ...]) -> Pixels:
    given = network.channels, network.scale, network.learned.pixels, network.nodata
    return Pixels(image, size, *given)
