"""Creating images window by window.

The data go to a folder beside the file, `NAME.part`, until all is written: a program that is killed
leaves no file that looks complete. What it left there can be taken up by one that does the same.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..program.files import Lock
from ._base import ImageError, Window, image_shape, require, window_of
from ._pyramid import Meaning, is_ome, ome_metadata, store, write_levels, write_tiff

_CHUNK = 512
"""Side of a zarr chunk: a window of a network's output touches few of them."""
_CHUNK_OF_VOLUME = 64
_TIFF = (".tif", ".tiff")
_SUFFIXES = (".npy", ".zarr", ".ome.zarr")
_WORDS = {1: "a trace", 2: "an image", 3: "a volume"}
_NOTED_SECONDS = 4.0  # between two notes of what is written


class WritableImage:
    """An image being written; `image[y0:y1, x0:x1] = values`, (h, w, C), or (h, w) if C is 1.

    What is not written is 0. `close` gives the file its name. An exception inside `with` removes
    what was written; but if it has a `job`, Ctrl-C or a signal leaves it, to go on with.
    """

    def __init__(self, path: Path, part: _Part, array: Any, meaning: Meaning):
        self.path, self.dtype, self.meaning = path, _dtype_of(array), meaning
        self.shape = tuple(array.shape)
        self._part, self._array = part, array
        self.there = len(part.written)
        """Windows that were there already."""

    def has(self, slices: tuple[slice, ...]) -> bool:
        """Whether this window was written, by this program or by one that did not end."""
        return _name_of(window_of(slices, self.path, self.shape)) in self._part.written

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
        store(self._array, place, values.reshape(window).astype(self.dtype, copy=False))
        self._part.note(_name_of(place), self._array)

    def close(self) -> None:
        """Gives the file its name; an older file of that name is replaced."""
        if self._array is None:
            return
        self._part.settle(self._array)
        result = self._part.array
        try:
            if self.path.suffix.lower() in _TIFF:
                result = self._part.folder / "packed.tif"
                write_tiff(result, self._array, self.meaning)
            elif is_ome(self.path):
                write_levels(result, self._array, self.meaning, _create_zarr)
                ome_metadata(result, self.path, self.shape, self.meaning)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.abandon()
            raise
        self._array = None
        if self.path.is_dir():
            _remove(self.path)  # a directory cannot be replaced in one step
        os.replace(result, self.path)
        self._part.remove()

    def stop(self) -> None:
        """What is written stays, if it has a job, for a program that goes on with it."""
        if not self._part.job:
            self.abandon()
        elif self._array is not None:
            self._part.settle(self._array)
            self._part.lock.close()

    def abandon(self) -> None:
        """Removes what was written."""
        self._array = None
        self._part.remove()

    def __enter__(self) -> WritableImage:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.stop()
        else:
            self.abandon()


def create_image(
    path: str | Path,
    shape: Sequence[int],
    dtype: Any,
    dimensions: int = 2,
    meaning: Meaning | None = None,
    job: str = "",
) -> WritableImage:
    """Creates an image to write windows of, in any order: `with create_image(...) as image`.

    Args:
      path: `.tif` or `.tiff` (BigTIFF, tiled, compressed and with a pyramid; until it is closed its
        pixels take their full size beside it), `.npy`, `.zarr` (version 2, compressed), or
        `.ome.zarr` (the same with a pyramid, as OME-Zarr 0.4).
      shape: (H, W) or (H, W, C); of a volume (D, H, W) or (D, H, W, C).
      dtype: integers or floats.
      dimensions: 2, or 3 for a volume, which is not written as TIFF.
      meaning: what else the file says: classes, their names and colours, a place on Earth.
      job: what is being computed. With the same job, what was written before is taken up: `has`
        says which windows are there.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    suffixes = (*_TIFF, *_SUFFIXES) if dimensions == 2 else _SUFFIXES
    if suffix not in suffixes:
        raise ImageError(
            path, f"{_WORDS[dimensions]} is written to a name that ends in {', '.join(suffixes)}"
        )
    if not path.parent.is_dir():
        raise ImageError(path, f"there is no folder {path.parent} to write it in")
    shape, dtype = image_shape(path, shape, dimensions), np.dtype(dtype).newbyteorder("=")
    if dtype.kind not in "uif":
        raise ImageError(path, f"an image has integers or floats, not {dtype}")
    if suffix in _TIFF:
        require("tifffile", path)  # now, not when all is computed
    part = _Part(path, f"{job} {shape} {dtype}" if job else "")
    try:
        array = _open_array(part, suffix, shape, dtype)
    except BaseException:
        part.remove()
        raise
    return WritableImage(path, part, array, meaning or Meaning())


class _Part:
    """The folder in which an image is written, and a list of what is written."""

    def __init__(self, path: Path, job: str):
        self.folder, self.job = path.with_name(f"{path.name}.part"), job
        self.lock = Lock(self.folder, flag="--out")
        self._list, about = self.folder / "written.txt", self.folder / "job.txt"
        self.array = self.folder / ("array.zarr" if path.suffix.lower() == ".zarr" else "array.npy")
        if is_ome(path):
            self.array = self.folder / "group"
        goes_on = bool(job) and about.is_file() and about.read_text() == job
        if not goes_on:
            for entry in self.folder.iterdir():
                if entry.name != "lock":
                    _remove(entry)
        self.written = set(self._list.read_text().splitlines()) if self._list.exists() else set()
        about.write_text(job)
        self._new: list[str] = []
        self._noted = time.monotonic()

    def note(self, name: str, array: Any) -> None:
        self._new.append(name)
        if self.job and time.monotonic() - self._noted > _NOTED_SECONDS:
            self.settle(array)

    def settle(self, array: Any) -> None:
        """What was written is on the disk before the list says so."""
        if isinstance(array, np.memmap):
            array.flush()
        if self.job and self._new:
            with open(self._list, "a") as file:
                file.write("".join(f"{name}\n" for name in self._new))
                file.flush()
                os.fsync(file.fileno())
        self._new, self._noted = [], time.monotonic()

    def remove(self) -> None:
        self.lock.close()
        _remove(self.folder)


def _open_array(part: _Part, suffix: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    if suffix == ".zarr":
        first = part.array if part.array.suffix else part.array / "0"
        return _create_zarr(first, shape, dtype)
    if part.written:
        return np.lib.format.open_memmap(part.array, "r+")
    array = np.lib.format.open_memmap(part.array, "w+", dtype, shape)
    _allocate(part.array)
    return array


def _create_zarr(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A zarr array, as an image: channels last. Those of an OME-Zarr group lie as that wants it."""
    tensorstore = require("tensorstore", path)
    side = _CHUNK if len(shape) < 4 else _CHUNK_OF_VOLUME
    stored, chunks = list(shape), [*(min(side, n) for n in shape[:-1]), shape[-1]]
    in_group = not path.suffix
    if in_group:
        stored, chunks = [shape[-1], *shape[:-1]], [1, *chunks[:-1]]
    metadata = {"shape": stored, "chunks": chunks, "dtype": dtype.str, "fill_value": 0}
    separator = {"dimension_separator": "/"} if in_group else {}
    array = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path.resolve())},
            "metadata": {**metadata, **separator},
            "create": True,
            "open": True,
        }
    ).result()
    return array[tensorstore.d[0].transpose[-1]] if in_group else array


def _allocate(path: Path) -> None:
    """A full disk is an error now; written through a memory map, it would end the program."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _dtype_of(array: Any) -> np.dtype:
    return array.dtype if isinstance(array, np.ndarray) else array.dtype.numpy_dtype


def _name_of(place: Window) -> str:
    return " ".join(f"{p.start}:{p.stop}" for p in place)


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
