"""The keyword `tiles=` of a layer."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from .._checkpoint import checkpoint


class Tileable(nnx.Module):
    """Mixin, before the layer class: `tiles=` runs the layer tile by tile.

    The layer's state (running statistics, the count of random numbers) is carried through.
    """

    def __init__(self, *args: Any, tiles: tuple[int, ...] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tiles = tiles

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        call = super().__call__
        if self.tiles is None:
            return call(x, *args, **kwargs)
        graphdef, state = nnx.split(self)

        def pure(state, x):
            layer = nnx.merge(graphdef, state)
            y = super(Tileable, layer).__call__(x, *args, **kwargs)
            return y, nnx.state(layer, nnx.Not(nnx.Param))

        spatial = tuple(range(1, x.ndim - 1))
        y, changed = checkpoint(pure, in_axes=(None, spatial), tiles=self.tiles)(state, x)
        nnx.update(self, changed)
        return y
