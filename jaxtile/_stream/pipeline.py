"""The tiles of a pass, one after the other: read, computed and written at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.values import Value
from .._run.alike import equal, order, positions, replaces
from .._run.slots import Slots
from .._run.tile import Tile
from .ends import Source, Store, slices


@dataclasses.dataclass(frozen=True)
class Reads:
    """Of values that are read by window; one without a source is not."""

    values: Sequence[Value]
    sources: Sequence[Source | Store | None]
    slots: Sequence[Slots]

    def windows(self, row: Any) -> list[np.ndarray | None]:
        return [
            None if source is None else source.read(slices(where, row))
            for source, where in zip(self.sources, self.slots, strict=True)
        ]

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct | None]:
        return [
            None if s is None else jax.ShapeDtypeStruct([n for _, n in where], v.aval.dtype)
            for v, s, where in zip(self.values, self.sources, self.slots, strict=True)
        ]


class Once:
    """Computes tiles that read the same once, on the host, as a loop does (`_run/alike.py`)."""

    def __init__(self, tile: Tile, skipped: Callable[[], None]):
        """`skipped` is called for each tile that is not computed."""
        self.tile, self.skipped = tile, skipped
        self.skips = tile.region.skips and len(tile.rows) > 1
        self.order: Sequence[int] = range(len(tile.rows))
        self.columns: list[int] = []
        self.key: Any = None
        self.results: Any = None
        self.constant = np.False_

    def prepare(self, compute: Callable[..., Any], given: Sequence[Any]) -> None:
        """Find out with which positions a tile is computed, and so which tiles may be alike.

        `given`: arguments of the function before the tile's row, arrays or their shapes.
        """

        def array(x: Any) -> Any:
            return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

        def run(_: Any, row: Any) -> Any:
            return [], compute(*jax.tree.map(array, given), row)

        if self.skips:
            self.columns, _ = positions(run, list(self.tile.rows[0]))
            self.order = [int(i) for i in order(self.tile.rows, self.columns)]

    def __call__(self, i: int, read: Any, compute: Callable[[], Any]) -> Any:
        """What tile `i`, which has read this, computes."""
        key = read, self.tile.rows[i][self.columns]
        if self.key is not None and equal(key, self.key):
            self.skipped()
            return self.results
        results, blank = compute(), self.tile.blank(read[0])
        same_positions = self.key is not None and equal(key[1], self.key[1])
        if replaces(blank, self.constant, same_positions):
            self.key, self.results, self.constant = key, results, blank
        return results


Item = TypeVar("Item")


def run(
    order: Sequence[Item],
    read: Callable[[Item], Any],
    compute: Callable[[Item, Any], Any],
    write: Callable[[Item, Any], None],
    done: Callable[[Item], Any],
) -> None:
    """All tiles, or batches of tiles, in this order.

    While the device computes one, a thread reads the next, and another writes the last.
    """
    with (
        ThreadPoolExecutor(1, "jaxtile-read") as reader,
        ThreadPoolExecutor(1, "jaxtile-write") as writer,
    ):
        ahead, behind = reader.submit(read, order[0]), None
        for n, item in enumerate(order):
            windows = ahead.result()
            if n + 1 < len(order):
                ahead = reader.submit(read, order[n + 1])
            found = compute(item, windows)
            if behind is not None:
                behind.result()
                done(order[n - 1])
            behind = writer.submit(write, item, found)
        if behind is not None:
            behind.result()
            done(order[-1])
