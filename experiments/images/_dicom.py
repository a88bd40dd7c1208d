"""DICOM: an image, or the frames of one file as a volume; values as the file says they are meant.

What the header leaves out or contradicts is an error: nothing is guessed about pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import Image, ImageError, describe, require, whole

_NEEDED = ("Rows", "Columns", "BitsAllocated")
_FLOATS = {32: np.float32, 64: np.float64}


def open_dicom(path: Path, dimensions: int, mask: bool = False) -> Image:
    """Values are rescaled as the file says; where 0 is white they are inverted, but in masks."""
    header = _read(path, pixels=False)
    if absent := [name for name in _NEEDED if header.get(name) in (None, "")]:
        raise ImageError(path, f"is DICOM without an image: its header has no {', '.join(absent)}")
    if header.get("PhotometricInterpretation") == "PALETTE COLOR" and not mask:
        raise ImageError(path, "has a palette, which is not read of DICOM: save it as PNG or TIFF")
    if "TotalPixelMatrixRows" in header:
        raise ImageError(path, "is a whole-slide image: save it as a pyramidal TIFF")
    frames = int(header.get("NumberOfFrames", 1) or 1)
    if (frames > 1) != (dimensions == 3):
        kind = "a volume" if frames > 1 else "one image"
        raise ImageError(
            path,
            f"is {kind}, with {frames} frame{'s' * (frames > 1)}, where `data.dimensions` is "
            f"{dimensions}; name a folder of such files for a volume",
        )
    size = (frames,) * (dimensions == 3) + (int(header.Rows), int(header.Columns))
    shape = (*size, int(header.get("SamplesPerPixel", 1) or 1))
    white = header.get("PhotometricInterpretation") == "MONOCHROME1" and not mask
    stored, rescaled = _stored_dtype(path, header), _rescaling(path, header, frames)
    if white and (stored.kind != "u" or rescaled != [(1.0, 0.0)]):
        raise ImageError(
            path,
            f"says that 0 is white (MONOCHROME1), of {stored} with the rescalings "
            f"{_some(rescaled)}; that is read of unsigned integers that are not rescaled. Save it "
            "with 0 as black (MONOCHROME2)",
        )
    dtype = stored if rescaled == [(1.0, 0.0)] else _rescaled_dtype(header, stored, rescaled)

    def decode() -> np.ndarray:
        values = _read(path).pixel_array.reshape(shape)
        if values.dtype.kind == "f" and dtype.kind != "f":
            raise ValueError(f"its header speaks of {dtype}, and its values are {values.dtype}")
        if white:
            return (2 ** _bits(header) - 1 - values.astype(np.int64)).astype(dtype)
        if rescaled != [(1.0, 0.0)]:
            slope, intercept = (np.reshape(n, (-1, 1, 1, 1)) for n in zip(*rescaled, strict=True))
            values = (values.reshape(-1, *shape[-3:]) * slope + intercept).reshape(shape)
        return values.astype(dtype)

    return whole(path, shape, dtype, decode)


def by_position(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Planes along their normal; or by the number that the scanner gave; or else as they come."""
    places = [_position(file) for file in files]
    if None in places:
        return list(files)
    found = sorted(zip(places, files, strict=True), key=lambda each: each[0])
    for (place, one), (following, other) in itertools.pairwise(found):
        if place == following:
            raise ImageError(
                folder,
                f"{one.name} and {other.name} are planes at one place: a folder holds one volume. "
                "Put files of another series, echo or time into folders of their own",
            )
    return [file for _, file in found]


def _position(path: Path) -> float | None:
    header = _read(path, pixels=False)
    place, along = header.get("ImagePositionPatient"), header.get("ImageOrientationPatient")
    if place and along:
        normal = np.cross(*np.array(along, float).reshape(2, 3))
        return float(normal @ np.array(place, float))
    return _number(path, header, "InstanceNumber", None)


def _read(path: Path, pixels: bool = True) -> Any:
    pydicom = require("pydicom", path, "volumes")
    try:
        return pydicom.dcmread(path, stop_before_pixels=not pixels)
    except Exception as error:
        raise ImageError(path, f"is not a DICOM file ({describe(error)})") from error


def _number(path: Path, header: Any, name: str, absent: float | None) -> Any:
    value = header.get(name)
    if value in (None, ""):
        return absent
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ImageError(path, f"its {name} (={value!r}) is not a number") from error


def _bits(header: Any) -> int:
    return int(header.get("BitsStored") or header.BitsAllocated)


def _stored_dtype(path: Path, header: Any) -> np.dtype:
    """Floats have no sign bit to speak of; a bit for each pixel becomes a byte."""
    bits = int(header.BitsAllocated)
    if bits in _FLOATS and "PixelRepresentation" not in header:
        return np.dtype(_FLOATS[bits])
    if bits not in (1, 8, 16, 32, 64):
        raise ImageError(path, f"has {bits} bits for a value; 1, 8, 16, 32 and 64 are read")
    return np.dtype(f"{'i' if header.get('PixelRepresentation', 0) else 'u'}{max(1, bits // 8)}")


def _rescaling(path: Path, header: Any, frames: int) -> list[tuple[float, float]]:
    """Slope and intercept, of all frames or of each: an enhanced CT has them beside its frames."""

    def of(part: Any) -> tuple[float, float]:
        slope = _number(path, part, "RescaleSlope", 1.0)
        return slope, _number(path, part, "RescaleIntercept", 0.0)

    def inside(group: Any) -> list[tuple[float, float]]:
        return [of(part) for part in group.get("PixelValueTransformationSequence") or ()][:1]

    shared = [
        found for g in header.get("SharedFunctionalGroupsSequence") or () for found in inside(g)
    ]
    each = [
        found for g in header.get("PerFrameFunctionalGroupsSequence") or () for found in inside(g)
    ]
    if each and len(each) != frames:
        raise ImageError(path, f"has {frames} frames, and says of {len(each)} how to rescale them")
    if len(set(each)) == 1:
        each = each[:1]
    return each or shared or [of(header)]


def _rescaled_dtype(
    header: Any, stored: np.dtype, rescaled: Sequence[tuple[float, float]]
) -> np.dtype:
    """Integers where nothing is lost: a CT's values, in Hounsfield units, are 16 bits."""
    if stored.kind == "f":
        return stored
    signed, bits = stored.kind == "i", _bits(header)
    whole_numbers = all(slope == 1 and shift == int(shift) for slope, shift in rescaled)
    most = 2 ** (bits - signed) - 1 + max(shift for _, shift in rescaled)
    least = -signed * 2 ** (bits - 1) + min(shift for _, shift in rescaled)
    exact = whole_numbers and least >= -(2**15) and most < 2**15
    return np.dtype(np.int16 if exact else np.float32)


def _some(rescaled: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"x {slope:g} + {shift:g}" for slope, shift in rescaled[:3])
