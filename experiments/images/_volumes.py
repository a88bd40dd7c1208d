"""Volumes as clinics and microscopes have them: NIfTI, and folders with a file for each plane."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import Image, ImageError, Window, describe, require, whole
from ._dicom import by_position

_PLANES = 32
"""Decoded planes that an open folder keeps."""


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


def open_planes(path: Path, dimensions: int, open_image: Callable[[Path], Image]) -> Image:
    """A folder of planes, in the order of their positions (DICOM) or of the numbers in names."""
    files = [f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")]
    dicom = [f for f in files if f.suffix.lower() == ".dcm"]
    planes = sorted(dicom or files, key=_by_number)
    if dimensions != 3:
        raise ImageError(
            path,
            f"is a folder with {len(planes)} files, which can be the planes of a volume: set "
            "`data.dimensions` to 3",
        )
    planes = by_position(path, planes) if dicom else planes
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
