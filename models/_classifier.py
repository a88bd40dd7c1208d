"""The classifiers of AlexNet and VGG16.

The original one is written as convolutions. On the image size that the networks were made for, the
first dense layer sees all positions at once. On a larger image it slides over them, and the logits
are averaged. (torchvision averages the *features* down to that size instead. On the original size
the two agree.)
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops


class Classifier(nnx.Module):
    """Two hidden layers of 4096, with dropout before each as in torchvision's AlexNet."""

    def __init__(
        self, features: int, size: int, num_classes: int, dropout: float, *, rngs: nnx.Rngs, **types
    ):
        self.size = size
        options: dict[str, Any] = {"padding": "VALID", "rngs": rngs, **types}
        self.fc6 = nn.Conv(features, 4096, (size, size), **options)
        self.fc7 = nn.Conv(4096, 4096, (1, 1), **options)
        self.fc8 = nn.Conv(4096, num_classes, (1, 1), **options)
        self.dropout = nn.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(nnx.relu(self.fc6(self.dropout(x))), "fc6")
        x = checkpoint_name(nnx.relu(self.fc7(self.dropout(x))), "fc7")
        return checkpoint_name(self.fc8(x).mean((1, 2)), "fc8")


class PooledClassifier(nnx.Module):
    """One dense layer on the mean of the features over all positions, as ResNet-50 has it."""

    size = 1

    def __init__(self, features: int, num_classes: int, *, rngs: nnx.Rngs, **types):
        self.fc = nnx.Linear(features, num_classes, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        return checkpoint_name(self.fc(checkpoint_name(x.mean((1, 2)), "avgpool")), "fc")


class DenseClassifier(nnx.Module):
    """A score for each position of the features, which stands for `stride` x `stride` pixels: the
    coarsest of the fully convolutional networks (Long, Shelhamer and Darrell, 2015).
    """

    size = 1

    def __init__(self, features: int, num_classes: int, stride: int, *, rngs: nnx.Rngs, **types):
        self.stride = stride
        self.score = nn.Conv(features, num_classes, (1, 1), rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = checkpoint_name(self.score(x), "coarse")
        return checkpoint_name(ops.upsample(x, factor=self.stride), "score")


def check_labels(model: str, classifier: nnx.Module | None, labels: jax.Array | None) -> None:
    """Raise an error if a loss lacks its labels, or has labels and no classifier to compare."""
    if (classifier is None) != (labels is None):
        raise ValueError(
            f"{model} has no classifier, so its loss takes no labels: make it with `num_classes`"
            if classifier is None
            else f"{model} has a classifier, so its loss needs labels"
        )
