"""Amounts of memory as people write them: `2GiB`, `500 MB`, `1.5e9`."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
}


_AMOUNT = r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*"


def parse_bytes(amount: int | float | str) -> int:
    """A number of bytes.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (2147483648, 1500000000, 4096)
    """
    number = math.nan
    if isinstance(amount, str):
        if found := re.fullmatch(_AMOUNT, amount.lower()):
            number = float(found[1]) * _UNITS.get(found[2], math.nan)
    elif isinstance(amount, int | float) and not isinstance(amount, bool):
        number = amount
    if not 1 <= number < math.inf:
        raise ValueError(
            f"{amount!r} is not an amount of memory: write a positive number and a unit (B, kB, "
            "MB, GB, TB, or KiB, MiB, GiB, TiB), as '2GiB'"
        )
    return int(number)


def format_bytes(n: float) -> str:
    """With three digits.

    >>> format_bytes(6_558_696_448), format_bytes(1010 * 2**20)
    ('6.11 GiB', '1010 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{digits(n)} {unit}"
        n /= 1024
    return f"{digits(n)} TiB"


def format_ms(seconds: float) -> str:
    """Milliseconds, without the unit.

    >>> format_ms(0.0123456), format_ms(13.1)
    ('12.3', '13100')
    """
    return digits(seconds * 1e3)


def digits(n: float) -> str:
    """Three digits, or all before the point."""
    return f"{n:.3g}" if abs(n) < 999.5 else f"{n:.0f}"
