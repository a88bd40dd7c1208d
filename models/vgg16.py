"""VGG16, the network of the large-image literature."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops

from ._classifier import Classifier, DenseClassifier, PooledClassifier, check_labels
from ._sizes import check_image, check_size

BLOCKS = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Channels of each convolution, in units of the first one's."""


class VGG16(nnx.Module):
    """VGG16: 13 convolutions in five blocks.

    Names: `conv1_1` (after ReLU), `conv1_2`, `pool1`, and so on; `loss`. With a classifier also
    `fc6`, `fc7`, `fc8`; pooled, `avgpool` and `fc`; dense, `coarse` and `score`.

    Args:
      num_classes: adds a classifier; see `models._classifier` for images larger than 224.
      pooled: the classifier is one dense layer on the mean over all positions. On large images
        the original one, which slides, takes as long as a third of the network, and more memory.
      dense: the classifier gives a score to each position of `pool5`, and so to every pixel; the
        sides of images are multiples of 32.
      in_channels: channels of the image.
      width: channels of the first convolution.
      dropout: rate in the classifier.
      dtype: of the computation; None takes it from image and weights.
      param_dtype: of the weights.
      rngs: as `nnx.Rngs(0)`.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        pooled: bool = False,
        dense: bool = False,
        in_channels: int = 3,
        width: int = 64,
        dropout: float = 0.5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.in_channels = n_in = in_channels
        for block, widths in enumerate(BLOCKS, start=1):
            for i, n in enumerate((w * width for w in widths), start=1):
                conv = nn.Conv(n_in, n, (3, 3), kernel_init=nnx.initializers.he_normal(), **types)
                setattr(self, f"conv{block}_{i}", conv)
                n_in = n
        if dense and (pooled or num_classes is None):
            raise ValueError("`dense` wants `num_classes`, and does not go with `pooled`")
        self.dense = dense
        if num_classes is None:
            self.classifier = None
        elif dense:
            self.classifier = DenseClassifier(n_in, num_classes, 2 ** len(BLOCKS), **types)
        elif pooled:
            self.classifier = PooledClassifier(n_in, num_classes, **types)
        else:
            self.classifier = Classifier(n_in, 7, num_classes, dropout, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`pool5`; with `num_classes`, the logits: of the image, or dense, of each pixel."""
        check_image("VGG16", x.shape, 2, self.in_channels)
        check_size("VGG16", x.shape, self._fits)
        for block in range(1, 6):
            x = self.block(x, block)
        return x if self.classifier is None else self.classifier(x)

    def conv_blocks(self) -> list[list[nn.Conv]]:
        """The convolutions of each block."""
        return [
            [getattr(self, f"conv{block}_{i}") for i in range(1, len(widths) + 1)]
            for block, widths in enumerate(BLOCKS, start=1)
        ]

    def block(self, x: jax.Array, block: int) -> jax.Array:
        """One of the five blocks: convolutions with ReLU, then a pool."""
        for i in range(1, len(BLOCKS[block - 1]) + 1):
            x = nnx.relu(getattr(self, f"conv{block}_{i}")(x))
            x = checkpoint_name(x, f"conv{block}_{i}")
        return checkpoint_name(ops.max_pool(x), f"pool{block}")

    def loss(self, x: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """The mean of `pool5`; with `num_classes`, the mean cross-entropy."""
        check_labels("VGG16", self.classifier, labels)
        y = self(x)
        if self.classifier is None:
            loss = y.astype(jnp.promote_types(y.dtype, jnp.float32)).mean()
        else:
            loss = ops.softmax_cross_entropy(y, labels)
        return checkpoint_name(loss, "loss")

    def _fits(self, n: int) -> bool:
        smallest = 32 * (1 if self.classifier is None else self.classifier.size)
        return n >= smallest and not (self.dense and n % 32)
