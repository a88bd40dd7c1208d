"""The keyword `tiles=` of a layer."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from ._checkpoint import checkpoint


class Tileable(nnx.Module):
    """Mixin that gives a layer the option `tiles=`; named before the layer's class.

    The tiled axes are the last ones before the channels, as many as `tiles` has numbers: for
    `NHWC` and `tiles=(4, 4)`, height and width.
    """

    def __init__(self, *args: Any, tiles: tuple[int, ...] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if np.ndim(tiles or ()) != 1:
            raise ValueError(f"`tiles` (={tiles}) must have one number per spatial axis")
        self.tiles = tiles

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        if self.tiles is None or not args:
            return super().__call__(*args, **kwargs)
        x, *rest = args
        count = len(self.tiles)
        if x.ndim <= count:
            raise ValueError(
                f"a layer with `tiles` (={self.tiles}) takes an array of at least {count + 1} "
                f"axes, channels last, not shape {x.shape}"
            )
        # Random streams are passed on as modules, because they change; options stay as they are.
        streams = {k: v for k, v in kwargs.items() if isinstance(v, nnx.Pytree)}
        options = {k: v for k, v in kwargs.items() if k not in streams}

        def call(layer: Tileable, x: jax.Array, **streams: Any) -> jax.Array:
            return super().__call__(x, *rest, **options, **streams)

        spatial = tuple(range(x.ndim - 1 - count, x.ndim - 1))
        return checkpoint(call, in_axes=(None, spatial), tiles=self.tiles)(self, x, **streams)
