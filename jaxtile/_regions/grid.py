"""How a region is computed: in tiles or in one piece, once or again in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import EllipsisType
from typing import Any, Literal

import numpy as np

from .._errors import TilingError
from .._graph.values import Value

GridSpec = tuple[int, ...] | Literal["whole"] | None
"""As users say it. A number of tiles per tiled axis; "whole": in one piece, and again in the
backward pass, as by `jax.checkpoint`; None: in one piece, and once, as plain JAX."""


@dataclasses.dataclass(frozen=True)
class Grid:
    tiles: tuple[int, ...] | None = None
    """Per tiled axis; None: in one piece."""
    recomputed: bool = True
    """Is it computed again in the backward pass? Tiles always are."""
    forward: tuple[int, ...] | None = None
    """Tiles in the forward pass, if these are others: little is held there, so fewer may do."""

    def in_one_piece(self, on_mesh: bool) -> bool:
        """Are reductions equations like any other? On a mesh also in what is kept: it runs in one
        piece per device, as what is recomputed whole does.
        """
        return self.tiles is None and (self.recomputed or on_mesh)

    def spec(self, axes: Sequence[int]) -> GridSpec:
        """As users say it, for a region with these of the tiled axes."""
        if self.tiles is not None:
            return tuple(self.tiles[axis] for axis in axes)
        return "whole" if self.recomputed else None


Tiles = (
    Sequence[int] | GridSpec | Mapping[str | EllipsisType | Value, Sequence[int] | GridSpec | Grid]
)
"""One grid for all regions, or one per stored value, with `...` for all others."""


def grid_of(tiles: Tiles, value: Value | None, rank: int) -> Grid:
    """The grid of the region that computes a value; None: a value that the user cannot name."""
    if not isinstance(tiles, Mapping):
        return _checked(tiles, rank, "`tiles`")
    name = None if value is None else value.name
    for key in (value, name, ...):
        if key is not None and key in tiles:
            return _checked(tiles[key], rank, f"`tiles[{'...' if key is ... else repr(name)}]`")
    raise TilingError(
        f"`tiles` (={dict(tiles)}) gives no grid for the region that computes "
        f"{name or 'an unnamed value'!r}: add that name, or the key `...` for all other regions"
    )


def _checked(spec: Any, rank: int, what: str) -> Grid:
    if isinstance(spec, Grid):
        tiles, forward = (
            None if each is None else _checked(each, rank, what).tiles
            for each in (spec.tiles, spec.forward)
        )
        return Grid(tiles, spec.recomputed, forward)
    if isinstance(spec, np.ndarray):
        spec = spec.tolist()
    if spec is None or spec == "whole":
        return Grid(recomputed=spec is not None)
    if not isinstance(spec, Sequence) or isinstance(spec, str):
        raise TilingError(
            f"{what} (={spec!r}) must be a tuple with one number of tiles per tiled axis, 'whole' "
            "(untiled and recomputed) or None (untiled and kept)"
        )
    tiles = tuple(spec)
    if len(tiles) != rank:
        raise TilingError(
            f"{what} (={tiles}) must have one number per tiled axis, and `in_axes` has {rank}"
        )
    if not all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) > 0 for n in tiles):
        raise TilingError(f"{what} (={tiles}) must be positive integers")
    return Grid(tuple(int(n) for n in tiles))
