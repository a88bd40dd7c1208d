"""Windows of arrays, at positions that differ from tile to tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._regions.tile import Slot, at
from .arrays import Array
from .ordering import on_host, to_device, to_host

Row = Sequence[Any]
"""The positions of one tile: a row of the table."""
Slots = Sequence[tuple[Slot, int]]
"""Per dimension of an array, where a tile's window begins, and its size."""


def window(x: Array, slots: Slots, row: Row) -> Array:
    """The window of this tile, on the device."""
    if not _whole(x, slots):
        sizes = [size for _, size in slots]
        x = lax.dynamic_slice(x, _starts(slots, row), sizes, allow_negative_indices=False)
    return to_device(x) if on_host(x) else x


def write(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    tile = tile.astype(x.dtype)
    if on_host(x):
        tile = to_host(tile)
    if _whole(x, slots):
        return tile
    return lax.dynamic_update_slice(x, tile, _starts(slots, row), allow_negative_indices=False)


def zeros_on_host(
    zeros: Callable[..., Array], shape: Sequence[int], dtype: Any, steps: int
) -> Array:
    """Zeros in host memory, written in so many steps; `zeros` makes them on the device.

    They have to be written. Where an array is allocated there for a loop to write to, XLA leaves
    out what it was filled with.
    """
    x = to_host(zeros(shape, dtype))
    d = int(np.argmax(shape))
    size = -(-shape[d] // steps)
    part = zeros([size if i == d else n for i, n in enumerate(shape)], dtype)

    def body(i: Array, x: Array) -> Array:
        start = jnp.minimum(i * size, shape[d] - size)
        return lax.dynamic_update_slice_in_dim(x, to_host(part), start, d)

    return lax.fori_loop(0, steps, body, x)


def add(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    return write(x, window(x, slots, row) + tile, slots, row)


def _whole(x: Array, slots: Slots) -> bool:
    return all(slot == 0 and size == n for (slot, size), n in zip(slots, x.shape, strict=True))


def _starts(slots: Slots, row: Row) -> list[Array]:
    return [jnp.asarray(at(slot, row), np.int32) for slot, _ in slots]
