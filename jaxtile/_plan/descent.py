"""Assignments from the fastest to the smallest: a local search.

What a result's state should be depends on all others, so there is no dynamic programme for it. But
networks repeat themselves: operations of one kind and shape are a *group* and get one state, and
neighbouring operations on arrays of one size are a *zone* and get one grid. That leaves tens of
decisions instead of hundreds. From a fast assignment the search goes down: of all moves that need
less memory it takes the one that costs the least time per byte, until nothing gets smaller. All
assignments that it meets on the way are remembered, and each budget has its best one among them.

Near a budget it looks again, at single operations: is there a move that is faster and still fits?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..policy import GridSpec
from .assignment import INSIDE, KEPT, PASSING, RESTORED, Assignment, Assignments, Mode

T = TypeVar("T")
Move = tuple[list[int], bool]
"""Operations that get one state, or, if true, one grid."""

_STEP = 0.9  # of the peak: how far the allowance falls at a time
_IMPROVED = 3  # assignments that are improved for one allowance
_BEYOND = 0.5  # of the allowance: the walk goes beyond it, and comes back with improvements


class Found(NamedTuple):
    seconds: float
    needs: np.ndarray
    peak: float
    assignment: Assignment

    def excess(self, allowed: float) -> float:
        """Bytes beyond an allowance, of all regions together."""
        return float(np.maximum(self.needs - allowed, 0).sum())


class Descent:
    """The assignments of an outline that no other one beats in both time and memory."""

    def __init__(self, costs: Assignments, grids: Sequence[tuple[int, ...]]):
        self.costs = costs
        outline = costs.outline
        self.once = (1,) * outline.rank
        self.modes = [Mode(None), Mode("whole"), Mode(self.once)]
        self.modes += [Mode(grid, forward) for grid in grids for forward in (False, True)]
        self.groups = list(_groups(costs).values())
        self.zones = list(_zones(costs))
        self.blocks = [b for zone in self.zones for b in _split(zone, _alone(costs))]
        self.moves = list(self._decisions(single=False))
        self.frontier: list[Found] = []
        self._seen: dict[Assignment, Found] = {}
        self._walks = [self._descend(start) for start in self._starts()]

    def fastest(self, allowed: float) -> Found | None:
        """The fastest assignment that was found to need at most so many bytes."""
        self._walk_to(_BEYOND * allowed)
        fits = [f for f in self.frontier if f.peak <= allowed]
        if not fits:
            return None
        found = sorted(fits, key=lambda f: f.seconds)[:_IMPROVED]
        for single in (False, True, False, True):
            found = [self._improved(f, allowed, single) for f in found]
        return min(found, key=lambda f: f.seconds)

    def _improved(self, best: Found, allowed: float, single: bool) -> Found:
        """Take every move that is faster and fits, one after the other."""
        for move in list(self._decisions(single)):
            for assignment in self._changed(best.assignment, *move):
                found = self._look(assignment)
                if found.peak <= allowed and found.seconds < 0.9995 * best.seconds:
                    best = found
        return best

    def leave_out(self, grid: GridSpec) -> None:
        """Never use a grid again."""
        self.modes = [m for m in self.modes if m.grid != grid]
        self.frontier = []
        self._seen = {}
        self._walks = [self._descend(start) for start in self._starts()]

    def _walk_to(self, allowed: float) -> None:
        """Go down only as far as needed: the last steps are the longest."""
        for walk in self._walks:
            for peak in walk:
                if peak <= allowed:
                    break

    def smallest(self) -> Found:
        self._walk_to(0)
        return min(self.frontier, key=lambda f: f.peak)

    def _starts(self) -> Iterator[Assignment]:
        """As plain JAX does it; and all recomputed, between results that nothing spans."""
        n = self.costs.n
        yield self._normal([INSIDE] * n, [Mode(None)] * n)
        alone = _alone(self.costs)
        yield self._normal([KEPT if k in alone else INSIDE for k in range(n)], [Mode("whole")] * n)

    def _descend(self, start: Assignment) -> Iterator[float]:
        """Give up as little time per byte as possible, until nothing gets smaller; the peaks.

        The allowance falls in small steps. What counts are the bytes beyond it of all regions: if
        several are too large, each of them must get smaller, and no single move reduces the peak.
        """
        here = self._look(start)
        allowed, prices = here.peak, dict.fromkeys(range(len(self.moves)), -math.inf)
        while True:
            yield here.peak
            if here.peak <= allowed:
                allowed, prices = _STEP * here.peak, dict.fromkeys(prices, -math.inf)
            best: tuple[float, Found] | None = None
            # A price is near to what it was before the last move: look at the lowest ones first.
            for move in sorted(prices, key=prices.__getitem__):
                if best is not None and prices[move] > best[0]:
                    break
                prices[move], found = self._cheapest(here, self.moves[move], allowed)
                if found is not None and (best is None or prices[move] < best[0]):
                    best = prices[move], found
            if best is None:
                return
            here = best[1]

    def _cheapest(self, here: Found, move: Move, allowed: float) -> tuple[float, Found | None]:
        """What a move costs per byte that it saves, and where it leads; none, if it saves none."""
        excess = here.excess(allowed)
        best: tuple[float, Found | None] = (math.inf, None)
        for assignment in self._changed(here.assignment, *move):
            found = self._look(assignment)
            saved = excess - found.excess(allowed)
            if saved > 0.001 * excess:
                best = min(best, (_price(found.seconds - here.seconds, saved), found), key=_first)
        return best

    def _look(self, assignment: Assignment) -> Found:
        if assignment not in self._seen:
            estimate = self.costs.estimate(assignment)
            found = Found(estimate.seconds, estimate.needs, estimate.peak, assignment)
            self._seen[assignment] = found
            if not any(f.seconds <= found.seconds and f.peak <= found.peak for f in self.frontier):
                self.frontier = [
                    f for f in self.frontier if f.seconds < found.seconds or f.peak < found.peak
                ]
                self.frontier.append(found)
        return self._seen[assignment]

    def _decisions(self, single: bool) -> Iterator[Move]:
        for group in self.groups:
            yield from ([([k], False) for k in group] if single else [(group, False)])
        for zone in self.blocks if single else self.zones:
            yield zone, True

    def _changed(self, here: Assignment, members: list[int], grid: bool) -> Iterator[Assignment]:
        """Another state for these operations, or another grid."""
        if not grid:
            for state in (INSIDE, PASSING, RESTORED, KEPT):
                if any(here.states[k] != state for k in members):
                    yield self._normal(_replaced(here.states, members, state), here.modes)
            return
        at = self.modes.index(here.modes[members[0]])
        for other in self.modes[max(0, at - 3) : at + 4]:
            if other != here.modes[members[0]] and self._enough(members, other.grid):
                yield self._normal(here.states, _replaced(here.modes, members, other))

    def _enough(self, members: list[int], grid: GridSpec) -> bool:
        """Has every one of these results a position for each tile?"""
        parts, tiled = self.costs.outline.parts, self.costs.tiled
        lengths = [parts[k].lengths for k in members if tiled[k]]
        return not isinstance(grid, tuple) or all(
            n == 0 or n >= g for each in lengths for n, g in zip(each, grid, strict=True)
        )

    def _normal(self, states: Sequence[int], modes: Sequence[Mode]) -> Assignment:
        """What is kept as plain JAX keeps it has no whole arrays but those that others read; what
        such operations read is kept.
        """
        found, costs, grids = list(states), self.costs, [m.grid for m in modes]
        for k in costs.parts:
            if grids[k] is None:
                found[k] = INSIDE
        for k in costs.parts:
            for i in costs.inputs[k]:
                if grids[k] != grids[i] and None in (grids[k], grids[i]):
                    found[i] = KEPT
        return Assignment(tuple(found), tuple(modes))


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


def _replaced(items: Sequence[T], members: Sequence[int], item: T) -> list[T]:
    found = list(items)
    for k in members:
        found[k] = item
    return found


def _alone(costs: Assignments) -> set[int]:
    """Results that are read later, while nothing else that was made before them is."""
    last = list(range(costs.n))
    for k in costs.parts:
        for i in costs.inputs[k]:
            last[i] = max(last[i], k)
    found, reach = set(), -1
    for k in costs.parts:
        if costs.tiled[k] and costs.held[k] > 0 and reach <= k:
            found.add(k)
        reach = max(reach, last[k])
    return found


def _price(slower: float, saved: float) -> float:
    """Seconds per byte that a move costs; if it costs none, the more bytes the better."""
    return slower / saved if slower > 0 else slower * saved


def _groups(costs: Assignments) -> dict[object, list[int]]:
    """Operations whose results may be whole, by kind and shape."""
    groups: dict[object, list[int]] = {}
    for k in costs.parts:
        operation = costs.outline.parts[k].operation
        if costs.tiled[k] and costs.held[k] > 0:
            key = (operation.kind, operation.output.shape, operation.macs, len(costs.inputs[k]))
            groups.setdefault(key, []).append(k)
    return groups


def _zones(costs: Assignments) -> Iterator[list[int]]:
    """Neighbouring operations on arrays of one size. Reductions belong to what they follow."""
    for _, zone in itertools.groupby(range(costs.n), key=_Lengths(costs)):
        yield list(zone)


def _split(zone: list[int], ends: set[int]) -> Iterator[list[int]]:
    """The parts of a zone between results that nothing spans."""
    block: list[int] = []
    for k in zone:
        block.append(k)
        if k in ends:
            yield block
            block = []
    if block:
        yield block


class _Lengths:
    """The size of the arrays that an operation works on; of a small one, that before it."""

    def __init__(self, costs: Assignments):
        self.costs = costs
        self.last: tuple[int, ...] = ()

    def __call__(self, k: int) -> tuple[int, ...]:
        if self.costs.tiled[k] or self.costs.reduces[k]:
            self.last = self.costs.outline.parts[k].lengths
        return self.last
