"""A network that can be applied to images of any size, and where in an image its result lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..data import Scale

_FARTHEST = 256  # pixels that an image may be continued by


class PredictionError(ValueError):
    """Why this network cannot be applied to this image. The text is for the user."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A trained network, as this program needs it."""

    scores: Callable[[Any, jax.Array], jax.Array]
    """Of weights and images of 8 bits: (B, h, w, classes), or (B, classes)."""
    weights: Any
    channels: int
    classes: Sequence[str]
    output_size: Callable[[int], int] | None
    """Of the map of scores, along an axis of the image; None: there is no map."""
    scale: Scale | None = None
    """Of pixels that are not of 8 bits."""

    def size_error(self, height: int, width: int) -> str | None:
        """Why it does not take an image of this size."""
        shape = jax.ShapeDtypeStruct((1, height, width, self.channels), jnp.uint8)
        try:
            jax.eval_shape(self.scores, self.weights, shape)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def fitting(self, n: int) -> int:
        """The first size from `n` on that it takes."""
        for size in range(n, n + _FARTHEST):
            if self.size_error(size, size) is None:
                return size
        raise PredictionError(self.size_error(n, n))


@dataclasses.dataclass(frozen=True)
class Map:
    """Where in the image the result of a network that segments lies."""

    padded: tuple[int, int]
    """The size that the network sees."""
    size: tuple[int, int]
    """The size of the result."""
    offset: tuple[int, int]
    """The pixel of the image that the result's first one belongs to."""

    @classmethod
    def of(cls, network: Network, shape: Sequence[int]) -> Map:
        padded = tuple(network.fitting(n) for n in shape[:2])
        size = tuple(network.output_size(n) for n in shape[:2])
        if min(size) < 1:
            needed = next(n for n in range(1, 1 << 20) if network.output_size(n) > 0)
            raise PredictionError(
                f"an image of {times(shape)} pixels is too small: the network needs at least "
                f"{needed} along each axis"
            )
        offset = tuple((n - network.output_size(n)) // 2 for n in padded)
        return cls(padded, size, offset)


def times(size: Sequence[int]) -> str:
    """A size as people write it: `30 x 40`."""
    return f"{size[0]} x {size[1]}"
