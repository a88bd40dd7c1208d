"""What a run computes: a model on normalised pixels, its loss, its scores, its metrics.

All are pure functions of weights and images, so that they can be planned, tiled and streamed. The
image stays as it came from the disk, 8 bits a channel: it is normalised inside the function, and so
inside the tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import jaxtile
import models
from jaxtile import ops

from ..data import IGNORED
from ..devices.hosts import Devices
from ..program.config import ConfigError

_MOST_COUNTED = 2**32  # positions of a batch: they are counted with 32 bits


class Weights(NamedTuple):
    """What a model is made of."""

    params: Any
    variables: Any
    """Running statistics, and how many random numbers were drawn."""


class Task:
    """A model for images of one size, as functions."""

    def __init__(self, config: ConfigDict):
        self.config = config
        self.dtype = jnp.dtype(config.dtype)
        model = nnx.eval_shape(self._make)
        self._graphdef, self._shapes, self._keys, self._variables = nnx.split(
            model, nnx.Param, nnx.RngKey, ...
        )
        self.segments = hasattr(model, "output_size")
        self.quality = "mean_iou" if self.segments else "accuracy"
        self.output_size = model.output_size if self.segments else None

    def _make(self) -> nnx.Module:
        """The model; it has as many channels and classes as the data."""
        data, options = self.config.data, self.config.model.to_dict()
        name = options.pop("name")
        sizes = {
            "unet": {"in_channels": data.channels, "classes": data.classes},
            "local_cnn": {"in_channels": data.channels, "num_classes": data.classes},
            "alexnet": {"num_classes": data.classes},
        }.get(name, {"in_channels": data.channels, "num_classes": data.classes})
        try:
            return models.create(
                name, **sizes, **options, dtype=self.dtype, rngs=nnx.Rngs(self.config.seed)
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`model`: {error}") from error

    def weights(self) -> Weights:
        """New weights, a function of the seed."""
        _, params, _, variables = nnx.split(self._make(), nnx.Param, nnx.RngKey, ...)
        return Weights(params, variables)

    def loss(
        self, params: Any, variables: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The loss in training mode, and the new variables."""
        model = self._merged(params, variables)
        value = model.loss(self.normalised(images), self._ignoring(labels))
        _, _, _, changed = nnx.split(model, nnx.Param, nnx.RngKey, ...)
        return value, changed

    def scores(self, weights: Weights, images: jax.Array) -> jax.Array:
        """The score of each class, in evaluation mode; per position if the model segments."""
        model = self._merged(*weights)
        model.eval()
        if self.config.eval.batch_statistics:
            model.set_attributes(use_running_average=False, raise_if_not_found=False)
        return model(self.normalised(images)).astype(jnp.float32)

    def normalised(self, images: jax.Array) -> jax.Array:
        mean, std = (
            jnp.asarray(v, self.dtype) for v in (self.config.data.mean, self.config.data.std)
        )
        return (images.astype(self.dtype) / 255 - mean) / std

    def counts(self, weights: Weights, images: jax.Array, labels: jax.Array) -> Counts:
        """What all metrics are made of, summed over the positions that count."""
        scores, labels = self.scores(weights, images), self._ignoring(labels)
        predicted, counted = scores.argmax(-1), labels >= 0
        classes = jnp.arange(self.config.data.classes)
        is_predicted = (predicted[..., None] == classes) & counted[..., None]
        is_true = labels[..., None] == classes
        axes = tuple(range(labels.ndim))
        number = jnp.uint32
        return Counts(
            ops.softmax_cross_entropy(scores, labels),
            counted.sum(dtype=number),
            (is_predicted & is_true).sum(axes, dtype=number),
            is_predicted.sum(axes, dtype=number),
            is_true.sum(axes, dtype=number),
        )

    def check_size(self, shape: tuple[int, ...]) -> None:
        """Raise an error if the model does not take images of this shape."""
        images = jax.ShapeDtypeStruct((1, *shape), jnp.uint8)
        try:
            jax.eval_shape(self.scores, jax.eval_shape(self.weights), images)
        except ValueError as error:
            raise ConfigError(f"the model does not fit the data: {error}") from error

    def describe(self, result: dict[str, Any]) -> str:
        """Metrics in one line."""

        def text(value: float | None) -> str:
            return "none" if value is None else f"{value:.4f}"

        line = f"loss {text(result['loss'])}, accuracy {text(result['accuracy'])}"
        if not self.segments:
            return line
        per_class = " ".join(map(text, result["iou"]))
        mean, dice = text(result["mean_iou"]), text(result["mean_dice"])
        return f"{line}, mean IoU {mean} (per class {per_class}), mean Dice {dice}"

    def describe_counts(self, result: dict[str, Any]) -> list[str]:
        """What the metrics are made of: how often each class was there; and warnings."""
        unit, counted = "pixels" if self.segments else "images", result["counted"]
        number = f"{sum(counted):,} {unit}"
        per_class = " ".join(f"{n:,}" for n in counted)
        lines = [f"{number} counted (per class {per_class})"]
        absent = [str(c) for c, n in enumerate(counted) if n == 0]
        if absent:
            lines.append(
                f"warning: none of the {number} is of class {', '.join(absent)}: the "
                f"{'mean IoU' if self.segments else 'accuracy'} says nothing about it"
            )
        return lines

    def in_axes(self, leading: int) -> tuple[Any, ...]:
        """Which axes are tiled, after so many arguments that are not: images, then labels."""
        axes = (0, 1, 2) if self.config.tile_batch else (1, 2)
        images_only = (0, None, None) if self.config.tile_batch else None
        return (*(None,) * leading, axes, axes if self.segments else images_only)

    def evaluation(self, shape: tuple[int, ...], tile: int, devices: Devices | None = None) -> Any:
        """`counts` on images of this shape, in tiles of about so many pixels along a side."""
        if math.prod(shape[:3]) >= _MOST_COUNTED:
            raise ConfigError(
                f"a batch of {shape[0]} x {shape[1]} x {shape[2]} pixels is too large to be "
                "evaluated: it must have less than 2**32. Set `eval.batch_size`, `eval.size` or "
                "`data.size`"
            )
        return self._tiled(self.counts, shape, tile, self.in_axes(1), devices)

    def prediction(self, shape: tuple[int, ...], tile: int) -> Any:
        """The most probable class, per position if the model segments."""

        def predict(weights: Weights, images: jax.Array) -> jax.Array:
            return self.scores(weights, images).argmax(-1).astype(jnp.int32)

        return self._tiled(predict, shape, tile, self.in_axes(1)[:2])

    def _tiled(
        self,
        fun: Callable[..., Any],
        shape: tuple[int, ...],
        tile: int,
        in_axes: Any,
        devices: Devices | None = None,
    ) -> Callable[..., Any]:
        devices = devices or Devices()
        grid = [math.ceil(n / tile) for n in shape[1:3]]
        if max(grid) == 1 and devices.mesh is None:
            return fun
        grid = devices.tiles([shape[0], *grid] if self.config.tile_batch else grid)
        options = devices.options(in_axes[1])
        return jaxtile.checkpoint(fun, in_axes=in_axes, tiles=tuple(grid), **options)

    def _merged(self, params: Any, variables: Any) -> nnx.Module:
        keys = jax.tree.map(lambda _: jax.random.key(self.config.seed), self._keys)
        return nnx.merge(self._graphdef, params, keys, variables, copy=True)

    @staticmethod
    def _ignoring(labels: jax.Array) -> jax.Array:
        """Labels of 8 bits have 255 for what does not count; others -1."""
        if labels.dtype != jnp.uint8:
            return labels
        return jnp.where(labels == IGNORED, -1, labels.astype(jnp.int32))


class Counts(NamedTuple):
    """Of a batch; per class where they are arrays."""

    loss: Any
    counted: Any
    correct: Any
    predicted: Any
    true: Any


def metrics(batches: list[Counts]) -> dict[str, Any]:
    """The usual measures of all batches together.

    Per class: how often it is there (`counted`), intersection over union, and Dice; the latter are
    None where a class neither is there nor is predicted, and then it is not in the mean.
    """
    counted = np.array([int(b.counted) for b in batches])
    losses = np.array([float(b.loss) for b in batches])
    correct, predicted, true = (
        sum(np.asarray(getattr(b, name)).astype(np.int64) for b in batches)
        for name in ("correct", "predicted", "true")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        iou = correct / (predicted + true - correct)
        dice = 2 * correct / (predicted + true)
        loss = losses[counted > 0] @ counted[counted > 0] / counted.sum()
        accuracy = correct.sum() / counted.sum()
    return {
        "loss": _number(loss),
        "accuracy": _number(accuracy),
        "mean_iou": _mean(iou),
        "mean_dice": _mean(dice),
        "iou": [_number(v) for v in iou],
        "dice": [_number(v) for v in dice],
        "counted": [int(n) for n in true],
    }


def _number(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _mean(values: np.ndarray) -> float | None:
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else None
