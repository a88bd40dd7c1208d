"""An array that lies uncompressed in a file, read by position.

It is not mapped into memory: a file that another program shortens while it is mapped ends this
program with a signal that cannot be caught. A read beyond the end is an error like any other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import ImageError

_AT_ONCE = 2**24  # bytes of one read


class RawArray:
    """An array in C order from byte `offset` on; `read` takes a slice (start, stop) per axis."""

    def __init__(self, path: Path, dtype: Any, shape: Sequence[int], offset: int = 0):
        self.path, self.dtype, self.shape, self.offset = path, np.dtype(dtype), shape, offset
        self._file = os.open(path, os.O_RDONLY)
        self._check_length(os.fstat(self._file).st_size)

    def _check_length(self, there: int) -> None:
        end = self.offset + math.prod(self.shape) * self.dtype.itemsize
        if there < end:
            raise ImageError(
                self.path, f"is truncated: its data reach to byte {end}, but it has {there} bytes"
            )

    def read(self, *slices: tuple[int, int]) -> np.ndarray:
        out = np.empty([stop - start for start, stop in slices], self.dtype)
        if not out.size:
            return out
        runs = len(slices)  # the axes before this one are walked; the rest lies in one piece
        while runs > 0 and slices[runs - 1] == (0, self.shape[runs - 1]):
            runs -= 1
        walked = max(0, runs - 1)
        strides = np.array([math.prod(self.shape[d + 1 :]) for d in range(len(slices))], np.int64)
        first = sum(int(s) * start for s, (start, _) in zip(strides, slices, strict=True))
        flat = out.reshape(*out.shape[:walked], -1)
        for index in np.ndindex(out.shape[:walked]):
            start = first + sum(int(s) * i for s, i in zip(strides, index, strict=False))
            self._fill(memoryview(flat[index]).cast("B"), start * self.dtype.itemsize)
        return out

    def _fill(self, buffer: memoryview, start: int) -> None:
        done = 0
        while done < len(buffer):
            most = min(len(buffer) - done, _AT_ONCE)
            found = os.pread(self._file, most, self.offset + start + done)
            if not found:
                self._check_length(os.fstat(self._file).st_size)
                raise ImageError(self.path, f"ends at byte {start + done} of its data")
            buffer[done : done + len(found)] = found
            done += len(found)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
