"""Training on images that stay on disk: windows of them are read while a step runs.

A step is `jaxtile.stream`'s: its loops run on the host, and what the policy stores waits in files
of the workdir that have no names. Then the weights are updated, as after any other step.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from typing import Any

import jax

import jaxtile
import policies
from policies import format_bytes

from ..devices.memory import Peak
from ..program.config import ConfigError
from .feed import Sent
from .step import State, Step

_SMALLEST_TILE = 64  # pixels along a side


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the image is streamed."""

    policy: str
    """As in a config."""
    grid: tuple[int, ...]
    """Of what the policy gives none."""
    grids: str
    """Those that are used."""
    bytes: int
    """Estimated, of the device: the state, its gradients, and a tile in both directions."""


def choose_tiles(step: Step, text: str) -> Tiles:
    """The grid for a policy, with tiles of `eval.tile` pixels. For a budget they are halved until
    they fit, and nothing is kept but for what passes from one convolution to the next.
    """
    size, tile = step.batch[0].shape[1:-1], step.learner.config.eval.tile
    budget = None
    if text.startswith("budget:"):
        budget = policies.parse_bytes(text.removeprefix("budget:"))
    while True:
        grid = tuple(math.ceil(n / tile) for n in size)
        found = _tiles(step, text, grid, budget is not None)
        if budget is None or found.bytes <= budget:
            return found
        if tile <= _SMALLEST_TILE:
            raise policies.BudgetError(
                f"with tiles of {tile} pixels, a step from disk needs about "
                f"{format_bytes(found.bytes)}, and the budget is {format_bytes(budget)}",
                found.bytes,
            )
        tile //= 2


def _tiles(step: Step, text: str, grid: tuple[int, ...], planned: bool) -> Tiles:
    if planned:
        text = f"passing:{'x'.join(map(str, grid))}"
    explained = jaxtile.explain(
        step.learner.loss,
        step.state.params,
        step.state.variables,
        *step.batch,
        in_axes=step.learner.in_axes(2),
        policy=policies.resolve(text),
        tiles=grid,
    )
    if any(not isinstance(region.grid, tuple) for region in explained.regions):
        raise ConfigError(
            f"`policy` (={text!r}) computes in one piece, which does not go with `data.placement` "
            "'disk': take budget:BYTES, passing:HxW, tiled:HxW or sqrt"
        )
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.state))
    used = dict.fromkeys(" x ".join(map(str, region.grid)) for region in explained.regions)
    return Tiles(text, grid, ", ".join(used), 2 * (weights + explained.tile_bytes))


class FromDisk:
    """The step of a run whose batches are read by window; in the place of a `Program`."""

    estimated = repeats = None

    def __init__(self, step: Step, tiles: Tiles, folder: pathlib.Path):
        began = time.perf_counter()
        if step.devices.mesh is not None:
            raise ConfigError("`data.placement` is 'disk', which a `mesh` does not know")
        self.tiles, self.bytes = tiles, tiles.bytes
        self.streamed = jaxtile.stream(
            step.learner.loss,
            in_axes=step.learner.in_axes(2),
            tiles=tiles.grid,
            policy=policies.resolve(tiles.policy),
            store=folder,
            skip=step.learner.config.skip,
        )
        self.update = step.update()
        self.compile_seconds = time.perf_counter() - began
        self.peak = Peak()

    def step(
        self, state: State, sound: jax.Array, images: Any, labels: Any
    ) -> tuple[State, dict[str, jax.Array]]:
        (value, variables), gradients = self.streamed.value_and_grad(
            state.params, state.variables, images, labels, has_aux=True
        )
        return self.update(state, sound, value, variables, gradients)

    def bytes_text(self) -> str:
        return (
            f"about {format_bytes(self.bytes)} of the device, in {self.tiles.grids} tiles from disk"
        )

    def memory_text(self) -> str:
        peak = self.peak.observed()
        return f"step ~{format_bytes(self.bytes)}" if peak is None else f"peak {format_bytes(peak)}"

    def skipped(self, batch: Sent) -> int:
        """Tiles of the last step that were skipped."""
        return self.streamed.skipped
