"""Images on disk as what a network reads from, and writes to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..data import Scale, check_channels, read_pixels
from ..images import Image, ImageError
from .network import PredictionError


class Pixels:
    """An image as a network takes it: a batch of one, in its type, of at least its size."""

    def __init__(
        self,
        image: Image,
        size: tuple[int, ...],
        channels: int,
        scale: Scale | None = None,
        dtype: Any = np.uint8,
        nodata: Sequence[float] = (),
    ):
        check_channels(image.path, image.shape[-1], channels)
        self.image, self.shape, self.scale = image, (1, *size, channels), scale
        self.dtype, self.nodata = np.dtype(dtype), nodata
        self.seconds = 0.0

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        began = time.perf_counter()
        values = self._read(place)
        self.seconds += time.perf_counter() - began
        return values

    def _read(self, place: tuple[slice, ...]) -> np.ndarray:
        # Beyond the image's last row and column there is that row and column again.
        inside = [
            slice(min(p.start, n - 1), min(p.stop, n))
            for p, n in zip(place[1:-1], self.image.shape, strict=False)
        ]
        missing = [
            (0, (p.stop - p.start) - (q.stop - q.start))
            for p, q in zip(place[1:-1], inside, strict=True)
        ]
        values = read_pixels(
            self.image, inside, self.shape[-1], self.scale, self.dtype, self.nodata
        )
        return np.pad(values, (*missing, (0, 0)), mode="edge")[None]


class Unbatched:
    """A sink for a batch of one that writes to an image; instead of classes, their values."""

    def __init__(self, image: Any, values: np.ndarray | None = None):
        self.image, self.values, self.axes = image, values, len(image.shape) - 1
        self.seconds = 0.0

    def has(self, place: tuple[slice, ...]) -> bool:
        return self.image.has(place[1 : 1 + self.axes])

    def __setitem__(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        began = time.perf_counter()
        with writing(self.image.path):
            self.image[place[1 : 1 + self.axes]] = (
                tile[0] if self.values is None else self.values[tile[0]]
            )
        self.seconds += time.perf_counter() - began


def table(values: Sequence[int]) -> np.ndarray:
    """The values of classes, in the smallest type that holds them."""
    return np.array(values, np.result_type(*map(np.min_scalar_type, values)))


@contextlib.contextmanager
def writing(out: str | os.PathLike) -> Iterator[None]:
    """What the system or a library says, as that the disk is full, with the name of the file."""
    try:
        yield
    except (ImageError, ConnectionError):  # of what is read meanwhile
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PredictionError(f"{out} cannot be written: {reason}") from error
