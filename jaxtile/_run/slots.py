"""Windows of arrays, at positions that differ from tile to tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._regions.tile import Scalars, Slot, at
from . import host_windows
from .arrays import Array
from .ordering import on_host, settled, to_device, to_host

Row = Scalars
"""The positions of one tile: a row of the table, or those columns that are needed."""
Zeros = Callable[..., Array]
"""Of a shape and a type; and a number, by which they differ from others."""
Slots = Sequence[tuple[Slot, int]]
"""Per dimension of an array, where a tile's window begins, and its size."""
Hosted = tuple[Sequence[int], Slots]
"""An array in host memory: its shape, and the windows of tiles."""


def window(x: Array, slots: Slots, row: Row) -> Array:
    """The window of this tile, on the device.

    What comes from host memory is settled: else XLA makes a part that is cut out of the window a
    window of its own, and reads that from there too.
    """
    if not _whole(x, slots):
        starts, sizes = _starts(slots, row), [size for _, size in slots]
        if on_host(x):
            x = host_windows.read(x, starts, sizes)
        else:
            x = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return settled([to_device(x)])[0] if on_host(x) else x


def windows_of(
    arrays: Sequence[Array | None], slots: Sequence[Slots], row: Row
) -> list[Array | None]:
    return [
        None if x is None else window(x, each, row) for x, each in zip(arrays, slots, strict=True)
    ]


def write(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    tile = tile.astype(x.dtype)
    if on_host(x):
        tile = to_host(tile)
    if _whole(x, slots):
        return tile
    starts = _starts(slots, row)
    if on_host(x):
        return host_windows.write(x, tile, starts)
    return lax.dynamic_update_slice(x, tile, starts, allow_negative_indices=False)


def allocated_on_host(zeros: Zeros, shape: Sequence[int], dtype: Any, number: int) -> Array:
    """An array in host memory for loops to write all of: XLA leaves out what it is filled with.

    `number`: of the arrays of a loop. Those that are the same to XLA are copied, at 2 GB/s.
    """
    return to_host(zeros(shape, dtype, number))


def zeros_on_host(zeros: Zeros, shape: Sequence[int], dtype: Any, number: int, steps: int) -> Array:
    """Zeros in host memory, written in so many steps; `zeros` makes them on the device."""
    x = allocated_on_host(zeros, shape, dtype, number)
    # The further in front the dimension, the longer are the runs of bytes that are written.
    d = next((d for d, n in enumerate(shape) if n >= steps), int(np.argmax(shape)))
    size = -(-shape[d] // steps)
    part = zeros([size if i == d else n for i, n in enumerate(shape)], dtype, number)

    def body(k: Array, x: Array) -> Array:
        start = jnp.minimum(k * size, shape[d] - size)
        return host_windows.write(x, to_host(part), [start if i == d else 0 for i in range(x.ndim)])

    return lax.fori_loop(0, steps, body, x)


def add(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    return write(x, window(x, slots, row) + tile, slots, row)


def fetched(arrays: Sequence[Array | None], slots: Sequence[Slots], row: Row) -> list[Array | None]:
    """The windows of those arrays that lie in host memory."""
    return [
        window(x, where, row) if x is not None and on_host(x) else None
        for x, where in zip(arrays, slots, strict=True)
    ]


def unfetched(
    arrays: Sequence[Array | None], windows: Sequence[Array | None]
) -> list[Array | None]:
    """The arrays of which no window was fetched: those on the device."""
    return [x if w is None else None for x, w in zip(arrays, windows, strict=True)]


def filled(windows: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The windows that there are, and the others."""
    return [o if w is None else w for w, o in zip(windows, others, strict=True)]


def hosted(arrays: Sequence[Array | None], slots: Sequence[Slots]) -> list[Hosted]:
    """Which of these arrays lie in host memory: their shapes, and the windows of tiles."""
    pairs = zip(arrays, slots, strict=True)
    return [(x.shape, where) for x, where in pairs if x is not None and on_host(x)]


def nothing(x: Array, slots: Slots, zeros: Zeros) -> Array:
    """Zeros on the device, of the size of a window."""
    return zeros([size for _, size in slots], x.dtype)


def _whole(x: Array, slots: Slots) -> bool:
    return all(slot == 0 and size == n for (slot, size), n in zip(slots, x.shape, strict=True))


def _starts(slots: Slots, row: Row) -> list[Array]:
    return [jnp.asarray(at(slot, row), np.int32) for slot, _ in slots]
