"""Transfers from and to host memory, beside the computation of other tiles.

A bus carries as much in a second as a GPU computes from, so a tile that waits for its windows, and
then for its results to be gone, takes twice its time. Here, while a tile is computed, the windows
of the next one are on their way, and so are the results of the one before:

    send    tile 1's results  tile 2's results  ...
    compute tile 2            tile 3            ...
    fetch   tile 3's windows  tile 4's windows  ...

XLA leaves that to the hardware that copies, beside kernels, if it sees two things. A window is one
piece of memory: tiles are strips, from edge to edge. And its position is a line in the loop's
counter: so positions are computed here, not read from the table of all tiles. Otherwise a kernel
copies, which fills the GPU, and nothing runs beside it.

What is fetched last is not used, and what is sent first is not a result. Both must lie inside the
arrays, so tiles at the ends are left to another loop, which comes later and writes what was sent
first.

Limits: the windows and results of a second tile are on the device. What the loop begins and ends
with, and the tiles that are left out, is not beside anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._regions.tile import Column
from .arrays import Array
from .kinds import Kind
from .ordering import after, on_host
from .slots import Hosted
from .work import Work

_FEWEST = 3  # tiles that are worth a loop of this kind


class Moved(NamedTuple):
    """An array in host memory, of which every tile has a strip."""

    column: int
    """Of the table: where the strip begins."""
    size: int
    length: int

    @classmethod
    def of(cls, hosted: Hosted) -> Moved | None:
        """None, if a tile's window is not one piece of memory, at a place of its own."""
        shape, slots = hosted
        parts = [d for d, (slot, size) in enumerate(slots) if slot != 0 or size != shape[d]]
        if len(parts) != 1:
            return None
        (d,) = parts
        slot, size = slots[d]
        if any(n != 1 for n in shape[:d]) or not isinstance(slot, Column):
            return None
        return cls(slot.index, size, shape[d])

    def inside(self, position: int) -> bool:
        return 0 <= position <= self.length - self.size


class Line(NamedTuple):
    """Tiles whose strips follow each other at equal distances."""

    kind: Kind
    first: dict[int, int]
    """Per column, where the first of them begins."""
    step: dict[int, int]

    def row(self, k: Any) -> dict[int, Any]:
        """Positions of the tile with this number; a number too far lies beyond the ends."""
        return {c: self.first[c] + self.step[c] * k for c in self.first}

    def at(self, k: Any, scalars: Any) -> list[Any]:
        """All positions of that tile, with those in host memory from the counter."""
        row = self.kind.row(scalars)
        for c, position in self.row(k).items():
            row[c] = position
        return row

    @classmethod
    def of(cls, rows: np.ndarray, tiles: np.ndarray, moved: Sequence[Moved]) -> Line | None:
        """These tiles, if there are enough, and one more strip at both ends is inside."""
        if len(tiles) < _FEWEST or (np.diff(tiles) != 1).any():
            return None
        columns = {m.column: rows[tiles, m.column] for m in moved}
        first = {c: int(p[0]) for c, p in columns.items()}
        step = {c: int(p[1] - p[0]) for c, p in columns.items()}
        found = cls(Kind.of(rows, tiles), first, step)
        straight = all((np.diff(p) == step[c]).all() for c, p in columns.items())
        ends = [found.row(k) for k in (-1, len(tiles))]
        inside = all(m.inside(at[m.column]) for at in ends for m in moved)
        return found if straight and inside else None


def line(rows: np.ndarray, tiles: np.ndarray, hosted: Sequence[Hosted]) -> Line | None:
    """As many of these tiles as follow each other in every array in host memory."""
    moved = [m for m in map(Moved.of, hosted) if m is not None]
    if not moved or len(moved) < len(hosted):
        return None
    for out in range(2 * _FEWEST):  # so many are left out, at both ends
        for before in range(out + 1):
            found = Line.of(rows, tiles[before : len(tiles) - out + before], moved)
            if found is not None:
                return found
    return None


def run(work: Work, line: Line, carry: Any, xs: Any) -> tuple[Any, Any]:
    """The tiles of a line. What it writes before the first of them is to be written again."""
    last = len(line.kind.tiles) - 1
    zero = work.zeros((), np.int32)  # as far as XLA knows, any number

    def instead(later: Array, now: Array) -> Array:
        """The next window. Until then both are there: else it would take this one's place, and not
        be fetched before nobody reads that.
        """
        return lax.select(jnp.full(now.shape, zero == 0), later, now)

    def body(state: Any, x: Any) -> tuple[Any, Any]:
        k, carry, fetched, waiting = state
        carry = work.send(carry, waiting, line.row(k - 1))
        later = work.fetch(line.row(k + 1))
        x = (line.at(k, x[0]), *x[1:])
        carry, out, waiting = work.put(carry, work.compute(work.read(carry, x, fetched), x), x)
        found = [r for r in jax.tree.leaves((carry, waiting, out)) if not on_host(r)]
        fetched = after(fetched, [min(found, key=lambda r: r.size)])
        return (k + 1, carry, jax.tree.map(instead, later, fetched), waiting), out

    # The same windows at a place that XLA does not know: else it fetches them once for all loops.
    first = work.fetch(line.row(zero))
    begin = jnp.int32(0), carry, first, work.unsent(carry, line.row(-1))
    (_, carry, _, waiting), out = lax.scan(body, begin, xs)
    return work.send(carry, waiting, line.row(last)), out
