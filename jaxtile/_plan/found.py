"""Assignments that a search has found: what they need, whether they fit, and the way to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .states import Assignment


class Room(NamedTuple):
    """Bytes that a schedule may need."""

    device: float
    host: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    seconds: float
    needs: np.ndarray
    peak: float
    assignment: Assignment
    kept: float = 0.0
    """Bytes that stay, if it is of a span."""
    hosted: float = 0.0
    """The most bytes in host memory."""

    def excess(self, room: Room) -> float:
        """Bytes beyond what there is room for, of all regions together."""
        beyond = float(np.maximum(self.needs - room.device, 0).sum())
        return beyond + max(self.hosted - room.host, 0.0)

    def fits(self, room: Room) -> bool:
        return self.peak <= room.device and self.hosted <= room.host


class Walk:
    """Assignments that need less and less memory, as far as anybody asked for them."""

    def __init__(self, steps: Callable[[list[Found]], Iterator[Found]]):
        """`steps`: from a list, to which they add all that they look at on the way, the steps."""
        self.seen: list[Found] = []
        self.here: Found | None = None
        self._steps = steps(self.seen)

    def to(self, room: Room) -> None:
        while self.here is None or not self.here.fits(room):
            found = next(self._steps, None)
            if found is None:
                return
            self.here = found

    def fastest(self, room: Room) -> Found | None:
        fits = (f for f in self.seen if f.fits(room))
        return min(fits, key=lambda f: f.seconds, default=None)
