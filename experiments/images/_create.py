"""Creating images window by window.

The data go to a hidden temporary name beside the file, which is renamed when all is written: a
program that is killed leaves no file that looks complete.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import ImageError, image_shape, require, window_of

_CHUNK = 512
"""Side of a zarr chunk: a window of a network's output touches few of them."""


class WritableImage:
    """An image being written; `image[y0:y1, x0:x1] = values`, (h, w, C), or (h, w) if C is 1.

    What is not written is 0. `close` gives the file its name; an exception inside `with` removes
    what was written instead.
    """

    def __init__(self, path: Path, temporary: Path, array: Any, shape: tuple[int, int, int]):
        self.path, self.shape, self.dtype = path, shape, _dtype_of(array)
        self._temporary, self._array = temporary, array

    def __setitem__(self, slices: tuple[slice, slice], values: Any) -> None:
        if self._array is None:
            raise ValueError(f"{self.path}: is closed, and can no longer be written to")
        y0, y1, x0, x1 = window_of(slices, self.path, self.shape)
        values = np.asarray(values)
        window = (y1 - y0, x1 - x0, self.shape[2])
        if values.shape not in (window, window[:2] if window[2] == 1 else window):
            raise ValueError(
                f"{self.path}: values of shape {values.shape} for the window {slices}, which is "
                f"{window}"
            )
        if not np.can_cast(values.dtype, self.dtype, "safe"):
            raise ValueError(
                f"{self.path}: values of dtype {values.dtype} would lose digits in an image of "
                f"dtype {self.dtype}: convert them first"
            )
        target = self._array[y0:y1, x0:x1]
        values = values.reshape(target.shape).astype(self.dtype, copy=False)
        if isinstance(self._array, np.ndarray):
            target[...] = values
        else:
            target.write(values).result()

    def close(self) -> None:
        """Gives the file its name; an older file of that name is replaced."""
        if self._array is None:
            return
        if isinstance(self._array, np.memmap):
            self._array.flush()
        self._array = None
        if self._temporary.is_dir() and self.path.exists():
            older = _temporary_name(self.path)
            os.rename(self.path, older)  # a directory cannot be replaced in one step
            os.rename(self._temporary, self.path)
            _remove(older)
        else:
            os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        """Removes what was written."""
        self._array = None
        _remove(self._temporary)

    def __enter__(self) -> WritableImage:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def create_image(path: str | Path, shape: Sequence[int], dtype: Any) -> WritableImage:
    """Creates an image to write windows of, in any order: `with create_image(...) as image`.

    Args:
      path: `.tif` or `.tiff` (BigTIFF, uncompressed), `.npy`, or `.zarr` (version 2, compressed).
      shape: (H, W) or (H, W, C).
      dtype: integers or floats.
    """
    path = Path(path)
    creators = {".tif": _create_tiff, ".tiff": _create_tiff, ".npy": _create_npy}
    creators[".zarr"] = _create_zarr
    suffix = path.suffix.lower()
    if suffix not in creators:
        raise ImageError(path, f"an image can be written as {', '.join(creators)}, not {suffix!r}")
    if not path.parent.is_dir():
        raise ImageError(path, f"there is no folder {path.parent} to write it in")
    shape, dtype = image_shape(path, shape), np.dtype(dtype)
    if dtype.kind not in "uif":
        raise ImageError(path, f"an image has integers or floats, not {dtype}")
    temporary = _temporary_name(path)
    try:
        array = creators[suffix](path, temporary, shape, dtype.newbyteorder("="))
        if temporary.is_file():
            _allocate(temporary)
    except BaseException:
        _remove(temporary)
        raise
    return WritableImage(path, temporary, array, shape)


def _create_tiff(path: Path, temporary: Path, shape: tuple[int, int, int], dtype: np.dtype) -> Any:
    tifffile = require("tifffile", path)
    colour = shape[2] in (3, 4) and dtype in (np.uint8, np.uint16)
    arguments = {"photometric": "rgb" if colour else "minisblack", "metadata": None}
    if shape[2] > 1:
        arguments["planarconfig"] = "contig"
    if shape[2] == 4 and colour:
        arguments["extrasamples"] = ["unassalpha"]
    stored = shape if shape[2] > 1 else shape[:2]
    return tifffile.memmap(temporary, shape=stored, dtype=dtype, bigtiff=True, **arguments)


def _create_npy(path: Path, temporary: Path, shape: tuple[int, int, int], dtype: np.dtype) -> Any:
    return np.lib.format.open_memmap(temporary, "w+", dtype, shape)


def _create_zarr(path: Path, temporary: Path, shape: tuple[int, int, int], dtype: np.dtype) -> Any:
    tensorstore = require("tensorstore", path)
    chunks = [min(_CHUNK, shape[0]), min(_CHUNK, shape[1]), shape[2]]
    return tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(temporary.resolve())},
            "metadata": {"shape": shape, "chunks": chunks, "dtype": dtype.str, "fill_value": 0},
            "create": True,
        }
    ).result()


def _allocate(path: Path) -> None:
    """A full disk is an error now; written through a memory map, it would end the program."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _dtype_of(array: Any) -> np.dtype:
    return array.dtype if isinstance(array, np.ndarray) else array.dtype.numpy_dtype


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def _remove(path: Path) -> None:
    """A write of many chunks ends with the first that fails: others may be on their way still."""
    for _ in range(100):
        if not path.is_dir():
            break
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.01)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
