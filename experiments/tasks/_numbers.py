"""Numbers instead of classes: image to image, or image to numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._base import Task, mean_of_counted, ratio


class Regression(Task):
    """A number, or several, for each pixel or each image; NaN does not count.

    The loss is the mean squared error. `r2` is the share of the labels' variance that is explained,
    over all channels together.

    Attributes:
      centre: a number near the labels. What is squared and added up is how far they are from it:
        their variance would otherwise drown in the rounding of large numbers.
    """

    centre: float = 0.0

    label_dtype, unlabelled, quality = np.float32, np.nan, "r2"

    def __init__(self, classes: int, dense: bool):
        super().__init__(classes, dense)
        self.label_channels = classes

    def loss(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        return mean_of_counted(jnp.square(self._errors(scores, labels)), ~jnp.isnan(labels))

    def compare(self, scores: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        counted, errors = ~jnp.isnan(labels), self._errors(scores, labels)
        known = jnp.where(counted, labels - self.centre, 0)
        found = {
            "loss": jnp.square(errors),
            "absolute": jnp.abs(errors),
            "value": known,
            "square": jnp.square(known),
            "counted": counted,
        }
        return {name: values.sum(-1) for name, values in found.items()}

    def metrics(self, sums: dict[str, np.ndarray]) -> dict[str, Any]:
        number = sums["counted"]
        loss, average = ratio(sums["loss"], number), ratio(sums["value"], number)
        variance = None if average is None else float(sums["square"] / number - average**2)
        return {
            "loss": loss,
            "mean_absolute_error": ratio(sums["absolute"], number),
            "root_mean_squared_error": None if loss is None else float(np.sqrt(loss)),
            "r2": 1 - loss / variance if variance else None,
            "counted": int(number),
        }

    def _errors(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        """0 where a label does not count; there is no gradient either."""
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        return jnp.where(jnp.isnan(labels), 0, scores - jnp.nan_to_num(labels))
