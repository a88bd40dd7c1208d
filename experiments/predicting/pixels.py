"""Images on disk as what a network reads from, and writes to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..data import Scale, read_bytes
from ..images import Image, ImageError
from .network import PredictionError


class Pixels:
    """An image as a network takes it: a batch of one, 8 bits a channel, of at least its size."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self, image: Image, size: tuple[int, int], channels: int, scale: Scale | None = None
    ):
        self.image, self.shape, self.scale = image, (1, *size, channels), scale

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        # Beyond the image's last row and column there is that row and column again.
        inside = [
            slice(min(p.start, n - 1), min(p.stop, n))
            for p, n in zip(place[1:3], self.image.shape, strict=False)
        ]
        missing = [
            (0, (p.stop - p.start) - (q.stop - q.start))
            for p, q in zip(place[1:3], inside, strict=True)
        ]
        values = read_bytes(self.image, inside, self.shape[3], self.scale)
        return np.pad(values, (*missing, (0, 0)), mode="edge")[None]


class Unbatched:
    """A sink for a batch of one that writes to an image."""

    def __init__(self, image: Any):
        self.image = image

    def __setitem__(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        with writing(self.image.path):
            self.image[place[1:3]] = tile[0]


@contextlib.contextmanager
def writing(out: str | os.PathLike) -> Iterator[None]:
    """What the system or a library says, as that the disk is full, with the name of the file."""
    try:
        yield
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PredictionError(f"{out} cannot be written: {reason}") from error


def check_image(image: Image) -> None:
    """Raise an error for what training refuses too."""
    if image.shape[2] > 4:
        raise ImageError(image.path, f"has {image.shape[2]} channels, where at most 4 can be")
