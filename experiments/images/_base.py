"""What an image is: a shape, a dtype, and a function that reads a window."""

from __future__ import annotations

import functools
import importlib
import math
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Window = tuple[slice, ...]
"""Along each axis of space, from where to where."""


class ImageError(ValueError):
    """What is wrong with a file, which the message names."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{named(path)}: {reason}")
        self.path = Path(path)
        self.reason = reason


def named(path: str | Path) -> str:
    """The name of a file or an address, of whose two slashes a path has one.

    >>> named(Path("s3://bucket/image.zarr"))
    's3://bucket/image.zarr'
    """
    return re.sub(r"^(https?|s3|gs):/(?=[^/])", r"\1://", str(path))


class Image:
    """An image on disk; `image[y0:y1, x0:x1]` reads that window as an array (h, w, C).

    A volume is an image with one axis more: `volume[z0:z1, y0:y1, x0:x1]`, (d, h, w, C).

    A window reaches at most to the image's edges: beyond them is an `IndexError`, for a window that
    is silently smaller than was asked for would be a wrong result elsewhere.

    Attributes:
      path: the file, or the directory of a zarr array.
      shape: (H, W, C); of a volume (D, H, W, C).
      dtype: of the windows, in native byte order.
      whole: whether the format has no windows, so that the first read decodes everything.
      block: (h, w) of what is decoded at once: windows that follow blocks decode nothing twice.
      tags: of a TIFF, those that say where on Earth it lies.
      nodata: the value of pixels without data, if the file names one.
    """

    whole = False

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        dtype: Any,
        read: Callable[[Window], np.ndarray],
        *,
        close: Callable[[], None] = lambda: None,
        block: Sequence[int] = (1, 1),
        dimensions: int = 2,
        tags: Sequence[Any] = (),
        nodata: float | None = None,
    ):
        self.path, self.tags, self.nodata = path, tuple(tags), nodata
        self.shape = image_shape(path, shape, dimensions)
        self.dtype = image_dtype(path, dtype)
        self.block = tuple(min(n, m) for n, m in zip(block, self.shape, strict=False))
        self._read, self._close = read, close

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        window = window_of(slices, self.path, self.shape)
        size = [part.stop - part.start for part in window]
        try:
            return np.array(self._read(window), self.dtype).reshape(*size, self.shape[-1])
        except (ImageError, MemoryError, ConnectionError):
            raise
        except Exception as error:
            raise ImageError(
                self.path,
                f"{_described(window)} cannot be read: the file is truncated or corrupt "
                f"({describe(error)})",
            ) from error

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Image({str(self.path)!r}, shape={self.shape}, dtype={self.dtype})"


class WholeImage(Image):
    """An image whose format has no windows."""

    whole = True


LARGEST_WHOLE_VOLUME = 2**30
"""Values of a file that is decoded whole."""


def whole(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, decode: Callable[[], np.ndarray]
) -> Image:
    """An image of a format without windows, which is decoded when it is first read."""
    if math.prod(shape) > LARGEST_WHOLE_VOLUME:
        raise ImageError(
            path,
            f"{shape} is more than the {LARGEST_WHOLE_VOLUME} values that a format without windows "
            "may have: save it as .nii or .zarr",
        )
    decoded = functools.cache(decode)
    return WholeImage(
        path,
        shape,
        dtype,
        lambda window: decoded()[window],
        close=decoded.cache_clear,
        block=shape[:-1],
        dimensions=len(shape) - 1,
    )


_LETTERS = {1: "W", 2: "H, W", 3: "D, H, W"}


def image_shape(path: Path, shape: Sequence[int], dimensions: int = 2) -> tuple[int, ...]:
    """(H, W) or (H, W, C) as (H, W, C); volumes likewise."""
    shape = tuple(int(n) for n in shape)
    if len(shape) not in (dimensions, dimensions + 1):
        axes = _LETTERS[dimensions]
        raise ImageError(
            path,
            f"{'a volume' if dimensions == 3 else 'an image'} is ({axes}) or ({axes}, C), but this "
            f"has {len(shape)} dimensions, {shape}",
        )
    if min(shape) < 1:
        raise ImageError(path, f"its shape {shape} holds no pixel")
    return shape if len(shape) == dimensions + 1 else (*shape, 1)


def image_dtype(path: Path, dtype: Any) -> np.dtype:
    """In native byte order; booleans are read as 0 and 1."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind not in "uif":
        raise ImageError(path, f"its values are {dtype}, but an image has integers or floats")
    return dtype.newbyteorder("=")


def window_of(slices: tuple[slice, ...], path: Path, shape: tuple[int, ...]) -> Window:
    """`image[y0:y1, x0:x1]` with all bounds, which must lie inside the image."""
    axes = len(shape) - 1
    if not (isinstance(slices, tuple) and [type(s) for s in slices] == [slice] * axes):
        wanted = {1: "x0:x1", 2: "y0:y1, x0:x1", 3: "z0:z1, y0:y1, x0:x1"}[axes]
        raise IndexError(f"{path}: an image is indexed as image[{wanted}], not with {slices!r}")
    window = []
    for axis, (part, size) in enumerate(zip(slices, shape, strict=False)):
        start = 0 if part.start is None else int(part.start)
        stop = size if part.stop is None else int(part.stop)
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise IndexError(
                f"{path}: {_AXES[axis - axes]} {start} to {stop} (step {part.step or 1}) are no "
                f"window of an image of shape {shape}"
            )
        window.append(slice(start, stop))
    return tuple(window)


_AXES = ("planes", "rows", "columns")


def _described(window: Window) -> str:
    """
    >>> _described((slice(0, 4), slice(2, 3)))
    'rows 0 to 4, columns 2 to 3'
    """
    names = _AXES[-len(window) :]
    return ", ".join(f"{n} {p.start} to {p.stop}" for n, p in zip(names, window, strict=True))


def require(module: str, path: Path | str, extra: str = "train") -> types.ModuleType:
    """An optional package; not an `ImageError`, since the file is not to blame."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        names = {"PIL": "pillow", "openslide": "openslide-python openslide-bin"}
        package = names.get(module.partition(".")[0], module)
        raise ImportError(
            f"{path}: this format needs the package {package}: pip install {package}, or "
            f"pip install 'jaxtile[{extra}]'"
        ) from error


def describe(error: Exception) -> str:
    """Another library's error on one line, of bounded length."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
