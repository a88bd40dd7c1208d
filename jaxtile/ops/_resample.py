"""Up-sampling, and skips of another size."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._spatial import Size, per_axis
from ._tileable import tileable


@tileable(x=1)
def upsample(x: jax.Array, *, factor: Size = 2, method: str = "nearest") -> jax.Array:
    """Enlarge `x` (`NHWC`) by whole factors: `"nearest"` or `"bilinear"` (trilinear in 3-D).

    Bilinear means half-pixel centres and repeated borders, as `jax.image.resize` and PyTorch
    (`align_corners=False`). It is shifts and sums: no matrix of weights as long as the image.

    >>> import jax.numpy as jnp
    >>> from jaxtile import ops
    >>> ops.upsample(jnp.array([[[0.0], [4.0]]]), method="bilinear")[0, :, 0].tolist()
    [0.0, 1.0, 3.0, 4.0]
    """
    if method not in ("nearest", "bilinear"):
        raise ValueError(f"`method` (={method!r}) must be 'nearest' or 'bilinear'")
    for axis, times in enumerate(per_axis("factor", factor, x.ndim - 2), start=1):
        if times > 1 and method == "nearest":
            x = jnp.repeat(x, times, axis)
        elif times > 1:
            shape = (*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])
            x = jnp.stack(_linear(x, axis, times), axis + 1).reshape(shape)
    return x


def _linear(x: jax.Array, axis: int, times: int) -> list[jax.Array]:
    """The `times` samples of each pixel: mixed with the one before, or the one after."""
    n = x.shape[axis]
    first, last = (lax.slice_in_dim(x, i, i + 1, axis=axis) for i in (0, n - 1))
    before = jnp.concatenate([first, lax.slice_in_dim(x, 0, n - 1, axis=axis)], axis)
    after = jnp.concatenate([lax.slice_in_dim(x, 1, n, axis=axis), last], axis)
    offsets = [(i + 0.5) / times - 0.5 for i in range(times)]
    return [x * (1 - abs(o)) + (before if o < 0 else after) * abs(o) for o in offsets]


def center_crop(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """The middle of `x` (`NHWC`), of this spatial size; an odd excess loses one more at the end."""
    if np.ndim(size) != 1 or len(size) != x.ndim - 2:
        raise ValueError(
            f"the size (={size}) must have {x.ndim - 2} numbers, one per spatial axis of the image "
            f"of shape {x.shape}"
        )
    excess = [n - m for n, m in zip(x.shape[1:-1], size, strict=True)]
    if any(e < 0 for e in excess):
        raise ValueError(f"cannot crop an image of shape {x.shape} to the larger size {(*size,)}")
    starts = [0, *(e // 2 for e in excess), 0]
    stops = [e // 2 + m for e, m in zip(excess, size, strict=True)]
    return lax.slice(x, starts, [x.shape[0], *stops, x.shape[-1]])


@tileable(x=1, skip=1)
def crop_concat(skip: jax.Array, x: jax.Array) -> jax.Array:
    """Cut the middle out of `skip` to the size of `x`, and put its channels before those of `x`."""
    return jnp.concatenate([center_crop(skip, x.shape[1:-1]), x], -1)
