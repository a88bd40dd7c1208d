"""Sizes, strides and padding, given once or per spatial axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

Size = int | Sequence[int]
Padding = str | int | Sequence[int | tuple[int, int]]
"""`"SAME"`, `"VALID"`, or how much on each side: one number, or per axis one or a pair."""


def per_axis(what: str, value: Size, rank: int) -> tuple[int, ...]:
    """`value` for each of `rank` spatial axes."""
    if rank < 1:
        raise ValueError(f"an image has at least one spatial axis, not {rank}: (N, H, W, C)")
    values = _entries(what, value, rank)
    if len(values) != rank:
        raise ValueError(f"`{what}` (={value}) must be one number or {rank}, one per spatial axis")
    if not all(isinstance(v, Integral) and int(v) > 0 for v in values):
        raise ValueError(f"`{what}` (={value}) must be positive whole numbers")
    return values


def pads(padding: Padding, rank: int) -> str | list[tuple[int, int]]:
    """Padding as lax takes it."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(
                f"`padding` (={padding!r}) must be 'SAME', 'VALID', or how much on each side"
            )
        return padding.upper()
    entries = _entries("padding", padding, rank)
    if len(entries) != rank:
        raise ValueError(f"`padding` (={padding}) must have {rank} entries, one per spatial axis")
    pairs = [(e, e) if np.ndim(e) == 0 else tuple(e) for e in entries]
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError(f"`padding` (={padding}) must have one number per axis, or a pair")
    return pairs


def _entries(what: str, value: Any, rank: int) -> tuple[Any, ...]:
    """One entry per spatial axis; a single number, NumPy's too, is the same for all."""
    if isinstance(value, Integral):
        return (value,) * rank
    if not isinstance(value, Iterable):
        raise ValueError(f"`{what}` (={value!r}) must be a whole number, or one per spatial axis")
    return tuple(value)
