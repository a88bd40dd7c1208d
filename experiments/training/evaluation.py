"""The evaluation of a run: metrics over the held-out images.

Files are evaluated whole, tile by tile, as prediction sees them (`whole_files.py`). What has one
size (images that are drawn; files, if all are as large as the windows of training; the central
windows that `eval.size` asks for) is evaluated in batches by one compiled program, on the whole
mesh if there is one.
"""

from __future__ import annotations

import time
from typing import Any

import jax

import jaxtile

from .. import data
from ..devices.hosts import Devices
from .learner import Learner, Weights
from .step import Step, batch_shapes
from .whole_files import WholeFiles

_SMALLEST_TILE = 128  # pixels along a side: below, tiles are mostly halo
_MANY_SIZES = 16  # of whole files: each is compiled


class Evaluation:
    """Metrics of weights on a dataset, in no more memory than a step takes, if tiles can do that.

    Attributes:
      text: what is evaluated.
      tile: positions along a tile.
    """

    def __init__(
        self, step: Step, dataset: data.Dataset, most_bytes: int, *, from_disk: bool = False
    ):
        """`from_disk`: files are never whole in memory, even if all have one size."""
        began = time.perf_counter()
        self.learner, self.devices, self.dataset = step.learner, step.devices, dataset
        files, self.text = what(self.learner, dataset, self.devices, from_disk)
        self._counts = self._batches
        if files is None:
            batch = batch_shapes(dataset, self.learner.config.eval.batch_size)
            self.tile, traced = tile_within(step, batch, most_bytes, self.devices)
            self._program = traced.lower().compile()
        else:
            example = files.example(self.learner.config.eval.tile)
            self.tile, _ = tile_within(step, example, most_bytes, Devices())
            self._counts = lambda weights: files(weights, self.tile)
        self.compile_seconds = time.perf_counter() - began

    def __call__(self, weights: Weights) -> dict[str, Any]:
        return self.learner.metrics(self._counts(weights))

    def _batches(self, weights: Weights) -> list[dict[str, Any]]:
        found = []
        for batch in data.evaluation(self.dataset, self.learner.config.eval.batch_size):
            placed = map(self.devices.placed, (batch.images, batch.labels))
            found.append(jax.device_get(self._program(weights, *placed)))
        return found


def what(
    learner: Learner,
    dataset: data.Dataset,
    devices: Devices | None = None,
    from_disk: bool = False,
) -> tuple[WholeFiles | None, str]:
    """Whole files, if they are what is evaluated; and a text for the user."""
    number = f"{len(dataset)} held-out image{'s' if len(dataset) > 1 else ''}"
    if dataset.is_whole and not (from_disk and isinstance(dataset, data.Folder)):
        return None, f"{number}, whole"
    size = " x ".join(map(str, dataset.shape[:-1]))
    window = f"the central {size} pixels of each of {number}"
    if learner.config.eval.size:
        return None, f"{window}, as `eval.size` says"
    if not isinstance(dataset, data.Folder):
        return None, window
    files = WholeFiles(learner, devices or Devices(), dataset)
    if refused := files.refused():
        return None, f"{window}; the model does not take them whole: {refused}"
    text, sizes = f"{number}, whole, tile by tile", len(files.sizes)
    if sizes > _MANY_SIZES:
        text += (
            f". They have {sizes} sizes, each of which is compiled once; `eval.size` takes central "
            "windows of one size instead"
        )
    return files, text


def tile_within(
    step: Step, batch: Any, most_bytes: int, devices: Devices
) -> tuple[int, jax.stages.Traced]:
    """`eval.tile`, halved until an evaluation takes no more bytes; and that evaluation.

    What a mesh's devices hold is not asked for.
    """
    learner, tile = step.learner, step.learner.config.eval.tile
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.state))
    images = sum(x.size * x.dtype.itemsize for x in batch)
    while True:
        traced = _traced(learner, step.state.weights, batch, tile, devices)
        if devices.mesh is not None or tile < 2 * _SMALLEST_TILE:
            return tile, traced
        needed = state + images + jaxtile.compiled_bytes(traced.lower()).temporaries
        if needed <= most_bytes:
            return tile, traced
        tile //= 2


def _traced(learner: Learner, weights: Any, batch: Any, tile: int, devices: Devices) -> Any:
    evaluation = learner.evaluation(batch[0].shape, tile, devices)
    return jax.jit(evaluation, out_shardings=devices.replicated).trace(
        devices.typed(weights, replicated=True), *devices.typed(batch, replicated=False)
    )
