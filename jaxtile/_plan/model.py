"""Time and memory of schedules, estimated from an outline.

The solver must compare thousands of schedules, so it needs to know what each costs without looking
at the graph. Every schedule is made of pieces: a *cut* is a position in the order of the
operations, and a *stretch* is what lies between two cuts. At a cut every result that is made before
it and read after it is stored. Each stretch is then treated in one of these *modes*: kept, as plain
JAX keeps it; computed again in the backward pass, whole; or computed again in tiles, on some grid.
The tables below have time and bytes of every stretch in every mode. For a network of 20 operations
and 10 grids that is 12 modes of at most 210 stretches.

Memory. While a stretch is differentiated, there are: what is held of everything before it; of the
stretch itself, what is held up to the operation that is being differentiated (in tiles: what one
tile holds); and the cotangents of all results that are read beyond that operation. So the peak is

    stored before + max over p in the stretch of (held from its start to p + cotangents at p)

and in tiles

    stored before + cotangents at its end + cotangents of what it reads + one tile

Time. Forward and backward of every operation. What is recomputed runs forward once more, unless
nothing reads it; in tiles also for the derivative of a ReLU at its end. Tiles compute their halo
too, run at the rate of tiles, and each costs the loop some time. Where operations of a tiled
stretch wait for a reduction inside it (batch statistics), all up to the reduction is computed in
one more loop, forwards and backwards.

Limits: the model does not know what XLA fuses, packs or reuses. The search compiles what the solver
finds, and corrects the bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..policy import GridSpec, Part
from .costs import Costs
from .facts import Facts
from .kernels import sides

_CUTS = 94  # inside a network, at most
_NEARBY = 3  # cuts on either side


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Costs of all stretches, by mode, first cut and last cut. Infinite time: not possible."""

    cuts: tuple[int, ...]
    """Positions: a cut at `c` lies before operation `c`."""
    modes: tuple[GridSpec, ...]
    """How a stretch is computed."""
    seconds: np.ndarray
    peak: np.ndarray
    """Bytes beyond what is stored before the stretch."""
    added: np.ndarray
    """Bytes that stay stored after its forward pass."""


class Model:
    """What any schedule of an outline costs."""

    def __init__(self, facts: Facts, costs: Costs):
        self.outline, self.durations, self.costs = facts.outline, facts.durations, costs
        self.n, parts = facts.n, facts.outline.parts
        self.forward, self.backward = np.array(facts.forward), np.array(facts.backward)
        self.held, self.bytes = np.array(facts.held), np.array(facts.bytes)
        self.reduces = np.array(facts.reduces)
        self.ends_with_clamp = np.array(facts.ends_with_clamp)
        # A stored result has a cotangent; inside a stretch, only one that is an array has.
        self.cotangent = np.array(facts.cotangent)
        readers = [[k for k in range(self.n) if i in parts[k].inputs] for i in range(self.n)]
        for k in self.outline.outputs:
            readers[k].append(self.n)
        self.last = np.array([max(r, default=i) for i, r in enumerate(readers)])
        self.first_reader = np.array([min(r, default=self.n) for r in readers])
        # Per cut, the first reader after it of what was made before it.
        self.next_reader = np.full((self.n + 1, self.n), self.n)
        for i, found in enumerate(readers):
            for k in sorted(found, reverse=True):
                self.next_reader[i + 1 : k + 1, i] = k
        unfused = self.cotangent * (np.array(facts.made) > 0)
        crossing = [unfused * self.live(c) for c in range(self.n + 1)]
        # While operation p is differentiated, the cotangents on both of its sides exist.
        self.beside = np.array([np.maximum(a, b).sum() for a, b in itertools.pairwise(crossing)])

    def live(self, cut: int) -> np.ndarray:
        """Which tiled results are made before a cut and read after it."""
        made = np.arange(self.n) < cut
        return made & (self.last >= cut) & (self.bytes > 0)

    def cuts(self) -> tuple[int, ...]:
        """Where to cut: before tiled operations, where little is live."""
        parts = self.outline.parts
        inner = [c for c in range(1, self.n) if parts[c].tiled or parts[c].reduces]
        # A reduction that follows the result before it is computed along with that.
        inner = [c for c in inner if not parts[c].reduces or not _follows(parts[c], c)]
        if len(inner) > _CUTS:
            weight = [self.bytes[self.live(c)].sum() for c in inner]
            rank = np.argsort(_relative(np.array(weight)), kind="stable")[:_CUTS]
            inner = sorted(inner[i] for i in rank)
        return (0, *inner, self.n)

    def stretches(self, grids: Sequence[tuple[int, ...]]) -> Stretches:
        cuts = self.cuts()
        modes: list[GridSpec] = [None, "whole", *grids]
        shape = (len(modes), len(cuts), len(cuts))
        tables = Stretches(
            cuts, tuple(modes), np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        )
        self._plain(tables)
        self._tiled(tables, grids)
        return tables

    def _plain(self, tables: Stretches) -> None:
        """Stretches that are kept, or recomputed whole."""
        held = np.cumsum(self.held)
        for b, j in enumerate(tables.cuts[1:], start=1):
            starts = np.array(tables.cuts[:b])
            before = np.where(starts > 0, held[starts - 1], 0)
            alive = self.live(j)
            # What lies at the cut is an array, also if it would be part of its reader otherwise.
            kept = np.maximum(self.held, self.bytes * alive)
            inside = _max_from(held + self.beside, starts, j)
            at_end = _cumulative(kept)[j] + self.cotangent[alive].sum()
            tables.peak[:2, :b, b] = np.maximum(inside, at_end) - before
            tables.added[0, :b, b] = _sum_from(kept, starts, j)
            tables.added[1, :b, b] = _sum_from(self.bytes * alive, starts, j)
            once = _sum_from(self.forward + self.backward, starts, j)
            again = _sum_from(self._again(j), starts, j)
            tables.seconds[0, :b, b] = once
            tables.seconds[1, :b, b] = once + again + self.costs.start

    def _again(self, cut: int) -> np.ndarray:
        """Seconds per operation to compute it again, in a stretch that ends at a cut.

        It need not run again if nothing before the cut reads its result, and nothing is held on the
        way to it; or if it is a reduction, whose small result is kept.
        """
        unread = (self.first_reader >= cut) & (self.held <= self.bytes)
        return np.where(unread | self.reduces, 0, self.forward)

    def _in_tiles(self, cut: int, share: np.ndarray, tiles: Any, again: bool = True) -> np.ndarray:
        """Seconds per operation, forwards, again and backwards, in all tiles of a stretch.

        `share`: of its positions, per tile; the first axis is that of operations. `again`: or not.
        """
        often, seconds = (self._again(cut) > 0) | self.ends_with_clamp, np.zeros_like(share)
        for k, (forward, backward) in self.durations.items():
            runs = 1 + (again and often[k])
            seconds[k] = runs * forward.of(share[k]) + backward.of(share[k])
        return seconds * (share > 0) * tiles

    def _tiled(self, tables: Stretches, grids: Sequence[tuple[int, ...]]) -> None:
        if not grids:
            return
        parts = self.outline.parts
        counts = np.array(grids, float)
        tiles = counts.prod(1)
        lengths = np.array([p.lengths for p in parts], float)
        # Each reduction that is awaited in tiles, and the first operation that awaits it.
        tiled = [(k, p) for k, p in enumerate(parts) if p.tiled and p.awaits]
        waiting = {p.awaits[-1]: k for k, p in reversed(tiled)}
        alive = np.array([self.live(c) for c in tables.cuts])
        shares = self._shares(tables.cuts, alive, lengths, counts)
        enough = ((lengths[:, None] == 0) | (lengths[:, None] >= counts)).all(-1)
        modes = slice(2, None)
        for b, j in enumerate(tables.cuts[1:], start=1):
            starts, share = np.array(tables.cuts[:b]), shares[:, b]
            loop = 2 * tiles * self.costs.loop
            upto = _cumulative(self._in_tiles(j, share, tiles))
            if j == self.n and self.outline.loss is not None:  # differentiated when it is computed
                once = _cumulative(self._in_tiles(j, share, tiles, again=False))
                seconds = once[j] - once[starts] + loop / 2
            else:
                seconds = upto[j] - upto[starts] + loop
            for reduction, reader in waiting.items():
                if reader < j:
                    inside = starts <= reduction
                    seconds[inside] += upto[reduction + 1] - upto[starts[inside]] + loop
            possible = _max_from(~enough & alive[b][:, None], starts, j) == 0
            tile = _sum_from(share * self.held[:, None], starts, j)
            largest = _max_from(share * self.bytes[:, None], starts, j)
            cotangents = self._read_by(starts, j) + self.cotangent[alive[b]].sum()
            stored = _sum_from(self.bytes * alive[b], starts, j)
            tables.seconds[modes, :b, b] = np.where(possible, seconds, np.inf).T
            tables.peak[modes, :b, b] = (cotangents[:, None] + tile + 2 * largest).T
            tables.added[modes, :b, b] = stored

    def _read_by(self, starts: np.ndarray, stop: int) -> np.ndarray:
        """Bytes of the cotangents of what stretches read from before their start."""
        return np.array([self.cotangent[self.next_reader[i] < stop].sum() for i in starts])

    def _shares(
        self, cuts: Sequence[int], alive: np.ndarray, lengths: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Per operation, cut and grid: the share of its positions that a tile computes, in a
        stretch that ends there.

        Of what is live at the cut a tile computes its part of the positions. From the last
        operation to the first, each asks for as many positions of what it reads as it needs.
        """
        parts = self.outline.parts
        wide = np.zeros((self.n, len(cuts), *counts.shape))
        inside, half = np.array(cuts)[:, None, None], sides(counts)
        for k in reversed(range(self.n)):
            wanted = alive[:, k] | ((np.array(cuts) > k) & parts[k].reduces)
            wide[k] = np.maximum(wide[k], wanted[:, None, None] * np.ceil(lengths[k] / counts))
            wide[k] = np.minimum(wide[k], lengths[k]) * (inside > k)
            computed = (wide[k] > 0).any(-1, keepdims=True)
            for i, demand in zip(parts[k].inputs, parts[k].demands, strict=True):
                scale, halo = np.array(demand, float).T
                wide[i] = np.maximum(wide[i], (wide[k] * scale + half * halo) * computed)
        size = lengths[:, None, None]
        needed = (wide > 0).any(-1, keepdims=True)
        return np.where(size > 0, wide / np.maximum(size, 1), needed).prod(-1)


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


def _follows(part: Part, position: int) -> bool:
    """Are all results that this operation reads made just before it?"""
    return all(i >= position - 4 for i in part.inputs)


def _relative(weight: np.ndarray) -> np.ndarray:
    """Weights relative to those nearby, because cuts are wanted everywhere: of each neighbourhood
    those with the least live bytes.
    """
    padded = np.pad(weight, _NEARBY, mode="edge")
    near = np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEARBY + 1)
    return weight / np.maximum(near.mean(1), 1)
