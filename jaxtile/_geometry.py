"""Intervals, tiles and windows along one axis.

Everything here is integer arithmetic on half-open intervals.

To produce the outputs `[lo, hi)`, a convolution or pool reads an interval of the input: its
*demand*. With kernel `k`, dilation `d`, stride `s`, `p` positions of padding before the first
input, and base dilation `b` (zeros between inputs, as in a transposed convolution), it reads the
positions `[lo*s - p, (hi-1)*s - p + (k-1)*d + 1)` of the dilated input.

A tile loop needs one interval per tile, all of one size, because the tiles share one compiled
program: a `Window`. Windows never leave the array. Where a demand sticks out over the border the
window is moved inwards and the positions outside are supplied by the reader with the padding value
of the op that asked for them. A tile therefore computes only values that the untiled function
computes too, so nothing has to be masked afterwards and no spurious NaN can arise beyond the
border.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Position = TypeVar("Position", int, np.ndarray)
"""One position, or one per tile."""


@dataclasses.dataclass(frozen=True)
class Stencil:
    """How one output position of a convolution or pool depends on input positions along one axis.

    >>> Stencil(kernel=3, before=1).demand(0, 4)
    (-1, 5)
    >>> Stencil(kernel=2, stride=2).demand(1, 3)
    (2, 6)
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    before: int = 0

    @property
    def extent(self) -> int:
        """Input positions between the first and the last that one output reads, both included."""
        return (self.kernel - 1) * self.dilation + 1

    def demand(self, lo: Position, hi: Position) -> tuple[Position, Position]:
        """Where the inputs begin and end that the outputs `[lo, hi)` read.

        They may lie outside the array. Works on integers and on arrays of them.
        """
        first = lo * self.stride - self.before
        last = (hi - 1) * self.stride - self.before + self.extent - 1
        return -(-first // self.base_dilation), last // self.base_dilation + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """One interval per tile along tiled axis `axis`.

    Tile `i` covers `[starts[i], starts[i] + size)`. Windows at the same positions are equal.
    """

    axis: int
    starts: np.ndarray
    size: int

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Window) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[int, int, bytes]:
        return self.axis, self.size, self.starts.tobytes()

    @functools.cached_property
    def bounds(self) -> tuple[int, int]:
        """The first position of any tile, and the end of the last one."""
        return int(self.starts.min()), int(self.starts.max()) + self.size

    @property
    def stops(self) -> np.ndarray:
        return self.starts + self.size

    def moved(self, starts: npt.ArrayLike, size: int) -> Window:
        """A window of the same axis at other positions.

        A scalar start means the same for every tile.
        """
        return Window(
            self.axis, np.broadcast_to(np.asarray(starts, np.int64), self.starts.shape), int(size)
        )

    def __repr__(self) -> str:
        return f"Window(axis={self.axis}, starts={self.starts.tolist()}, size={self.size})"


def partition(axis: int, length: int, tiles: int, devices: int = 1) -> Window:
    """`tiles` windows of equal size that cover `[0, length)`; or that many on each device.

    Where the length does not divide, the last tile shares positions with the one before, which
    belong to the last. If it would share all of them, neighbours share one position each instead,
    so that every tile has something of its own. Devices have blocks as if they were tiles of the
    second sort, and their tiles lie inside their blocks.

    >>> partition(0, 10, 4)
    Window(axis=0, starts=[0, 3, 6, 7], size=3)
    >>> partition(0, 10, 8)
    Window(axis=0, starts=[0, 1, 2, 3, 5, 6, 7, 8], size=2)
    >>> partition(0, 10, 2, devices=4)
    Window(axis=0, starts=[0, 1, 2, 3, 5, 6, 7, 8], size=2)
    """
    blocks, size = np.arange(devices, dtype=np.int64) * length // devices, -(-length // devices)
    numbers, tile = np.arange(tiles, dtype=np.int64), -(-size // tiles)
    inside = np.minimum(numbers * tile, size - tile)
    if (tiles - 1) * tile >= size:
        inside = numbers * size // tiles
    return Window(axis, (blocks[:, None] + inside).reshape(-1), tile)


def owned(window: Window, length: int) -> np.ndarray:
    """How many leading positions of each tile of a partition belong to that tile and to no other.

    >>> owned(partition(0, 10, 4), 10).tolist()
    [3, 3, 1, 3]
    """
    return np.diff(window.starts, append=length)


def hull(demands: Sequence[Window], length: int) -> Window:
    """The smallest window inside `[0, length)` that holds all that was demanded, for every tile.

    Positions outside `[0, length)` are dropped: they are padding, and padding belongs to the
    reader. Where that leaves a tile less than others need, its window is moved inwards.

    >>> hull([Window(0, np.array([-1, 3, 7]), 6)], 12)
    Window(axis=0, starts=[0, 3, 6], size=6)
    """
    first, last = demands[0].bounds
    if len({*demands}) == 1 and demands[0].size > 0 and first >= 0 and last <= length:
        return demands[0]
    starts = np.stack(np.broadcast_arrays(*(d.starts for d in demands)))
    stops = np.stack(np.broadcast_arrays(*(d.stops for d in demands)))
    lo, hi = np.maximum(starts, 0), np.minimum(stops, length)
    empty = hi <= lo
    lo = np.where(empty, length, lo).min(axis=0)
    hi = np.where(empty, 0, hi).max(axis=0)
    size = min(length, max(1, int((hi - lo).max())))
    nothing_asked = hi <= lo
    lo = np.where(nothing_asked, np.clip(starts[0], 0, length), lo)
    return Window(demands[0].axis, np.minimum(lo, length - size), size)
