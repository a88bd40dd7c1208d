"""How tiles grow: what a tile of an operation's result needs of what the operation reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import Mixes, TilingError
from .._geometry import Window
from .._graph.values import Node, Value
from .._regions.demands import plan


class Demand(NamedTuple):
    """Along one tiled axis, `n` positions of a result need `scale * n + halo` of an operand."""

    scale: float
    halo: float


Demands = tuple[tuple[Demand, ...], ...]
"""Per value that an operation reads, and per tiled axis."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """The equations of one operation, to ask what a tile of its results needs."""

    nodes: Sequence[Node]
    domain: Sequence[Value]
    """Tiled results, and tiled operands of reductions: what a tile computes."""
    reads: Sequence[Value]
    """Tiled results of other operations."""
    lengths: Sequence[int]

    def demands(self, known: dict[Any, Demands]) -> Demands:
        """Per value that is read and tiled axis; alike operations are asked about once."""
        equations = [n.equation for n in self.nodes]
        key = (
            tuple(self.lengths),
            tuple((v.aval.shape, v.axes) for v in (*self.domain, *self.reads)),
            tuple((e.primitive.name, e.out_avals, e.in_axes) for e in equations),
            tuple(str(n.equation.params) for n in self.nodes if n.works),
        )
        if key not in known:
            known[key] = self._demands()
        return known[key]

    def _demands(self) -> Demands:
        axes = range(len(self.lengths))
        if not self.domain or not self.reads:
            return tuple((Demand(0, 0),) * len(axes) for _ in self.reads)
        if all(n.rule.by_position for n in self.nodes if n.tiled):
            return tuple(tuple(Demand(float(a in v.axes), 0) for a in axes) for v in self.reads)
        small = [_size(n) for n in self.lengths]
        large = [2 * _size(n) if n > 1 else 1 for n in self.lengths]
        needed = zip(self._needed(small), self._needed(large), self.reads, strict=True)
        return tuple(
            tuple(
                self._line(value, a, (small[a], few.get(a, 0)), (large[a], many.get(a, 0)))
                for a in axes
            )
            for few, many, value in needed
        )

    def _line(
        self, value: Value, axis: int, small: tuple[int, int], large: tuple[int, int]
    ) -> Demand:
        """The line through two tiles: their positions, and the positions that they need."""
        if axis not in value.axes:
            return Demand(0, 0)
        if not self.lengths[axis]:  # the result has no such axis, or one position along it
            return Demand(0, value.aval.shape[value.axes.index(axis)])
        if large[0] == small[0]:
            return Demand(0, large[1])
        scale = (large[1] - small[1]) / (large[0] - small[0])
        return Demand(scale, small[1] - scale * small[0])

    def _needed(self, sizes: Sequence[int]) -> list[dict[int, int]]:
        """Per value that is read and axis, the positions that one tile in the middle needs."""
        axes = range(len(self.lengths))
        middle = [n // 2 // size * size for n, size in zip(self.lengths, sizes, strict=True)]
        wanted = {
            v: {
                d: Window(a, np.array([middle[a]]), sizes[a])
                for d, a in enumerate(v.axes)
                if a is not None
            }
            for v in self.domain
        }
        tiled = [n for n in self.nodes if n.tiled and n.reduction is None]
        try:
            windows = plan(tiled, wanted, dict.fromkeys(axes, 1)).windows
        except (Mixes, TilingError):
            return [dict(enumerate(self.lengths)) for _ in self.reads]
        result: dict[Value, dict[int, int]] = {v: {} for v in self.reads}
        for value, window in windows.items():
            needed = result.get(value.array, {})
            for w in window.values():
                needed[w.axis] = max(needed.get(w.axis, 0), w.size)
        return list(result.values())


def _size(length: int) -> int:
    """A power of two, so that strides divide it; as large as fits twice with room for a halo, so
    that of an enlargement more than one position is needed.
    """
    return 1 << max(0, (length // 8).bit_length() - 1)
