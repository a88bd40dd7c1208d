"""Layers: Flax's with `tiles=`, and those that Flax does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from .. import ops
from ._tileable import Tileable


class Conv(Tileable, nnx.Conv):
    """`flax.nnx.Conv` with `tiles=`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxtile import nn
    >>> layer = nn.Conv(3, 8, (3, 3), tiles=(4, 4), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 64, 64, 3))).shape
    (1, 64, 64, 8)
    """


class ConvTranspose(Tileable, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` with `tiles=`."""


class BatchNorm(Tileable, nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with `tiles=` and `frozen=`.

    In training mode the layer normalises with the statistics of the batch, over all tiles
    together, and updates the running statistics; in evaluation mode it uses the running ones. A
    frozen layer uses the running statistics in both modes and never changes them.

    Flax holds the running statistics in float32; here they have the type of the weights if that is
    wider.
    """

    def __init__(self, *args: Any, frozen: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.frozen = frozen
        for statistic in (self.mean, self.var):
            dtype = jnp.promote_types(statistic[...].dtype, self.param_dtype)
            statistic.set_value(statistic[...].astype(dtype))

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, **kwargs: Any
    ) -> jax.Array:
        return super().__call__(x, True if self.frozen else use_running_average, **kwargs)


class _CoordinateDropout(nnx.Dropout):
    """Flax's dropout, with another mask."""

    def __call__(
        self,
        inputs: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        if deterministic is None:
            deterministic = self.deterministic
        if deterministic or self.rate == 0:
            return inputs
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("Dropout needs `rngs`, when it is made or when it is called")
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs[self.rng_collection]
        key = rngs() if isinstance(rngs, nnx.RngStream) else rngs
        return ops.coordinate_dropout(
            inputs, key, rate=self.rate, broadcast_dims=self.broadcast_dims
        )


class Dropout(Tileable, _CoordinateDropout):
    """`flax.nnx.Dropout` whose mask is a function of key and coordinate alone, with `tiles=`.

    See `jaxtile.ops.coordinate_dropout`.
    """


class LocalConv(nnx.Module):
    """Locally connected layer: a kernel of its own for each position. Stride 1, no padding.

    `in_size`: the image's spatial shape, which fixes the number of kernels.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        in_size: Sequence[int],
        *,
        tiles: tuple[int, ...] | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = None,
        rngs: nnx.Rngs,
    ):
        if len(in_size) != len(kernel_size):
            raise ValueError(
                f"`in_size` (={tuple(in_size)}) and `kernel_size` (={tuple(kernel_size)}) must "
                "have one number per spatial axis each"
            )
        out = tuple(n - k + 1 for n, k in zip(in_size, kernel_size, strict=True))
        if any(n < 1 for n in out):
            raise ValueError(
                f"`kernel_size` (={tuple(kernel_size)}) is larger than `in_size` "
                f"(={tuple(in_size)}) along an axis"
            )
        shape = (*out, *kernel_size, in_features, out_features)
        init = kernel_init or nnx.initializers.lecun_normal(batch_axis=tuple(range(len(out))))
        self.kernel = nnx.Param(init(rngs.params(), shape, param_dtype))
        self.dtype, self.tiles = dtype, tiles

    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel = promote_dtype((x, self.kernel[...]), dtype=self.dtype)
        return ops.local_conv(x, kernel, tiles=self.tiles)
