"""AlexNet's convolutional part, as TensorFlow's benchmark trains it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops

from ._classifier import Classifier, check_labels
from ._sizes import check_image, check_size

_WIDTHS = (1, 3, 6, 4, 4)
"""Channels of each convolution, in units of the first one's."""
_KERNELS = (11, 5, 3, 3, 3)


class AlexNet(nnx.Module):
    """AlexNet. The defaults are the reference graph, to `pool5`, with local response norm.

    Names: `conv1/Conv2D`, `conv1/BiasAdd`, `conv1` (after ReLU), `lrn1/LRN`, `pool1`, and so on;
    `loss`. With a classifier also `fc6`, `fc7`, `fc8`.

    torchvision's network, whose weights `models.load_weights` reads, is
    `AlexNet(1000, lrn=False, conv1_padding=2, rngs=rngs)`.

    Args:
      num_classes: adds a classifier; see `models._classifier` for images larger than 224.
      width: channels of the first convolution.
      lrn: local response norm after the first two layers.
      conv1_padding: of the first convolution, whose stride is 4.
      dropout: rate in the classifier.
      dtype: of the computation; None takes it from image and weights.
      param_dtype: of the weights.
      rngs: as `nnx.Rngs(0)`.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        width: int = 64,
        lrn: bool = True,
        conv1_padding: str | int = "SAME",
        dropout: float = 0.5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.lrn, self.conv1_padding = lrn, conv1_padding
        n_in = 3
        for i, (w, k) in enumerate(zip(_WIDTHS, _KERNELS, strict=True), start=1):
            n = w * width
            options = {"strides": 4, "padding": conv1_padding} if i == 1 else {}
            conv = nn.Conv(n_in, n, (k, k), use_bias=False, **options, **types)
            setattr(self, f"conv{i}", conv)
            setattr(self, f"bias{i}", nnx.Param(jnp.zeros(n, param_dtype)))
            n_in = n
        self.classifier = (
            None if num_classes is None else Classifier(n_in, 6, num_classes, dropout, **types)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`pool5`; with `num_classes`, the logits."""
        check_image("AlexNet", x.shape, 2, 3)
        check_size("AlexNet", x.shape, self._fits)
        for i in range(1, 6):
            x = checkpoint_name(getattr(self, f"conv{i}")(x), f"conv{i}/Conv2D")
            bias = getattr(self, f"bias{i}")[...].astype(x.dtype)
            x = checkpoint_name(x + bias, f"conv{i}/BiasAdd")
            x = checkpoint_name(nnx.relu(x), f"conv{i}")
            if i <= 2 and self.lrn:
                x = checkpoint_name(ops.local_response_norm(x), f"lrn{i}/LRN")
            if i in (1, 2, 5):
                x = checkpoint_name(ops.max_pool(x, window=3, strides=2), f"pool{i}")
        return x if self.classifier is None else self.classifier(x)

    def loss(self, x: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        """Half the sum of squares of `pool5`; with `num_classes`, the mean cross-entropy."""
        check_labels("AlexNet", self.classifier, labels)
        return checkpoint_name(self._loss(self(x), labels), "loss")

    def _loss(self, y: jax.Array, labels: jax.Array | None) -> jax.Array:
        if self.classifier is not None:
            return ops.softmax_cross_entropy(y, labels)
        y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        return (y * y).sum() / 2

    def _fits(self, n: int) -> bool:
        pad = self.conv1_padding
        n = (n + 2 * pad - 11) // 4 + 1 if isinstance(pad, int) else -(-n // 4)
        for _ in range(3):
            n = (n - 3) // 2 + 1
            if n < 1:
                return False
        return n >= (1 if self.classifier is None else self.classifier.size)
