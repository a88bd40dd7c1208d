"""Textures: gratings, blobs and streaks, at as many angles as there are classes.

A step may want a new gigapixel, so a pixel costs a few operations only. A grating is a sum of
products of something of the row and something of the column, and so are two gratings across each
other; the cells of a streak are found in a table; uneven light is linear between points. Noise is
cut from a table of random numbers, for every window from another place. Threads draw windows, each
in arrays of its own: to get new ones from the system for every window took 16 threads longer than
to draw. Windows are large, since between two operations of NumPy a thread waits for all others:
with a quarter of the columns, 16 threads took 20 s for three gigapixels at once, instead of 11.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_LIGHT_SCALE = 60  # pixels between points of the uneven light
_COLUMNS = 8192  # of a window with `_LIGHT_SCALE` rows; narrower ones have more rows
_NOISE = np.random.default_rng(0).standard_normal(2**20, np.float32) * np.float32(12)
_MANY = 2**22  # pixels that are worth threads

Pattern = Callable[[slice, slice, "_Scratch"], np.ndarray]


class _Scratch(threading.local):
    """Arrays of a thread, as large as a window; what is in them does not last."""

    def __init__(self) -> None:
        size = _LIGHT_SCALE * _COLUMNS
        self._floats = np.empty((3, size), np.float32)
        self._integers = np.empty((2, size), np.uint32)

    def floats(self, number: int, *shape: int) -> np.ndarray:
        return self._floats[number, : math.prod(shape)].reshape(shape)

    def integers(self, number: int, *shape: int) -> np.ndarray:
        return self._integers[number, : math.prod(shape)].reshape(shape)


def draw_texture(rng: np.random.Generator, label: int, classes: int, *shape: int) -> np.ndarray:
    """Image (H, W, C), uint8: kind `label % 3`, at the angle that `label // 3` says."""
    image = np.empty(shape, np.uint8)
    draw(Texture(rng, label, classes, image).windows())
    return image


def draw(windows: Sequence[Window]) -> None:
    """All of them, on threads if that is worth it."""
    scratch = _Scratch()

    def one(window: Window) -> None:
        window.texture.draw(window, scratch)

    if sum(window.size for window in windows) < _MANY:
        for window in windows:
            one(window)
    else:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), "textures") as pool:
            list(pool.map(one, windows))


@dataclasses.dataclass(frozen=True)
class Window:
    """Part of a texture: at which point of the light it begins; rows; columns; where noise begins
    for each channel.
    """

    texture: Texture
    at: int
    rows: slice
    columns: slice
    noise: np.ndarray

    @property
    def size(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


class Texture:
    """What its windows have in common; they are drawn in `image`, which may be part of another."""

    def __init__(self, rng: np.random.Generator, label: int, classes: int, image: np.ndarray):
        height, width, channels = image.shape
        self.image, self.rng = image, rng
        self.pattern = _pattern(rng, label, classes, height, width)
        self.gains = [1.0] if channels == 1 else rng.uniform(0.8, 1.2, channels).tolist()
        self.light = _Light(rng, height, width)

    def windows(self) -> list[Window]:
        height, width, channels = self.image.shape
        places = list(_windows(height, width))
        last = _NOISE.size - _LIGHT_SCALE * _COLUMNS
        starts = self.rng.integers(0, last, (len(places), channels))
        return [Window(self, *place, start) for place, start in zip(places, starts, strict=True)]

    def draw(self, window: Window, scratch: _Scratch) -> None:
        shade = self.pattern(window.rows, window.columns, scratch)
        self.light.add_to(shade, window.at, window.columns, scratch)
        seen = scratch.floats(2, *shade.shape)
        for channel, (gain, start) in enumerate(zip(self.gains, window.noise, strict=True)):
            np.multiply(shade, np.float32(gain), out=seen)
            seen += _NOISE[start : start + shade.size].reshape(shade.shape)
            np.clip(seen, 0, 255, out=seen)
            self.image[window.rows, window.columns, channel] = seen


def _pattern(
    rng: np.random.Generator, label: int, classes: int, height: int, width: int
) -> Pattern:
    level, kind = divmod(label, 3)
    angle = math.pi * (level + rng.uniform(-0.2, 0.2)) / -(-classes // 3)
    period, phases = rng.uniform(9, 14), rng.uniform(0, 2 * math.pi, 2)
    x, y = np.arange(width), np.arange(height)
    along = Wave(math.cos(angle) * x, math.sin(angle) * y)
    across = Wave(-math.sin(angle) * x, math.cos(angle) * y)
    contrast = rng.uniform(25, 60)
    if kind == 2:
        table = contrast * rng.uniform(-1, 1, 64 * 64)
        return _streaks(along.times(3 / period), across.times(1 / period), table)
    first = along.times(2 * math.pi / period, phases[0])
    if kind == 0:
        return _gratings([(contrast, first.times(1, -math.pi / 2))])
    # sin a sin b is half the difference of two cosines
    second = across.times(math.pi / period, phases[1])
    return _gratings([(contrast / 2, first.minus(second)), (-contrast / 2, first.plus(second))])


@dataclasses.dataclass(frozen=True)
class Wave:
    """A phase that grows evenly: the sum of a column's and a row's."""

    columns: np.ndarray
    rows: np.ndarray

    def times(self, rate: float, start: float = 0.0) -> Wave:
        return Wave(rate * self.columns + start, rate * self.rows)

    def plus(self, other: Wave) -> Wave:
        return Wave(self.columns + other.columns, self.rows + other.rows)

    def minus(self, other: Wave) -> Wave:
        return self.plus(other.times(-1))


def _gratings(waves: list[tuple[float, Wave]]) -> Pattern:
    """A sum of cosines: cos(x + y) is cos x cos y - sin x sin y."""
    factors = [
        (np.float32(sign) * of_row(wave.rows).astype(np.float32)[:, None], column)
        for height, wave in waves
        for sign, of_row, of_column in ((1, np.cos, np.cos), (-1, np.sin, np.sin))
        for column in [(height * of_column(wave.columns)).astype(np.float32)]
    ]

    def pattern(rows: slice, columns: slice, scratch: _Scratch) -> np.ndarray:
        shape = rows.stop - rows.start, columns.stop - columns.start
        total, product = scratch.floats(0, *shape), scratch.floats(1, *shape)
        for i, (of_row, of_column) in enumerate(factors):
            np.multiply(of_row[rows], of_column[columns], out=product if i else total)
            if i:
                total += product
        return total

    return pattern


def _streaks(long: Wave, short: Wave, values: np.ndarray) -> Pattern:
    """64 x 64 cells, of sides 1 along both waves, and then the same again.

    Positions are numbers of 32 bits that start anew after 64 cells.
    """
    values = values.astype(np.float32)

    def fixed(position: np.ndarray) -> np.ndarray:
        return (np.floor(position * 2**26).astype(np.int64) % 2**32).astype(np.uint32)

    (a, b), (c, d) = ((fixed(w.columns), fixed(w.rows)[:, None]) for w in (long, short))

    def pattern(rows: slice, columns: slice, scratch: _Scratch) -> np.ndarray:
        shape = rows.stop - rows.start, columns.stop - columns.start
        cell = np.add(a[columns], b[rows], out=scratch.integers(0, *shape))
        cell >>= np.uint32(26)
        cell <<= np.uint32(6)
        across = np.add(c[columns], d[rows], out=scratch.integers(1, *shape))
        across >>= np.uint32(26)
        cell |= across
        return np.take(values, cell, out=scratch.floats(0, *shape), mode="clip")

    return pattern


class _Light:
    """Random values of deviation 20 around 128, at points, and linear between them."""

    def __init__(self, rng: np.random.Generator, height: int, width: int):
        shape = [math.ceil(n / _LIGHT_SCALE) + 2 for n in (height, width)]
        values = 20 * rng.standard_normal(shape, np.float32) + 128
        place = np.arange(width, dtype=np.float32) / np.float32(_LIGHT_SCALE)
        before = place.astype(np.int32)
        between = place - before.astype(np.float32)
        self.lines = values[:, before] + between * (values[:, before + 1] - values[:, before])
        self.weights = (np.arange(_LIGHT_SCALE, dtype=np.float32) / _LIGHT_SCALE)[:, None]

    def add_to(self, window: np.ndarray, at: int, columns: slice, scratch: _Scratch) -> None:
        """To rows that begin at the point `at`."""
        for line, top in enumerate(range(0, len(window), _LIGHT_SCALE), start=at):
            first, second = self.lines[line, columns], self.lines[line + 1, columns]
            rows = window[top : top + _LIGHT_SCALE]
            rows += first
            more = scratch.floats(1, *rows.shape)
            rows += np.multiply(self.weights[: len(rows)], second - first, out=more)


def _windows(height: int, width: int) -> Iterator[tuple[int, slice, slice]]:
    """At which point of the light they begin; rows; columns."""
    lines = max(1, _COLUMNS // width)
    for at in range(0, -(-height // _LIGHT_SCALE), lines):
        for left in range(0, width, _COLUMNS):
            rows = slice(at * _LIGHT_SCALE, min((at + lines) * _LIGHT_SCALE, height))
            yield at, rows, slice(left, min(left + _COLUMNS, width))
