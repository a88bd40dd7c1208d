"""Arrays that are read by window, while a step runs: images, and masks, that stay on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Place = tuple[slice, ...]


class Lazy:
    """`lazy[y0:y1, x0:x1]` reads that window; it can be flipped and turned before."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        read: Callable[[Place], np.ndarray],
        close: Callable[[], None] = lambda: None,
    ):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.ndim = len(self.shape)
        self._read, self.delete = read, close

    def __getitem__(self, place: Place) -> np.ndarray:
        return self._read(place)

    def flipped(self, dims: Sequence[int]) -> Lazy:
        """As `numpy.flip`."""

        def read(place: Place) -> np.ndarray:
            parts = list(place)
            for d in dims:
                parts[d] = slice(self.shape[d] - place[d].stop, self.shape[d] - place[d].start)
            return np.flip(self[tuple(parts)], dims)

        return Lazy(self.shape, self.dtype, read, self.delete)

    def swapped(self, a: int, b: int) -> Lazy:
        """As `numpy.swapaxes`."""

        def swap(items: Sequence[Any]) -> tuple[Any, ...]:
            found = list(items)
            found[a], found[b] = found[b], found[a]
            return tuple(found)

        return Lazy(
            swap(self.shape),
            self.dtype,
            lambda place: np.swapaxes(self[swap(place)], a, b),
            self.delete,
        )


def all_of(array: Lazy) -> Place:
    """The window that is the whole array."""
    return tuple(slice(0, n) for n in array.shape)


def moved(place: Sequence[slice], starts: Sequence[int]) -> Place:
    """A window along the axes of space, where another one begins."""
    return tuple(slice(p.start + a, p.stop + a) for p, a in zip(place, starts, strict=False))


def stacked(parts: Sequence[Any]) -> Lazy:
    """Arrays or lazy arrays of one shape as one, with an axis more in front."""

    def read(place: Place) -> np.ndarray:
        return np.stack([part[tuple(place[1:])] for part in parts[place[0]]])

    def delete() -> None:
        for part in parts:
            if isinstance(part, Lazy):
                part.delete()

    return Lazy((len(parts), *parts[0].shape), parts[0].dtype, read, delete)
