"""Volumes as clinics and microscopes have them: NIfTI, DICOM, and folders with a file per plane."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import Image, ImageError, WholeImage, Window, describe, require

_PLANES = 32
"""Decoded planes that an open folder keeps."""
_LARGEST_WHOLE = 2**30
"""Voxels of a file that is decoded whole."""


def open_nifti(path: Path, dimensions: int) -> Image:
    """NIfTI: the last axis is the first of the volume, as (Z, Y, X); a fourth one is channels.

    Of `.nii` windows are read. `.nii.gz` has none: the first read decodes it whole.
    """
    nibabel = require("nibabel", path, "volumes")
    try:
        proxy = nibabel.load(path).dataobj
        shape = tuple(proxy.shape)
        raw = proxy.dtype.newbyteorder("=")
    except Exception as error:
        raise ImageError(path, f"is not a NIfTI file, or is corrupt ({describe(error)})") from error
    if dimensions == 2 and len(shape) > 2 and math.prod(shape[2:]) != 1:
        raise ImageError(path, f"is a volume, {shape}: set `data.dimensions` to 3")
    space = (*shape, 1, 1)[:dimensions]
    channels = math.prod(shape[dimensions:])
    dtype = raw if (proxy.slope, proxy.inter) == (1, 0) else np.dtype(np.float32)

    def arranged(values: Any, size: Sequence[int]) -> np.ndarray:
        values = np.asarray(values).reshape(*size, channels)
        return values.transpose(*reversed(range(dimensions)), dimensions).astype(dtype, copy=False)

    def read(window: Window) -> np.ndarray:
        place = tuple(reversed(window))
        rest = (slice(None),) * (len(shape) - dimensions)
        return arranged(proxy[(*place, *rest)], [p.stop - p.start for p in place])

    if path.suffix.lower() == ".gz":
        return whole(path, (*space[::-1], channels), dtype, lambda: arranged(proxy, space))
    block = (1,) * (dimensions - 1) + (space[0],)
    return Image(path, (*space[::-1], channels), dtype, read, block=block, dimensions=dimensions)


def whole(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, decode: Callable[[], np.ndarray]
) -> Image:
    """An image of a format without windows, which is decoded when it is first read."""
    if math.prod(shape) > _LARGEST_WHOLE:
        raise ImageError(
            path,
            f"{shape} is more than the {_LARGEST_WHOLE} values that a format without windows may "
            "have: save it as .nii or .zarr",
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


def open_dicom(path: Path, dimensions: int, mask: bool = False) -> Image:
    """DICOM: an image, or the frames of one file as a volume; values are rescaled as it says."""
    header = _dicom(path, pixels=False)
    if header.get("PhotometricInterpretation") == "PALETTE COLOR" and not mask:
        raise ImageError(path, "has a palette, which is not read of DICOM: save it as PNG or TIFF")
    frames = int(header.get("NumberOfFrames", 1) or 1)
    if "TotalPixelMatrixRows" in header:
        raise ImageError(path, "is a whole-slide image: save it as a pyramidal TIFF")
    if (frames > 1) != (dimensions == 3):
        kind = "a volume" if frames > 1 else "one image"
        raise ImageError(
            path,
            f"is {kind}, with {frames} frame{'s' * (frames > 1)}, where `data.dimensions` is "
            f"{dimensions}; name a folder of such files for a volume",
        )
    size = (frames,) * (dimensions == 3) + (int(header.Rows), int(header.Columns))
    shape, dtype = (*size, int(header.get("SamplesPerPixel", 1))), _rescaled_dtype(header)
    return whole(path, shape, dtype, lambda: _pixels(path).reshape(shape).astype(dtype))


def open_planes(path: Path, dimensions: int, open_image: Callable[[Path], Image]) -> Image:
    """A folder of planes, in the order of their positions (DICOM) or of the numbers in names."""
    files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
    dicom = [f for f in files if f.suffix.lower() == ".dcm"]
    planes = sorted(dicom, key=_position) if dicom else sorted(files, key=_by_number)
    if dimensions != 3:
        raise ImageError(
            path,
            f"is a folder with {len(planes)} files, which can be the planes of a volume: set "
            "`data.dimensions` to 3",
        )
    images = [open_image(file) for file in planes]
    shapes = {(image.shape, image.dtype) for image in images}
    if len(shapes) != 1:
        found = ", ".join(f"{shape} {dtype}" for shape, dtype in list(shapes)[:3])
        raise ImageError(path, f"its planes differ: {found}")
    ((shape, dtype),) = shapes

    @functools.lru_cache(_PLANES)
    def plane(number: int) -> np.ndarray:
        with open_image(planes[number]) as image:
            return image[0 : shape[0], 0 : shape[1]]

    def read(window: Window) -> np.ndarray:
        depth, *place = window
        found = [plane(i)[tuple(place)] for i in range(depth.start, depth.stop)]
        return np.stack(found) if found else np.empty((0, *plane(0)[tuple(place)].shape), dtype)

    for image in images:
        image.close()
    size = (len(planes), *shape)
    block = (1, *shape[:2])
    close = plane.cache_clear
    return Image(path, size, dtype, read, close=close, block=block, dimensions=3)


def _by_number(path: Path) -> list[Any]:
    """
    >>> sorted([Path("z10.png"), Path("z9.png")], key=_by_number)[0].name
    'z9.png'
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]


def _dicom(path: Path, pixels: bool = True) -> Any:
    pydicom = require("pydicom", path, "volumes")
    try:
        return pydicom.dcmread(path, stop_before_pixels=not pixels)
    except Exception as error:
        raise ImageError(path, f"is not a DICOM file ({describe(error)})") from error


def _position(path: Path) -> tuple[float, str]:
    """Along the normal of the planes; or the number that the scanner gave it."""
    header = _dicom(path, pixels=False)
    if "ImagePositionPatient" in header and "ImageOrientationPatient" in header:
        along = np.array(header.ImageOrientationPatient, float).reshape(2, 3)
        return float(np.cross(*along) @ np.array(header.ImagePositionPatient, float)), path.name
    return float(header.get("InstanceNumber", 0) or 0), path.name


def _rescaling(header: Any) -> tuple[float, float]:
    return float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))


def _rescaled_dtype(header: Any) -> np.dtype:
    """Integers where nothing is lost: a CT's values, in Hounsfield units, are 16 bits."""
    slope, intercept = _rescaling(header)
    bits, signed = int(header.BitsAllocated), bool(header.get("PixelRepresentation", 0))
    if (slope, intercept) == (1, 0):
        return np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    exact = slope == 1 and intercept == int(intercept)
    most = 2 ** (int(header.BitsStored) - signed) - 1 + intercept
    least = (-(2 ** (int(header.BitsStored) - 1)) if signed else 0) + intercept
    return np.dtype(np.int16 if exact and least >= -(2**15) and most < 2**15 else np.float32)


def _pixels(path: Path) -> np.ndarray:
    file = _dicom(path)
    values, (slope, intercept) = file.pixel_array, _rescaling(file)
    if (slope, intercept) == (1, 0):
        return values
    return values.astype(np.float64) * slope + intercept
