"""Time and memory of schedules, from an outline: the planner's arithmetic.

A *cut* is a position in the topological order of the operations. A *stretch* is what lies between
two cuts. At a cut every result that is made before it and read after it is stored; a stretch is
then kept as plain JAX keeps it, or computed again in the backward pass, whole or in tiles.

Memory. While the backward pass is inside a stretch, live are: what is held of everything before it;
of the stretch itself, the held results up to the operation that is being differentiated (in tiles:
those of one tile); and the cotangents of all results that cross that operation. So a peak is

    stored before + max over p in the stretch of (held from its start to p + cotangents at p)

and in tiles

    stored before + cotangents at its end + cotangents of what it reads + one tile

Time. Forward and backward of every operation; what is recomputed once more, unless nothing reads
it; in tiles with the halo, at the rate of tiles, and the time that a loop takes per tile. Where the
rest of a tiled stretch waits for a reduction inside it (batch statistics), all up to the reduction
is one more loop, forwards and backwards. Each of these loops has its own cotangents of what the
stretch reads, and XLA adds them up when it has all.

All numbers are tables over (cut, cut), computed with NumPy, so that a solver need not look at the
graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._graph.operations import Operation
from ..policy import Choice, Outline
from .costs import Costs

KEEP, WHOLE = None, "whole"


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Tables over modes, first cuts and last cuts. Infinite time: not possible."""

    cuts: tuple[int, ...]
    """Positions: a cut at `c` lies before operation `c`."""
    modes: tuple
    """`None`, "whole" or a grid; and whether what the stretch reads waits in host memory."""
    seconds: np.ndarray
    peak: np.ndarray
    """Bytes beyond what is stored before the stretch."""
    added: np.ndarray
    """Bytes that stay stored after its forward pass."""


class EstimatedStage(NamedTuple):
    """Operations `start` to `end`, both included."""

    start: int
    end: int
    choice: Choice
    seconds: float
    working: float
    """Bytes beyond what is stored before it."""


class Estimate(NamedTuple):
    seconds: float
    peak: float
    """Bytes of temporaries."""
    stages: tuple[EstimatedStage, ...]


class Model:
    """What any schedule of an outline costs."""

    def __init__(self, outline: Outline, costs: Costs, *, offload: bool = False):
        self.outline, self.costs, self.offload = outline, costs, offload
        parts = outline.parts
        self.n = len(parts)
        kernels = _kernels(outline)
        self.starts = np.array([k is not None for k in kernels])
        self.forward = np.array([costs.seconds(k) if k else 0.0 for k in kernels])
        self.backward = np.array([costs.gradient(k) if k else 0.0 for k in kernels])
        self.held = np.array([p.held_bytes for p in parts], float)
        self.bytes = np.array([p.bytes if p.tiled else 0 for p in parts], float)
        # Of what is stored the cotangent is an array too; inside a stretch only of what is held.
        self.cotangent = np.array(
            [p.bytes if p.tiled and p.differentiable else 0 for p in parts], float
        )
        readers = [[k for k in range(self.n) if i in parts[k].inputs] for i in range(self.n)]
        for k in outline.outputs:
            readers[k].append(self.n)
        self.last = np.array([max(r, default=i) for i, r in enumerate(readers)])
        self.first_reader = np.array([min(r, default=self.n) for r in readers])
        # Per cut, the first reader after it of what was made before it.
        self.next_reader = np.full((self.n + 1, self.n), self.n)
        for i, found in enumerate(readers):
            for k in sorted(found, reverse=True):
                self.next_reader[i + 1 : k + 1, i] = k
        unfused = self.cotangent * (self.held > 0)
        crossing = [unfused * self.live(c) for c in range(self.n + 1)]
        # While operation p is differentiated, the cotangents on both of its sides exist.
        self.beside = np.array([np.maximum(a, b).sum() for a, b in itertools.pairwise(crossing)])
        self.grids = grids(outline)

    def live(self, cut: int) -> np.ndarray:
        """Which tiled results are made before a cut and read after it."""
        made = np.arange(self.n) < cut
        return made & (self.last >= cut) & (self.bytes > 0)

    def cuts(self, most: int = 96) -> tuple[int, ...]:
        """Where to cut: before tiled operations, where little is live."""
        parts = self.outline.parts
        inner = [c for c in range(1, self.n) if parts[c].tiled or parts[c].reduces]
        # A reduction that follows the result before it is computed along with that.
        inner = [c for c in inner if not parts[c].reduces or not _follows(parts[c], c)]
        if len(inner) > most - 2:
            weight = [self.bytes[self.live(c)].sum() for c in inner]
            rank = np.argsort(_relative(np.array(weight)), kind="stable")[: most - 2]
            inner = sorted(inner[i] for i in rank)
        return (0, *inner, self.n)

    def stretches(self) -> Stretches:
        cuts = self.cuts()
        modes = [(KEEP, False), (WHOLE, False), *((g, False) for g in self.grids)]
        if self.offload and self.costs.host_bandwidth:
            modes += [(m, True) for m, _ in modes[1:]]
        shape = (len(modes), len(cuts), len(cuts))
        tables = Stretches(
            cuts, tuple(modes), np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        )
        self._plain(tables)
        self._tiled(tables)
        if len(modes) > 2 + len(self.grids):
            self._offloaded(tables)
        return tables

    def estimate(self, choices: Mapping[Any, Choice]) -> Estimate:
        """Time and peak of any schedule: what is stored need not be all that is live at a cut; what
        is missing is computed again where it is needed.
        """
        parts = self.outline.parts
        index = {p.name: k for k, p in enumerate(parts)}
        ends = sorted((index[name], choice) for name, choice in choices.items() if name is not ...)
        ends = [e for e in ends if parts[e[0]].tiled]
        rest = choices.get(..., Choice(WHOLE))
        stored = {k for k, _ in ends}
        on_device = {k for k, choice in ends if not choice.offload}
        kept: set[int] = set()
        stages: list[EstimatedStage] = []
        peak, start = 0.0, 0
        for end, choice in [*ends, (self.n - 1, rest)]:
            own = list(range(start, end + 1))
            if not own:
                continue
            again = [] if choice.grid is KEEP else self._missing(own, stored | kept)
            before = sum(self.bytes[k] for k in on_device if k < start)
            before += sum(self.held[k] for k in kept - on_device)
            cost, extra = self._stage(own, again, choice.grid)
            stages.append(EstimatedStage(start, end, choice, float(cost), float(extra)))
            peak = max(peak, before + extra)
            if choice.grid is KEEP:
                kept |= set(own)
            start = end + 1
        seconds = sum(stage.seconds for stage in stages)
        moved = 2 * sum(self.bytes[k] for k, choice in ends if choice.offload)
        if moved and self.costs.host_bandwidth:
            seconds += moved / self.costs.host_bandwidth
        return Estimate(seconds, peak, tuple(stages))

    def _missing(self, own: list[int], held: set[int]) -> list[int]:
        """Earlier operations whose results are needed and not held."""
        found: set[int] = set()
        pending = list(own)
        while pending:
            for i in self.outline.parts[pending.pop()].inputs:
                if i < own[0] and i not in held and i not in found:
                    found.add(i)
                    pending.append(i)
        return sorted(found)

    def _stage(self, own: list[int], again: list[int], grid: Any) -> tuple[float, float]:
        """Seconds, and bytes beyond what is stored, of one stage of a schedule."""
        cut = own[-1] + 1
        everything = [*again, *own]
        once = (self.forward + self.backward)[everything].sum() + self.forward[again].sum()
        alive = self.live(cut)
        if not isinstance(grid, tuple):
            redone = 0 if grid is KEEP else self.forward[own][~self._unread(cut)[own]].sum()
            return once + redone, (np.cumsum(self.held[everything]) + self.beside[everything]).max()
        parts = self.outline.parts
        lengths = np.array([p.lengths for p in parts], float)
        counts = np.array([grid], float)
        share = self._shares((cut,), alive[None], lengths, counts)[:, 0, 0]
        tiles = counts.prod()
        awaited = {parts[k].awaits for k in own if parts[k].awaits >= everything[0]}
        work = share * (2 * self.forward + self.backward) * tiles * self.costs.tile
        started = (share > 0) * self.starts * 3 * self.costs.start * tiles
        work, everywhere = np.maximum(work, started), np.array(everything)
        ends = [*awaited, everything[-1]]
        seconds = sum(work[everywhere[everywhere <= end]].sum() for end in ends)
        tile = (share * self.held)[everything].sum() + 2 * (share * self.bytes)[everything].max()
        reads = {i for k in everything for i in parts[k].inputs if i < own[0]} - set(again)
        return (
            seconds + 2 * len(ends) * tiles * self.costs.loop,
            tile + self.cotangent[alive].sum() + len(ends) * self.cotangent[list(reads)].sum(),
        )

    def _plain(self, tables: Stretches) -> None:
        """Stretches that are kept, or recomputed whole."""
        held = np.cumsum(self.held)
        for b, j in enumerate(tables.cuts[1:], start=1):
            starts = np.array(tables.cuts[:b])
            before = np.where(starts > 0, held[starts - 1], 0)
            alive = self.live(j)
            inside = _max_from(held + self.beside, starts, j)
            at_end = held[j - 1] + self.cotangent[alive].sum()
            tables.peak[:2, :b, b] = np.maximum(inside, at_end) - before
            tables.added[0, :b, b] = _sum_from(self.held, starts, j)
            tables.added[1, :b, b] = _sum_from(self.bytes * alive, starts, j)
            once = _sum_from(self.forward + self.backward, starts, j)
            again = _sum_from(np.where(self._unread(j), 0, self.forward), starts, j)
            tables.seconds[0, :b, b] = once
            tables.seconds[1, :b, b] = once + again + self.costs.start

    def _unread(self, cut: int) -> np.ndarray:
        """Operations that need not run again: nothing before the cut reads the result, and nothing
        is held on the way to it.
        """
        return (self.first_reader >= cut) & (self.held <= self.bytes)

    def _tiled(self, tables: Stretches) -> None:
        if not self.grids:
            return
        parts = self.outline.parts
        counts = np.array(self.grids, float)
        tiles = counts.prod(1)
        lengths = np.array([p.lengths for p in parts], float)
        # Each reduction that is awaited, and the first operation that awaits it.
        waiting = {p.awaits: k for k, p in reversed(list(enumerate(parts))) if p.awaits >= 0}
        alive = np.array([self.live(c) for c in tables.cuts])
        shares = self._shares(tables.cuts, alive, lengths, counts)
        enough = ((lengths[:, None] == 0) | (lengths[:, None] >= counts)).all(-1)
        modes = slice(2, 2 + len(counts))
        for b, j in enumerate(tables.cuts[1:], start=1):
            starts, share = np.array(tables.cuts[:b]), shares[:, b]
            once = self.forward + self.backward
            again = np.where(self._unread(j), 0, self.forward)
            work = share * (self.costs.tile * (once + again))[:, None] * tiles
            started = (share > 0) * self.starts[:, None] * (3 * self.costs.start * tiles)
            work, loop = np.maximum(work, started), 2 * tiles * self.costs.loop
            upto = _cumulative(work)
            seconds, loops = upto[j] - upto[starts] + loop, np.ones(b)
            for reduction, reader in waiting.items():
                if reader < j:
                    inside = starts <= reduction
                    seconds[inside] += upto[reduction + 1] - upto[starts[inside]] + loop
                    loops[inside] += 1
            possible = _max_from(~enough & alive[b][:, None], starts, j) == 0
            tile = _sum_from(share * self.held[:, None], starts, j)
            largest = _max_from(share * self.bytes[:, None], starts, j)
            cotangents = loops * self._read_by(starts, j) + self.cotangent[alive[b]].sum()
            stored = _sum_from(self.bytes * alive[b], starts, j)
            tables.seconds[modes, :b, b] = np.where(possible, seconds, np.inf).T
            tables.peak[modes, :b, b] = (cotangents[:, None] + tile + 2 * largest).T
            tables.added[modes, :b, b] = stored

    def _read_by(self, starts: np.ndarray, stop: int) -> np.ndarray:
        """Bytes of cotangents of what stretches read that was made before them."""
        return np.array([self.cotangent[self.next_reader[i] < stop].sum() for i in starts])

    def _shares(self, cuts, alive, lengths, counts) -> np.ndarray:
        """Per operation, cut and grid: the share of its positions that a tile computes, in a
        stretch that ends there.
        """
        parts = self.outline.parts
        wide = np.zeros((self.n, len(cuts), *counts.shape))
        inside = np.array(cuts)[:, None, None]
        for k in reversed(range(self.n)):
            wanted = alive[:, k] | (parts[k].reduces and inside[:, 0, 0] > k)
            wide[k] = np.maximum(wide[k], wanted[:, None, None] * np.ceil(lengths[k] / counts))
            wide[k] = np.minimum(wide[k], lengths[k]) * (inside > k)
            computed = (wide[k] > 0).any(-1, keepdims=True)
            for i, demand in zip(parts[k].inputs, parts[k].demands, strict=True):
                scale, halo = np.array(demand, float).T
                wide[i] = np.maximum(wide[i], (wide[k] * scale + halo) * computed)
        size = lengths[:, None, None]
        needed = (wide > 0).any(-1)
        return np.where(size > 0, wide / np.maximum(size, 1), needed[..., None]).prod(-1)

    def _offloaded(self, tables: Stretches) -> None:
        """Variants in which the last result before a stretch waits for it in host memory."""
        once = len(self.grids) + 1
        for a, i in enumerate(tables.cuts):
            made = [k for k in range(i) if self.bytes[k] and self.last[k] >= i]
            if not made:
                continue
            value = made[-1]
            moved = 2 * self.bytes[value] / self.costs.host_bandwidth
            for b, j in enumerate(tables.cuts):
                if j > self.last[value] and j > i:
                    source, target = (slice(1, 1 + once), a, b), (slice(1 + once, None), a, b)
                    tables.seconds[target] = tables.seconds[source] + moved
                    tables.peak[target] = tables.peak[source]
                    tables.added[target] = tables.added[source] - self.bytes[value]


def _kernels(outline: Outline) -> list[Operation | None]:
    """The operations with what they read from memory; None for those that are part of others.

    A change of type is: its readers read what it reads. So are small results, as those of a norm's
    statistics, and a second sum over one array, as that of its squares.
    """
    found: list[Operation | None] = []
    read_as: dict[str, Any] = {}
    summed: set[Any] = set()
    for part in outline.parts:
        operation = part.operation
        reads = tuple(read_as.get(t.name, t) for t in operation.inputs)
        moves = operation.kind == "movement" and len(reads) == 1
        if moves and operation.inputs[0].shape == operation.output.shape:
            read_as[operation.output.name] = reads[0]
            found.append(None)
            continue
        small = operation.kind in ("elementwise", "movement") and not part.tiled
        another = operation.kind == "reduction" and reads in summed
        own = not (small or another)
        found.append(dataclasses.replace(operation, inputs=reads) if own else None)
        if operation.kind == "reduction":
            summed.add(reads)
    if not any(found):  # nothing but changes of type, say
        found[-1] = outline.parts[-1].operation
    return found


def grids(outline: Outline) -> list[tuple[int, ...]]:
    """Grids to try: along axes without a halo (a batch) first, then along all."""
    parts = [p for p in outline.parts if p.tiled]
    if not parts:
        return []
    longest = np.array([p.lengths for p in parts]).max(0)
    halo = [
        any(line[a].scale not in (0, 1) or line[a].halo for p in parts for line in p.demands)
        for a in range(outline.rank)
    ]

    def grid(along_free: int, along_halo: int) -> tuple[int, ...]:
        wanted = [along_halo if h else along_free for h in halo]
        # Along an axis of one position nothing is tiled, and its length is 0.
        return tuple(max(1, int(min(n, m))) for n, m in zip(wanted, longest, strict=True))

    free = max((int(n) for n, h in zip(longest, halo, strict=True) if not h), default=1)
    powers = [2**i for i in range(1, 11)]
    found = [grid(n, 1) for n in powers if n < free] + [grid(free, 1)]
    found += [grid(free, n) for n in (2, 3, 4, 6, 8, 12, 16)]
    return [g for g in dict.fromkeys(found) if any(n > 1 for n in g)]


def _sum_from(x: np.ndarray, starts: np.ndarray, stop: int) -> np.ndarray:
    """Sums of `x[start:stop]` along the first axis."""
    sums = _cumulative(x)
    return sums[stop] - sums[starts]


def _cumulative(x: np.ndarray) -> np.ndarray:
    """Sums of `x[:n]` along the first axis, for all `n`."""
    return np.concatenate([np.zeros_like(x[:1], dtype=float), np.cumsum(x, 0)])


def _max_from(x: np.ndarray, starts: np.ndarray, stop: int) -> np.ndarray:
    """Maxima of `x[start:stop]` along the first axis."""
    return np.maximum.accumulate(x[:stop][::-1], 0)[::-1][starts]


def _follows(part, position: int) -> bool:
    return all(i >= position - 4 for i in part.inputs)


def _relative(weight: np.ndarray, reach: int = 3) -> np.ndarray:
    """Weights relative to those nearby: cuts are wanted everywhere, at the cheapest place."""
    padded = np.pad(weight, reach, mode="edge")
    near = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    return weight / np.maximum(near.mean(1), 1)
