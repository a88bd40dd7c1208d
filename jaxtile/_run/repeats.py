"""How many tiles of each region read the same as another one, told from the arguments alone.

A window of an argument is looked at. A window of a stored value is known by the tiles that write
it: where these are alike, so is what they write. What is the same by chance is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._graph.values import Value
from .._regions.region import Region
from .._regions.regions import Schedule
from .._regions.stages import stage_runner
from .._regions.tile import at
from .alike import nearly_constant, positions
from .slots import Row, Slots
from .tile import Tile


class Repeats:
    """Counts such tiles, for any arguments of a schedule."""

    def __init__(self, schedule: Schedule):
        self.inputs = schedule.graph.inputs
        skipping = [r for r in schedule.regions if r.skips and r.has_loop]
        tiles = [Tile(region, stage_runner()) for region in skipping]
        self.tiles = [(tile, _columns(tile)) for tile in tiles]

    def __call__(self, arguments: Sequence[Any]) -> dict[int, int]:
        """Per region that may skip tiles, how many; nothing if the arguments are shapes only."""
        tiled = [(v, x) for v, x in zip(self.inputs, arguments, strict=True) if v.tiled]
        if not all(hasattr(x, "__array__") for _, x in tiled):
            return {}
        seen = _Seen({v: np.asarray(x) for v, x in tiled})
        return {t.region.index: seen.repeated(t, columns) for t, columns in self.tiles}


class _Seen:
    """Arguments, and of what regions write, which tiles are alike."""

    def __init__(self, arguments: dict[Value, np.ndarray]):
        self.arguments = arguments
        self.written: dict[Value, tuple[Region, np.ndarray]] = {}

    def repeated(self, tile: Tile, columns: Sequence[int]) -> int:
        """How many tiles of a region are like an earlier one. `columns`: what they depend on."""
        region, kinds = tile.region, list(map(tuple, tile.rows[:, columns].tolist()))
        numbers: dict[Hashable, int] = {}
        labels = []
        for i, (kind, row) in enumerate(zip(kinds, tile.rows, strict=True)):
            pairs = zip(region.inputs, tile.input_slots, strict=True)
            read = [self._read(v, slots, row) for v, slots in pairs]
            labels.append(numbers.setdefault(i if None in read else (kind, *read), i))
        inside = Counter(kinds).most_common(1)[0][0]  # at borders, little is constant
        known = [n if kind == inside else -1 for n, kind in zip(labels, kinds, strict=True)]
        grid = [region.split[axis] for axis in sorted(region.split)]
        for target in region.targets:
            if target.reduction is None:
                self.written[target.value] = region, np.reshape(known, grid)
        return len(labels) - len(numbers)

    def _read(self, value: Value, slots: Slots, row: Row) -> Hashable:
        """What a window holds, or who wrote it; None: that is not known, or not likely again."""
        starts = [int(at(slot, row)) for slot, _ in slots]
        ends = [start + size for start, (_, size) in zip(starts, slots, strict=True)]
        if value in self.arguments:
            x = self.arguments[value][tuple(map(slice, starts, ends))]
            dims = tuple(d for d, axis in enumerate(value.axes) if axis is not None)
            return hash(x.tobytes()) if nearly_constant([x], [dims]) else None
        if value not in self.written:
            return None
        region, labels = self.written[value]
        tiles, place = [slice(None)] * labels.ndim, []
        for d, window in region.windows(value).items():
            first = np.searchsorted(window.starts, starts[d], "right") - 1
            last = np.searchsorted(window.starts, ends[d] - 1, "right")
            tiles[sorted(region.split).index(window.axis)] = slice(first, last)
            place.append(starts[d] - int(window.starts[first]))
        read = labels[tuple(tiles)]
        return None if (read < 0).any() else (*place, read.tobytes())


def _columns(tile: Tile) -> list[int]:
    """The positions that a tile is computed with."""
    region = tile.region

    def run(_: Row, row: Row) -> Any:
        windows = [
            jnp.zeros([n for _, n in slots], v.aval.dtype)
            for v, slots in zip(region.inputs, tile.input_slots, strict=True)
        ]
        globals_ = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in region.globals]
        return [], tile.shares(windows, globals_, row)

    return positions(run, list(tile.rows[0]))[0]
