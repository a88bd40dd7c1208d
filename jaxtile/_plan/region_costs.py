"""Time and memory of one region of a schedule, forwards and backwards.

Work in tiles includes the halo, and no operation is shorter than the time to start it. What a loop
reads of whole arrays and writes to them it copies. Searches come back to the same regions again and
again, so what was worked out is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .costs import Costs
from .facts import Facts
from .kernels import sides
from .regions import Cost, Region
from .states import HOSTED, KEPT, RESTORED


class Tile(NamedTuple):
    """One tile of a region, or all of it: what does not depend on what becomes of results."""

    share: Mapping[int, float]
    """Per operation, of its positions."""
    first: float
    """Seconds of all tiles, forwards, if that is in tiles."""
    again: float
    """Seconds of all tiles, backwards, with what is computed again for that, but for the result."""
    last: float
    """To compute the result again."""
    forward: float
    """Bytes that it needs at once, forwards, if that is in tiles."""
    held: float
    """Bytes that are held for the derivative."""
    cotangents: float
    """Bytes of cotangents, at the worst moment."""
    before: float
    """Bytes that it needs at once to compute what passes again."""


class RegionCosts:
    """Of regions of one outline."""

    def __init__(self, facts: Facts, costs: Costs):
        self.facts, self.costs = facts, costs
        self._costs: dict[Any, Cost] = {}
        self._tiles: dict[Any, Tile] = {}
        self._lines: dict[Any, list[float]] = {}

    def cost(self, region: Region, states: Sequence[int]) -> Cost:
        facts = self.facts
        if region.mode.grid is None:
            # When an operation runs, forwards or backwards, what is held after it is not there.
            forward = backward = later = 0.0
            for k in reversed(region.own):
                forward = max(forward, facts.made[k] - later)
                backward = max(backward, 2 * facts.bytes[k] - later)
                later += facts.held[k] if k < region.end else 0.0
            return Cost(0.0, forward + facts.bytes[region.end], backward)
        passing = tuple(i for i in region.reads if i in region.before)
        hosted = tuple(i for i in (*region.reads, *region.sources) if states[i] == HOSTED)
        state = states[region.end]
        key = (region.mode, state, passing, hosted, region.own, region.before, region.at_once)
        if key not in self._costs:
            self._costs[key] = self._recomputed(region, passing, hosted, state)
        return self._costs[key]

    def _recomputed(
        self, region: Region, passing: Sequence[int], hosted: Sequence[int], state: int
    ) -> Cost:
        """Of a region that is computed again, in tiles or in one piece."""
        facts, end, tiled_forward = self.facts, region.end, region.mode.tiled_forward
        tile = self._tile(region)
        share, first, forward = tile.share, tile.first, tile.forward
        if not tiled_forward:
            first = 0.0 if region.at_once else sum(facts.forward[k] for k in region.own)
            forward = self._at_once(region.own, [end], dict.fromkeys(region.own, 1.0))
        held = tile.held + sum(share[k] * facts.bytes[k] for k in passing)
        # A ReLU at the end is differentiated, and its result no longer needed, before the rest.
        clamped = facts.bytes[end] if facts.ends_with_clamp[end] else 0.0
        held += max(share[end] * clamped, tile.cotangents)
        if tiled_forward and state != HOSTED:  # a loop writes tiles to all of its result
            forward += (1 - share[end]) * facts.bytes[end]
        if region.mode.strips:
            ahead = self._windows(hosted, share)
            sums = self._windows([i for i in region.reads if i in hosted], share)
            ends = share[end] * facts.bytes[end] if state == HOSTED else 0.0
            forward, held = forward + ahead + ends, held + 2 * ahead + sums + ends
        given = self._given(region, state in (KEPT, HOSTED, RESTORED))
        if any(end in facts.inputs[k] for k in region.own):  # reductions follow the result
            if region.mode.grid == "whole":  # their cotangents are added to its, by its positions
                held = max(held, 2 * facts.bytes[end])
            elif state == KEPT:  # each tile reads its window of what was kept
                held += facts.bytes[end]
        seconds = first + tile.again + (0.0 if given else tile.last)
        return Cost(seconds, forward, max(held, tile.before), first)

    def _tile(self, region: Region) -> Tile:
        key = region.mode.grid, region.own, region.before, region.at_once
        if key not in self._tiles:
            self._tiles[key] = self._worked_out(region)
        return self._tiles[key]

    def _worked_out(self, region: Region) -> Tile:
        facts, own, grid = self.facts, region.own, region.mode.grid
        tiles = math.prod(grid) if isinstance(grid, tuple) else 1
        everything = sorted({*region.before, *own})
        share = self._shares(region, everything) if tiles > 1 else dict.fromkeys(everything, 1.0)
        at = {
            k: [d.at(share[k]) if tiles > 1 else d.whole for d in facts.durations[k]]
            for k in everything
            if k in facts.durations
        }
        timed = [k for k in own if k in at]
        forward, backward = (sum(at[k][i] for k in timed) for i in range(2))
        before = sum(at[k][0] for k in region.before if k in at)
        summed = sum(at[k][0] for k in timed if facts.reduces[k])
        last = at[region.end][0] if region.end in timed and not facts.reduces[region.end] else 0.0
        first, again = tiles * forward, tiles * (before + backward + forward - summed - last)
        if tiles > 1:
            started = tiles * self.costs.loop
            once, later = self._moved(region)
            first, again = first + started + once, again + started + later
        if region.at_once:  # one loop, which computes everything once
            first, again, last = 0.0, tiles * (forward + backward) + started + later, 0.0
        return Tile(
            share,
            first=first,
            again=again,
            last=tiles * last,
            forward=self._at_once(own, [region.end], share),
            held=sum(share[k] * facts.held[k] for k in own if k != region.end),
            cotangents=max(self._cotangents(region, k, share, tiles > 1) for k in own),
            before=self._at_once(region.before, region.reads, share),
        )

    def _windows(self, hosted: Sequence[int], share: Mapping[int, float]) -> float:
        """Bytes of the windows of these that a tile reads."""
        facts, inside = self.facts, share.keys()
        windows = dict.fromkeys(hosted, 0.0)
        for k in inside:
            for i in facts.inputs[k]:
                if i in windows:
                    windows[i] = max(windows[i], share[k] * facts.bytes[i])
        return sum(windows.values())

    def _given(self, region: Region, known: bool) -> bool:
        """Need the result of a region not be computed again? If it was kept, it is read, where
        reductions follow it; in one piece also for the derivative of a ReLU with which it ends.
        """
        facts, end = self.facts, region.end
        if facts.held[end] > facts.bytes[end]:
            return False
        if facts.ends_with_clamp[end]:
            return known and region.mode.grid == "whole"
        return known or not any(end in facts.inputs[k] for k in region.own)

    def _cotangents(
        self, region: Region, k: int, share: Mapping[int, float], in_tiles: bool
    ) -> float:
        """Bytes of the cotangents of an operation's result and operands, inside a region; and of
        the windows of whole ones, if it is computed in tiles.
        """
        found = 0.0
        for i in (k, *self.facts.inputs[k]):
            if i in share and i != region.end:
                found += share[i] * self.facts.bytes[i]
            elif in_tiles:
                found += self.facts.bytes[i] * share.get(i, share[k])
        return found

    def _at_once(
        self, operations: Sequence[int], ends: Sequence[int], share: Mapping[int, float]
    ) -> float:
        """Bytes that operations need forwards: of the results at which they end, and of others
        until they were read.

        An elementwise operation writes over an operand that nobody reads again, unless a library
        has made that, as it does results of convolutions.
        """
        facts = self.facts
        last = {i: k for k in operations for i in (k, *facts.inputs[k]) if i not in ends}
        size = {k: share[k] * (facts.bytes[k] if k in ends else facts.made[k]) for k in operations}
        now = most = 0.0
        for k in operations:
            done = {i: size.get(i, 0.0) for i in facts.inputs[k] if last.get(i) == k}
            free = sum(n for i, n in done.items() if facts.elementwise[i])
            over = facts.elementwise[k] and free >= size[k]
            most = max(most, now if over else now + size[k])
            now += size[k] - sum(done.values())
        return most

    def _moved(self, region: Region) -> tuple[float, float]:
        """Seconds to copy windows out of whole arrays, and tiles into them: forwards, if that is in
        tiles, and backwards.
        """
        facts = self.facts
        read = sum(facts.bytes[i] for i in region.reads if i not in region.before)
        made = facts.bytes[region.end]
        cotangents = sum(facts.cotangent[i] for i in region.reads) + facts.cotangent[region.end]
        both = 2 / self.costs.bandwidth
        return both * (read + made), both * (read + cotangents)

    def _shares(self, region: Region, everything: Sequence[int]) -> dict[int, float]:
        """Per operation, the share of its positions that a tile computes."""
        grid, operations = region.mode.grid, tuple(everything)
        assert isinstance(grid, tuple)
        lines = []
        for axis, count in enumerate(grid):
            key = axis, count, region.end, operations
            if key not in self._lines:
                self._lines[key] = self._line(*key)
            lines.append(self._lines[key])
        return dict(zip(operations, map(math.prod, zip(*lines, strict=True)), strict=True))

    def _line(self, axis: int, count: int, end: int, operations: Sequence[int]) -> list[float]:
        """The same along one axis that has so many tiles: from the last operation to the first,
        each asks for as many positions of what it reads as it needs.
        """
        facts, half = self.facts, float(sides(count))
        lengths = {k: facts.outline.parts[k].lengths[axis] for k in operations}
        wide = dict.fromkeys(operations, 0.0)
        for k in reversed(operations):
            own = -(-lengths[k] // count) if k == end or facts.reduces[k] else 0
            wide[k] = here = min(max(wide[k], own), lengths[k])
            for i, line in facts.reads[k]:
                if i in wide:
                    demand = line[axis]
                    wide[i] = max(wide[i], here * demand.scale + half * demand.halo)
        return [wide[k] / n if n else 1.0 for k, n in lengths.items()]
