"""Time and memory of a schedule that says of every result what becomes of it (`states`).

Time. Forwards, each region computes what is inside it. Backwards it computes the same again, and
before that the passing arrays that it reads, from what is there; then come the gradients of what is
inside. Regions that restore something run forwards once more. What each of them takes is in
`region_costs`.

Memory. While a region is differentiated there are all kept arrays before it, the whole cotangents
of what it computes and reads and of everything that spans it, and what one of its tiles holds. A
loop that reads an input at the positions that it computes needs one array for both cotangents, and
forwards one for input and result, if that input is passing. What is hosted takes time to move
instead, for every loop that reads it.

Limits: an estimate ranks schedules, and the compiler has the last word (`search`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..policy import Choices, Outline
from .costs import Costs
from .facts import Facts, bits
from .region_costs import RegionCosts
from .regions import Region, Regions
from .states import HOSTED, INSIDE, KEPT, PASSING, RESTORED, Assignment, Mode, Modes, chosen
from .traffic import Traffic


class Begin(NamedTuple):
    """The whole result with which a segment begins, and how it is computed again if it passes."""

    joint: int | None
    """None: the network begins here."""
    state: int | None
    before: tuple[int, ...] = ()
    """Operations that do so."""
    sources: tuple[int, ...] = ()
    """Whole arrays that they read, and what becomes of these."""
    of_sources: tuple[int, ...] = ()


class Segment(NamedTuple):
    """Operations between two whole results that nothing else spans."""

    seconds: float
    needs: np.ndarray
    """Per region, bytes beyond what is kept before the segment."""
    regions: list[Region]
    kept: float
    """Bytes that stay after it."""
    hosted: float
    """The same, in host memory."""
    most_hosted: float
    """The most bytes there while it runs, beyond those of what comes before the segment."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float
    needs: np.ndarray
    """Per region, bytes while it runs, forwards or backwards."""
    regions: list[Region]
    hosted: float
    """The most bytes in host memory."""

    @property
    def peak(self) -> float:
        return float(self.needs.max(initial=0.0))


class InPlace(NamedTuple):
    """Inputs of a loop of which every tile reads the part that it writes of its result."""

    parts: Sequence[int] = ()
    of_its_shape: Sequence[int] = ()
    """Those whose place the result can take."""


class Assignments:
    """What assignments for one outline cost."""

    def __init__(self, outline: Outline, costs: Costs):
        self.costs, self.facts = costs, Facts(outline, costs)
        self.regions = Regions(self.facts)
        self.of_regions = RegionCosts(self.facts, costs)
        self.modes = Modes()
        self._link = costs.host_bandwidth or math.inf
        facts = self.facts
        self._chosen = np.array([k in facts.whole for k in range(facts.n)], bool)
        """Is there a choice? If not, what its state is:"""
        self._settled = np.array([KEPT if t else INSIDE for t in facts.tiled], np.uint8)
        self._known: dict[Any, np.ndarray] = {}
        self._beside: dict[Any, InPlace] = {}
        self._segments: dict[Any, Segment] = {}

    def assignment(self, states: Sequence[int], modes: Sequence[Mode]) -> Assignment:
        return Assignment(np.array(states, np.uint8), self.modes.numbers(modes))

    def of(self, choices: Choices) -> Assignment:
        return self.assignment(*chosen(choices, self.facts.outline))

    def estimate(self, given: Assignment) -> Estimate:
        found = self.span(None, self.facts.parts, given)
        return Estimate(found.seconds, found.needs, found.regions, found.most_hosted)

    def span(self, joint: int | None, own: Sequence[int], given: Assignment) -> Segment:
        """Of all segments of operations that begin at a kept result: what lies between two whole
        results that nothing else spans does not depend on what lies elsewhere, and is not worked
        out again.
        """
        seconds, kept, regions = 0.0, 0.0, list[Region]()
        needs = [np.zeros(0)]
        hosted = most_hosted = 0.0
        settled = np.where(self._chosen, given.states, self._settled)
        there = self._there(joint, own, settled)
        states, modes = settled.tobytes(), given.modes.tolist()
        for first, some, riding in self._split(joint, own, states, modes) if own else ():
            begin = self._begin(first, states, there)
            here = slice(some[0], some[-1] + 1)
            key = some[0], riding, states[here], given.modes[here].tobytes(), begin
            found = self._segments.get(key)
            if found is None:
                every = [*some, *riding]
                of_each = {k: self.modes[modes[k]] for k in every}
                found = self._segments[key] = self._segment(begin, every, states, of_each)
            seconds += found.seconds
            needs.append(kept + found.needs)
            regions += found.regions
            kept += found.kept
            most_hosted = max(most_hosted, hosted + found.most_hosted)
            hosted += found.hosted
        return Segment(seconds, np.concatenate(needs), regions, kept, hosted, most_hosted)

    def _there(self, joint: int | None, own: Sequence[int], states: np.ndarray) -> int:
        """Of these operations, those whose results are kept, as the bits of one number."""
        key = (joint, own[0], own[-1]) if own else None
        if key not in self._known:
            known = {*own, joint}
            self._known[key] = np.array([k in known for k in range(self.facts.n)], bool)
        there = self._known[key] & (states >= KEPT)
        return int.from_bytes(np.packbits(there, bitorder="little").tobytes(), "little")

    def _split(
        self, joint: int | None, own: Sequence[int], states: Sequence[int], modes: Sequence[int]
    ) -> Iterator[tuple[int | None, list[int], tuple[int, ...]]]:
        """Segments: the whole result that each one begins with, its operations, and the later
        reductions that are added up where its last result is computed.
        """
        facts = self.facts
        start, before = facts.at[own[0]], tuple[int, ...]()
        end = start + len(own)
        for k, after in facts.joints.items():
            if not start < after < end or states[k] in (INSIDE, RESTORED):
                continue
            riding = tuple(
                r
                for r, way in facts.following[k]
                if self.modes[modes[r]].grid != "whole" and all(states[i] == INSIDE for i in way)
            )
            if riding and (self.modes[modes[k]].grid is None or riding[-1] > own[-1]):
                continue
            if not any(self.modes[modes[r]].grid == "whole" for r in facts.across[k]):
                yield joint, [i for i in facts.parts[start:after] if i not in before], riding
                joint, start, before = k, after, riding
        yield joint, [i for i in facts.parts[start:end] if i not in before], ()

    def _begin(self, joint: int | None, states: Sequence[int], kept: int) -> Begin:
        if joint is None or states[joint] != PASSING:
            return Begin(joint, None if joint is None else states[joint])
        before, sources = self.regions.reach([joint], kept)
        return Begin(joint, PASSING, before, sources, tuple(states[i] for i in sources))

    def _segment(
        self, begin: Begin, own: Sequence[int], states: Sequence[int], modes: Mapping[int, Mode]
    ) -> Segment:
        facts, joint = self.facts, begin.joint
        known = own if joint is None else [joint, *own]
        whole = bits(k for k in known if states[k] != INSIDE)
        kept = bits(k for k in (*known, *begin.sources) if states[k] in (KEPT, HOSTED))
        regions = self.regions.of(own, whole, modes)
        self.regions.group(regions, states, kept)
        for region in regions:
            region.cost = self.of_regions.cost(region, states)
        once = {k for r in regions if r.mode.grid is None for k in r.own}
        held = {k: facts.held[k] for k in once}
        for k in own:
            if states[k] == KEPT:
                held[k] = max(held.get(k, 0.0), facts.bytes[k])
        for region in regions:
            if region.mode.grid is None:
                held |= {i: facts.bytes[i] for i in region.reads if i != joint}
        last = _last_reads(regions)
        needs = self._needs(regions, states, known, held, last)
        hosted = [k for k in known if states[k] == HOSTED]
        if there := {*hosted, *(i for i in begin.sources if states[i] == HOSTED)}:
            self._move_to_host(regions, there, last)
        return Segment(
            facts.plain(once) + sum(r.cost.seconds + r.extra for r in regions),
            np.array(needs),
            regions,
            kept=sum(held.values()),
            hosted=sum(facts.bytes[k] for k in hosted if k != joint),
            most_hosted=self._most_hosted(regions, hosted, own, last) if hosted else 0.0,
        )

    def _move_to_host(
        self, regions: Sequence[Region], there: Collection[int], last: Mapping[int, int]
    ) -> None:
        """Regions wait for values in host memory and for their cotangents.

        A value is written, and the region that made it reads its sum of cotangents. Every region
        that reads it does so in both passes, and reads and writes the sum; but the sum begins with
        zeros that are written, or, if tiles read parts, with what the first of them writes.
        """
        size = self.facts.bytes
        for region in regions:
            read, sources = ([i for i in x if i in there] for x in (region.reads, region.sources))
            if not read and not sources and region.end not in there:
                continue
            first, again = Traffic(), Traffic()
            if region.end in there:
                first.sent += size[region.end]
                again.fetched += size[region.end]
            for i in read:
                first.fetched += size[i]
                again.fetched += size[i]
                again.sent += size[i]
                if last[i] != region.end:
                    again.added += size[i]
                elif i not in self._beside_result(region).parts:
                    again.added += size[i]
                    region.extra += size[i] / self._link
            again.fetched += sum(size[i] for i in sources)
            cost = region.cost
            region.extra += first.waited(region.mode, cost.first, self._link)
            region.extra += again.waited(region.mode, cost.seconds - cost.first, self._link)

    def _needs(
        self,
        regions: Sequence[Region],
        states: Sequence[int],
        known: Sequence[int],
        held: Mapping[int, float],
        last: Mapping[int, int],
    ) -> list[float]:
        """Bytes while each region runs, forwards or backwards, besides those of other segments."""
        facts, begin = self.facts, known[0]
        # What changes from one operation to the next.
        kept, cotangents, passing = ([0.0] * (known[-1] + 3 - begin) for _ in range(3))
        for k in known:
            if states[k] not in (INSIDE, HOSTED):
                cotangents[k - begin] += facts.cotangent[k]
                cotangents[last.get(k, k) + 1 - begin] -= facts.cotangent[k]
            if states[k] in (PASSING, RESTORED):
                passing[k + 1 - begin] += facts.bytes[k]
                passing[last.get(k, k) + 1 - begin] -= facts.bytes[k]
        for k, size in held.items():
            kept[k + 1 - begin] += size
        kept, cotangents, passing = (
            list(itertools.accumulate(x)) for x in (kept, cotangents, passing)
        )
        needs = []
        for region in regions:
            end, cost = region.end, region.cost
            forward = passing[end - begin] + cost.forward
            if states[end] != HOSTED and self._takes_place(region, states, last):
                forward -= facts.bytes[end]
            # In one piece, cotangents are apart from the sums that later readers have begun.
            apart = sum(
                facts.cotangent[i]
                for i in region.reads
                if region.mode.grid == "whole" and last[i] != end
            )
            backward = cotangents[end - begin] + region.restored + max(cost.backward, apart)
            if states[end] != HOSTED and self._shares_cotangents(region, last):
                backward -= facts.cotangent[end]
            backward += region.at_once * passing[end - begin]  # which is still there
            needs.append(kept[end - begin] + max(backward, forward))
        return needs

    def _most_hosted(
        self,
        regions: Sequence[Region],
        hosted: Sequence[int],
        own: Sequence[int],
        last: Mapping[int, int],
    ) -> float:
        """Bytes in host memory at the worst moment of the backward pass. A value waits there until
        the first region that reads it is differentiated, and its cotangents from the last one on.
        """
        size, inside, begin = self.facts.bytes, set(own), min(hosted[0], own[0])
        first = {i: r.end for r in reversed(regions) for i in (*r.reads, *r.sources)}
        # What changes from one operation to the next.
        there = [0.0] * (own[-1] + 2 - begin)
        for k in hosted:
            if k in first or k not in self.facts.joints:  # else it is gone when this begins
                there[first.get(k, k) - begin] += size[k] * (k in inside)
            there[k - begin] += size[k]
            there[last.get(k, k) + 1 - begin] -= size[k]
        there = list(itertools.accumulate(there))
        # If nobody reads the first one, it and its cotangents were there at the same time.
        unread = sum(size[k] for k in hosted if k not in inside and k not in first)
        return max(unread, *(there[r.end - begin] for r in regions), 0.0)

    def _shares_cotangents(self, region: Region, last: Mapping[int, int]) -> bool:
        """Do the cotangents of an input take the place of the result's?"""
        cotangent = self.facts.cotangent
        return any(
            last[i] == region.end and cotangent[i] == cotangent[region.end]
            for i in self._in_place(region)
        )

    def _takes_place(self, region: Region, states: Sequence[int], last: Mapping[int, int]) -> bool:
        """Does the result of a forward loop take the place of an input that nobody reads again?"""
        return region.mode.tiled_forward and any(
            last[i] == region.end and states[i] == PASSING for i in self._in_place(region)
        )

    def _in_place(self, region: Region) -> Sequence[int]:
        """What a loop reads where it writes its result, and nowhere else."""
        return self._beside_result(region).of_its_shape

    def _beside_result(self, region: Region) -> InPlace:
        end, own, grid = region.end, region.own, region.mode.grid
        if (own, end, grid) not in self._beside:
            parts, found = self.facts.outline.parts, InPlace()
            lengths, whole = parts[end].lengths, parts[end].operation.output.shape
            if isinstance(grid, tuple) and math.prod(grid) > 1:  # without a loop XLA decides
                divide = all(n % g == 0 for n, g in zip(lengths, grid, strict=True))
                read = self._parallel(own) if divide else []
                same = [i for i in read if parts[i].operation.output.shape == whole]
                found = InPlace(read, same)
            self._beside[own, end, grid] = found
        return self._beside[own, end, grid]

    def _parallel(self, own: Sequence[int]) -> list[int]:
        """What operations read of other regions at those positions only that they compute."""
        beside, inside = dict.fromkeys(own, True), set(own)
        found: dict[int, bool] = {}
        for k in reversed(own):
            for i, line in self.facts.reads[k]:
                same = beside[k] and all(d.scale == 1 and not d.halo for d in line)
                seen = beside if i in inside else found
                seen[i] = seen.get(i, True) and same
        return [i for i, same in found.items() if same]


def _last_reads(regions: Sequence[Region]) -> dict[int, int]:
    """Per whole result, the end of the last region that reads it."""
    last: dict[int, int] = {}
    for region in regions:
        for i in region.reads:
            last[i] = max(last.get(i, i), region.end)
    return last
