"""Time and memory of a schedule that says of every result what becomes of it.

The solver cuts a network into stretches and stores all that is live at a cut. That is too coarse
for networks with skips and norms: of a bottleneck block, its narrow results should be kept and its
wide ones, which are cheap to compute from them, should not. So here a schedule is an *assignment*.
Each tiled result is

    kept      a whole array until the backward pass has used it,
    restored  a whole array in the forward pass, and once more in the backward pass, where the
              regions from the one that computes it to its last reader are run again,
    passing   a whole array in the forward pass, and computed again, by window, for every region
              that reads it in the backward pass, or
    inside    never a whole array: part of the regions that read it,

and the region that computes it has a grid. Regions follow from that as `_regions` builds them: a
region begins at whole arrays and ends at one, or at reductions (a norm's statistics).

Time. Forwards, each region computes what is inside it. Backwards it computes the same again, and
before that the passing arrays that it reads, from what is there; then come the gradients of what is
inside. Regions that restore something run forwards once more. Work in tiles includes the halo, no
operation is shorter than the time to start it, and what a loop reads of whole arrays and writes to
them it copies.

Memory. While a region is differentiated there are all kept arrays before it, the whole cotangents
of what it computes and reads and of everything that spans it, and what one of its tiles holds. A
loop that reads an input at the positions that it computes needs one array for both cotangents.

Limits: an estimate ranks schedules, and the compiler has the last word (`search`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..policy import GridSpec, Outline
from ..policy._demands import Demand
from .costs import Costs
from .kernels import durations

INSIDE, PASSING, RESTORED, KEPT = range(4)
Reach = tuple[tuple[int, ...], tuple[int, ...]]
Line = tuple[Demand, ...]
"""Per tiled axis, what a tile of a result needs of an operand."""


class Mode(NamedTuple):
    """How a region is computed."""

    grid: GridSpec
    """None: once, as plain JAX does; all that is needed for the derivative is held."""
    tiled_forward: bool = False
    """Has the forward pass the same tiles? Otherwise it is in one piece."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    states: tuple[int, ...]
    """Per operation, what becomes of its result."""
    modes: tuple[Mode, ...]
    """Per operation, how the region is computed that ends with it."""


class Cost(NamedTuple):
    """Of one region: seconds, and bytes beyond whole arrays, forwards and backwards."""

    seconds: float
    forward: float
    backward: float


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
    restored: float = 0.0
    """Bytes that are restored for it."""
    cost: Cost = dataclasses.field(default=Cost(0.0, 0.0, 0.0))


class Segment(NamedTuple):
    """Operations between two kept results that nothing else spans."""

    seconds: float
    needs: list[float]
    """Per region, bytes beyond what is kept before the segment."""
    regions: list[Region]
    kept: float
    """Bytes that stay after it."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float
    needs: np.ndarray
    """Per region, bytes while it runs, forwards or backwards."""
    regions: list[Region]

    @property
    def peak(self) -> float:
        return float(self.needs.max(initial=0.0))


class Assignments:
    """What assignments for one outline cost."""

    def __init__(self, outline: Outline, costs: Costs):
        self.outline, self.costs = outline, costs
        parts = outline.parts
        self.n, self.rank = len(parts), outline.rank
        self.tiled = [p.tiled and p.bytes > 0 for p in parts]
        self.reduces = [p.reduces and not t for p, t in zip(parts, self.tiled, strict=True)]
        self.durations = durations(outline, costs)
        whole = [[d.whole for d in self.durations.get(i, ())] or [0.0, 0.0] for i in range(self.n)]
        self.forward, self.backward = map(list, zip(*whole, strict=True))
        self.held = [float(p.held_bytes) for p in parts]
        self.made = [float(p.made_bytes) for p in parts]
        self.bytes = [float(p.bytes) if p.tiled else 0.0 for p in parts]
        self.cotangent = [
            b if p.differentiable else 0.0 for b, p in zip(self.bytes, parts, strict=True)
        ]
        self.by_position = [
            all(d.scale in (0, 1) and not d.halo for line in p.demands for d in line) for p in parts
        ]
        self.elementwise = [p.operation.kind == "elementwise" for p in parts]
        self._contract()
        self.asked = [_bits([*self.inputs[k], *self.awaits[k]]) for k in range(self.n)]
        self.joints = self._joints()
        self._costs: dict[Any, Cost] = {}
        self._beside: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._segments: dict[Any, Segment] = {}
        self._reached: dict[tuple[int, ...], list[tuple[int, int, int, Reach]]] = {}

    def _contract(self) -> None:
        """What each operation reads, without operations that are part of their readers; and of
        reductions that read the same, one for all.
        """
        self.reads: list[list[tuple[int, Line]]] = []
        kept: set[int] = set()
        hidden: list[list[int]] = [[] for _ in range(self.n)]
        first: dict[tuple[int, ...], int] = {}
        stands_for = list(range(self.n))
        for k, part in enumerate(self.outline.parts):
            read: list[tuple[int, Line]] = []
            for j, line in zip(part.inputs, part.demands, strict=True):
                if j in kept:
                    read.append((j, line))
                else:  # it reads what that one reads
                    read += [(i, line) for i, _ in self.reads[j]]
                    hidden[k] += [j, *hidden[j]]
            self.reads.append(read)
            fused = k not in self.durations and not self.held[k] and self.by_position[k]
            if self.reduces[k]:
                stands_for[k] = first.setdefault(tuple(i for i, _ in read), k)
            elif not self.tiled[k] or (fused and k not in self.outline.outputs):
                continue
            if stands_for[k] == k:
                kept.add(k)
        self.parts = sorted(kept)
        self.whole = {k for k in kept if self.tiled[k] and k not in self.outline.outputs}
        """Results that may be whole arrays; those of the function are in any case."""
        self.inputs = [[i for i, _ in read] for read in self.reads]
        self.awaits = [
            frozenset(stands_for[r] for j in (k, *hidden[k]) for r in self.outline.parts[j].awaits)
            for k in range(self.n)
        ]

    def narrows(self) -> dict[int, int]:
        """Results that are read later, while nothing else that was made before them is; and where,
        in `parts`, the next operations begin.
        """
        last = list(range(self.n))
        for k in self.parts:
            for i in self.inputs[k]:
                last[i] = max(last[i], k)
        found: dict[int, int] = {}
        reach = -1
        for at, k in enumerate(self.parts):
            if self.tiled[k] and self.held[k] > 0 and reach <= k < last[k]:
                later = (n for n in range(at + 1, len(self.parts)) if self.tiled[self.parts[n]])
                if (after := next(later, None)) is not None:
                    found[k] = after
            reach = max(reach, last[k])
        return found

    def _joints(self) -> dict[int, int]:
        """Narrows with which a segment can end: reductions belong to what they follow, so they must
        be before its end.
        """
        narrows = self.narrows().items()
        return {k: after for k, after in narrows if not self._followed(k, self.parts[after:])}

    def _followed(self, k: int, later: Sequence[int]) -> bool:
        """Are there reductions of a result, or of what is computed from it position by position?"""
        same = {k}
        for p in later:
            if same.issuperset(self.inputs[p]):
                if self.reduces[p]:
                    return True
                if self.by_position[p]:
                    same.add(p)
        return False

    def estimate(self, given: Assignment) -> Estimate:
        """Of all segments: what lies between two kept results that nothing else spans does not
        depend on what lies elsewhere, and is not worked out again.
        """
        seconds, kept, needs, regions = 0.0, 0.0, [], []
        for joint, own in self._split(given.states):
            key = (
                own[0],
                tuple(given.states[k] for k in own),
                tuple(given.modes[k] for k in own),
                joint,
            )
            if key not in self._segments:
                self._segments[key] = self.segment(joint, own, given)
            found = self._segments[key]
            seconds += found.seconds
            needs += [kept + n for n in found.needs]
            regions += found.regions
            kept += found.kept
        return Estimate(seconds, np.array(needs), regions)

    def _split(self, states: Sequence[int]) -> Iterator[tuple[int | None, list[int]]]:
        """Segments: the kept result that each one begins with, and its operations."""
        joint, start = None, 0
        for k, after in self.joints.items():
            if states[k] == KEPT:
                yield joint, self.parts[start:after]
                joint, start = k, after
        if self.parts[start:]:
            yield joint, self.parts[start:]

    def segment(self, joint: int | None, own: Sequence[int], given: Assignment) -> Segment:
        """What operations cost that begin at a kept result, and end at one."""
        states = list(given.states)
        for k in own:
            if k not in self.whole:
                states[k] = KEPT if self.tiled[k] else INSIDE
        known = own if joint is None else [joint, *own]
        whole = _bits(k for k in known if states[k] != INSIDE)
        kept = _bits(k for k in known if states[k] == KEPT)
        regions = self._regions(own, whole, given.modes)
        seconds = self._grouped(regions, states, kept)
        for region in regions:
            region.cost = self._cost(region, states)
        once = {k for r in regions if r.mode.grid is None for k in r.own}
        seconds += sum(r.cost.seconds for r in regions) + self.plain(once)
        held = {k: self.held[k] for k in once}
        for k in own:
            if states[k] == KEPT:
                held[k] = max(held.get(k, 0.0), self.bytes[k])
        for region in regions:
            if region.mode.grid is None:
                held |= {i: self.bytes[i] for i in region.reads if i != joint}
        needs = self._needs(regions, states, known, held)
        return Segment(seconds, needs, regions, sum(held.values()))

    def plain(self, operations: Collection[int]) -> float:
        """Seconds of these, forwards and backwards, once."""
        return sum(self.forward[k] + self.backward[k] for k in operations)

    def _regions(
        self, operations: Sequence[int], whole: int, modes: Sequence[Mode]
    ) -> list[Region]:
        found: dict[Any, Region] = {}
        inside = _bits(k for k in operations if self.reduces[k] and modes[k].grid == "whole")
        for k in operations:
            if not whole >> k & 1 and (not self.reduces[k] or inside >> k & 1):
                continue
            in_one = modes[k].grid == "whole"
            own, reads = self._reach([k], whole, inside if in_one else 0)
            inside &= ~_bits(own)
            key: Any = k
            if self.reduces[k]:
                # It follows a whole array, or is one of several that are computed from the same.
                follows = len(reads) == 1 and all(self.by_position[i] for i in own[:-1])
                carrier = found.get(reads[0]) if follows else None
                key = reads[0] if carrier and carrier.mode == modes[k] else (*reads, -1, *own[:-1])
            if key in found:
                found[key].own = tuple(sorted({*found[key].own, *own}))
                continue
            found[key] = Region(k, own, reads, modes[k])
        # A reduction that leads to no whole array ends a region itself.
        while inside:
            k = inside.bit_length() - 1
            own, reads = self._reach([k], whole, inside)
            found[k] = Region(k, own, reads, modes[k])
            inside &= ~_bits(own)
        return sorted(found.values(), key=lambda r: r.end)

    def _grouped(self, regions: Sequence[Region], states: Sequence[int], kept: int) -> float:
        """What each region computes of its inputs, and what groups restore: seconds for that."""
        at = {r.end: n for n, r in enumerate(regions)}
        last = dict.fromkeys(range(len(regions)), -1)
        for n, region in enumerate(regions):
            for i in region.reads:
                if states[i] == RESTORED:
                    last[at[i]] = n
        seconds, first, end = 0.0, 0, -1
        for n in range(len(regions)):
            end = max(end, last[n])
            if end <= n:
                seconds += self._group(regions[first : n + 1], states, kept)
                first = n + 1
        return seconds

    def _group(self, regions: Sequence[Region], states: Sequence[int], kept: int) -> float:
        """Seconds to run regions again, if they restore anything."""
        if len(regions) == 1:
            self._passing(regions[0], kept)
            return 0.0
        made = {r.end for r in regions}
        restored = [k for k in made if states[k] == RESTORED]
        outside = {i for r in regions for i in r.reads if i not in made}
        passing = sorted(i for i in outside if not kept >> i & 1)
        before = self._reach(passing, kept)[0]
        seconds = sum(self.forward[k] for k in before)
        given = sum(self.bytes[i] for i in passing)
        # They are computed whole, one after the other, when nothing else of the group is there.
        begin = given + 2 * max((self.made[k] for k in before), default=0.0)
        kept |= _bits([*passing, *restored])
        for region in regions:
            self._passing(region, kept)
            if states[region.end] in (RESTORED, PASSING):
                seconds += sum(self.forward[k] for k in region.own if not self.reduces[k])
            region.restored = given + sum(self.bytes[k] for k in restored if k < region.end)
        regions[-1].restored = max(regions[-1].restored, begin)
        return seconds

    def _passing(self, region: Region, kept: int) -> None:
        """What a region must compute before its own operations."""
        passing = [i for i in region.reads if not kept >> i & 1]
        if passing and region.mode.grid is not None:
            region.before = self._reach(passing, kept)[0]

    def _reach(self, ends: Sequence[int], whole: int, inside: int = 0) -> Reach:
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
            seen |= self.asked[k]
            for r in self.awaits[k]:
                if inside >> r & 1 and r not in own:
                    own.add(r)
                    pending.append(r)
            for i in self.inputs[k]:
                if whole >> i & 1:
                    reads.add(i)
                elif i not in own:
                    own.add(i)
                    pending.append(i)
        answer = tuple(sorted(own)), tuple(sorted(reads))
        known.insert(0, (seen, whole & seen, inside & seen, answer))
        return answer

    def _cost(self, region: Region, states: Sequence[int]) -> Cost:
        if region.mode.grid is None:
            # When an operation runs, forwards or backwards, what is held after it is not there.
            forward = backward = later = 0.0
            for k in reversed(region.own):
                forward = max(forward, self.made[k] - later)
                backward = max(backward, 2 * self.bytes[k] - later)
                later += self.held[k] if k < region.end else 0.0
            return Cost(0.0, forward + self.bytes[region.end], backward)
        passing = tuple(i for i in region.reads if i in region.before)
        known = states[region.end] in (KEPT, RESTORED)
        key = (region.mode, known, passing, region.own, region.before)
        if key not in self._costs:
            self._costs[key] = self._recomputed(region, passing, known)
        return self._costs[key]

    def _recomputed(self, region: Region, passing: Sequence[int], known: bool) -> Cost:
        """Of a region that is computed again, in tiles or in one piece."""
        grid, tiled_forward = region.mode
        tiles = math.prod(grid) if isinstance(grid, tuple) else 1
        own, everything = set(region.own), sorted({*region.before, *region.own})
        share = self._shares(region, everything) if tiles > 1 else dict.fromkeys(everything, 1.0)
        read = {i for k in region.own for i in self.inputs[k]}
        seconds = 0.0 if tiled_forward else sum(self.forward[k] for k in region.own)
        seconds += (1 + tiled_forward) * (tiles > 1) * tiles * self.costs.loop
        for k in everything:
            if k not in self.durations:
                continue
            forward, backward = (
                d.of(share[k]) if tiles > 1 else d.whole for d in self.durations[k]
            )
            times = [forward] if k in region.before else []
            if k in own:
                times += [backward, forward][: 1 + tiled_forward]
                # A result that only reductions follow is read, if it was kept.
                unread = k == region.end and (known or k not in read)
                if not self.reduces[k] and not (unread and self.held[k] <= self.bytes[k]):
                    times.append(forward)
            seconds += sum(times) * tiles
        if tiles > 1:
            seconds += self._moved(region, tiled_forward)
        tile = sum(share[k] * self.held[k] for k in region.own if k != region.end)
        tile += sum(share[k] * self.bytes[k] for k in passing)
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
        for i in (k, *self.inputs[k]):
            if i in share and i != region.end:
                found += share[i] * self.bytes[i]
            elif in_tiles:
                found += self.bytes[i] * share.get(i, share[k])
        return found

    def _at_once(self, region: Region, share: Mapping[int, float]) -> float:
        """Bytes that a region needs forwards: of its result, and of what is still to be read.

        An elementwise operation writes over an operand that nobody reads again.
        """
        last = {i: k for k in region.own for i in (k, *self.inputs[k])}
        size = {k: share[k] * self.made[k] for k in region.own}
        size[region.end] = share[region.end] * self.bytes[region.end]
        now = most = 0.0
        for k in region.own:
            done = sum(size.get(i, 0.0) for i in set(self.inputs[k]) if last[i] == k)
            over = self.elementwise[k] and done >= size[k]
            most = max(most, now if over else now + size[k])
            now += size[k] - done
        return most

    def _moved(self, region: Region, tiled_forward: bool) -> float:
        """Seconds to copy windows out of whole arrays, and tiles into them."""
        read = sum(self.bytes[i] for i in region.reads if i not in region.before)
        made = self.bytes[region.end]
        cotangents = sum(self.cotangent[i] for i in region.reads) + self.cotangent[region.end]
        return 2 * (read + cotangents + tiled_forward * (read + made)) / self.costs.bandwidth

    def _shares(self, region: Region, everything: Sequence[int]) -> dict[int, float]:
        """Per operation, the share of its positions that a tile computes: from the last to the
        first, each asks for as many positions of what it reads as it needs.
        """
        grid, parts, inside = region.mode.grid, self.outline.parts, set(everything)
        assert isinstance(grid, tuple)
        wide: dict[int, list[float]] = {k: [0.0] * self.rank for k in everything}
        for k in reversed(everything):
            lengths = parts[k].lengths
            if k == region.end or self.reduces[k]:
                tile = [-(-n // g) for n, g in zip(lengths, grid, strict=True)]
                wide[k] = [max(a, b) for a, b in zip(wide[k], tile, strict=True)]
            wide[k] = [min(a, n) for a, n in zip(wide[k], lengths, strict=True)]
            for i, line in self.reads[k]:
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
    ) -> list[float]:
        """Bytes while each region runs, forwards or backwards, besides those of other segments."""
        last: dict[int, int] = {}
        for region in regions:
            for i in region.reads:
                last[i] = max(last.get(i, i), region.end)
        begin = known[0]
        # What changes from one operation to the next.
        kept, cotangents, passing = ([0.0] * (known[-1] + 3 - begin) for _ in range(3))
        for k in known:
            if states[k] != INSIDE:
                cotangents[k - begin] += self.cotangent[k]
                cotangents[last.get(k, k) + 1 - begin] -= self.cotangent[k]
            if states[k] in (PASSING, RESTORED):
                passing[k + 1 - begin] += self.bytes[k]
                passing[last.get(k, k) + 1 - begin] -= self.bytes[k]
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
            if self._shares_cotangents(region, last):
                backward -= self.cotangent[end]
            needs.append(kept[end - begin] + max(backward, forward))
        return needs

    def _shares_cotangents(self, region: Region, last: Mapping[int, int]) -> bool:
        """Do the cotangents of an input take the place of the result's?"""
        end, grid = region.end, region.mode.grid
        if not isinstance(grid, tuple) or math.prod(grid) == 1:  # without a loop XLA decides
            return False
        lengths, reads = self.outline.parts[end].lengths, self._parallel(region.own, end)
        return all(n % g == 0 for n, g in zip(lengths, grid, strict=True)) and any(
            last[i] == end and self.cotangent[i] == self.cotangent[end] for i in reads
        )

    def _parallel(self, own: tuple[int, ...], end: int) -> list[int]:
        """What operations read of other regions at those positions only that they compute."""
        if (own, end) not in self._beside:
            beside, inside = dict.fromkeys(own, True), set(own)
            found: dict[int, bool] = {}
            for k in reversed(own):
                for i, line in self.reads[k]:
                    same = beside[k] and all(d.scale == 1 and not d.halo for d in line)
                    seen = beside if i in inside else found
                    seen[i] = seen.get(i, True) and same
            whole = self.outline.parts[end].operation.output.shape
            self._beside[own, end] = [
                i
                for i, same in found.items()
                if same and self.outline.parts[i].operation.output.shape == whole
            ]
        return self._beside[own, end]


def _bits(numbers: Iterable[int]) -> int:
    """A set of small numbers, as the bits of one."""
    found = 0
    for n in numbers:
        found |= 1 << n
    return found
