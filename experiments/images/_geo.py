"""GeoTIFF: the tags that say where on Earth an image lies, for a map of the same pixels; and the
value of pixels without data.

A tag is (code, type, count, value, False), as `tifffile` writes it. Pixels are square or not, in
any coordinates: what the keys mean is not looked at, they are carried over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SCALE, TIEPOINTS, MATRIX = 33550, 33922, 34264
_NODATA = 42113  # of GDAL, as text
_KEYS = (34735, 34736, 34737)  # of the coordinate system: numbers, floats, text


def georeference(page: Any) -> list[tuple[int, int, int, Any, bool]]:
    """Of a page; none if it has no place on Earth."""
    tags = [page.tags.get(code) for code in (SCALE, TIEPOINTS, MATRIX, *_KEYS)]
    return [(t.code, int(t.dtype), t.count, t.value, False) for t in tags if t is not None]


def nodata_of(page: Any) -> float | None:
    """The value of pixels without data, if the file names one: a number, or NaN."""
    try:
        return float(str(page.tags.valueof(_NODATA)).strip("\0 "))
    except ValueError:
        return None


def shifted(
    tags: Sequence[tuple[int, int, int, Any, bool]], offset: Sequence[int]
) -> list[tuple[int, int, int, Any, bool]]:
    """Those of a map that begins at pixel `offset` (row, column) of the image.

    >>> shifted([(TIEPOINTS, 12, 6, (0, 0, 0, 500.0, 800.0, 0), False)], (8, 3))
    [(33922, 12, 6, (-3.0, -8.0, 0, 500.0, 800.0, 0), False)]
    """
    if len(offset) != 2:
        return []
    return [(*tag[:3], _moved(tag[0], tag[3], *offset), False) for tag in tags]


def _moved(code: int, value: Any, row: int, column: int) -> Any:
    if code == TIEPOINTS:  # (column, row, 0, x, y, z), any number of times
        points = [value[i : i + 6] for i in range(0, len(value), 6)]
        return tuple(
            x for i, j, *rest in points for x in (float(i - column), float(j - row), *rest)
        )
    if code == MATRIX:  # 4 x 4, from (column, row, 0, 1) to (x, y, z, 1)
        rows = [value[i : i + 4] for i in range(0, 16, 4)]
        return tuple(x for a, b, c, d in rows for x in (a, b, c, d + a * column + b * row))
    return value
