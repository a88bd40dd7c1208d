"""How XLA packs temporaries into one block: the largest first, each into the smallest gap.

Buffers that are never live together may share an address. XLA places them one after another, never
moves one again, and so leaves gaps: the block is larger than what is live at any time. It does so
twice, largest first and longest-lived first, and takes the smaller block
(`GlobalDecreasingSizeBestFitHeap`, spatial and temporal).

Known inefficiencies: small buffers are left out, as if they always found a gap of their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._buffers import Buffer


def packed_bytes(buffers: Sequence[Buffer]) -> int:
    """The size of the block."""
    by_size = sorted(buffers, key=lambda b: (-b.bytes, b.start - b.end))
    by_time = sorted(buffers, key=lambda b: (b.start - b.end, -b.bytes))
    return min(_place(by_size), _place(by_time))


def _place(buffers: Sequence[Buffer]) -> int:
    placed: list[tuple[int, int, int, int]] = []
    top = 0
    for b in buffers:
        begin = _smallest_gap(
            b.bytes,
            sorted((lo, hi) for lo, hi, start, end in placed if start <= b.end and b.start <= end),
        )
        placed.append((begin, begin + b.bytes, b.start, b.end))
        top = max(top, begin + b.bytes)
    return top


def _smallest_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Where the smallest gap begins that has room; else, where everything ends."""
    best, where, free = None, None, 0
    for lo, hi in taken:
        gap = lo - free
        if gap >= size and (best is None or gap < best):
            best, where = gap, free
        free = max(free, hi)
    return free if where is None else where
