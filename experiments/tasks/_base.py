"""What a task is."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np


class Task:
    """The meaning of a network's scores. Derive from it, and write `loss` and `compare` at least.

    Scores come as (N, ..., classes), labels as (N, ...), with one more axis if `label_channels` is
    set; where `dense` is false there are no axes in between. All functions of them are JAX, are
    computed in tiles, and must not care about positions.

    Attributes:
      dense: whether there is a label for each position, not for each image.
      label_dtype, label_channels: of a label; None: no axis for channels.
      unlabelled: the value of a label that does not count.
      quality: of the metrics, that by which the best weights are chosen; larger is better.
      has_probabilities: whether `probabilities` is there.
    """

    dense: bool = True
    label_dtype: ClassVar[Any] = np.float32
    label_channels: int | None = None
    unlabelled: ClassVar[float] = np.nan
    quality: ClassVar[str] = "score"
    has_probabilities: ClassVar[bool] = False

    def __init__(self, classes: int, dense: bool = True):
        self.classes, self.dense = classes, dense

    @property
    def label_values(self) -> range | None:
        """What a label can be, beside `unlabelled`; None: anything of its type."""
        return None

    def loss(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        """What training makes small: a number, the mean over the labels that count."""
        raise NotImplementedError

    def compare(self, scores: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Numbers per label, (N, ...) or with one more axis, 0 where a label does not count.

        They are added up over all positions of all images, with 64 bits on the way, and `metrics`
        gets the sums. `loss` and `counted` are two of them.
        """
        raise NotImplementedError

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, Any]:
        """Measures of quality, made of the sums: numbers, lists of numbers, None for what cannot
        be said.
        """
        return {name: ratio(total, sums["counted"]) for name, total in sums.items()}

    def predict(self, scores: jax.Array) -> jax.Array:
        """What is written and drawn, (N, ...) or with one more axis."""
        return scores

    def probabilities(self, scores: jax.Array) -> jax.Array:
        """Of each class."""
        raise ValueError(f"{type(self).__name__} has no probabilities")

    def describe(self, result: dict[str, Any]) -> str:
        """Metrics in one line."""
        apart = ("step", "counted")  # of these `remarks` tells
        found = {k: v for k, v in result.items() if isinstance(v, int | float) and k not in apart}
        return ", ".join(f"{name} {text(value)}" for name, value in found.items())

    def remarks(self, result: dict[str, Any]) -> list[str]:
        """What the metrics are made of, in one line; and warnings."""
        return [f"{result.get('counted', 0):,} {self.unit}s counted"]

    @property
    def unit(self) -> str:
        return "pixel" if self.dense else "image"

    def draw(self, axis: Any, value: Any) -> None:
        """A label or a prediction of one image, on an axis of matplotlib."""
        value = np.asarray(value)
        if self.dense:
            shown = value[..., 0] if self.label_channels is not None else value
            axis.imshow(shown, cmap="viridis", interpolation="nearest")
        else:
            axis.text(0.5, 0.5, np.array2string(value, precision=3), ha="center", va="center")


def ratio(total: Any, number: Any) -> Any:
    """A total by a number, or by each of several; None where there is nothing.

    >>> ratio(3, 4), ratio([1, 2], [2, 0])
    (0.75, [0.5, None])
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.asarray(total, np.float64) / np.asarray(number, np.float64)
    values = [float(v) if np.isfinite(v) else None for v in found.reshape(-1)]
    return values[0] if found.ndim == 0 else values


def text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def mean(values: list[float | None]) -> float | None:
    """Of those that are there."""
    there = [v for v in values if v is not None]
    return float(np.mean(there)) if there else None


def mean_of_counted(losses: jax.Array, counted: jax.Array) -> jax.Array:
    """The mean of losses where a label counts; 0 if none does."""
    number = jnp.sum(counted, dtype=jnp.float32)
    return jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(number, 1)
