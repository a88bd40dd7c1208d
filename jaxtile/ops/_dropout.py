"""Dropout by coordinate."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from ._tileable import tileable


@tileable(x=1)
def coordinate_dropout(
    x: jax.Array, key: jax.Array, *, rate: float | jax.Array, broadcast_dims: Sequence[int] = ()
) -> jax.Array:
    """Dropout whose mask at a position is a hash of the key and that position, and nothing else.

    Tiled, untiled and sharded networks therefore drop the same elements; so do an image and a
    larger one that begins with it (with `jax.random` the mask depends on the array's shape too).
    What is kept is divided by `1 - rate`. Dimensions in `broadcast_dims` share one mask. The rate
    may be traced, if it is below 1.

    The hash is threefry, applied to two coordinates at a time: the first pair makes a key for each
    row, the next pair hashes the positions in it.

    >>> import jax, jax.numpy as jnp
    >>> from jaxtile import ops
    >>> key = jax.random.key(0)
    >>> small = ops.coordinate_dropout(jnp.ones((1, 4, 4, 1)), key, rate=0.5)
    >>> large = ops.coordinate_dropout(jnp.ones((1, 6, 9, 1)), key, rate=0.5)
    >>> bool((small == large[:, :4, :4]).all())
    True
    """
    if not isinstance(rate, jax.Array):
        if not 0 <= rate <= 1:
            raise ValueError(f"`rate` (={rate}) must be between 0 and 1")
        if rate == 0:
            return x
        if rate == 1:
            return jnp.zeros_like(x)
    shared = {d % x.ndim for d in broadcast_dims}
    shape = tuple(1 if d in shared else n for d, n in enumerate(x.shape))
    # 24 bits: as fine as a float32 between 0 and 1.
    draw = (_bits(key, shape) >> 8).astype(jnp.float32) * 2.0**-24
    return jnp.where(draw >= rate, x / (1 - rate), jnp.zeros_like(x))


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits per position."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    first, second = words[0], words[1]
    for d in range(0, len(shape), 2):
        pair = [e for e in (d, d + 1) if e < len(shape)]
        partial = shape[: pair[-1] + 1] + (1,) * (len(shape) - pair[-1] - 1)
        counters = [lax.broadcasted_iota(jnp.uint32, partial, e) for e in pair]
        counters += [jnp.zeros(partial, jnp.uint32)] * (2 - len(pair))
        first, second = threefry2x32_p.bind(
            jnp.broadcast_to(first, partial), jnp.broadcast_to(second, partial), *counters
        )
    return first ^ second
