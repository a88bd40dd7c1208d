"""Schedules as the planner describes them: stages, by the names of their operations."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .._graph.values import Place
from ..policy import Choice, GridSpec


class PlannedStage(NamedTuple):
    """The operations between two cuts, what is done with them, and what that costs."""

    first: str
    last: str
    operations: int
    grid: GridSpec
    stored: tuple[str, ...]
    """Results that are stored because later stages read them."""
    stored_bytes: int
    held_bytes: int
    """Estimated bytes that stay after its forward pass: what is stored, or what plain JAX keeps."""
    offloaded: tuple[str, ...]
    working_bytes: int
    """Estimated bytes while it is differentiated, beyond what is stored before it."""
    seconds: float
    passing: tuple[str, ...] = ()
    """Results that are whole in the forward pass only; whole in the backward pass are their
    cotangents."""
    restored: tuple[str, ...] = ()
    """Results that are whole in the forward pass, and once more in the backward pass."""
    forward: tuple[int, ...] | None = None
    """Its grid in the forward pass, if it is another one."""

    @property
    def choices(self) -> dict[str, Choice]:
        """What a policy says of its results."""
        places: dict[str, Place] = dict.fromkeys(self.stored, "device")
        places |= dict.fromkeys(self.offloaded, "host")
        places |= dict.fromkeys(self.passing, "passing")
        places |= dict.fromkeys(self.restored, "restored")
        return {name: Choice(self.grid, place, self.forward) for name, place in places.items()}

    @property
    def mode(self) -> str:
        if not isinstance(self.grid, tuple):
            return "keep" if self.grid is None else "whole"
        return " x ".join(map(str, self.grid)) + " tiles"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A whole schedule, with its time and its peak of temporaries as the model has them."""

    stages: tuple[PlannedStage, ...]
    rest: Choice
    """For everything that leads to no stored result, such as the loss."""
    source: str
    """`solver` or `descent`."""
    seconds: float
    peak: float
