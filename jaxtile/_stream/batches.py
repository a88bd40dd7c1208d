"""Tiles that are computed at once.

A small tile does not keep an accelerator busy. Tiles whose positions are the same, as far as their
program computes with them, differ only in what they read: all those that touch no border, for
instance. So the windows of several are stacked, and one program computes all of them. It has one
more dimension, and the same positions for all. Tiles that are left over are computed by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._memory.estimate import estimate_memory
from .._run.alike import positions

_AT_LEAST = 8
"""Batches that all tiles make: while one is computed, others are read and written."""

Batch = tuple[int, ...]
"""The numbers of tiles that are computed at once."""


def batches(
    compute: Callable[..., Any], given: Sequence[Any], rows: np.ndarray, limit: int
) -> list[Batch]:
    """All tiles, as many at once as fit into `limit` bytes, by an estimate.

    `given`: arguments of the function before the tile's row, the windows (or their shapes) first.
    """
    alone: list[Batch] = [(i,) for i in range(len(rows))]
    if not limit or len(rows) < 2 or not jax.tree.leaves(given[0]):
        return alone
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    row = jax.ShapeDtypeStruct(rows[0].shape, rows.dtype)
    found = estimate_memory(jax.jit(compute).trace(*shapes, row)).bytes
    windows = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes[0]))
    fitting = limit // max(1, windows + found.outputs + found.temporaries)
    size = min(int(fitting), len(rows) // _AT_LEAST)
    if size < 2:
        return alone

    def run(_: Any, row: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return [], compute(*zeros, row)

    columns, _ = positions(run, list(rows[0]))
    return _grouped(rows[:, columns], size)


def _grouped(rows: np.ndarray, size: int) -> list[Batch]:
    """Tiles with equal rows, so many at once; in the order of their first ones."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault(tuple(row.tolist()), []).append(i)
    size = min(size, max(map(len, alike.values())))
    found: list[Batch] = []
    for tiles in alike.values():
        whole = len(tiles) // size * size
        found += [tuple(tiles[k : k + size]) for k in range(0, whole, size)]
        found += [(i,) for i in tiles[whole:]]
    return sorted(found)


def stacked(windows: Sequence[Any]) -> Any:
    """What the tiles of a batch have read, as one program takes it."""
    return windows[0] if len(windows) == 1 else jax.tree.map(lambda *x: np.stack(x), *windows)
