"""Whole held-out files, evaluated exactly: what prediction would write, compared with the labels.

An image is read window by window and computed tile by tile (`jaxtile.stream`); its pixels are
counted as the tiles come, with 64 bits, and neither image nor mask is ever whole in memory. With
several processes each takes its share of the files, on one of its devices.

Known inefficiencies: each size of image is a program of its own, compiled the first time; of a
process's devices one works.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile

from .. import data
from ..devices.hosts import Devices
from ..images import Image, ImageError
from ..predicting.network import Map, Network, PredictionError
from ..predicting.pixels import Pixels
from ..predicting.whole_image import Progress
from .task import Counts, Task, Weights

_SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True)
class _Network(Network):
    """One that remembers which sizes fit."""

    fits: dict[int, int] = dataclasses.field(default_factory=dict)

    def fitting(self, n: int) -> int:
        if n not in self.fits:
            self.fits[n] = super().fitting(n)
        return self.fits[n]


class WholeFiles:
    """Counts of each file of a folder, given weights."""

    def __init__(self, task: Task, devices: Devices, folder: data.Folder):
        self.task, self.devices, self.folder = task, devices, folder
        self.sizes = sorted({header.size for header in folder.headers})
        self.classes, self.channels = folder.classes, folder.shape[2]
        names = [str(c) for c in range(self.classes)]
        shapes = jax.eval_shape(task.weights)
        self.network = _Network(task.scores, shapes, self.channels, names, task.output_size)
        self._programs: dict[Any, Any] = {}

    def refused(self) -> str | None:
        """Why the network does not take one of them; None: it takes all."""
        for size in self.sizes:
            try:
                if self.task.segments:
                    Map.of(self.network, size)
                elif error := self.network.size_error(*size):
                    return error
            except PredictionError as error:
                return str(error)
        return None

    def example(self, tile: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """A batch with as much in a tile as the largest file, and not many more tiles."""
        size = [min(max(n), 2 * tile) for n in zip(*self.sizes, strict=True)]
        if self.task.segments:
            size = [self.network.fitting(n) for n in size]
            label_size = map(self.task.output_size, size)
            labels = jax.ShapeDtypeStruct((1, *label_size), jnp.uint8)
        else:
            size = self.sizes[-1] if self.network.size_error(*size) else size
            labels = jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.ShapeDtypeStruct((1, *size, self.channels), jnp.uint8), labels

    def __call__(self, weights: Weights, tile: int) -> list[Counts]:
        """Of each file, in order; all processes get all of them."""
        if self.devices.mesh is not None:
            here = jax.local_devices()[0]
            weights = jax.tree.map(lambda x: jax.device_put(np.asarray(x), here), weights)
        mine = range(len(self.folder))[jax.process_index() :: self.devices.processes]
        self._said = time.monotonic()
        text = json.dumps({index: self._try(index, weights, tile) for index in mine})
        found: dict[int, Any] = {}
        for part in self.devices.gathered(text):
            found.update({int(index): result for index, result in json.loads(part).items()})
        return self._checked(found)

    def _checked(self, found: dict[int, Any]) -> list[Counts]:
        counts = []
        for index in range(len(self.folder)):
            result = found[index]
            if "error" not in result:
                counts.append(Counts(**{k: np.asarray(v) for k, v in result.items()}))
            elif self.folder.on_bad_file == "error":
                raise data.DataError(*result["error"])
            else:
                self.folder.skipped[self.folder.name(index)] = ": ".join(result["error"])
        if not counts:
            raise data.DataError(
                self.folder.name(0), f"this and all other {len(self.folder) - 1} files are bad"
            )
        return counts

    def _try(self, index: int, weights: Weights, tile: int) -> dict[str, Any]:
        """Counts as numbers, or what is wrong with the file, for all processes to know."""
        try:
            with self.folder.opened(index) as (image, label):
                of = self._segmented if self.task.segments else self._classified
                counts = of(weights, image, label, tile, lambda *tiles: self._say(index, *tiles))
        except ImageError as error:
            return {"error": [str(error.path), error.reason]}
        return {name: np.asarray(value).tolist() for name, value in counts._asdict().items()}

    def _say(self, index: int, done: int, tiles: int) -> None:
        """Progress, if it takes long."""
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            where = f"file {index + 1} of {len(self.folder)}, tile {done} of {tiles}"
            print(f"evaluation: {where}", flush=True)

    def _segmented(
        self, weights: Weights, image: Image, mask: Any, tile: int, progress: Progress
    ) -> Counts:
        area = Map.of(self.network, image.shape)
        run = self._program(self._compare, area.padded, area.size, tile)
        pixels = Pixels(image, area.padded, self.channels, self.folder.scale)
        pairs, losses = _Pairs(self.classes), _Sum()
        run(weights, pixels, _Labels(mask, area), out=(pairs, losses), progress=progress)
        counted = pairs.counts.sum()
        return Counts(
            losses.total / max(1, counted),
            counted,
            pairs.counts.diagonal(),
            pairs.counts.sum(0),
            pairs.counts.sum(1),
        )

    def _compare(self, weights: Weights, images: jax.Array, labels: jax.Array) -> Any:
        """Per position: label and prediction as one number, and the loss."""
        height, width = labels.shape[1:]
        scores = self.task.scores(weights, images)[:, :height, :width]
        counts, labels = labels != data.IGNORED, labels.astype(jnp.int32)
        pairs = labels * self.classes + scores.argmax(-1).astype(jnp.int32)
        is_label = labels[..., None] == jnp.arange(self.classes)
        losses = jax.nn.logsumexp(scores, -1) - jnp.where(is_label, scores, 0).sum(-1)
        return jnp.where(counts, pairs, self.classes**2), jnp.where(counts, losses, 0)

    def _classified(
        self, weights: Weights, image: Image, label: int, tile: int, progress: Progress
    ) -> Counts:
        size = image.shape[:2]
        run = self._program(lambda w, x: self.task.scores(w, x)[0], size, size, tile)
        pixels = Pixels(image, size, self.channels, self.folder.scale)
        scores = np.asarray(run(weights, pixels, progress=progress), np.float64)
        predicted, true = np.eye(self.classes, dtype=int)[[scores.argmax(), label]]
        loss = np.logaddexp.reduce(scores) - scores[label]
        return Counts(loss, 1, predicted * true, predicted, true)

    def _program(self, fun: Any, padded: Any, size: tuple[int, int], tile: int) -> Any:
        """Kept, so that the next evaluation compiles nothing."""
        key = padded, size, tile
        if key not in self._programs:
            axes = (None, (1, 2), (1, 2)) if self.task.segments else (None, (1, 2))
            tiles = tuple(math.ceil(n / tile) for n in size)
            self._programs[key] = jaxtile.stream(fun, in_axes=axes, tiles=tiles)
        return self._programs[key]


class _Labels:
    """The part of a mask that a network's result has, as a batch of one."""

    dtype = np.dtype(np.uint8)

    def __init__(self, mask: Any, area: Map):
        self.mask, self.offset, self.shape = mask, area.offset, (1, *area.size)

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (
            slice(p.start + n, p.stop + n) for p, n in zip(place[1:], self.offset, strict=True)
        )
        return self.mask[rows, columns][None]


class _Pairs:
    """A sink that counts how often each label meets each prediction."""

    def __init__(self, classes: int):
        self.counts = np.zeros((classes, classes), np.int64)

    def __setitem__(self, place: Any, tile: np.ndarray) -> None:
        number = np.bincount(tile.ravel(), minlength=self.counts.size + 1)
        self.counts += number[:-1].reshape(self.counts.shape)  # the last does not count


class _Sum:
    """A sink that adds up."""

    def __init__(self) -> None:
        self.total = 0.0

    def __setitem__(self, place: Any, tile: np.ndarray) -> None:
        self.total += float(tile.sum(dtype=np.float64))
