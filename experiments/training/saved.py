"""What a run has saved: its newest checkpoints and its best one. One process reads and writes.

A checkpoint's record names the best step up to there, and its weights are in `best/`. They stay as
long as a checkpoint names them: a run that goes on from it may not come to better ones again.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from ..devices.hosts import Devices
from .checkpoints import Checkpoints, unflatten
from .step import State, Step


class Saved:
    """The checkpoints of a run. The first process reads them, and the others get them from it."""

    def __init__(self, path: pathlib.Path, keep: int, devices: Devices):
        self.devices, self.folder = devices, path / "checkpoints"
        if devices.is_first:
            self._checkpoints = Checkpoints(self.folder, keep=keep)
            self._best = Checkpoints(path / "best", keep=None)

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
        state = unflatten(step.state, found.arrays, self.folder / str(done))
        return done, self.devices.from_first(state), self._checked(found.record)

    def _checked(self, record: dict[str, Any]) -> dict[str, Any]:
        best = record["best"]
        if best is None or best["step"] in self._best.steps():
            return record
        print(
            f"warning: the best weights so far, of step {best['step']}, are missing in "
            f"{self._best.folder}: the best from here on are kept",
            flush=True,
        )
        return {**record, "best": None}

    def save(self, done: int, state: State, record: dict[str, Any]) -> None:
        if self.devices.is_first:
            self._checkpoints.save(done, state, record)
            records = map(self._checkpoints.record, self._checkpoints.steps())
            self._best.keep_only({r["best"]["step"] for r in records if r.get("best")})

    def save_best(self, done: int, state: State, record: dict[str, Any]) -> None:
        if self.devices.is_first:
            self._best.save(done, state, record)

    def forget_best_after(self, done: int) -> None:
        """A run that goes on from there comes to them again, or to others."""
        if self.devices.is_first:
            self._best.keep_only(range(done + 1))
