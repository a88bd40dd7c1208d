"""Pooling."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from .._rules.reductions import extreme
from ._spatial import Padding, Size, pads, per_axis
from ._tileable import tileable


@tileable(x=1)
def max_pool(
    x: jax.Array, *, window: Size = 2, strides: Size | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """The largest value of each window of `x` (`NHWC`). Strides are the window unless given.

    Among equal values the gradient goes, whole, to the first in row-major order, tiled or not, as
    in PyTorch. After a ReLU ties are common: a window of zeros is one.

    >>> import jax, jax.numpy as jnp
    >>> from jaxtile import ops
    >>> jax.grad(lambda x: ops.max_pool(x).sum())(jnp.zeros((1, 2, 2, 1)))[0, :, :, 0].tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    lowest = extreme(x.dtype, lowest=True)
    return lax.reduce_window(x, lowest, lax.max, *_windows(x, window, strides, padding))


@tileable(x=1)
def avg_pool(
    x: jax.Array,
    *,
    window: Size = 2,
    strides: Size | None = None,
    padding: Padding = "VALID",
    count_padding: bool = True,
) -> jax.Array:
    """The mean of each window of `x` (`NHWC`). Strides are the window unless given.

    With `count_padding` the padding's zeros count; without, the mean is over the image's pixels.
    """
    arguments = _windows(x, window, strides, padding)
    total = lax.reduce_window(x, 0.0, lax.add, *arguments)
    if count_padding:
        return total / math.prod(arguments[0])
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    return total / lax.reduce_window(ones, 0.0, lax.add, *arguments)


def _windows(
    x: jax.Array, window: Size, strides: Size | None, padding: Padding
) -> tuple[tuple[int, ...], tuple[int, ...], str | list[tuple[int, int]]]:
    """Window, strides and padding of all dimensions, as `lax.reduce_window` takes them."""
    rank = x.ndim - 2
    sizes = per_axis("window", window, rank)
    steps = sizes if strides is None else per_axis("strides", strides, rank)
    around = pads(padding, rank)
    if not isinstance(around, str):
        around = [(0, 0), *around, (0, 0)]
    return (1, *sizes, 1), (1, *steps, 1), around
