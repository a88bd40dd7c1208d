"""Assignments from the fastest to the smallest: a local search.

What a result's state should be depends on all others, so there is no dynamic programme for it. But
networks repeat themselves: operations of one kind and shape are a *group* and get one state, and
neighbouring operations on arrays of one size are a *zone* and get one grid. That leaves tens of
decisions instead of hundreds. From a fast assignment the search goes down: of all moves that need
less memory it takes the one that costs the least time per byte, until it fits. Then it looks again,
also at single operations: is there a move that is faster and still fits?

Such a search ends where no single move helps, which for a ResNet in an eighth of its memory can be
1.4 times slower than necessary. So it is *shaken*: a few moves at random in one part of the
network, then moves there that make it fit again or faster, and what came out is kept if it is
better. The random numbers are the same each time, and so is the plan.

What somebody else found, or what was found for more room, is a better start than what is fastest,
if it needs only little too much. From there single operations are moved too, and all of a block at
once: often neither its results nor its grid alone can change without needing more.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from ..policy import GridSpec
from .assignment import Assignments
from .found import Found, Room, Walk
from .groups import Span, groups, split, zones
from .states import HOSTED, INSIDE, KEPT, PASSING, RESTORED, Assignment, Mode

Move = tuple[list[int], Literal["state", "grid", "both"]]
"""Operations, and what they get: one state, one grid, or both."""

_STEP = 0.9  # of the peak: how far the allowance falls at a time
_BEYOND = 0.5  # of the allowance: walks go beyond it, and come back with improvements
_IMPROVED = 2  # assignments that are improved further for one allowance
_SHAKES = 20  # of each assignment that is improved, and of the best one
_LOOKS = 1000  # assignments that are looked at meanwhile
_WORTHWHILE = 0.99  # of the time before: if improving gains more, it is done once more
_NEAR = 8  # one part of the network in so many is shaken at a time


class Descent:
    """Assignments of an outline, or of a span of it, for any allowance of memory."""

    def __init__(
        self,
        costs: Assignments,
        grids: Sequence[tuple[int, ...]],
        span: Span | None = None,
        host: float = 0.0,
    ):
        """`host`: bytes of host memory for results that wait there."""
        self.host = host
        self.states = (INSIDE, PASSING, RESTORED, KEPT, HOSTED)[: 4 + (host > 0)]
        self.costs, self.facts = costs, costs.facts
        self.span = span or Span(None, self.facts.parts, None)
        self.is_part = span is not None
        self.here = slice(self.span.own[0], self.span.own[-1] + 1) if span else slice(None)
        inside = {*self.span.own}
        edges = [(k, i) for k in self.span.own for i in self.facts.inputs[k] if i in inside]
        self.readers, self.read = np.array(edges, int).reshape(-1, 2).T
        modes = [Mode(None), Mode("whole")]
        modes += [Mode(grid, forward) for grid in grids for forward in (False, True)]
        self.modes: list[int] = costs.modes.numbers(modes).tolist()
        self.groups = list(groups(self.facts, self.span).values())
        self.zones = list(zones(self.facts, self.span))
        self.blocks = [b for zone in self.zones for b in split(zone, self.facts.joints)]
        self.moves = list(self._decisions(single=False))
        self.all_moves = self.moves
        if span is None:
            self.all_moves = [*self.moves, *self._decisions(single=True)]
            self.all_moves += [(block, "both") for block in self.blocks]
        self._own = np.array(self.span.own, int)
        self._positions = np.arange(self.facts.n)[self.here]
        self._seen: dict[tuple[bytes, bytes], Found] = {}
        self._walks = [self._walk(start) for start in self._starts()]
        self._answers: list[Found] = []

    def fastest(
        self, allowed: float, others: Iterable[Assignment] = (), spanned: Assignment | None = None
    ) -> Found | None:
        """The fastest assignment that was found to need at most so many bytes.

        `others`: assignments that somebody else found, and that may be improved; `spanned`: one
        that was put together from spans, which is better than what walks through all lead to.
        """
        room = Room(allowed, self.host)
        given = [*others] if spanned is None else [*others, spanned]
        known = [self._look(self._normal(a.states, a.modes)) for a in given] + self._answers
        begun = [f for f in known if f.fits(room)]
        if spanned is None or not begun:
            begun += self._made_to_fit([f for f in known if not f.fits(room)], room)
        anew = not begun or (spanned is None and not self._answers)
        for walk in self._walks if anew else ():
            walk.to(Room(_BEYOND * allowed, self.host))
            begun += [f for f in (walk.fastest(room),) if f is not None]
        if anew or self.host:  # spans know nothing of host memory
            begun += self._looping(room)
        if not begun and self.host and (least := self.smallest().peak) > allowed:
            self.fastest(least)  # what is faster there, with host memory, may need less as well
            begun = sorted((f for f in self.seen() if f.fits(room)), key=lambda f: f.seconds)[:1]
        if not begun:
            return None
        begun = [self._improved(f, room, single=False) for f in dict.fromkeys(begun)]
        found = sorted(begun, key=lambda f: f.seconds)[:_IMPROVED]
        found = [self._shaken(self._refined(f, room), room, times=1) for f in found]
        best = self._shaken(min(found, key=lambda f: f.seconds), room, times=_IMPROVED)
        before = math.inf
        # With host memory it began far from what is best: spans know nothing of that.
        while self.host and best.seconds < _WORTHWHILE * before:
            before = best.seconds
            best = self._shaken(self._refined(best, room), room, times=_IMPROVED)
        self._answers = [best, *self._answers][:_IMPROVED]
        return best

    def smallest(self) -> Found:
        for walk in self._walks:
            walk.to(Room(0.0, self.host))
        found = [f for walk in self._walks for f in walk.seen if f.hosted <= self.host]
        return min(found, key=lambda f: f.peak)

    def seen(self) -> list[Found]:
        return list(self._seen.values())

    def _made_to_fit(self, large: Iterable[Found], room: Room) -> list[Found]:
        """Where walks lead from what needs more room, as what was found for it before."""
        walks = [self._walk(f.assignment, room.device, self.all_moves) for f in large]
        for walk in walks:
            walk.to(room)
        return [f for walk in walks if (f := walk.fastest(room)) is not None]

    def _looping(self, room: Room) -> list[Found]:
        """Of each kind of `_loops`, the fastest that fits; or, from the nearest, where a walk leads
        that makes it fit.
        """
        found: list[Found | None] = []
        for state, cuts in itertools.product(self.states[KEPT:], self._cuts()):
            begun = map(self._look, self._loops(state, cuts))
            nearest = min(begun, key=lambda f: (f.excess(room), f.seconds), default=None)
            if nearest is not None and not nearest.fits(room):
                walk = self._walk(nearest.assignment, room.device)
                walk.to(room)
                nearest = walk.fastest(room)
            found.append(nearest)
        return [f for f in found if f is not None]

    def _refined(self, found: Found, room: Room) -> Found:
        for single in (True, False, True):
            found = self._improved(found, room, single)
        return found

    def _improved(self, best: Found, room: Room, single: bool) -> Found:
        """Take every move that is faster and fits, one after the other."""
        for move in list(self._decisions(single)):
            for assignment in self._changed(best.assignment, *move):
                found = self._look(assignment)
                if found.fits(room) and found.seconds < 0.9995 * best.seconds:
                    best = found
        return best

    def _shaken(self, best: Found, room: Room, times: int) -> Found:
        """A better assignment, by moves at random and what follows from them."""
        rng, enough = random.Random(0), len(self._seen) + times * _LOOKS
        moves = [m for single in (True, False) for m in self._decisions(single)]
        for _ in range(times * _SHAKES):
            if len(self._seen) >= enough:
                break
            middle, around = rng.randrange(self.facts.n), self.facts.n // _NEAR
            near = [m for m in moves if abs(m[0][0] - middle) <= around] or moves
            rng.shuffle(near)
            shaken = best.assignment
            for move in near[: rng.randint(1, 4)]:
                shaken = rng.choice([shaken, *self._changed(shaken, *move)])
            found = self._settled(self._look(shaken), near, room, best.seconds)
            if found.fits(room) and found.seconds < best.seconds:
                best = found
        return best

    def _settled(self, here: Found, moves: Sequence[Move], room: Room, limit: float) -> Found:
        """Take every move that brings it nearer to fitting within a limit of time, or, once it
        fits, is faster.
        """
        for move in moves:
            for assignment in self._changed(here.assignment, *move):
                found = self._look(assignment)
                if not here.fits(room):
                    nearer = found.excess(room) < 0.99 * here.excess(room)
                    better = nearer and found.seconds < limit
                else:
                    better = found.fits(room) and found.seconds < 0.9995 * here.seconds
                here = found if better else here
        return here

    def _starts(self) -> Iterator[Assignment]:
        """As plain JAX does it; and all recomputed, between results that nothing spans."""
        n = self.facts.n
        yield self._all([INSIDE] * n, Mode(None))
        yield self._all(
            [KEPT if k in self.facts.joints else INSIDE for k in range(n)], Mode("whole")
        )

    def _all(self, states: Sequence[int], mode: Mode) -> Assignment:
        given = self.costs.assignment(states, [mode] * self.facts.n)
        return self._normal(given.states, given.modes)

    def _cuts(self) -> Iterator[Collection[int]]:
        """Where a network may be cut: at results that nothing spans; and at those of operations
        that read around a position, since the rest is then computed again without a halo.
        """
        yield self.facts.joints
        yield {k for k in range(self.facts.n) if not self.facts.by_position[k]}

    def _loops(self, state: int, cuts: Collection[int]) -> Iterator[Assignment]:
        """All in tiles of one grid, with one state at all cuts. Walks may not get there: if not
        even one result fits whole, several of them have to change together.
        """
        states = [state if k in cuts else INSIDE for k in range(self.facts.n)]
        for mode in map(self.costs.modes.__getitem__, self.modes):
            if mode.loops and all(self._enough(zone, mode.grid) for zone in self.zones):
                yield self._all(states, mode)

    def _walk(self, start: Assignment, allowed: float = 0.0, moves: Sequence[Move] = ()) -> Walk:
        return Walk(lambda seen: self._descend(start, seen, allowed, moves or self.moves))

    def _descend(
        self, start: Assignment, seen: list[Found], allowed: float, moves: Sequence[Move]
    ) -> Iterator[Found]:
        """Give up as little time per byte as possible, until nothing gets smaller.

        The allowance falls in small steps, from what is `allowed` if that is more than the start
        needs. What counts are the bytes beyond it of all regions: if several are too large, each of
        them must get smaller, and no single move reduces the peak.
        """
        here = self._look(start)
        seen.append(here)
        room = Room(max(here.peak, allowed), self.host)
        prices = dict.fromkeys(range(len(moves)), -math.inf)
        while True:
            yield here
            if here.fits(room):
                room = room._replace(device=_STEP * here.peak)
                prices = dict.fromkeys(prices, -math.inf)
            best: tuple[float, Found] | None = None
            # A price is near to what it was before the last move: look at the lowest ones first.
            for move in sorted(prices, key=prices.__getitem__):
                if best is not None and prices[move] > best[0]:
                    break
                prices[move], found = self._cheapest(here, moves[move], room, seen)
                if found is not None and (best is None or prices[move] < best[0]):
                    best = prices[move], found
            if best is None:
                return
            here = best[1]

    def _cheapest(
        self, here: Found, move: Move, room: Room, seen: list[Found]
    ) -> tuple[float, Found | None]:
        """What a move costs per byte that it saves, and where it leads; none, if it saves none."""
        excess = here.excess(room)
        best: tuple[float, Found | None] = (math.inf, None)
        for assignment in self._changed(here.assignment, *move):
            found = self._look(assignment)
            seen.append(found)
            saved = excess - found.excess(room)
            if saved > 0.001 * excess:
                price = _price(found.seconds - here.seconds, saved)
                best = (price, found) if price < best[0] else best
        return best

    def _look(self, assignment: Assignment) -> Found:
        key = assignment.states[self.here].tobytes(), assignment.modes[self.here].tobytes()
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._found(assignment)
        return found

    def _found(self, assignment: Assignment) -> Found:
        if not self.is_part:
            estimate = self.costs.estimate(assignment)
            return Found(
                estimate.seconds,
                estimate.needs,
                estimate.peak,
                assignment,
                hosted=estimate.hosted,
            )
        part = self.costs.span(self.span.begin, self.span.own, assignment)
        peak = float(part.needs.max(initial=0.0))
        return Found(part.seconds, part.needs, peak, assignment, part.kept)

    def _decisions(self, single: bool) -> Iterator[Move]:
        for group in self.groups:
            for members in [[k] for k in group] if single else [group]:
                yield members, "state"
        for zone in self.blocks if single else self.zones:
            yield zone, "grid"

    def _changed(
        self, here: Assignment, members: list[int], what: Literal["state", "grid", "both"]
    ) -> Iterator[Assignment]:
        """Another state for these operations, another grid, or both: nothing of them whole longer
        than the forward pass, in tiles.
        """
        if what == "state":
            own = np.array(members)
            free = own[~self.costs.modes.once[here.modes[own]]]  # others have no choice
            for state in self.states:
                if (here.states[free] != state).any():
                    yield self._normal(_replaced(here.states, free, state), here.modes)
            return
        mode = here.modes[members[0]]
        at = self.modes.index(mode)
        near = self.modes[max(0, at - 3) : at + 4]
        for other in near if what == "grid" else self.modes[2:]:
            if not self._enough(members, self.costs.modes[other].grid):
                continue
            if what == "both":
                modes = _replaced(here.modes, members, other)
                for state in (INSIDE, PASSING):
                    yield self._normal(_replaced(here.states, members, state), modes)
            elif other != mode:
                yield self._normal(here.states, _replaced(here.modes, members, other))

    def _enough(self, members: list[int], grid: GridSpec) -> bool:
        """Has every one of these results a position for each tile?"""
        parts, tiled = self.facts.outline.parts, self.facts.tiled
        lengths = [parts[k].lengths for k in members if tiled[k]]
        return not isinstance(grid, tuple) or all(
            n == 0 or n >= g for each in lengths for n, g in zip(each, grid, strict=True)
        )

    def _normal(self, states: np.ndarray, modes: np.ndarray) -> Assignment:
        """As it runs. Up to a whole result all is computed on that result's grid. What is kept as
        plain JAX keeps it has no whole arrays but those that others read; what such operations read
        is kept. What is hosted is made and read by loops.
        """
        states, modes, known = states.copy(), modes.copy(), self.costs.modes
        once = known.once[modes]
        if once[self.here].any():
            states[self._own[once[self._own]]] = INSIDE
            states[self.read[once[self.readers] != once[self.read]]] = KEPT
        if self.host:
            loops = known.loops[modes]
            elsewhere = ~(loops[self.readers] & loops[self.read])
            states[self.read[elsewhere & (states[self.read] == HOSTED)]] = KEPT
        for border in (self.span.begin, self.span.end):
            if border is not None:
                states[border] = KEPT
        positions = self._positions
        ends = np.where(states[self.here] != INSIDE, positions, positions[-1])
        modes[self.here] = modes[np.minimum.accumulate(ends[::-1])[::-1]]
        return Assignment(states, modes)


def _replaced(items: np.ndarray, members: Sequence[int] | np.ndarray, item: int) -> np.ndarray:
    found = items.copy()
    found[members] = item
    return found


def _price(slower: float, saved: float) -> float:
    """Seconds per byte that a move costs; if it costs none, the more bytes the better."""
    return slower / saved if slower > 0 else slower * saved
