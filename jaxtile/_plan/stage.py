"""A stage of a plan: what lies between two cuts."""

from __future__ import annotations

from typing import NamedTuple


class PlannedStage(NamedTuple):
    first: str
    last: str
    operations: int
    grid: tuple[int, ...] | str | None
    stored: tuple[str, ...]
    """Results that outlive it."""
    stored_bytes: int
    held_bytes: int
    """Estimated, that stay after its forward pass: what is stored, or what plain JAX keeps."""
    offloaded: tuple[str, ...]
    working_bytes: int
    """Estimated, beyond what is stored before it, while it is differentiated."""
    seconds: float

    @property
    def mode(self) -> str:
        if self.grid is None:
            return "keep"
        return "whole" if self.grid == "whole" else " x ".join(map(str, self.grid)) + " tiles"
