"""A network that can be applied to images of any size, and where in an image its result lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from ..data import Scale
from ..tasks import Task

_FARTHEST = 256  # pixels that an image may be continued by


class PredictionError(ValueError):
    """Why this network cannot be applied to this image. The text is for the user."""


class Learned(Protocol):
    """What is known of a network, as `training.learner` has it."""

    spatial: int
    pixels: Any
    task: Task

    @property
    def lost(self) -> int:
        """By how many positions scores are fewer than pixels along an axis."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A trained network, as this program needs it."""

    scores: Callable[[Any, jax.Array], jax.Array]
    """Of weights and images of 8 bits: (B, h, w, classes), or (B, classes)."""
    weights: Any
    channels: int
    learned: Learned
    classes: Sequence[str] = ()
    """Their names."""
    scale: Scale | None = None
    """Of pixels that are not of 8 bits."""
    values: Sequence[int] = ()
    """Of each class in masks; (): its number."""
    nodata: Sequence[float] = ()
    """Values of pixels without data."""
    resize: int = 0
    """Pixels along a side that it was trained with; 0: images as they are."""
    level: int = 0
    """Of pyramids, which it was trained with."""

    def size_error(self, *size: int) -> str | None:
        """Why it does not take an image of this size."""
        shape = jax.ShapeDtypeStruct((1, *size, self.channels), self.learned.pixels)
        try:
            jax.eval_shape(self.scores, self.weights, shape)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def fitting(self, n: int) -> int:
        """The first size from `n` on that it takes."""
        axes = self.learned.spatial
        for size in range(n, n + _FARTHEST):
            if self.size_error(*(size,) * axes) is None:
                return size
        raise PredictionError(self.size_error(*(n,) * axes))


@dataclasses.dataclass(frozen=True)
class Map:
    """Where in the image the result of a network that segments lies."""

    padded: tuple[int, ...]
    """The size that the network sees."""
    size: tuple[int, ...]
    """The size of the result."""
    offset: tuple[int, ...] = ()
    """The pixel of the image that the result's first one belongs to."""

    @classmethod
    def of(cls, network: Network, shape: Sequence[int]) -> Map:
        sizes, lost = shape[: network.learned.spatial], network.learned.lost
        padded = tuple(network.fitting(n) for n in sizes)
        size = tuple(n - lost for n in sizes)
        if min(size) < 1:
            raise PredictionError(
                f"an image of {times(sizes)} pixels is too small: the network needs at least "
                f"{lost + 1} along each axis"
            )
        return cls(padded, size, (lost // 2,) * len(sizes))


def times(size: Sequence[int]) -> str:
    """A size as people write it: `30 x 40`."""
    return " x ".join(map(str, size))
