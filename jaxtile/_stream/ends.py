"""Where tiles come from and where they go.

Arguments are read, outputs are written. What is stored between passes is both: an array in the
memory of the host, or in a file that has no name, so that nothing is left of it when the process
ends, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._errors import TilingError
from .._graph.values import Value
from .._regions.tile import at


class Source:
    """A tiled argument that is read by window."""

    def __init__(self, name: str, array: Any, aval: Any):
        self.name, self.aval = name, aval
        # A window of an array on the device would be cut by a program of its own.
        self.array = np.asarray(array) if isinstance(array, jax.Array) else array

    def read(self, place: tuple[slice, ...]) -> np.ndarray:
        try:
            found = np.array(self.array[place], self.aval.dtype)
        except Exception as error:
            error.add_note(f"while `jaxtile.stream` read {_position(self.name, place)}")
            raise
        size = tuple(p.stop - p.start for p in place)
        if found.shape != size:
            raise TilingError(
                f"{_position(self.name, place)} has shape {found.shape}, not {size}: is the "
                f"argument's `shape` {self.aval.shape} right?"
            )
        return found


class Sink:
    """What a tiled output is written to."""

    def __init__(self, name: str, array: Any, value: Value):
        shape, dtype = tuple(value.aval.shape), value.aval.dtype
        self.name, self.array = name, np.empty(shape, dtype) if array is None else array
        if array is None:
            return
        if not hasattr(array, "__setitem__") or isinstance(array, jax.Array):
            raise TilingError(f"`{name}` (a {type(array).__name__}) cannot be assigned to")
        if tuple(getattr(array, "shape", shape)) != shape:
            raise TilingError(f"`{name}` has shape {tuple(array.shape)}, the output {shape}")
        if dtype_of(getattr(array, "dtype", dtype)) != dtype:
            raise TilingError(
                f"`{name}` has dtype {array.dtype}, the output {dtype}: convert in the function"
            )

    def has(self, place: tuple[slice, ...]) -> bool:
        """Whether this was written before, by a call that did not come to its end."""
        known = getattr(self.array, "has", None)
        return known is not None and bool(known(place))

    def write(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        try:
            self.array[place] = tile
        except Exception as error:
            error.add_note(f"while `jaxtile.stream` wrote {_position(self.name, place)}")
            raise


class Store:
    """An array that a pass writes and others read, all by window; at first it is zero."""

    def __init__(self, value: Value, dtype: Any, folder: str | os.PathLike[str] | None):
        self.shape, self.dtype = tuple(value.aval.shape), np.dtype(dtype)
        self.size = max(1, value.aval.size * self.dtype.itemsize)
        self.memory = np.zeros(self.shape, self.dtype) if folder is None else None
        self.file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        if self.file is None:
            return
        try:  # a full disk is an error here; later it would be the end of the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, self.size)
            else:
                self.file.truncate(self.size)
        except OSError as error:
            what = f"{value.name or 'a value'}, {self.size} bytes,"
            error.add_note(f"while `jaxtile.stream` made room for {what} in `store` (={folder!r})")
            raise

    def read(self, place: tuple[slice, ...]) -> np.ndarray:
        return np.array(self._array()[place])

    def has(self, place: tuple[slice, ...]) -> bool:
        return False

    def write(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        self._array()[place] = tile

    def add(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        self._array()[place] += tile.astype(self.dtype)

    def close(self) -> None:
        self.memory = None
        if self.file is not None:
            self.file.close()

    def _array(self) -> np.ndarray:
        """The whole array. A file is mapped anew for each window: only that is ever in memory."""
        if self.memory is not None:
            return self.memory
        assert self.file is not None
        return np.ndarray(self.shape, self.dtype, mmap.mmap(self.file.fileno(), self.size))


def slices(slots: Sequence[tuple[Any, int]], row: Any) -> tuple[slice, ...]:
    """Where the window of a tile lies: per dimension its start, by the tile's row, and its size."""
    starts = [int(at(slot, row)) for slot, _ in slots]
    return tuple(slice(n, n + size) for n, (_, size) in zip(starts, slots, strict=True))


def all_of(value: Value) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in value.aval.shape)


def _position(name: str, place: tuple[slice, ...]) -> str:
    return f"{name}[{', '.join(f'{p.start}:{p.stop}' for p in place)}]"


def dtype_of(dtype: Any) -> np.dtype:
    """As NumPy's type, in the machine's byte order; some readers have types of their own."""
    return np.dtype(getattr(dtype, "numpy_dtype", dtype)).newbyteorder("=")
