"""Locally connected layers: a convolution whose kernel differs from position to position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ._tileable import tileable


@tileable(x=1, kernel=0)
def local_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Untied convolution, stride 1, no padding, in one or two dimensions.

    `kernel` has an axis per output position: `(rows, columns, height, width, in, out)`. It is as
    large as the image, so its spatial axes are tiled with the image's.

    One matrix product per row of the kernel, over its width and the channels: a workspace of
    `width` times the input, where gathering whole patches would take `height * width` times.

    >>> import jax.numpy as jnp
    >>> from jaxtile import ops
    >>> ops.local_conv(jnp.ones((2, 8, 8, 3)), jnp.ones((6, 6, 3, 3, 3, 4)), tiles=(2, 3)).shape
    (2, 6, 6, 4)
    """
    rank = x.ndim - 2
    if rank not in (1, 2) or kernel.ndim != 2 * rank + 2:
        raise ValueError(
            f"`kernel` of shape {kernel.shape} does not fit `x` of shape {x.shape}: an image "
            "(N, H, W, C) takes a kernel (rows, columns, height, width, C, out)"
        )
    out, size = kernel.shape[:rank], kernel.shape[rank : 2 * rank]
    wanted = tuple(n - k + 1 for n, k in zip(x.shape[1:-1], size, strict=True))
    if out != wanted or kernel.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"`kernel` of shape {kernel.shape} has weights for an output of size {out} and "
            f"{kernel.shape[-2]} channels, but `x` of shape {x.shape} gives one of size {wanted} "
            f"from {x.shape[-1]} channels"
        )
    if rank == 1:
        return _row(x, kernel)
    rows = out[0]
    products = [
        _row(lax.slice_in_dim(x, i, i + rows, axis=1), kernel[:, :, i]) for i in range(size[0])
    ]
    return sum(products[1:], products[0])


def _row(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The kernel's last spatial axis: shifted copies side by side, then one product."""
    width, columns = kernel.shape[-3], kernel.shape[-4]
    shifted = [lax.slice_in_dim(x, i, i + columns, axis=x.ndim - 2) for i in range(width)]
    patches = jnp.concatenate(shifted, axis=-1)
    weights = jnp.concatenate([kernel[..., i, :, :] for i in range(width)], axis=-2)
    return jnp.einsum("n...i,...io->n...o", patches, weights)
