"""Sizes, strides and padding, given once or per spatial axis."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

Size = int | Sequence[int]
Padding = str | int | Sequence[int | tuple[int, int]]
"""`"SAME"`, `"VALID"`, or how much on each side: one number, or per axis one or a pair."""


def per_axis(what: str, value: Size, rank: int) -> tuple[int, ...]:
    """`value` for each of `rank` spatial axes."""
    values = _entries(value, rank)
    if len(values) != rank:
        raise ValueError(f"`{what}` (={value}) must be one number or {rank}, one per spatial axis")
    if any(v < 1 for v in values):
        raise ValueError(f"`{what}` (={value}) must be positive")
    return values


def pads(padding: Padding, rank: int) -> str | list[tuple[int, int]]:
    """Padding as lax takes it."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(
                f"`padding` (={padding!r}) must be 'SAME', 'VALID', or how much on each side"
            )
        return padding.upper()
    entries = _entries(padding, rank)
    if len(entries) != rank:
        raise ValueError(f"`padding` (={padding}) must have {rank} entries, one per spatial axis")
    return [(e, e) if np.ndim(e) == 0 else (e[0], e[1]) for e in entries]


def _entries(value: Any, rank: int) -> tuple[Any, ...]:
    """One entry per spatial axis; a single number, NumPy's too, is the same for all."""
    return (value,) * rank if isinstance(value, Integral) else tuple(value)
