"""Losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ._tileable import tileable


@tileable(logits=1, labels=1)
def softmax_cross_entropy(
    logits: jax.Array, labels: jax.Array, *, ignore: int | None = -1
) -> jax.Array:
    """Mean cross-entropy of `logits` (`..., classes`) with integer `labels` (`...`).

    Positions labelled `ignore` do not count, neither in the sum nor in the number divided by; if
    all are ignored the loss is 0. Any other label that is not a class makes the loss NaN: there is
    no right number. The sum is accumulated in at least float32.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`labels` of shape {labels.shape} must have one entry per position of `logits` of "
            f"shape {logits.shape}, whose last axis is the class"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"`labels` must be integers, not {labels.dtype}")
    # In 8 bits 256 classes, or -1, would wrap round.
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    classes = logits.shape[-1]
    shifted = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    here = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    chosen = jnp.where(here, shifted, 0).sum(-1)
    losses = jnp.log(jnp.exp(shifted).sum(-1)) - chosen
    losses = jnp.where((labels >= 0) & (labels < classes), losses, jnp.nan)
    if ignore is None:
        return losses.mean()
    counts = labels != ignore
    # An int32 would wrap round: images of two gigapixels have 2**31 positions.
    number = counts.sum(dtype=losses.dtype)
    return jnp.where(counts, losses, 0).sum() / jnp.maximum(number, 1)
