"""Reductions over tiled axes: a state per tile, how two are merged, and derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax

State = tuple[jax.Array, ...]
"""What a reduction has accumulated: arrays that are shaped like its result."""

Masks = Sequence[jax.Array | None]
"""Per operand of a reduction, which of the elements that a tile (or a device) sees are its own.

Where neighbours overlap, the others are counted elsewhere. None: all of them are its own.
"""


def masked(x: jax.Array, owned: jax.Array | None, value: Any) -> jax.Array:
    """`x` where an element is one's own, `value` elsewhere."""
    return x if owned is None else jax.numpy.where(owned, x, value)


@dataclasses.dataclass(frozen=True)
class Share:
    """One tile's part of a reduction, as its derivatives see it."""

    operands: Sequence[jax.Array]
    owned: Masks
    remembered: State
    """What was stored of this tile."""
    state: State
    """Of all tiles together."""


class Reduction(Protocol):
    """A reduction over tiled axes, as an accumulation over tiles.

    The result is `finish` of all tiles' states, merged. A tile sees its own window of each operand.
    """

    adds: ClassVar[bool] = False
    """Is merging two states adding them?"""

    def start(self) -> State:
        """The state before the first tile."""
        ...

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        """The state of one tile."""
        ...

    def merge(self, state: State, partial: State) -> State:
        """The state of two sets of tiles together."""
        ...

    def finish(self, state: State) -> jax.Array:
        """The result, from the state of all tiles."""
        ...

    def remember(self, partial: State) -> State:
        """What the backward pass must know of this tile that it cannot recompute bit for bit.

        It is stored per tile.
        """
        return ()

    def pullback(self, share: Share, cotangent: jax.Array) -> Sequence[jax.Array]:
        """The operands' cotangents in one tile, from that of the result."""
        raise TypeError("integers have no cotangent")

    def push(self, share: Share, tangents: Sequence[jax.Array]) -> jax.Array:
        """What one tile adds to the result's tangent: the pullback, transposed."""
        own = [masked(x, mine, 0) for x, mine in zip(tangents, share.owned, strict=True)]
        pullback = jax.linear_transpose(
            lambda c: [*self.pullback(share, c)], self.finish(share.state)
        )
        return pullback(own)[0]
