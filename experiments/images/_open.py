"""Opening images: by suffix, with what can be wrong with a file found out before it is used."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ._base import Image, ImageError, WholeImage, Window, describe, image_shape, require
from ._dicom import open_dicom
from ._ome import Store, address_of, arranged, multiscale
from ._raw import RawArray
from ._slide import open_slide
from ._tiff import open_tiff
from ._volumes import open_nifti, open_planes

LARGEST_WHOLE = 2**28
"""Pixels of a PNG or JPEG, which is decoded whole."""

_LARGE = (
    2**28
)  # bytes of chunks: such reads wait for each other, and look at the memory that is left
_one_large_read = threading.Lock()

_PILLOW_READERS = {
    ".png": ("PngImagePlugin", "PngImageFile"),
    ".jpg": ("JpegImagePlugin", "JpegImageFile"),
    ".jpeg": ("JpegImagePlugin", "JpegImageFile"),
}


def open_image(
    path: str | Path, dimensions: int = 2, level: int = 0, *, mask: bool = False
) -> Image:
    """Opens an image to read windows of it: `open_image(path)[y0:y1, x0:x1]`, (h, w, C).

    With `dimensions=3` it is a volume, and with 1 a trace. `level` is the resolution of a pyramid,
    0 the finest; a file that has but one is refused for another level, unless it is a `mask`,
    which may be as large as the level of its image.

    A `mask` has the values in the file: of a palette the indices, and of 1 bit 0 and 1. An image
    has what they look like: of a palette the colours, 8-bit RGB; PNGs and TIFFs of 1 bit are 0 and
    255, and a TIFF in which 0 is white is inverted. Rotations in JPEG metadata are not applied.

    * `.tif`, `.tiff`, and the slides `.svs`, `.ndpi`, `.scn`, `.bif`, `.qptiff`: tiled and striped,
      BigTIFF, pyramids; a window decodes only the tiles or strips that it touches. Pages of one
      channel each become channels; of a volume, planes.
    * `.mrxs`, `.vms`, `.vmu`: slides, by OpenSlide.
    * `.npy`: (H, W) or (H, W, C); a window reads its bytes.
    * `.zarr`, or any directory with a zarr array in it, version 2 or 3: (H, W) or (H, W, C); or
      an OME-Zarr group. It may be at an address (`https://`, `s3://`, `gs://`), which can also be
      the text of a file `.url`.
    * `.nii`, `.nii.gz`, `.dcm`: volumes and images; or a folder with a file for each plane.
    * `.png`, `.jpg`, `.jpeg`: these formats have no windows. The first read decodes the whole
      image and keeps it until the image is closed; beyond 2^28 pixels they are refused.
    """
    address, path = address_of(path), Path(path)
    if address:
        return _open_zarr(Store(path, address), dimensions, level, mask)
    if not path.exists():
        raise ImageError(path, "there is no such file")
    suffix = suffix_of(path)
    if path.is_dir() and not _is_zarr(path) and any(map(is_image_name, path.iterdir())):
        return open_planes(path, dimensions, functools.partial(open_image, mask=mask))
    with_levels = path.is_dir() or suffix in _SLIDES or suffix in _TIFFS
    if level and not with_levels and not mask:
        raise ImageError(path, f"has one resolution, and no level {level}")
    if path.is_dir():
        return _open_zarr(Store(path), dimensions, level, mask)
    if suffix not in SUFFIXES:
        raise ImageError(
            path, f"the suffix {suffix!r} is not one of {', '.join(SUFFIXES)}: save it as one"
        )
    if path.stat().st_size == 0:
        raise ImageError(path, "is empty (0 bytes)")
    if dimensions != 2 and (suffix in _PILLOW_READERS or suffix in _SLIDES):
        raise ImageError(path, "is an image, where a file of another number of axes is wanted")
    if suffix in _TIFFS:
        return open_tiff(path, dimensions, level, mask)
    if suffix in _SLIDES:
        return open_slide(path, level)
    if suffix in _PILLOW_READERS:
        return _open_with_pillow(path, mask)
    if suffix == ".dcm":
        return open_dicom(path, dimensions, mask)
    return _OPENERS[suffix](path, dimensions)


def is_image_name(path: Path) -> bool:
    """Whether a folder's entry is to be read as an image: not hidden, with a known suffix."""
    return suffix_of(path) in SUFFIXES and not path.name.startswith(".")


def suffix_of(path: Path) -> str:
    """
    >>> suffix_of(Path("scan.nii.gz")), suffix_of(Path("A.TIF"))
    ('.nii.gz', '.tif')
    """
    name = path.name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else path.suffix.lower()


def _is_zarr(path: Path) -> bool:
    names = (".zarray", ".zgroup", ".zattrs", "zarr.json")
    return path.suffix.lower() == ".zarr" or any((path / name).exists() for name in names)


def _open_npy(path: Path, dimensions: int) -> Image:
    try:
        with open(path, "rb") as file:
            shape, transposed, dtype = _npy_header(file)
            offset = file.tell()
        if dtype.hasobject:
            raise ValueError("Python objects")
    except Exception as error:
        raise ImageError(
            path, f"is not an array in .npy format, or is truncated ({describe(error)})"
        ) from error
    image_shape(path, shape, dimensions)
    array = RawArray(path, dtype, shape[::-1] if transposed else shape, offset)

    def read(window: Window) -> np.ndarray:
        slices = [(p.start, p.stop) for p in window] + [(0, n) for n in shape[dimensions:]]
        return array.read(*slices[::-1]).T if transposed else array.read(*slices)

    return Image(
        path,
        shape,
        dtype,
        read,
        close=array.close,
        block=(shape[0], *[1] * (dimensions - 1))
        if transposed
        else (*[1] * (dimensions - 1), shape[dimensions - 1]),
        dimensions=dimensions,
    )


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _open_zarr(store: Store, dimensions: int, level: int, mask: bool) -> Image:
    found = multiscale(store, level, mask)
    if level and found is None and not mask:
        raise ImageError(store.path, f"has one resolution, and no level {level}")
    store, axes = found or (store, None)
    path = store.path
    if store.text("zarr.json") is not None:
        driver = "zarr3"
    elif store.text(".zarray") is not None:
        driver = "zarr"
    else:
        there = path.iterdir() if path.is_dir() else ()
        inside = sorted(entry.name for entry in there if entry.is_dir())[:4]
        raise ImageError(
            path,
            "is a directory without a zarr array (no zarr.json or .zarray)"
            + (f"; if it is a group, name the array in it: {', '.join(inside)}" if inside else ""),
        )
    try:
        array = store.open(driver)
        dtype = array.dtype.numpy_dtype
        array = array if axes is None else arranged(path, array, axes, dimensions)
    except (ImageError, ImportError, ConnectionError):
        raise
    except Exception as error:
        raise ImageError(path, f"is not a zarr array ({describe(error)})") from error
    chunk = array.chunk_layout.read_chunk.shape
    _check_memory(path, chunk, dtype, 1)

    def read(window: Window) -> np.ndarray:
        parts = zip(window, chunk, strict=False)
        touched = math.prod(_parts(p.start, p.stop, n) for p, n in parts)
        if touched * math.prod(chunk) * dtype.itemsize < _LARGE:
            with store.reached():
                return array[window].read().result()
        with _one_large_read, store.reached():
            _check_memory(path, chunk, dtype, touched)
            return array[window].read().result()

    block = chunk[:dimensions]
    return Image(path, array.shape, dtype, read, block=block, dimensions=dimensions)


def _parts(start: int, stop: int, size: int) -> int:
    return -(-stop // size) - start // size


def _check_memory(path: Path, chunk: Sequence[int], dtype: np.dtype, touched: int) -> None:
    """Chunks are decoded whole; where there is no memory for them, tensorstore ends the program."""
    size, free = math.prod(chunk) * dtype.itemsize, free_memory()
    if free is not None and touched * size > free // 2:  # what is decoded is copied once
        raise ImageError(
            path,
            f"its chunks, {' x '.join(map(str, chunk))} of {dtype}, take {size / 2**30:.1f} GiB "
            f"each, and this window needs {touched} of them; {free / 2**30:.1f} GiB of memory are "
            "free. Save it with smaller chunks, as 512 x 512",
        )


def free_memory() -> int | None:
    """Bytes that this process can still take; None where the system does not say."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(s for s in lines if s.startswith("MemAvailable")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # of a container
        most, taken = (
            Path("/sys/fs/cgroup", f"memory.{n}").read_text() for n in ("max", "current")
        )
        found.append(int(most) - int(taken))
    with contextlib.suppress(OSError, ImportError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(most - pages * resource.getpagesize())
    return min(found, default=None)


def _open_with_pillow(path: Path, mask: bool) -> Image:
    module, reader = _PILLOW_READERS[path.suffix.lower()]
    reader = getattr(require(f"PIL.{module}", path), reader)
    try:
        # The reader itself rather than PIL.Image.open, whose limit on pixels is a global setting.
        with reader(path) as image:
            (width, height), mode = image.size, image.mode
            raw_mode = str(image.tile[0].args) if image.tile else ""
    except Exception as error:
        kind = "PNG" if module.startswith("Png") else "JPEG"
        raise ImageError(path, f"is not a {kind}, or is corrupt ({describe(error)})") from error
    if height * width > LARGEST_WHOLE:
        raise ImageError(
            path,
            f"{height} x {width} pixels are more than the {LARGEST_WHOLE} that a format without "
            "windows may have: convert it to a tiled TIFF, of which windows can be read",
        )
    # Pillow reads 16-bit grey values, but cuts 16-bit colours, and grey with alpha, to 8 bits.
    wide = mode != "I;16" and ";16" in raw_mode
    converted = {"CMYK": "RGB"} if mask else {"CMYK": "RGB", "P": "RGB", "1": "L"}
    seen = "LA" if raw_mode.startswith("LA;16") else converted.get(mode, mode)
    shape = height, width, {"LA": 2, "RGB": 3, "RGBA": 4}.get(seen, 1)

    def decode() -> np.ndarray:
        if wide:
            values = require("imagecodecs", path).png_decode(path.read_bytes())
            return values.reshape(height, width, -1)[..., : shape[-1]]  # a colour may be alpha
        with reader(path) as image:
            image.info.pop("transparency", None)  # of a palette: Pillow would warn
            return np.asarray(image if seen == mode else image.convert(seen)).reshape(shape)

    lock = threading.Lock()
    held: list[np.ndarray] = []

    def read(window: Window) -> np.ndarray:
        with lock:
            if not held:
                held.append(decode())
            return held[0][window]

    dtype = np.uint16 if wide or mode.startswith("I") else np.uint8
    return WholeImage(path, shape, dtype, read, close=held.clear, block=(1, width))


_TIFFS = (".tif", ".tiff", ".svs", ".ndpi", ".scn", ".bif", ".qptiff")
_SLIDES = (".mrxs", ".vms", ".vmu")
_OPENERS: dict[str, Callable[[Path, int], Image]] = {
    ".npy": _open_npy,
    ".nii": open_nifti,
    ".nii.gz": open_nifti,
}

SUFFIXES = (*_TIFFS, ".zarr", ".url", *_OPENERS, ".dcm", *_PILLOW_READERS, *_SLIDES)
