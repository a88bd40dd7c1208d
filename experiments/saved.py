"""What a run has saved: its newest checkpoints and its best one. One process reads and writes."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from .checkpoints import Checkpoints, unflatten
from .hosts import Devices
from .step import State, Step


class Saved:
    """The checkpoints of a run. The first process reads them, and the others get them from it."""

    def __init__(self, path: pathlib.Path, keep: int, devices: Devices):
        self.devices, self.folder = devices, path / "checkpoints"
        if devices.is_first:
            self._checkpoints = Checkpoints(self.folder, keep=keep)
            self._best = Checkpoints(path / "best", keep=1)

    def restore(self, step: Step) -> tuple[int, State, dict[str, Any]]:
        """The step that was reached, the state after it, and the record beside it."""
        found = self._checkpoints.restore() if self.devices.is_first else None
        done = int(self.devices.from_first(np.array(found.step if found else -1)))
        if done < 0:
            return 0, step.first_state(), {"best": None}
        print(f"going on after step {done}", flush=True)
        if found is None:
            state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.state)
            return done, self.devices.from_first(state), {"best": None}
        state = unflatten(step.state, found.arrays)
        return done, self.devices.from_first(state), found.record

    def save(self, done: int, state: State, record: dict[str, Any]) -> None:
        if self.devices.is_first:
            self._checkpoints.save(done, state, record)

    def save_best(self, done: int, state: State, record: dict[str, Any]) -> None:
        if self.devices.is_first:
            self._best.save(done, state, record, replace=True)

    def forget_best_after(self, done: int) -> None:
        if self.devices.is_first:
            self._best.forget_after(done)
