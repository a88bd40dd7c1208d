"""Labelled images that need no download, each a function of seed and index.

`Cells`: ellipses of varied size and brightness, some of them touching, on an uneven background with
noise, debris that is as bright as cells but smaller, and rings that are as large but hollow. Masks
are exact. No threshold finds the cells (intersection over union below 0.8); a small U-Net does.

Of three dimensions they are ellipsoids, see `_volumes.py`.

`Textures`: one of a few kinds for an image, see `_textures.py`. `Mosaics`: one for each of its
squares.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from . import _textures
from ._dataset import Dataset, Geometry
from ._volumes import draw_volume

_AREA_PER_CELL = 64 * 64 * 0.45
"""Pixels: about a quarter of the image is cells."""
_SQUARES = 8
"""Of a mosaic, along each side."""
_MOST_KEPT = 4 * 2**30
"""Bytes of drawn images that are kept for the next epoch, if all of them fit."""


class _Synthetic(Dataset):
    def __init__(self, number: int, geometry: Geometry, *, classes: int, seed: int, start: int = 0):
        kind = type(self).__name__.lower()
        if geometry.size is None:
            raise ValueError(f"`size` must be given for {kind}: synthetic images have any size")
        if number < 1:
            raise ValueError(f"the number of images (={number}) of {kind} must be positive")
        self.number, self.geometry, self.seed, self.start = number, geometry, seed, start
        super().__init__(
            (*geometry.size, geometry.channels),
            self._label_shape(),
            classes=classes,
            augment=geometry.augment,
        )
        self._kept: dict[int, tuple[np.ndarray, Any]] = {}

    def _drawn(self, index: int) -> tuple[np.ndarray, Any]:
        """What `_draw` returns, from memory if it can be."""
        found = self._kept.get(index)
        if found is None:
            found = self._draw(index)
            if len(self) * sum(x.nbytes for x in found) <= _MOST_KEPT:
                self._kept[index] = found
        return found

    def _draw(self, index: int) -> tuple[np.ndarray, Any]:
        raise NotImplementedError

    def _label_shape(self) -> tuple[int, ...]:
        return ()

    def __len__(self) -> int:
        return self.number

    def name(self, index: int) -> str:
        return f"{type(self).__name__.lower()} {self.start + index} (seed {self.seed})"

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.start + index, 1])


class Cells(_Synthetic):
    """Masks of 1 in cells and 0 elsewhere; `classes` may be more than the two."""

    def __init__(self, *arguments: Any, classes: int, **keywords: Any):
        if not 2 <= classes <= 255:
            raise ValueError(f"`classes` (={classes}) must be 2 for cells, or more")
        super().__init__(*arguments, classes=classes, **keywords)

    def _label_shape(self) -> tuple[int, ...]:
        return self.geometry.size

    def _draw(self, index: int) -> tuple[np.ndarray, Any]:
        draw = draw_cells if len(self.shape) == 3 else draw_volume
        return draw(self._generator(index), *self.shape)

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        image, mask = self._drawn(index)
        return image, self.centre(mask)


class Textures(_Synthetic):
    """One class for an image; classes are as frequent as each other."""

    def __init__(self, *arguments: Any, classes: int, **keywords: Any):
        if classes < 2:
            raise ValueError(f"`classes` (={classes}) must be at least 2")
        super().__init__(*arguments, classes=classes, **keywords)
        if len(self.shape) != 3:
            raise ValueError(f"`dimensions` (={len(self.shape) - 1}) must be 2 for textures")

    def _draw(self, index: int) -> tuple[np.ndarray, Any]:
        label = (self.start + index) % self.classes
        image = _textures.draw_texture(self._generator(index), label, self.classes, *self.shape)
        return image, np.int32(label)

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        return self._drawn(index)


class Mosaics(Textures):
    """Eight by eight squares, each a texture of its own; masks say of which class."""

    def __init__(self, *arguments: Any, classes: int, **keywords: Any):
        if classes > 255:
            raise ValueError(f"`classes` (={classes}) must be at most 255 for mosaics")
        super().__init__(*arguments, classes=classes, **keywords)

    def _label_shape(self) -> tuple[int, ...]:
        return self.geometry.size

    def _draw(self, index: int) -> tuple[np.ndarray, Any]:
        rng = self._generator(index)
        image, mask = np.empty(self.shape, np.uint8), np.empty(self.shape[:-1], np.uint8)
        sides = [-(-n // _SQUARES) for n in mask.shape]
        starts = itertools.product(
            *(range(0, n, m) for n, m in zip(mask.shape, sides, strict=True))
        )
        windows = []
        for number, start in enumerate(starts):
            if number % self.classes == 0:  # all are as frequent as each other, in any order
                order = rng.permutation(self.classes)
            square = tuple(slice(a, a + m) for a, m in zip(start, sides, strict=True))
            mask[square] = label = int(order[number % self.classes])
            windows += _textures.Texture(rng, label, self.classes, image[square]).windows()
        _textures.draw(windows)
        return image, mask

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        image, mask = self._drawn(index)
        return image, self.centre(mask)


def draw_cells(
    rng: np.random.Generator, height: int, width: int, channels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Image (H, W, C) and mask (H, W), both uint8."""
    light = np.zeros((height, width), np.float32)
    mask = np.zeros((height, width), np.uint8)
    number = max(1, round(height * width / _AREA_PER_CELL))
    centres = np.empty((number, 2))
    for i in range(number):
        minor = rng.uniform(7, 16)
        axes = (minor, minor * rng.uniform(1, 1.7))
        centres[i] = rng.uniform(0, (height, width))
        if i and rng.random() < 0.4:  # beside an earlier one, so that many touch
            angle = rng.uniform(0, 2 * math.pi)
            centres[i] = centres[rng.integers(i)] + 22 * np.array(
                (math.sin(angle), math.cos(angle))
            )
        brightness, turn = rng.uniform(25, 75), rng.uniform(0, math.pi)
        where, distance = _ellipse(centres[i], axes, turn, (height, width))
        inside = distance < 1
        mask[where][inside] = 1
        shade = brightness * (1.15 - 0.35 * distance)
        np.maximum(light[where], shade, out=light[where], where=inside)
    for _ in range(number // 2):
        hollow = rng.random() < 0.4
        axes = rng.uniform(8, 14, 2) if hollow else rng.uniform(1.5, 4, 2)
        centre, turn = rng.uniform(0, (height, width)), rng.uniform(0, math.pi)
        where, distance = _ellipse(centre, axes, turn, (height, width))
        shown = (distance < 1) & ((distance > 0.7) | (not hollow)) & (mask[where] == 0)
        light[where][shown] = rng.uniform(35, 70)
    uneven = _smooth(rng, height, width, max(height, width) / 3) * 32
    texture = _smooth(rng, height, width, 10) * 12
    light += 85 + uneven + texture
    return _with_noise(rng, light, channels, 15), mask


def _ellipse(
    centre: np.ndarray, axes: Any, turn: float, size: tuple[int, int]
) -> tuple[tuple[slice, slice], np.ndarray]:
    """Its bounding box within the image, and there the squared distance, 1 at the rim."""
    reach = math.ceil(max(axes))
    bounds = [
        (min(max(int(c) - reach, 0), n), min(max(int(c) + reach + 2, 0), n))
        for c, n in zip(centre, size, strict=True)
    ]
    y, x = (
        np.arange(start, max(start, stop), dtype=np.float32) - c
        for (start, stop), c in zip(bounds, centre, strict=True)
    )
    along = math.cos(turn) * x[None, :] + math.sin(turn) * y[:, None]
    across = math.cos(turn) * y[:, None] - math.sin(turn) * x[None, :]
    where = tuple(slice(start, max(start, stop)) for start, stop in bounds)
    return where, (along / axes[1]) ** 2 + (across / axes[0]) ** 2


def _smooth(rng: np.random.Generator, height: int, width: int, scale: float) -> np.ndarray:
    """Random values of deviation about 1 at points `scale` apart, linear between them."""
    rows, columns = (math.ceil(n / scale) + 2 for n in (height, width))
    values = rng.standard_normal((rows, columns), np.float32)

    def stretch(values: np.ndarray, size: int) -> np.ndarray:
        place = np.arange(size, dtype=np.float32) / np.float32(scale)
        before = place.astype(np.int32)
        weight = (place - before)[:, None]
        return values[before] * (1 - weight) + values[before + 1] * weight

    return stretch(stretch(values, height).T, width).T


def _with_noise(
    rng: np.random.Generator, light: np.ndarray, channels: int, deviation: float
) -> np.ndarray:
    image = np.empty((*light.shape, channels), np.uint8)
    for channel in range(channels):
        gain = 1 if channels == 1 else np.float32(rng.uniform(0.8, 1.2))
        noise = rng.standard_normal(light.shape, np.float32)
        image[..., channel] = np.clip(gain * light + np.float32(deviation) * noise, 0, 255)
    return image
