"""ConvNeXt in Linen, as its paper has it: https://arxiv.org/abs/2201.03545, without drop path.

Nothing of jaxtile is in here. The defaults are ConvNeXt-T, 28,589,128 weights.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

_DRAWN = nn.initializers.truncated_normal(0.02)


class ConvNeXt(nn.Module):
    """The scores of images, `NHWC`.

    Args:
      classes: of the classifier.
      depths: blocks per stage.
      dims: channels per stage.
      dtype: of weights and activations.
    """

    classes: int = 1000
    depths: tuple[int, ...] = (3, 3, 9, 3)
    dims: tuple[int, ...] = (96, 192, 384, 768)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        least = 4 * 2 ** (len(self.dims) - 1)
        if min(x.shape[1:3]) < least:
            size = " x ".join(map(str, x.shape[1:3]))
            raise ValueError(f"ConvNeXt takes images of at least {least} x {least}, not {size}")
        for stage, (depth, dim) in enumerate(zip(self.depths, self.dims, strict=True)):
            if stage == 0:
                x = _norm(self.dtype)(_patches(dim, 4, self.dtype)(x))
            else:
                x = _patches(dim, 2, self.dtype)(_norm(self.dtype)(x))
            for _ in range(depth):
                x = Block(self.dtype)(x)
        x = _norm(self.dtype)(x.mean((1, 2)))
        return _dense(self.classes, self.dtype)(x)


class Block(nn.Module):
    """A 7 x 7 depthwise convolution, then four times the channels and back, and a shortcut."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dim = x.shape[-1]
        y = nn.Conv(
            dim,
            (7, 7),
            padding=3,
            feature_group_count=dim,
            kernel_init=_DRAWN,
            dtype=self.dtype,
            param_dtype=self.dtype,
        )(x)
        y = _dense(4 * dim, self.dtype)(_norm(self.dtype)(y))
        y = _dense(dim, self.dtype)(nn.gelu(y, approximate=False))
        scale = self.param("scale", nn.initializers.constant(1e-6), (dim,), self.dtype)
        return x + scale * y


def _norm(dtype: Any) -> nn.Module:
    return nn.LayerNorm(epsilon=1e-6, dtype=dtype, param_dtype=dtype)


def _dense(features: int, dtype: Any) -> nn.Module:
    return nn.Dense(features, kernel_init=_DRAWN, dtype=dtype, param_dtype=dtype)


def _patches(features: int, size: int, dtype: Any) -> nn.Module:
    """A convolution of patches that do not overlap."""
    return nn.Conv(
        features,
        (size, size),
        strides=size,
        padding="VALID",
        kernel_init=_DRAWN,
        dtype=dtype,
        param_dtype=dtype,
    )
