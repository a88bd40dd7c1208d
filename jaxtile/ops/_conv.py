"""Convolutions."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ._spatial import Padding, Size, pads, per_axis
from ._tileable import tileable


@tileable(x=1)
def conv(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: Size = 1,
    padding: Padding = "SAME",
    dilation: Size = 1,
    groups: int = 1,
) -> jax.Array:
    """Convolution of `x` (`NHWC`) with `kernel` (`HWIO`; `I` = channels / `groups`).

    >>> import jax.numpy as jnp
    >>> from jaxtile import ops
    >>> image, kernel = jnp.ones((1, 64, 64, 3)), jnp.ones((3, 3, 3, 8))
    >>> ops.conv(image, kernel, strides=2, tiles=(4, 4)).shape
    (1, 32, 32, 8)
    """
    rank = x.ndim - 2
    y = lax.conv_general_dilated(
        x,
        kernel,
        per_axis("strides", strides, rank),
        pads(padding, rank),
        rhs_dilation=per_axis("dilation", dilation, rank),
        dimension_numbers=_dimensions(rank),
        feature_group_count=groups,
    )
    return y if bias is None else y + bias


def depthwise_conv(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, **options: Any
) -> jax.Array:
    """`conv` of each channel by itself; `kernel` is `HW1O`, with `O` a multiple of the channels."""
    return conv(x, kernel, bias, groups=x.shape[-1], **options)


@tileable(x=1)
def conv_transpose(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: Size = 2,
    padding: Padding = "VALID",
) -> jax.Array:
    """Transposed convolution, as `jax.lax.conv_transpose`: `kernel` is `HWIO` and is not flipped.

    PyTorch's weight `IOHW` is this kernel flipped along its spatial axes.
    """
    rank = x.ndim - 2
    y = lax.conv_transpose(
        x,
        kernel,
        per_axis("strides", strides, rank),
        pads(padding, rank),
        dimension_numbers=_dimensions(rank),
    )
    return y if bias is None else y + bias


def _dimensions(rank: int) -> tuple[str, str, str]:
    letters = {1: "W", 2: "HW", 3: "DHW"}.get(rank)
    if letters is None:
        raise ValueError(f"an image has one to three spatial axes, not {rank}: (N, H, W, C)")
    return f"N{letters}C", f"{letters}IO", f"N{letters}C"
