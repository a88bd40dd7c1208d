"""The keyword `tiles=` of a layer."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ._checkpoint import checkpoint


class Tileable(nnx.Module):
    """Mixin, before the layer class: `tiles=` runs the layer tile by tile."""

    def __init__(self, *args: Any, tiles: tuple[int, ...] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tiles = tiles

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        def call(layer: Tileable, x: jax.Array) -> jax.Array:
            return super().__call__(x, *args, **kwargs)

        if self.tiles is None:
            return call(self, x)
        spatial = tuple(range(1, x.ndim - 1))
        return checkpoint(call, in_axes=(None, spatial), tiles=self.tiles)(self, x)
