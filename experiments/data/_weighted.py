"""Training examples by class: with `data.class_weights` rare classes are seen more often.

First a class is drawn, by its weight; then a pixel of that class, all being as likely, in all
masks of the training set. It is the centre of the window. Where labels are of whole images, it is
an image of that class. The same in another order, as the rest of the program needs it: an image is
drawn (`chances`), and in it class and pixel (`OfClasses`).

Masks are too large to keep where each class is. What is kept is how many pixels of it are in each
of at most `_MOST_CELLS` cells of a mask; of the cell that was drawn, the mask is read again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..images import Image
from ._dataset import DataError

_MOST_CELLS = 2**14
_SMALLEST_CELL = 16  # its pixels are two to the power of this

Places = dict[int, dict[int, int]]
"""Of each value of a mask: how many pixels have it, by the number of their cell."""


def cells(size: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How long the sides of a cell are, and how many cells there are along each axis.

    >>> cells((100_000, 80_000))
    (1024, (98, 79))
    >>> cells((100, 257))
    (256, (1, 2))
    """
    side = 2 ** (_SMALLEST_CELL // len(size))
    while math.prod(math.ceil(n / side) for n in size) > _MOST_CELLS:
        side *= 2
    return side, tuple(math.ceil(n / side) for n in size)


def in_cells(
    window: Sequence[slice], size: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """The parts of a window that lie in one cell each: the cell's number, and where in the window.

    >>> list(in_cells((slice(200, 300),), (99_000_000,)))
    [(0, (slice(0, 100, None),))]
    """
    side, number = cells(size)
    numbers = [range(w.start // side, math.ceil(w.stop / side)) for w in window]
    for cell in itertools.product(*numbers):
        yield (
            int(np.ravel_multi_index(cell, number)),
            tuple(
                slice(max(c * side - w.start, 0), min((c + 1) * side, w.stop) - w.start)
                for c, w in zip(cell, window, strict=True)
            ),
        )


def chances(counts: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Of each image and class, (images, classes), the chance to be drawn.

    Args:
      counts: how many pixels of each class an image has; or 1 for its class, and 0.
      weights: of the classes; those that no image has are left out.

    >>> chances(np.array([[90, 0], [10, 1], [100, 3]]), [1, 1]).round(3).tolist()
    [[0.225, 0.0], [0.025, 0.125], [0.25, 0.375]]
    """
    total = counts.sum(0)
    shares = np.where(total > 0, np.asarray(weights, float), 0) * counts / np.maximum(total, 1)
    if not shares.any():
        raise ValueError(
            f"`data.class_weights` (={tuple(weights)}): no training example is of a class whose "
            f"weight is not 0; of the classes there are {', '.join(map(str, total))}"
        )
    return shares / shares.sum()


class OfClasses:
    """A region: the pixels of a mask, each class with its chance."""

    def __init__(
        self, opened: Callable[[], Image], found: Places, values: Sequence[int], shares: np.ndarray
    ):
        self.opened = opened
        there = [c for c in range(len(values)) if shares[c] > 0]
        self.values, self.shares = [values[c] for c in there], shares[there] / shares.sum()
        self.cells = [np.array(list(found[v].items())).T for v in self.values]

    def draw(self, rng: np.random.Generator, size: Sequence[int]) -> Sequence[float]:
        drawn = rng.choice(len(self.values), p=self.shares)
        numbers, counts = self.cells[drawn]
        cell = rng.choice(numbers, p=counts / counts.sum())
        side, number = cells(size)
        first = [int(n) * side for n in np.unravel_index(cell, number)]
        window = tuple(slice(a, min(a + side, n)) for a, n in zip(first, size, strict=True))
        mask = self.opened()
        pixels = np.argwhere(mask[window][..., 0] == self.values[drawn])
        if not len(pixels):
            raise DataError(mask.path, f"was changed: there is no {self.values[drawn]} any more")
        return [a + int(p) for a, p in zip(first, pixels[rng.integers(len(pixels))], strict=True)]


def described(weights: Sequence[float], shares: np.ndarray, masks: bool) -> str:
    """What is told to the user, of the chances of each image and class."""
    of_classes = ", ".join(
        f"{share:.1%} of class {c}" for c, share in enumerate(shares.sum(0)) if weights[c]
    )
    what = "centres of training windows" if masks else "training images"
    return f"{what} are drawn by `data.class_weights`: {of_classes}"
