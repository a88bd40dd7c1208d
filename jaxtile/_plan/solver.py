"""The fastest sequence of stretches that fits a budget.

There are far too many sequences to try them all. But a stretch need not know how the earlier ones
were computed, only how many bytes they left stored. So for each cut and each number of stored bytes
it is enough to know the fastest way to get there (a dynamic programme): if a stretch adds `added`
bytes and needs `peak` beyond what was stored before it, then

    best[j][stored + added] = min(best[i][stored] + seconds)    where stored + peak <= budget

over all stretches (i, j) and modes.

Stored bytes are counted in slots of a fixed size, rounded up. So the answer never exceeds the
budget, and a larger budget never gives a slower answer; but one that fits by less than the rounding
may be missed.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from .model import Stretches

SLOTS = 1024


class ChosenStretch(NamedTuple):
    """One stretch of a solution, by indices into `Stretches`."""

    mode: int
    start: int
    stop: int


class Solution(NamedTuple):
    stages: tuple[ChosenStretch, ...]
    seconds: float
    peak: float
    """The largest number of bytes, by the tables, unrounded."""


def fastest(tables: Stretches, budget: float, whole: float | None = None) -> Solution | None:
    """The fastest solution whose peak is at most `budget`; None: there is none.

    `whole`: what slots are a part of; by default, all that can be stored.
    """
    slot = _slot(tables) if whole is None else whole / (SLOTS // 2)
    n = len(tables.cuts)
    added = np.ceil(tables.added / slot - 1e-9).astype(int)
    room = np.floor((budget - tables.peak) / slot + 1e-9).astype(int)  # largest slot to start from
    possible = np.isfinite(tables.seconds) & (room >= 0) & ~_dominated(tables)
    best = np.full((n, SLOTS + 1), np.inf)
    best[0, 0] = 0
    for j in range(1, n):
        for mode, i in zip(*np.nonzero(possible[:, :j, j]), strict=True):
            _relax(best, i, j, added[mode, i, j], room[mode, i, j], tables.seconds[mode, i, j])
    if not np.isfinite(best[-1]).any():
        return None
    return measured(tables, _trace_back(best, tables, added, np.where(possible, room, -1)))


def smallest(tables: Stretches) -> Solution:
    """The solution with the lowest peak."""
    alone = np.where(np.isfinite(tables.seconds[:, 0, -1]), tables.peak[:, 0, -1], np.inf)
    low, high = 0.0, float(alone.min())
    found = None
    while found is None or high - low > max(0.5, 1e-3 * high):
        middle = (low + high) / 2 if found else high
        solution = fastest(tables, middle)
        if solution is None:
            low = middle
        else:
            found, high = solution, min(middle, solution.peak)
    return found


def measured(tables: Stretches, stages: tuple[ChosenStretch, ...]) -> Solution:
    """Time and peak of a sequence of stages."""
    stored = peak = seconds = 0.0
    for mode, i, j in stages:
        peak = max(peak, stored + tables.peak[mode, i, j])
        stored += tables.added[mode, i, j]
        seconds += tables.seconds[mode, i, j]
    return Solution(stages, float(seconds), float(peak))


def _slot(tables: Stretches) -> float:
    """Bytes per slot, the same for every budget.

    If all amounts are multiples of one number that is not too small, it is that number, and nothing
    is rounded.
    """
    everything = float(tables.added[0, 0, -1])
    measure = math.gcd(*np.unique(tables.added.astype(np.int64)).tolist())
    if measure and everything / measure <= SLOTS // 2:
        return float(measure)
    return max(1.0, everything / (SLOTS // 2))


def _dominated(tables: Stretches) -> np.ndarray:
    """Modes that another mode of the same stretch beats in every respect; of equals, the first."""
    worse = np.zeros(tables.seconds.shape, bool)
    for a, b in itertools.permutations(range(len(tables.modes)), 2):
        pairs = [(t[b], t[a]) for t in (tables.seconds, tables.peak, tables.added)]
        better = np.all([x <= y for x, y in pairs], axis=0)
        strict = np.any([x < y for x, y in pairs], axis=0) | (b < a)
        worse[a] |= better & strict
    return worse


def _relax(best: np.ndarray, i: int, j: int, added: int, room: int, seconds: float) -> None:
    last = min(room, SLOTS - added)
    if last >= 0:
        target = best[j, added : last + added + 1]
        np.minimum(target, best[i, : last + 1] + seconds, out=target)


def _trace_back(
    best: np.ndarray, tables: Stretches, added: np.ndarray, room: np.ndarray
) -> tuple[ChosenStretch, ...]:
    """The stages that lead to the best end, found from the last to the first."""
    stages: list[ChosenStretch] = []
    j = best.shape[0] - 1
    slot = int(np.argmin(best[j]))
    while j > 0:
        for mode, i in zip(*np.nonzero(room[:, :j, j] >= 0), strict=True):
            source = slot - added[mode, i, j]
            if not 0 <= source <= min(room[mode, i, j], SLOTS):
                continue
            if best[i, source] + tables.seconds[mode, i, j] == best[j, slot]:
                stages.append(ChosenStretch(int(mode), int(i), int(j)))
                j, slot = int(i), int(source)
                break
        else:
            raise AssertionError("the dynamic programme has no predecessor")
    return tuple(stages[::-1])
