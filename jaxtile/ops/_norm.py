"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ._tileable import tileable


@tileable(x=1)
def local_response_norm(
    x: jax.Array,
    *,
    radius: int = 2,
    bias: float = 2.0,
    alpha: float = 1e-4,
    beta: float = 0.75,
) -> jax.Array:
    """`x / (bias + alpha * s) ** beta`, with `s` the sum of squares over `2 * radius + 1` channels.

    PyTorch divides its `alpha` by the number of channels in the window; this does not.
    """
    window = (1,) * (x.ndim - 1) + (2 * radius + 1,)
    total = lax.reduce_window(x * x, 0.0, lax.add, window, (1,) * x.ndim, "SAME")
    return x * lax.pow(bias + alpha * total, jnp.array(-beta, x.dtype))


@tileable(x=1)
def batch_statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and (biased) variance of each channel, in at least float32.

    The variance is `E[x^2] - E[x]^2`: both sums in one pass over the image. Two passes would
    compute every tile twice.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    return mean, jnp.maximum(0, (x * x).mean(axes) - mean * mean)


@tileable(x=1)
def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array | None = None,
    var: jax.Array | None = None,
    *,
    epsilon: float = 1e-5,
) -> jax.Array:
    """Batch norm: with `mean` and `var` (running or frozen), else with the statistics of `x`."""
    if (mean is None) != (var is None):
        raise ValueError("give both `mean` and `var`, or neither for the statistics of `x`")
    if mean is None or var is None:
        mean, var = batch_statistics(x)
    gain = scale * lax.rsqrt(var + epsilon)
    return ((x - mean) * gain + bias).astype(x.dtype)
