"""Creating images window by window.

The data go to a hidden temporary name beside the file, which is renamed when all is written: a
program that is killed leaves no file that looks complete.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import ImageError, image_shape, require, window_of

_CHUNK = 512
"""Side of a zarr chunk or TIFF tile: a window of a network's output touches few of them."""
_CHUNK_OF_VOLUME = 64
_TIFF = (".tif", ".tiff")


class WritableImage:
    """An image being written; `image[y0:y1, x0:x1] = values`, (h, w, C), or (h, w) if C is 1.

    What is not written is 0. `close` gives the file its name; an exception inside `with` removes
    what was written instead.
    """

    def __init__(self, path: Path, temporary: Path, array: Any, shape: tuple[int, ...]):
        self.path, self.shape, self.dtype = path, shape, _dtype_of(array)
        self._temporary, self._array, self._packed = temporary, array, _temporary_name(path)

    def __setitem__(self, slices: tuple[slice, ...], values: Any) -> None:
        if self._array is None:
            raise ValueError(f"{self.path}: is closed, and can no longer be written to")
        place = window_of(slices, self.path, self.shape)
        values = np.asarray(values)
        window = (*(p.stop - p.start for p in place), self.shape[-1])
        if values.shape not in (window, window[:-1] if window[-1] == 1 else window):
            raise ValueError(
                f"{self.path}: values of shape {values.shape} for the window {slices}, which is "
                f"{window}"
            )
        if not np.can_cast(values.dtype, self.dtype, "safe"):
            raise ValueError(
                f"{self.path}: values of dtype {values.dtype} would lose digits in an image of "
                f"dtype {self.dtype}: convert them first"
            )
        target = self._array[place]
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
        if self.path.suffix.lower() in _TIFF:
            try:
                _pack(self.path, self._packed, self._array)
                os.replace(self._packed, self._temporary)
            except BaseException:
                self.abandon()
                raise
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
        _remove(self._packed)

    def __enter__(self) -> WritableImage:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def create_image(
    path: str | Path, shape: Sequence[int], dtype: Any, dimensions: int = 2
) -> WritableImage:
    """Creates an image to write windows of, in any order: `with create_image(...) as image`.

    Args:
      path: `.tif` or `.tiff` (BigTIFF, tiled and compressed; until it is closed its pixels take
        their full size beside it), `.npy`, or `.zarr` (version 2, compressed).
      shape: (H, W) or (H, W, C); of a volume (D, H, W) or (D, H, W, C).
      dtype: integers or floats.
      dimensions: 2, or 3 for a volume, which is written as `.npy` or `.zarr`.
    """
    path = Path(path)
    creators = {**dict.fromkeys(_TIFF, _create_npy), ".npy": _create_npy, ".zarr": _create_zarr}
    suffix = path.suffix.lower()
    if suffix not in creators:
        raise ImageError(path, f"an image can be written as {', '.join(creators)}, not {suffix!r}")
    if not path.parent.is_dir():
        raise ImageError(path, f"there is no folder {path.parent} to write it in")
    shape, dtype = image_shape(path, shape, dimensions), np.dtype(dtype)
    if dtype.kind not in "uif":
        raise ImageError(path, f"an image has integers or floats, not {dtype}")
    if suffix in _TIFF and dimensions != 2:
        raise ImageError(path, "a volume can be written as .npy or .zarr")
    if suffix in _TIFF:
        require("tifffile", path)  # now, not when all is computed
    temporary = _temporary_name(path)
    try:
        array = creators[suffix](path, temporary, shape, dtype.newbyteorder("="))
        if temporary.is_file():
            _allocate(temporary)
    except BaseException:
        _remove(temporary)
        raise
    return WritableImage(path, temporary, array, shape)


def _pack(path: Path, packed: Path, array: np.ndarray) -> None:
    """Write an array as a TIFF of compressed tiles, which are compressed by several threads."""
    tifffile = require("tifffile", path)
    height, width, channels = array.shape
    colour = channels in (3, 4) and array.dtype in (np.uint8, np.uint16)
    arguments: dict[str, Any] = {"photometric": "rgb" if colour else "minisblack"}
    if channels > 1:
        arguments["planarconfig"] = "contig"
    if channels == 4 and colour:
        arguments["extrasamples"] = ["unassalpha"]
    # As many samples a pixel as a TIFF wants: one is no axis.
    stored = array if channels > 1 else array[..., 0]

    def tiles() -> Iterator[np.ndarray]:
        for y in range(0, height, _CHUNK):
            for x in range(0, width, _CHUNK):
                part = stored[y : y + _CHUNK, x : x + _CHUNK]
                missing = [(0, _CHUNK - n) for n in part.shape[:2]]
                yield np.pad(part, [*missing, *[(0, 0)] * (part.ndim - 2)])

    tifffile.imwrite(
        packed,
        tiles(),
        shape=stored.shape,
        dtype=stored.dtype,
        bigtiff=True,
        tile=(_CHUNK, _CHUNK),
        compression="zlib",
        metadata=None,
        maxworkers=os.cpu_count(),
        **arguments,
    )


def _create_npy(path: Path, temporary: Path, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return np.lib.format.open_memmap(temporary, "w+", dtype, shape)


def _create_zarr(path: Path, temporary: Path, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    tensorstore = require("tensorstore", path)
    side = _CHUNK if len(shape) < 4 else _CHUNK_OF_VOLUME
    chunks = [*(min(side, n) for n in shape[:-1]), shape[-1]]
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
