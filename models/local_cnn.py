"""The small CNN of untied layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops

from ._sizes import check_image


class LocalCNN(nnx.Module):
    """Two locally connected layers and a linear classifier.

    Layer `i` is `L{i}.filter` (untied convolution), `L{i}.filterA` (gain and bias), `L{i}.filterNL`
    (nonlinearity); then `classifier.linear1` and `classifier.softmax` (the loss). The reference
    keeps the input, `a` and `b` of `filterA` for its backward pass, which is what `a * (x + b)`
    needs; it does not say which nonlinearity it uses.

    An untied layer has weights for every position, so the image's size is part of the model; tiled,
    the weights are read by window too. The classifier sums over all positions: tile by tile.

    Args:
      size: of the image, a square, or (height, width).
      in_channels: channels of the image.
      channels: of both layers.
      kernels: kernel size of each layer.
      num_classes: of the classifier.
      activation: the nonlinearity.
      dtype: of the computation; None takes it from image and weights.
      param_dtype: of the weights.
      rngs: as `nnx.Rngs(0)`.
    """

    def __init__(
        self,
        size: int | Sequence[int] = 41,
        in_channels: int = 1,
        *,
        channels: int = 64,
        kernels: tuple[int, int] = (9, 7),
        num_classes: int = 3034,
        activation: Callable[[jax.Array], jax.Array] = jnp.tanh,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        size = (size, size) if isinstance(size, int) else (size[0], size[1])
        self.size, self.in_channels, self.activation = size, in_channels, activation
        n_in = in_channels
        for i, k in enumerate(kernels):
            setattr(self, f"L{i}", UntiedLayer(n_in, channels, k, size, **types))
            size = (size[0] - k + 1, size[1] - k + 1)
            n_in = channels
        self.classifier = nnx.LinearGeneral(
            (*size, channels), num_classes, axis=(1, 2, 3), use_bias=False, **types
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        check_image("LocalCNN", x.shape, 2, self.in_channels)
        if x.shape[1:-1] != self.size:
            raise ValueError(
                f"LocalCNN has weights for each position of an image of size {self.size}; shape "
                f"{x.shape} has another size. Make one for it: LocalCNN(size={x.shape[1:-1]})"
            )
        for i in range(2):
            layer = getattr(self, f"L{i}")
            x = checkpoint_name(layer.filter(x), f"L{i}.filter")
            a, b = layer.a[...].astype(x.dtype), layer.b[...].astype(x.dtype)
            x = checkpoint_name(a * (x + b), f"L{i}.filterA")
            x = checkpoint_name(self.activation(x), f"L{i}.filterNL")
        return checkpoint_name(self.classifier(x), "classifier.linear1")

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean softmax cross-entropy; images labelled -1 do not count."""
        loss = ops.softmax_cross_entropy(self(x), labels)
        return checkpoint_name(loss, "classifier.softmax")

    def evaluate(self, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Loss, accuracy, and four numbers: accuracy, top-5 accuracy, mean p and mean -log p of the
        label. (The reference computes four numbers too, and does not say which.)
        """
        logits = self(x)
        probability = checkpoint_name(jax.nn.softmax(logits), "classifier.softmax.probability")
        loss = ops.softmax_cross_entropy(logits, labels)
        loss = checkpoint_name(loss, "classifier.softmax")
        chosen = jnp.take_along_axis(probability, labels[:, None], -1)
        better = (probability > chosen).sum(-1)
        scores = [better < 1, better < 5, chosen, -jnp.log(chosen)]
        metrics = jnp.stack([s.mean(dtype=probability.dtype) for s in scores])
        metrics = checkpoint_name(metrics, "classifier.evaluate")
        return loss, checkpoint_name(metrics[0], "classifier.evaluate.accuracy"), metrics


class UntiedLayer(nnx.Module):
    """Weights of one layer: kernels, a scalar gain, a bias per position and channel."""

    def __init__(self, n_in, n_out, kernel, size, *, rngs, param_dtype, dtype):
        self.filter = nn.LocalConv(
            n_in, n_out, (kernel, kernel), size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        out = (size[0] - kernel + 1, size[1] - kernel + 1, n_out)
        self.a = nnx.Param(jnp.ones((), param_dtype))
        self.b = nnx.Param(jnp.zeros(out, param_dtype))
