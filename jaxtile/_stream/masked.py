"""A source of which only a part counts: `jaxtile.masked`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._errors import TilingError
from .ends import dtype_of


def masked(source: Any, mask: Any, fill: Any = 0) -> Masked:
    """`numpy.where(mask, source, fill)`, but computed window by window, as windows are read.

    For `jaxtile.stream(..., skip=True)`: the noise of a slide's background becomes one value, so
    that its tiles are alike. Where a whole window is masked, nothing is read. For an array in
    memory, `jax.numpy.where` does the same.

    Args:
      source: anything with `.shape`, `.dtype` and NumPy slicing.
      mask: an array of as many dimensions; nonzero: this counts. It may be coarser, as a thumbnail
        is: its elements share the positions along an axis evenly.
      fill: what the rest is, one number or one for each element of the last axis.

    >>> import jaxtile, numpy as np
    >>> slide = np.arange(16, dtype=np.uint8).reshape(4, 4)  # or a file
    >>> jaxtile.masked(slide, np.array([[1, 0], [0, 0]]), 255)[0:2, 0:4]
    array([[  0,   1, 255, 255],
           [  4,   5, 255, 255]], dtype=uint8)
    """
    return Masked(source, np.asarray(mask), fill)


class Masked:
    """What `masked` returns: a source for `jaxtile.stream`."""

    def __init__(self, source: Any, mask: np.ndarray, fill: Any):
        if not hasattr(source, "shape") or not hasattr(source, "dtype"):
            raise TilingError(
                f"`source` (={source!r}) must have a shape and a dtype, as arrays have"
            )
        self.source, self.mask = source, mask
        self.shape, self.dtype = tuple(source.shape), dtype_of(source.dtype)
        self.fill = np.asarray(fill, self.dtype)
        if mask.ndim != len(self.shape) or not all(0 < m <= n for m, n in self._sizes()):
            raise TilingError(
                f"`mask`, of shape {mask.shape}, must have as many dimensions as the source, of "
                f"shape {self.shape}, and along none of them more elements, or none"
            )

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        where = [
            np.arange(p.start, p.stop) * m // n
            for p, (m, n) in zip(place, self._sizes(), strict=True)
        ]
        counts = self.mask[np.ix_(*where)] != 0
        blank = np.broadcast_to(self.fill, counts.shape)
        if not counts.any():
            return blank
        return np.where(counts, np.asarray(self.source[place], self.dtype), blank)

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.mask.shape, self.shape, strict=True))
