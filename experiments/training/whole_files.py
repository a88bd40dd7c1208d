"""Whole held-out files, evaluated exactly: what prediction would write, compared with the labels.

An image is read window by window and computed tile by tile (`jaxtile.stream`); its pixels are
counted as the tiles come, with 64 bits, and neither image nor mask is ever whole in memory. With
several processes each takes its share of the files, on one of its devices.

Known inefficiencies: each size of image is a program of its own, compiled the first time; of a
process's devices one works.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from typing import Any

import jax
import numpy as np

import jaxtile

from .. import data
from ..devices.hosts import Devices
from ..images import Image, ImageError
from ..predicting.network import Map, Network, PredictionError
from ..predicting.pixels import Pixels
from ..predicting.whole_image import Progress
from .learner import Learner, Sums, Weights

_SECONDS_BETWEEN_LINES = 8.0


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

    def __init__(self, learner: Learner, devices: Devices, folder: data.Folder):
        self.learner, self.devices, self.folder = learner, devices, folder
        self.sizes = sorted({header.size for header in folder.headers})
        self.channels = folder.shape[-1]
        shapes = jax.eval_shape(learner.weights)
        self.network = _Network(learner.scores, shapes, self.channels, learner)
        self._programs: dict[Any, Any] = {}

    def refused(self) -> str | None:
        """Why the network does not take one of them; None: it takes all."""
        for size in self.sizes:
            try:
                if self.learner.task.dense:
                    Map.of(self.network, size)
                elif error := self.network.size_error(*size):
                    return error
            except PredictionError as error:
                return str(error)
        return self._not_tiled()

    def _not_tiled(self) -> str | None:
        """Why the network does not run in tiles; None: it does."""
        example = self.example(self.learner.config.eval.tile)
        fun = functools.partial(self.learner.sums, rows=True)
        axes = self._axes(example[0].ndim - 2)
        tiles = (2,) * (example[0].ndim - 2)
        try:
            jaxtile.explain(fun, self.network.weights, *example, in_axes=axes, tiles=tiles)
        except jaxtile.TilingError as error:
            return str(error)
        return None

    def _axes(self, dimensions: int) -> tuple[Any, ...]:
        space = tuple(range(1, 1 + dimensions))
        return None, space, space if self.learner.task.dense else None

    def example(self, tile: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """A batch with as much in a tile as the largest file, and not many more tiles."""
        size = [min(max(n), 2 * tile) for n in zip(*self.sizes, strict=True)]
        if self.learner.task.dense:
            size = [self.network.fitting(n) for n in size]
        elif self.network.size_error(*size):
            size = self.sizes[-1]
        label = self.learner.label([self.learner.output_size(n) for n in size])
        return (
            jax.ShapeDtypeStruct((1, *size, self.channels), self.folder.dtype),
            jax.ShapeDtypeStruct((1, *label), self.folder.label_dtype),
        )

    def __call__(self, weights: Weights, tile: int) -> list[Sums]:
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

    def _checked(self, found: dict[int, Any]) -> list[Sums]:
        counts = []
        for index in range(len(self.folder)):
            result = found[index]
            if "error" not in result:
                counts.append({k: np.asarray(v) for k, v in result.items()})
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
                say = lambda *tiles: self._say(index, *tiles)  # noqa: E731
                sums = self._sums(weights, image, label, tile, say)
        except ImageError as error:
            return {"error": [str(error.path), error.reason]}
        return {name: value.tolist() for name, value in sums.items()}

    def _say(self, index: int, done: int, tiles: int) -> None:
        """Progress, if it takes long."""
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            where = f"file {index + 1} of {len(self.folder)}, tile {done} of {tiles}"
            print(f"evaluation: {where}", flush=True)

    def _sums(
        self, weights: Weights, image: Image, label: Any, tile: int, progress: Progress
    ) -> Sums:
        size = image.shape[:-1]
        area = Map.of(self.network, image.shape) if self.learner.task.dense else Map(size, size)
        labels = label[None] if not self.learner.task.dense else _Labels(label, area, self.folder)
        run = self._program(area, tile)
        given = self.channels, self.folder.scale, self.folder.dtype, self.folder.nodata
        pixels = Pixels(image, area.padded, *given)
        found = run(weights, pixels, labels, progress=progress)
        axes = (0, 1) if self.learner.task.dense else (0,)
        return {name: _total(np.asarray(values), axes) for name, values in found.items()}

    def _program(self, area: Map, tile: int) -> Any:
        """Kept, so that the next evaluation compiles nothing."""
        key = area, tile
        if key not in self._programs:
            fun = functools.partial(self.learner.sums, rows=True)
            axes = self._axes(len(area.size))
            tiles = tuple(math.ceil(n / tile) for n in area.size)
            self._programs[key] = jaxtile.stream(fun, in_axes=axes, tiles=tiles)
        return self._programs[key]


def _total(rows: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The sum over images and rows, with 64 bits."""
    return rows.sum(axes, dtype=np.float64 if rows.dtype.kind == "f" else np.int64)


class _Labels:
    """The part of a mask that a network's result has, as a batch of one."""

    def __init__(self, mask: Any, area: Map, folder: data.Folder):
        self.mask, self.offset, self.dtype = mask, area.offset, folder.label_dtype
        self.shape = (1, *area.size, *folder.label_shape[len(area.size) :])

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        window = tuple(
            slice(p.start + n, p.stop + n) for p, n in zip(place[1:], self.offset, strict=False)
        )
        return self.mask[window][None]
