"""Time and memory of a schedule that says of every result what becomes of it (`states`).

Time. Forwards, each region computes what is inside it. Backwards it computes the same again, and
before that the passing arrays that it reads, from what is there; then come the gradients of what is
inside. Regions that restore something run forwards once more. Work in tiles includes the halo, no
operation is shorter than the time to start it, and what a loop reads of whole arrays and writes to
them it copies.

Memory. While a region is differentiated there are all kept arrays before it, the whole cotangents
of what it computes and reads and of everything that spans it, and what one of its tiles holds. A
loop that reads an input at the positions that it computes needs one array for both cotangents. What
is hosted takes time to move instead, for every loop that reads it.

Limits: an estimate ranks schedules, and the compiler has the last word (`search`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..policy import Outline
from .costs import HOSTED_ONCE, HOSTED_PER_READER, Costs
from .facts import Facts, bits
from .regions import Cost, Region, Regions
from .states import HOSTED, INSIDE, KEPT, PASSING, RESTORED, Assignment


class Segment(NamedTuple):
    """Operations between two kept results that nothing else spans."""

    seconds: float
    needs: list[float]
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


class Assignments:
    """What assignments for one outline cost."""

    def __init__(self, outline: Outline, costs: Costs):
        self.costs, self.facts = costs, Facts(outline, costs)
        self.regions = Regions(self.facts)
        self._costs: dict[Any, Cost] = {}
        self._beside: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._segments: dict[Any, Segment] = {}

    def estimate(self, given: Assignment) -> Estimate:
        """Of all segments: what lies between two kept results that nothing else spans does not
        depend on what lies elsewhere, and is not worked out again.
        """
        seconds, kept, needs, regions = 0.0, 0.0, [], []
        hosted = most_hosted = 0.0
        for joint, own in self._split(given.states):
            key = (
                own[0],
                tuple(given.states[k] for k in own),
                tuple(given.modes[k] for k in own),
                joint,
                None if joint is None else given.states[joint],
            )
            if key not in self._segments:
                self._segments[key] = self.segment(joint, own, given)
            found = self._segments[key]
            seconds += found.seconds
            needs += [kept + n for n in found.needs]
            regions += found.regions
            kept += found.kept
            most_hosted = max(most_hosted, hosted + found.most_hosted)
            hosted += found.hosted
        return Estimate(seconds, np.array(needs), regions, most_hosted)

    def _split(self, states: Sequence[int]) -> Iterator[tuple[int | None, list[int]]]:
        """Segments: the kept result that each one begins with, and its operations."""
        facts = self.facts
        joint, start = None, 0
        for k, after in facts.joints.items():
            if states[k] in (KEPT, HOSTED):
                yield joint, facts.parts[start:after]
                joint, start = k, after
        if facts.parts[start:]:
            yield joint, facts.parts[start:]

    def segment(self, joint: int | None, own: Sequence[int], given: Assignment) -> Segment:
        """What operations cost that begin at a kept result, and end at one."""
        facts = self.facts
        states = list(given.states)
        for k in own:
            if k not in facts.whole:
                states[k] = KEPT if facts.tiled[k] else INSIDE
        known = own if joint is None else [joint, *own]
        whole = bits(k for k in known if states[k] != INSIDE)
        kept = bits(k for k in known if states[k] in (KEPT, HOSTED))
        regions = self.regions.of(own, whole, given.modes)
        seconds = self.regions.grouped(regions, states, kept)
        for region in regions:
            region.cost = self._cost(region, states)
        once = {k for r in regions if r.mode.grid is None for k in r.own}
        seconds += sum(r.cost.seconds for r in regions) + facts.plain(once)
        hosted = [k for k in known if states[k] == HOSTED]
        seconds += self._moved_to_host(regions, hosted, joint) if hosted else 0.0
        held = {k: facts.held[k] for k in once}
        for k in own:
            if states[k] == KEPT:
                held[k] = max(held.get(k, 0.0), facts.bytes[k])
        for region in regions:
            if region.mode.grid is None:
                held |= {i: facts.bytes[i] for i in region.reads if i != joint}
        last = _last_reads(regions)
        needs = self._needs(regions, states, known, held, last)
        most_hosted = self._most_hosted(regions, hosted, own, last) if hosted else 0.0
        return Segment(
            seconds,
            needs,
            regions,
            kept=sum(held.values()),
            hosted=sum(facts.bytes[k] for k in hosted if k != joint),
            most_hosted=most_hosted,
        )

    def _cost(self, region: Region, states: Sequence[int]) -> Cost:
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
        known = states[region.end] in (KEPT, HOSTED, RESTORED)
        key = (region.mode, known, passing, region.own, region.before)
        if key not in self._costs:
            self._costs[key] = self._recomputed(region, passing, known)
        return self._costs[key]

    def _recomputed(self, region: Region, passing: Sequence[int], known: bool) -> Cost:
        """Of a region that is computed again, in tiles or in one piece."""
        facts = self.facts
        grid, tiled_forward = region.mode
        tiles = math.prod(grid) if isinstance(grid, tuple) else 1
        own, everything = set(region.own), sorted({*region.before, *region.own})
        share = self._shares(region, everything) if tiles > 1 else dict.fromkeys(everything, 1.0)
        read = {i for k in region.own for i in facts.inputs[k]}
        seconds = 0.0 if tiled_forward else sum(facts.forward[k] for k in region.own)
        seconds += (1 + tiled_forward) * (tiles > 1) * tiles * self.costs.loop
        for k in everything:
            if k not in facts.durations:
                continue
            forward, backward = (
                d.of(share[k]) if tiles > 1 else d.whole for d in facts.durations[k]
            )
            times = [forward] if k in region.before else []
            if k in own:
                times += [backward, forward][: 1 + tiled_forward]
                # A result that only reductions follow is read, if it was kept.
                unread = k == region.end and (known or k not in read)
                if not facts.reduces[k] and not (unread and facts.held[k] <= facts.bytes[k]):
                    times.append(forward)
            seconds += sum(times) * tiles
        if tiles > 1:
            seconds += self._moved(region, tiled_forward)
        tile = sum(share[k] * facts.held[k] for k in region.own if k != region.end)
        tile += sum(share[k] * facts.bytes[k] for k in passing)
        tile += max(self._cotangents(region, k, share, tiles > 1) for k in region.own)
        part = share if tiled_forward else dict.fromkeys(region.own, 1.0)
        return Cost(seconds, self._at_once(region, part), tile)

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

    def _at_once(self, region: Region, share: Mapping[int, float]) -> float:
        """Bytes that a region needs forwards: of its result, and of what is still to be read.

        An elementwise operation writes over an operand that nobody reads again.
        """
        facts = self.facts
        last = {i: k for k in region.own for i in (k, *facts.inputs[k])}
        size = {k: share[k] * facts.made[k] for k in region.own}
        size[region.end] = share[region.end] * facts.bytes[region.end]
        now = most = 0.0
        for k in region.own:
            done = sum(size.get(i, 0.0) for i in set(facts.inputs[k]) if last[i] == k)
            over = facts.elementwise[k] and done >= size[k]
            most = max(most, now if over else now + size[k])
            now += size[k] - done
        return most

    def _moved(self, region: Region, tiled_forward: bool) -> float:
        """Seconds to copy windows out of whole arrays, and tiles into them."""
        facts = self.facts
        read = sum(facts.bytes[i] for i in region.reads if i not in region.before)
        made = facts.bytes[region.end]
        cotangents = sum(facts.cotangent[i] for i in region.reads) + facts.cotangent[region.end]
        return 2 * (read + cotangents + tiled_forward * (read + made)) / self.costs.bandwidth

    def _moved_to_host(
        self, regions: Sequence[Region], hosted: Sequence[int], joint: int | None
    ) -> float:
        """Seconds to move values in host memory and their cotangents, there and back."""
        size = self.facts.bytes
        times = dict.fromkeys(hosted, HOSTED_ONCE)
        times |= {} if joint not in times else {joint: 0}
        for i in itertools.chain.from_iterable(r.reads for r in regions):
            if i in times:
                times[i] += HOSTED_PER_READER
        moved = sum(size[k] * n for k, n in times.items())
        return moved / (self.costs.host_bandwidth or math.inf)

    def _shares(self, region: Region, everything: Sequence[int]) -> dict[int, float]:
        """Per operation, the share of its positions that a tile computes: from the last to the
        first, each asks for as many positions of what it reads as it needs.
        """
        facts = self.facts
        grid, parts, inside = region.mode.grid, facts.outline.parts, set(everything)
        assert isinstance(grid, tuple)
        wide: dict[int, list[float]] = {k: [0.0] * facts.rank for k in everything}
        for k in reversed(everything):
            lengths = parts[k].lengths
            if k == region.end or facts.reduces[k]:
                tile = [-(-n // g) for n, g in zip(lengths, grid, strict=True)]
                wide[k] = [max(a, b) for a, b in zip(wide[k], tile, strict=True)]
            wide[k] = [min(a, n) for a, n in zip(wide[k], lengths, strict=True)]
            for i, line in facts.reads[k]:
                if i in inside:
                    need = [w * d.scale + d.halo for w, d in zip(wide[k], line, strict=True)]
                    wide[i] = [max(a, b) for a, b in zip(wide[i], need, strict=True)]
        return {
            k: math.prod(
                w / n if n else 1.0 for w, n in zip(wide[k], parts[k].lengths, strict=True)
            )
            for k in everything
        }

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
            backward = cotangents[end - begin] + region.restored + cost.backward
            if states[end] != HOSTED and self._shares_cotangents(region, last):
                backward -= facts.cotangent[end]
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
        the region that made it is differentiated, and its cotangents from its last reader on.
        """
        size, inside = self.facts.bytes, set(own)
        return max(
            sum(size[k] * ((k in inside) + (last.get(k, k) >= r.end)) for k in hosted if k <= r.end)
            for r in regions
        )

    def _shares_cotangents(self, region: Region, last: Mapping[int, int]) -> bool:
        """Do the cotangents of an input take the place of the result's?"""
        end, grid = region.end, region.mode.grid
        if not isinstance(grid, tuple) or math.prod(grid) == 1:  # without a loop XLA decides
            return False
        lengths, reads = self.facts.outline.parts[end].lengths, self._parallel(region.own, end)
        return all(n % g == 0 for n, g in zip(lengths, grid, strict=True)) and any(
            last[i] == end and self.facts.cotangent[i] == self.facts.cotangent[end] for i in reads
        )

    def _parallel(self, own: tuple[int, ...], end: int) -> list[int]:
        """What operations read of other regions at those positions only that they compute."""
        if (own, end) not in self._beside:
            beside, inside = dict.fromkeys(own, True), set(own)
            found: dict[int, bool] = {}
            for k in reversed(own):
                for i, line in self.facts.reads[k]:
                    same = beside[k] and all(d.scale == 1 and not d.halo for d in line)
                    seen = beside if i in inside else found
                    seen[i] = seen.get(i, True) and same
            whole = self.facts.outline.parts[end].operation.output.shape
            self._beside[own, end] = [
                i
                for i, same in found.items()
                if same and self.facts.outline.parts[i].operation.output.shape == whole
            ]
        return self._beside[own, end]


def _last_reads(regions: Sequence[Region]) -> dict[int, int]:
    """Per whole result, the end of the last region that reads it."""
    last: dict[int, int] = {}
    for region in regions:
        for i in region.reads:
            last[i] = max(last.get(i, i), region.end)
    return last
