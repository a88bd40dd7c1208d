"""Tiles inside an image, and those at its border: a loop for each.

Windows never leave an array. At a border they are moved inwards, and readers find what they asked
for at another place in them, beside padding. So a read is shifted by a position of the tile's row,
and the compiler copies the window, in every tile. Inside an image all tiles are shifted alike, by
numbers, and as a rule by none: there is nothing to copy. Of the gradients of VGG16 on windows of
3474 x 3474, such copies were 9 % of the time. So if most tiles are inside, they have a loop of
their own, whose program has numbers where these tiles agree.

Limits: that is two programs to trace and to compile, which take the time of two. With few tiles,
most of which are at a border, there is one loop, and all windows are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Kind(NamedTuple):
    """Tiles of one loop."""

    tiles: np.ndarray
    known: Mapping[int, int]
    """Per column of the table in which all of them agree, what it holds."""

    @classmethod
    def of(cls, rows: np.ndarray, tiles: np.ndarray | None = None) -> Kind:
        """All tiles; or these, whose rows differ less."""
        if tiles is None:
            return cls(np.arange(len(rows)), {})
        own = rows[tiles]
        same = np.flatnonzero((own == own[0]).all(0))
        return cls(tiles, {int(k): int(own[0, k]) for k in same})

    def row(self, scalars: Any) -> list[Any]:
        """The positions of a tile: numbers where they are known."""
        return [self.known.get(k, x) for k, x in enumerate(scalars)]


def kinds(rows: np.ndarray, columns: Sequence[int]) -> list[Kind]:
    """Tiles at a border and tiles inside, if these are most; otherwise all together.

    `columns`: of the positions in `rows`, those that shift reads.

    >>> rows = np.array([[0, 0], [9, 1], [19, 1], [29, 1], [38, 2]])
    >>> [(kind.tiles.tolist(), dict(kind.known)) for kind in kinds(rows, [1])]
    [([0, 4], {}), ([1, 2, 3], {1: 1})]
    >>> len(kinds(rows[:2], [1]))
    1
    """
    if not columns or len(rows) < 2:
        return [Kind.of(rows)]
    _, found, counts = np.unique(rows[:, columns], axis=0, return_inverse=True, return_counts=True)
    inside = found.reshape(-1) == counts.argmax()
    if inside.all() or 2 * inside.sum() <= len(rows):
        return [Kind.of(rows)]
    return [Kind.of(rows, np.flatnonzero(own)) for own in (~inside, inside)]
