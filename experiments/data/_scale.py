"""What is read becomes uint8, or keeps its values in another type; with as many channels as wanted.

To become uint8, values of 8 bits stay as they are. Of other types, a range (the one that the
training images have, or one that is given) becomes 0 to 255, linearly, and what lies beyond it 0 or
255. An image that has as many channels as are wanted keeps them. If not, alpha is dropped, grey is
repeated for three channels, and three channels become grey as their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..images import Image, ImageError

NOT_FINITE = (
    "holds values that are not finite: if such pixels have no data, name them in `data.nodata`, as "
    '(float("nan"),); if one channel lacks them, write another value there'
)
_AT_ONCE = 2**20  # values that are computed with in 64 bits


class Scale:
    """Values from `low` to `high` become 0 to 255; what was met beyond them is remembered."""

    def __init__(self, low: float, high: float):
        if not low < high:
            raise ValueError(f"a range (=({low}, {high})) must be a smaller and a larger number")
        self.low, self.high = low, high
        self.lowest, self.highest = low, high

    def bytes(self, values: np.ndarray) -> np.ndarray:
        """
        >>> Scale(0, 4095).bytes(np.array([[0, 2048, 4095, 5000]], np.uint16))
        array([[  0, 128, 255, 255]], dtype=uint8)
        """
        out = np.empty(values.shape, np.uint8)
        rows = max(1, _AT_ONCE // max(1, values[:1].size))
        for y in range(0, len(values), rows):
            part = values[y : y + rows].astype(np.float64)
            lowest, highest = part.min(initial=self.low), part.max(initial=self.high)
            if not np.isfinite((lowest, highest)).all():
                raise ValueError(NOT_FINITE)
            self.lowest, self.highest = min(self.lowest, lowest), max(self.highest, highest)
            part -= self.low
            part *= 255 / (self.high - self.low)
            out[y : y + rows] = np.rint(np.clip(part, 0, 255, out=part))
        return out

    def beyond(self) -> str | None:
        """What was cut, as a sentence."""
        if (self.lowest, self.highest) == (self.low, self.high):
            return None
        return (
            f"values from {self.lowest:.10g} to {self.highest:.10g} were met, and what lies beyond "
            f"{self} was cut"
        )

    def __str__(self) -> str:
        return f"{self.low:.10g} to {self.high:.10g}"


def colours(values: np.ndarray) -> np.ndarray:
    """Without alpha."""
    return values[..., : {2: 1, 4: 3}.get(values.shape[-1], values.shape[-1])]


def check_channels(path: Path, found: int, wanted: int) -> None:
    """Raise an error if an image cannot have as many channels as are wanted."""
    if found != wanted and (found > 4 or wanted not in (1, 3)):
        raise ImageError(
            path,
            f"has {found} channels, where {wanted} are wanted (`data.channels`); only grey and "
            "colours become each other. For planes of a volume, set `data.dimensions` to 3",
        )


def as_bytes(values: np.ndarray, channels: int, scale: Scale | None = None) -> np.ndarray:
    """uint8 with so many channels, by the rules above.

    >>> as_bytes(np.array([[[10, 20, 31, 99]]], np.uint8), 1)
    array([[[20]]], dtype=uint8)
    """
    values = values if values.shape[-1] == channels else colours(values)
    if values.dtype != np.uint8:
        if scale is None:
            raise ValueError(f"its values are {values.dtype}, and no range is known for them")
        values = scale.bytes(values)
    if values.shape[-1] == channels:
        return values
    if channels == 3:
        return np.repeat(values, 3, axis=-1)
    return ((values.astype(np.uint16).sum(-1, keepdims=True) + 1) // 3).astype(np.uint8)


def as_they_are(values: np.ndarray, channels: int, dtype: np.dtype) -> np.ndarray:
    """The same in another type than 8 bits: values keep their meaning. Only a mean is rounded, if
    the type is one of integers.

    >>> as_they_are(np.array([[[10, 20, 30]]], np.uint16), 1, np.dtype("float32"))
    array([[[20.]]], dtype=float32)
    """
    if not np.can_cast(values.dtype, dtype, "same_kind" if dtype.kind == "f" else "safe"):
        raise ValueError(f"its values are {values.dtype}, which `data.dtype` ({dtype}) cannot hold")
    values = values if values.shape[-1] == channels else colours(values)
    if values.shape[-1] != channels and channels == 3:
        values = np.repeat(values, 3, -1)
    elif values.shape[-1] != channels:
        mean = values.mean(-1, keepdims=True)
        values = np.rint(mean) if dtype.kind in "ui" else mean
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(NOT_FINITE if not np.isfinite(values).all() else _too_large(values, dtype))
    return found


def _too_large(values: np.ndarray, dtype: np.dtype) -> str:
    largest = float(np.abs(values).max())
    return f"holds {largest:.6g}, which `data.dtype` ({dtype}) cannot: take float32"


def is_nodata(values: np.ndarray, nodata: Sequence[float]) -> np.ndarray:
    """Where all channels of a pixel have one of these values; `float("nan")` may be one.

    >>> is_nodata(np.array([[[0, 0], [0, 7]]]), (0,))
    array([[ True, False]])
    """
    try:
        numbers = np.asarray(nodata, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`nodata` (={tuple(nodata)}) must be numbers") from error
    if values.dtype.kind != "f":
        return np.isin(values, numbers).all(-1)
    with np.errstate(over="ignore"):
        lacking = np.isin(values, numbers.astype(values.dtype))  # with the digits of the file
    if np.isnan(numbers).any():
        lacking |= np.isnan(values)
    return lacking.all(-1)


def not_listed(
    path: Path,
    declared: float | None,
    dtype: np.dtype,
    nodata: Sequence[float],
    trained: bool = False,
) -> str | None:
    """A warning, if a file names a value of pixels without data, and `nodata` does not.

    `trained`: is it too late to change that?
    """
    if declared is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        value = np.array([[declared]]).astype(dtype)
    if is_nodata(value, nodata)[0] or (dtype.kind != "f" and value[0, 0] != declared):
        return None  # no integer is a fraction, or NaN
    text = 'float("nan")' if np.isnan(declared) else repr(declared)
    option = f"`data.nodata = ({text},)`"
    but = f"the network was trained without {option}, and takes them as any others"
    if not trained:
        but = f"here they count as any others: {option} leaves them out"
    return f"warning: {path} says that pixels of {declared} have no data, but {but}"


def read_pixels(
    image: Image,
    place: Sequence[slice],
    channels: int,
    scale: Scale | None,
    dtype: np.dtype,
    nodata: Sequence[float] = (),
) -> np.ndarray:
    """A window of an image, by the rules above; pixels without data become 0 before."""
    values = image[tuple(place)]
    if nodata:
        nothing = values.dtype.type(0)
        if dtype == np.uint8 and values.dtype != np.uint8 and scale is not None:
            nothing = np.float64(np.clip(0, scale.low, scale.high))  # no value that was met beyond
        values = np.where(is_nodata(values, nodata)[..., None], nothing, values)
    try:
        if dtype == np.uint8:
            return as_bytes(values, channels, scale)
        return as_they_are(values, channels, dtype)
    except ValueError as error:
        raise ImageError(image.path, str(error)) from error
