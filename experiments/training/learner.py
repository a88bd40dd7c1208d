"""What a run learns: a model on normalised pixels, and what its scores mean, as pure functions.

Pure functions of weights and images can be planned, tiled and streamed. The image stays as it came
from the disk, 8 bits a channel as a rule: it is normalised inside the function, and so inside the
tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

import jaxtile
import models

from .. import tasks
from ..devices.hosts import Devices
from ..program.config import ConfigError

_MOST_COUNTED = 2**32  # positions of a batch: they are counted with 32 bits
_FARTHEST = 256  # positions to the next size that a model takes
_FURTHER = 64  # positions to a larger size, which networks that halve images take too
_ANY_SIZE = 256  # of images to make weights for, until the data are known

Sums = dict[str, np.ndarray]


class Weights(NamedTuple):
    """What a model is made of."""

    params: Any
    variables: Any
    """Running statistics, and how many random numbers were drawn."""


class Learner:
    """A model and a task, as functions.

    Attributes:
      image_shape: of the images that weights are made for; a model may have weights per position.
      mean, std: by which pixels are normalised; () until they are found in the data.
      network: the model.
      task: what its scores mean.
    """

    def __init__(self, config: ConfigDict, image_shape: Sequence[int] | None = None):
        self.config = config
        self.dtype, self.pixels = jnp.dtype(config.dtype), jnp.dtype(config.data.dtype)
        self.spatial = config.data.dimensions
        self.mean, self.std = config.data.mean, config.data.std
        size = config.data.size or _ANY_SIZE
        sizes = (size,) * self.spatial if isinstance(size, int) else tuple(size)
        self.image_shape = tuple(image_shape or (*sizes, config.data.channels))
        self._shapes: dict[tuple[int, ...], Any] = {}  # of weights, by that of images
        options = config.model.to_dict()
        name, classes = options.pop("name"), config.data.classes
        try:
            self.network = models.network(
                name,
                options,
                seed=config.seed,
                in_channels=config.data.channels,
                classes=classes,
                num_classes=classes,
                spatial=self.spatial,
                dtype=self.dtype,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`model`: {error}{models.line_of(error)}") from error
        if config.eval.batch_statistics and self.network.library != "nnx":
            raise ConfigError(
                "`eval.batch_statistics` needs a model of Flax NNX, whose norms can be told apart "
                f"from its dropout; {name!r} is of {self.network.library}"
            )

    @functools.cached_property
    def task(self) -> tasks.Task:
        """Found out once the size of images is known: a model may take only some."""
        try:
            dense = self._scores_of(self.image_shape).ndim == self.spatial + 2
            return tasks.create(self.config.task, classes=self.config.data.classes, dense=dense)
        except ValueError as error:
            raise ConfigError(f"`task`: {error}") from error

    @property
    def segments(self) -> bool:
        return self.task.dense

    @functools.cached_property
    def lost(self) -> int:
        """By how many positions scores are fewer than pixels along an axis."""
        scores, lost = self._lost_of(self._fitting)
        *sizes, channels = self._fitting
        larger = (*(n + _FURTHER for n in sizes), channels)
        try:
            also, lost_there = self._lost_of(larger)
        except Exception:  # whatever its library raises: it takes one size only
            also, lost_there = scores, lost
        if len({*lost, *lost_there}) != 1 or lost[0] < 0 or lost[0] % 2:
            raise ConfigError(
                "`model`: there must be scores for each pixel, in the order of pixels, or without "
                f"as many at each border: images of shape {self._fitting} give {scores}, of shape "
                f"{larger} {also}. If there is one for several pixels, enlarge them in the model, "
                "as jax.image.resize does"
            )
        return lost[0]

    def _lost_of(self, shape: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
        """The shape of scores, and by how many positions they are fewer along each axis."""
        scores = self._scores_of(shape).shape
        return scores, [n - m for n, m in zip(shape[:-1], scores[1:-1], strict=True)]

    @functools.cached_property
    def _fitting(self) -> tuple[int, ...]:
        """A shape of images that the model takes."""
        *sizes, channels = self.image_shape
        for more in range(_FARTHEST):
            shape = (*(n + more for n in sizes), channels)
            try:
                self._scores_of(shape)
            except (ValueError, TypeError):
                continue
            return shape
        return self.image_shape

    def output_size(self, n: int) -> int:
        """Positions that have scores, along an axis of `n` pixels."""
        return n - self.lost if self.task.dense else 0

    def weights(self) -> Weights:
        """New weights, a function of the seed."""
        return Weights(*self.network.init(jnp.zeros((1, *self.image_shape), self.dtype)))

    def loss(
        self, params: Any, variables: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The loss in training mode, and the new variables."""
        given = self.normalised(images)
        scores, changed = self.network.apply(params, variables, given, train=True)
        return checkpoint_name(self.task.loss(scores, labels), "loss"), changed

    def scores(self, weights: Weights, images: jax.Array) -> jax.Array:
        """In evaluation mode; per position if the task is dense."""
        own = {"own_statistics": True} if self.config.eval.batch_statistics else {}
        found, _ = self.network.apply(*weights, self.normalised(images), train=False, **own)
        return found.astype(jnp.float32)

    def normalised(self, images: jax.Array) -> jax.Array:
        """Pixels of 8 bits are numbers from 0 to 1, others are taken as they are."""
        # Until they are known, only shapes are asked for.
        mean, std = (jnp.asarray(v or 1, self.dtype) for v in (self.mean, self.std))
        values = images.astype(self.dtype)
        return ((values / 255 if self.pixels == jnp.uint8 else values) - mean) / std

    def sums(
        self, weights: Weights, images: jax.Array, labels: jax.Array, *, rows: bool = False
    ) -> dict[str, jax.Array]:
        """What all metrics are made of, summed over the positions that count.

        With `rows`, for each image and each position along the first axis by itself, so that a
        gigapixel can be added up with more bits than these have.
        """
        positions = labels.ndim - (self.task.label_channels is not None)
        scores = self.scores(weights, images)
        if rows:  # an image may be continued to a size that the model takes
            scores = scores[tuple(slice(0, n) for n in labels.shape[:positions])]

        def summed(values: jax.Array) -> jax.Array:
            kept = min(2, positions) if rows else 0
            number = jnp.float32 if jnp.issubdtype(values.dtype, jnp.floating) else jnp.uint32
            return values.sum(tuple(range(kept, positions)), dtype=number)

        return {n: summed(v) for n, v in self.task.compare(scores, labels).items()}

    def metrics(self, parts: list[Any]) -> dict[str, Any]:
        """Of sums of batches or files: those of all of them together."""

        def total(name: str) -> np.ndarray:
            values = [np.asarray(part[name]) for part in parts]
            number = np.float64 if values[0].dtype.kind == "f" else np.int64
            return sum(v.astype(number) for v in values)

        return self.task.metrics({name: total(name) for name in parts[0]})

    def check_size(self, shape: Sequence[int]) -> None:
        """Raise an error if the model does not take images of this shape."""
        try:
            found = self._scores_of(shape)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the model does not fit the data: {error}{models.line_of(error)}"
            ) from error
        if found.shape[-1] != self.config.data.classes or found.ndim not in (2, self.spatial + 2):
            raise ConfigError(
                f"the model does not fit the data: for images {(1, *shape)} its scores have shape "
                f"{found.shape}, where `data.classes` (={self.config.data.classes}) are wanted for "
                "each image or each position: (N, classes) or (N, ..., classes)"
            )

    def check_task(self, shape: Sequence[int], label_shape: Sequence[int]) -> None:
        """Raise an error if somebody's own task lacks what a run needs, before its first step."""
        name, task = f"`task` (={self.config.task!r})", self.task
        scores = self._scores_of(shape)
        labels = jax.ShapeDtypeStruct((1, *label_shape), task.label_dtype)
        loss = jax.eval_shape(task.loss, scores, labels)
        if loss.shape:
            raise ConfigError(f"{name}: `loss` must be one number, but has shape {loss.shape}")
        sums = jax.eval_shape(task.compare, scores, labels)
        positions = labels.ndim - (task.label_channels is not None)
        try:
            found = task.metrics({n: np.ones(v.shape[positions:]) for n, v in sums.items()})
        except KeyError as error:
            raise ConfigError(
                f"{name}: `metrics` asks for {error}, but `compare` gives {', '.join(sums)}"
            ) from error
        if task.quality not in found:
            raise ConfigError(
                f"{name}: `quality` (={task.quality!r}) must be one of the metrics: "
                f"{', '.join(found)}"
            )

    def _scores_of(self, shape: Sequence[int]) -> Any:
        images = jax.ShapeDtypeStruct((1, *shape), self.pixels)
        if self.image_shape not in self._shapes:
            self._shapes[self.image_shape] = jax.eval_shape(self.weights)
        return jax.eval_shape(self.scores, self._shapes[self.image_shape], images)

    def label(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of a label, where scores have this many positions."""
        channels = self.task.label_channels
        return (*(size if self.task.dense else ()), *(() if channels is None else (channels,)))

    def in_axes(self, leading: int) -> tuple[Any, ...]:
        """Which axes are tiled, after so many arguments that are not: images, then labels."""
        batch, space = self.config.tile_batch, tuple(range(1, 1 + self.spatial))
        axes = (0, *space) if batch else space
        images_only = (0, *(None,) * self.spatial) if batch else None
        return (*(None,) * leading, axes, axes if self.task.dense else images_only)

    def evaluation(self, shape: tuple[int, ...], tile: int, devices: Devices | None = None) -> Any:
        """`sums` on images of this shape, in tiles of about so many pixels along a side."""
        if math.prod(shape[:-1]) >= _MOST_COUNTED:
            raise ConfigError(
                f"a batch of {' x '.join(map(str, shape[:-1]))} pixels is too large to be "
                "evaluated: it must have less than 2**32. Set `eval.batch_size`, `eval.size` or "
                "`data.size`"
            )
        return self._tiled(self.sums, shape, tile, self.in_axes(1), devices)

    def prediction(self, shape: tuple[int, ...], tile: int) -> Any:
        """What the task makes of the scores: the most probable class, say."""

        def predict(weights: Weights, images: jax.Array) -> jax.Array:
            return self.task.predict(self.scores(weights, images))

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
        grid = [math.ceil(n / tile) for n in shape[1:-1]]
        if max(grid) == 1 and devices.mesh is None:
            return fun
        grid = devices.tiles([shape[0], *grid] if self.config.tile_batch else grid)
        options = devices.options(in_axes[1])
        return jaxtile.checkpoint(fun, in_axes=in_axes, tiles=tuple(grid), **options)
