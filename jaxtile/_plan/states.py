"""What a schedule says of every result of a network.

The solver cuts a network into stretches and stores all that is live at a cut. That is too coarse
for networks with skips and norms: of a bottleneck block, its narrow results should be kept and its
wide ones, which are cheap to compute from them, should not. So here a schedule is an *assignment*.
Each tiled result is

    kept      a whole array until the backward pass has used it,
    hosted    the same, in host memory, and so are its cotangents; loops read windows of both,
    restored  a whole array in the forward pass, and once more in the backward pass, where the
              regions from the one that computes it to its last reader are run again,
    passing   a whole array in the forward pass, and computed again, by window, for every region
              that reads it in the backward pass, or
    inside    never a whole array: part of the regions that read it,

and the region that computes it has a grid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._graph.values import Place
from ..policy import Choice, Choices, GridSpec, Outline

INSIDE, PASSING, RESTORED, KEPT, HOSTED = range(5)
_STATES: dict[Place, int] = {
    "device": KEPT,
    "host": HOSTED,
    "passing": PASSING,
    "restored": RESTORED,
}


class Mode(NamedTuple):
    """How a region is computed."""

    grid: GridSpec
    """None: once, as plain JAX does; all that is needed for the derivative is held."""
    tiled_forward: bool = False
    """Has the forward pass the same tiles? Otherwise it is in one piece."""

    @property
    def loops(self) -> bool:
        """Is it a loop over tiles, forwards and backwards?"""
        return self.tiled_forward and isinstance(self.grid, tuple) and math.prod(self.grid) > 1

    @property
    def strips(self) -> bool:
        """From edge to edge: then transfers from and to host memory run beside computation."""
        return self.loops and isinstance(self.grid, tuple) and math.prod(self.grid[1:]) == 1


class Modes:
    """All modes of one network's schedules, by number. Searches change arrays of these numbers
    thousands of times.
    """

    def __init__(self) -> None:
        self._modes: list[Mode] = []
        self._numbers: dict[Mode, int] = {}
        self.once, self.loops = np.zeros(0, bool), np.zeros(0, bool)
        """Per number: is there no grid? And are there loops?"""

    def __getitem__(self, number: int) -> Mode:
        return self._modes[number]

    def numbers(self, modes: Sequence[Mode]) -> np.ndarray:
        if new := [mode for mode in dict.fromkeys(modes) if mode not in self._numbers]:
            self._modes += new
            self._numbers = {mode: n for n, mode in enumerate(self._modes)}
            self.once = np.array([mode.grid is None for mode in self._modes])
            self.loops = np.array([mode.loops for mode in self._modes])
        return np.array([self._numbers[mode] for mode in modes], np.uint16)


@dataclasses.dataclass(frozen=True, eq=False)
class Assignment:
    states: np.ndarray
    """Per operation, what becomes of its result."""
    modes: np.ndarray
    """Per operation, the number of how the region is computed that ends with it."""


def chosen(choices: Choices, outline: Outline) -> tuple[list[int], list[Mode]]:
    """States and modes as a policy chose them. Up to a stored result all is computed on that
    result's grid.
    """
    states, modes, choice = [], [], choices.get(..., Choice("whole"))
    for part in reversed(outline.parts):
        stored = part.tiled and part.name in choices
        choice = choices[part.name] if stored else choice
        states.append(_STATES[choice.place] if stored else INSIDE)
        in_tiles = isinstance(choice.grid, tuple) and choice.forward is None
        modes.append(Mode(choice.grid, tiled_forward=in_tiles))
    return states[::-1], modes[::-1]
