"""Tasks with classes: one for each pixel, one for an image, or any number of them."""

from __future__ import annotations

import colorsys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtile import ops

from ._base import Task, mean, mean_of_counted, ratio, text

_DISTINCT = [  # also for those who see some colours as one (Okabe and Ito)
    *[(38, 38, 38), (230, 159, 0), (86, 180, 233), (0, 158, 115)],
    *[(240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)],
]
IGNORED = 255
_MOST_CONFUSED = 12  # classes: each pair of them is counted


class _OneClass(Task):
    """One class of several for each label: labels are their numbers."""

    what: ClassVar[str]
    has_probabilities = True

    @property
    def label_values(self) -> range:
        return range(self.classes)

    def loss(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        return ops.softmax_cross_entropy(scores, self._ignoring(labels))

    def compare(self, scores: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        labels, classes = self._ignoring(labels), jnp.arange(self.classes)
        counted = labels >= 0
        is_true = labels[..., None] == classes
        is_predicted = (scores.argmax(-1)[..., None] == classes) & counted[..., None]
        losses = jax.nn.logsumexp(scores, -1) - jnp.where(is_true, scores, 0).sum(-1)
        found = {
            "loss": jnp.where(counted, losses, 0),
            "correct": is_predicted & is_true,
            "predicted": is_predicted,
            "true": is_true,
        }
        if self.classes <= _MOST_CONFUSED:
            pairs = is_true[..., None] & is_predicted[..., None, :]
            found["pairs"] = pairs.reshape(*labels.shape, -1)
        return found

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, Any]:
        """The usual measures. Per class: how often it is there (`counted`), intersection over
        union, and Dice; the latter are None where a class neither is there nor is predicted, and
        then it is not in the mean.
        """
        correct, predicted, true = (sums[n] for n in ("correct", "predicted", "true"))
        iou, dice = (
            ratio(correct, predicted + true - correct),
            ratio(2 * correct, predicted + true),
        )
        return {
            "loss": ratio(sums["loss"], true.sum()),
            "accuracy": ratio(correct.sum(), true.sum()),
            "mean_iou": mean(iou),
            "mean_dice": mean(dice),
            "iou": iou,
            "dice": dice,
            "counted": [int(n) for n in true],
            **self._confusion(sums),
        }

    def _confusion(self, sums: dict[str, np.ndarray]) -> dict[str, Any]:
        """For each class, how often it was taken for each class."""
        if "pairs" not in sums:
            return {}
        return {"confusion": sums["pairs"].reshape(self.classes, -1).astype(int).tolist()}

    def predict(self, scores: jax.Array) -> jax.Array:
        return scores.argmax(-1).astype(jnp.uint8 if self.classes <= 256 else jnp.uint16)

    def probabilities(self, scores: jax.Array) -> jax.Array:
        return jax.nn.softmax(scores)

    def remarks(self, result: dict[str, Any]) -> list[str]:
        """How often each class was there; and a warning for those that were not."""
        counted = result["counted"]
        number = f"{sum(counted):,} {self.unit}s"
        per_class = " ".join(f"{n:,}" for n in counted)
        lines = [f"{number} counted (per class {per_class})"]
        absent = [str(c) for c, n in enumerate(counted) if n == 0]
        if absent:
            lines.append(
                f"warning: none of the {number} is of class {', '.join(absent)}: the {self.what} "
                "says nothing about it"
            )
        return lines

    def _ignoring(self, labels: jax.Array) -> jax.Array:
        """Labels of 8 bits have 255 for what does not count; others -1."""
        if labels.dtype != jnp.uint8:
            return labels
        return jnp.where(labels == IGNORED, -1, labels.astype(jnp.int32))


def class_colours(classes: int) -> list[tuple[int, int, int]]:
    """Red, green and blue of each class, in pictures and in files; the first is dark.

    >>> class_colours(3)
    [(38, 38, 38), (230, 159, 0), (86, 180, 233)]
    """
    shades = [
        tuple(round(255 * x) for x in colorsys.hsv_to_rgb(0.381966 * i % 1, 0.6, 0.9))
        for i in range(classes)
    ]
    return [*_DISTINCT, *shades][:classes]


class Segmentation(_OneClass):
    """A class for each pixel."""

    label_dtype, unlabelled = np.uint8, IGNORED
    quality, what = "mean_iou", "mean IoU"

    def __init__(self, classes: int):
        super().__init__(classes, dense=True)

    def describe(self, result: dict[str, Any]) -> str:
        line = f"loss {text(result['loss'])}, accuracy {text(result['accuracy'])}"
        per_class = " ".join(map(text, result["iou"]))
        found, dice = text(result["mean_iou"]), text(result["mean_dice"])
        return f"{line}, mean IoU {found} (per class {per_class}), mean Dice {dice}"

    def draw(self, axis: Any, value: Any) -> None:
        value = np.asarray(value)
        table = np.full((256, 3), 255, np.uint8)  # what does not count is white
        table[: self.classes] = class_colours(self.classes)
        axis.imshow(table[value.astype(np.uint8)], interpolation="nearest")


class Classification(_OneClass):
    """A class for each image."""

    label_dtype, unlabelled = np.int32, -1
    quality, what = "accuracy", "accuracy"

    def __init__(self, classes: int):
        super().__init__(classes, dense=False)

    def describe(self, result: dict[str, Any]) -> str:
        return f"loss {text(result['loss'])}, accuracy {text(result['accuracy'])}"

    def draw(self, axis: Any, value: Any) -> None:
        axis.text(0.5, 0.5, f"class {value}", ha="center", va="center", fontsize=14)


class MultiLabel(Task):
    """Any number of classes at once: a label is 1 or 0 for each class, or 255 where nobody knows.

    Each class is decided by itself; the loss is the mean binary cross-entropy.
    """

    label_dtype, unlabelled, quality = np.uint8, IGNORED, "mean_f1"
    has_probabilities = True

    def __init__(self, classes: int, dense: bool):
        super().__init__(classes, dense)
        self.label_channels = classes

    @property
    def label_values(self) -> range:
        return range(2)

    def loss(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        return mean_of_counted(self._losses(scores, labels), labels != IGNORED)

    def compare(self, scores: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        counted = labels != IGNORED
        true, predicted = counted & (labels == 1), counted & (scores > 0)
        return {
            "loss": jnp.where(counted, self._losses(scores, labels), 0).sum(-1),
            "counted": counted,
            "right": counted & (true == predicted),
            "both": true & predicted,
            "true": true,
            "predicted": predicted,
        }

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, Any]:
        f1 = ratio(2 * sums["both"], sums["true"] + sums["predicted"])
        return {
            "loss": ratio(sums["loss"], sums["counted"].sum()),
            "accuracy": ratio(sums["right"].sum(), sums["counted"].sum()),
            "mean_f1": mean(f1),
            "f1": f1,
            "precision": ratio(sums["both"], sums["predicted"]),
            "recall": ratio(sums["both"], sums["true"]),
            "counted": [int(n) for n in sums["counted"]],
            "there": [int(n) for n in sums["true"]],
        }

    def predict(self, scores: jax.Array) -> jax.Array:
        return (scores > 0).astype(jnp.uint8)

    def probabilities(self, scores: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(scores)

    def remarks(self, result: dict[str, Any]) -> list[str]:
        there = " ".join(f"{n:,}" for n in result["there"])
        return [f"per class {there} {self.unit}s that have it"]

    def _losses(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        return jax.nn.softplus(scores) - scores * (labels == 1)
