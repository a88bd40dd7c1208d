"""The regions of an assignment: a region begins at whole arrays and ends at one, or at reductions.

They follow from the states of the results as `jaxtile._regions` builds them when the function is
tiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from .facts import Facts, bits
from .states import HOSTED, PASSING, RESTORED, Mode

Reach = tuple[tuple[int, ...], tuple[int, ...]]


class Cost(NamedTuple):
    """Of one region: seconds, and bytes beyond whole arrays, forwards and backwards."""

    seconds: float
    forward: float
    backward: float
    first: float = 0.0
    """Seconds of the forward pass, of all."""


@dataclasses.dataclass
class Region:
    end: int
    own: tuple[int, ...]
    """Operations, in order."""
    reads: tuple[int, ...]
    """Whole arrays that they read."""
    mode: Mode
    before: tuple[int, ...] = ()
    """Operations that compute the passing ones of these."""
    sources: tuple[int, ...] = ()
    """Other whole arrays that are read for that, in the backward pass."""
    restored: float = 0.0
    """Bytes that are restored for it."""
    at_once: bool = False
    """Does it lead to the loss, so that its tiles are differentiated when they are computed?"""
    cost: Cost = dataclasses.field(default=Cost(0.0, 0.0, 0.0))
    extra: float = 0.0
    """Seconds to run it again for others, and those that it waits for host memory."""


class Regions:
    """Of assignments for one outline."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self._reached: dict[tuple[int, ...], list[tuple[int, int, int, Reach]]] = {}

    def of(self, operations: Sequence[int], whole: int, modes: Mapping[int, Mode]) -> list[Region]:
        facts = self.facts
        found: dict[Any, Region] = {}
        inside = bits(k for k in operations if facts.reduces[k] and modes[k].grid == "whole")
        for k in operations:
            if not whole >> k & 1 and (not facts.reduces[k] or inside >> k & 1):
                continue
            in_one = modes[k].grid == "whole"
            own, reads = self.reach([k], whole, inside if in_one else 0)
            inside &= ~bits(own)
            key: Any = k
            if facts.reduces[k]:
                # It follows a whole array, or is one of several that are computed from the same.
                awaited = frozenset(r for i in own for r in facts.awaits[i])
                first = reads[0] if len(reads) == 1 and self._follows(own, awaited, reads[0]) else k
                key = first if first in found and not in_one else (reads, own[:-1], awaited)
            if key in found:
                found[key].own = tuple(sorted({*found[key].own, *own}))
                continue
            found[key] = Region(k, own, reads, modes[k])
        # A reduction that leads to no whole array ends a region itself.
        while inside:
            k = inside.bit_length() - 1
            own, reads = self.reach([k], whole, inside)
            found[k] = Region(k, own, reads, modes[k])
            inside &= ~bits(own)
        return sorted(found.values(), key=lambda r: r.end)

    def _follows(self, own: Sequence[int], awaited: Collection[int], first: int) -> bool:
        """Do operations compute, position by position, from one result and what was there before
        it?
        """
        return all(self.facts.by_position[i] for i in own[:-1]) and all(r < first for r in awaited)

    def _mark_loss(self, regions: Sequence[Region], states: Sequence[int]) -> None:
        """In tiles, the last region is differentiated when it is computed, if it leads to the loss.
        Not if what it reads is run again with it, or lies in host memory.
        """
        for region in regions[-1:]:
            grid = region.mode.grid
            in_tiles = isinstance(grid, tuple) and math.prod(grid) > 1
            elsewhere = any(states[i] in (RESTORED, HOSTED) for i in region.reads)
            region.at_once = in_tiles and self.facts.loss in region.own and not elsewhere

    def group(self, regions: Sequence[Region], states: Sequence[int], kept: int) -> None:
        """What each region computes of its inputs, and what groups restore."""
        self._mark_loss(regions, states)
        at = {r.end: n for n, r in enumerate(regions)}
        last = dict.fromkeys(range(len(regions)), -1)
        for n, region in enumerate(regions):
            for i in region.reads:
                if states[i] == RESTORED:
                    last[at[i]] = n
        first, end = 0, -1
        for n in range(len(regions)):
            end = max(end, last[n])
            if end <= n:
                self._group(regions[first : n + 1], states, kept)
                first = n + 1

    def _group(self, regions: Sequence[Region], states: Sequence[int], kept: int) -> None:
        """Regions that are run again, if they restore anything. They read and make whole arrays, so
        nothing of that may be in host memory.
        """
        facts = self.facts
        if len(regions) == 1:
            return self._passing(regions[0], kept)
        made = {r.end for r in regions}
        restored = [k for k in made if states[k] == RESTORED]
        outside = {i for r in regions for i in r.reads if i not in made}
        if any(states[k] == HOSTED for k in (*outside, *made)):
            regions[0].extra = math.inf
            return
        passing = sorted(i for i in outside if not kept >> i & 1)
        before = self.reach(passing, kept)[0]
        regions[0].extra = sum(facts.forward[k] for k in before)
        given = sum(facts.bytes[i] for i in passing)
        # They are computed whole, one after the other, when nothing else of the group is there.
        begin = given + 2 * max((facts.made[k] for k in before), default=0.0)
        kept |= bits([*passing, *restored])
        for region in regions:
            self._passing(region, kept)
            if states[region.end] in (RESTORED, PASSING):
                region.extra += sum(facts.forward[k] for k in region.own if not facts.reduces[k])
            region.restored = given + sum(facts.bytes[k] for k in restored if k < region.end)
        regions[-1].restored = max(regions[-1].restored, begin)

    def _passing(self, region: Region, kept: int) -> None:
        """What a region must compute before its own operations."""
        passing = [i for i in region.reads if not kept >> i & 1]
        if passing and region.mode.grid is not None and not region.at_once:
            region.before, sources = self.reach(passing, kept)
            region.sources = tuple(i for i in sources if i not in region.reads)

    def reach(self, ends: Sequence[int], whole: int, inside: int = 0) -> Reach:
        """The operations that compute these results, and the whole arrays that they read.

        `whole`, `inside`: sets of operations, as bits of a number: which results are whole arrays,
        and which reductions are operations like any other. An answer is remembered together with
        those bits of both that it depends on.
        """
        known = self._reached.setdefault(tuple(ends), [])
        for at, (seen, whole_there, inside_there, answer) in enumerate(known):
            if whole & seen == whole_there and inside & seen == inside_there:
                known.insert(0, known.pop(at))  # likely to be asked for again
                return answer
        own, reads, pending, seen = set(ends), set(), list(ends), 0
        while pending:
            k = pending.pop()
            seen |= self.facts.asked[k]
            for r in self.facts.awaits[k]:
                if inside >> r & 1 and r not in own:
                    own.add(r)
                    pending.append(r)
            for i in self.facts.inputs[k]:
                if whole >> i & 1:
                    reads.add(i)
                elif i not in own:
                    own.add(i)
                    pending.append(i)
        answer = tuple(sorted(own)), tuple(sorted(reads))
        known.insert(0, (seen, whole & seen, inside & seen, answer))
        return answer
