"""What a file has beside its pixels: smaller copies for viewers, and what the values mean."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._base import require

_TILE = 512
Tag = tuple[int, int, int, Any, bool]
"""Of a TIFF: code, type, count, value, and False for only in the first page."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a file says of its pixels."""

    classes: Sequence[tuple[int, str, tuple[int, int, int]]] = ()
    """Of a mask: each class's value, name and colour. Its smaller copies have no values between."""
    tags: Sequence[Tag] = ()
    """Of a TIFF: where on Earth it lies."""


def is_ome(path: Path) -> bool:
    return path.name.lower().endswith(".ome.zarr")


def store(array: Any, place: tuple[slice, ...], values: np.ndarray) -> None:
    """Write a window of an array of NumPy or tensorstore."""
    if isinstance(array, np.ndarray):
        array[place] = values
    else:
        array[place].write(values).result()


def sizes(space: Sequence[int]) -> list[tuple[int, ...]]:
    """Of the smaller copies, each half as large, until one fits into a tile.

    >>> sizes((3000, 1000))
    [(1500, 500), (750, 250), (375, 125)]
    """
    found = [tuple(space)]
    while max(found[-1]) > _TILE:
        found.append(tuple(-(-n // 2) for n in found[-1]))
    return found[1:]


def halve(source: Any, target: Any, nearest: bool) -> None:
    """Write the copy of half the size, block by block."""
    side = 2 * _TILE if len(source.shape) < 4 else _TILE // 4
    for corner in itertools.product(*(range(0, n, side) for n in source.shape[:-1])):
        part = tuple(slice(a, min(a + side, n)) for a, n in zip(corner, source.shape, strict=False))
        values = source[part]
        values = np.asarray(values if isinstance(values, np.ndarray) else values.read().result())
        place = tuple(slice(p.start // 2, -(-p.stop // 2)) for p in part)
        store(target, place, _halved(values, nearest))


def _halved(values: np.ndarray, nearest: bool) -> np.ndarray:
    """
    >>> _halved(np.array([[1, 3], [5, 7], [9, 9]])[..., None], nearest=False)[..., 0]
    array([[4],
           [9]])
    """
    if nearest:
        return values[tuple(slice(None, None, 2) for _ in values.shape[:-1])]
    mean = values.astype(np.float64)
    for axis in range(values.ndim - 1):
        odd = [(0, mean.shape[axis] % 2 if d == axis else 0) for d in range(mean.ndim)]
        mean = np.pad(mean, odd, mode="edge")
        first, second = (np.take(mean, range(i, mean.shape[axis], 2), axis) for i in (0, 1))
        mean = (first + second) / 2
    return (np.rint(mean) if values.dtype.kind in "ui" else mean).astype(values.dtype)


def write_tiff(path: Path, array: np.ndarray, meaning: Meaning) -> None:
    """A TIFF of compressed tiles, with smaller copies; several threads compress."""
    tifffile = require("tifffile", path)
    levels = [array]
    for i, size in enumerate(sizes(array.shape[:-1])):
        file = path.with_name(f"level{i}.npy")
        shape = (*size, array.shape[-1])
        levels.append(np.lib.format.open_memmap(file, "w+", array.dtype, shape))
        halve(levels[-2], levels[-1], bool(meaning.classes))
    first = {"subifds": len(levels) - 1, "extratags": list(meaning.tags), **_described(meaning)}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for i, level in enumerate(levels):
            more = first if i == 0 else {"subfiletype": 1}
            _write_level(file, level, meaning, more)


def _write_level(file: Any, array: np.ndarray, meaning: Meaning, more: dict[str, Any]) -> None:
    channels = array.shape[-1]
    colour = channels in (3, 4) and array.dtype in (np.uint8, np.uint16)
    more["photometric"] = "rgb" if colour else "minisblack"
    if meaning.classes and array.dtype == np.uint8 and channels == 1:
        more |= {"photometric": "palette", "colormap": _palette(meaning)}
    if channels > 1:
        more["planarconfig"] = "contig"
    if channels == 4 and colour:
        more["extrasamples"] = ["unassalpha"]
    # As many samples a pixel as a TIFF wants: one is no axis.
    stored = array if channels > 1 else array[..., 0]

    def tiles() -> Iterator[np.ndarray]:
        for y, x in itertools.product(*(range(0, n, _TILE) for n in stored.shape[:2])):
            part = stored[y : y + _TILE, x : x + _TILE]
            missing = [(0, _TILE - n) for n in part.shape[:2]]
            yield np.pad(part, [*missing, *[(0, 0)] * (part.ndim - 2)])

    file.write(
        tiles(),
        shape=stored.shape,
        dtype=stored.dtype,
        tile=(_TILE, _TILE),
        compression="zlib",
        metadata=None,
        maxworkers=os.cpu_count(),
        **more,
    )


def _palette(meaning: Meaning) -> np.ndarray:
    table = np.zeros((3, 256), np.uint16)
    for value, _, colour in meaning.classes:
        table[:, value] = np.array(colour) * 257
    return table


def _described(meaning: Meaning) -> dict[str, str]:
    """Classes, for people and programs: JSON in the image's description."""
    classes = [
        {"value": value, "name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)}
        for value, name, colour in meaning.classes
    ]
    return {"description": json.dumps({"classes": classes})} if classes else {}


def write_levels(
    group: Path, array: Any, meaning: Meaning, create: Callable[[Path, Any, Any], Any]
) -> None:
    """The smaller copies of an OME-Zarr group, after the first array."""
    for i, size in enumerate(sizes(array.shape[:-1]), 1):
        shape = (*size, array.shape[-1])
        smaller = create(group / str(i), shape, array.dtype.numpy_dtype)
        halve(array, smaller, bool(meaning.classes))
        array = smaller


def ome_metadata(group: Path, path: Path, shape: Sequence[int], meaning: Meaning) -> None:
    """What makes a group of arrays an OME-Zarr image; of a mask, its classes."""
    axes = "zyx"[-(len(shape) - 1) :]
    count = 1 + len(sizes(shape[:-1]))
    scales = [{"type": "scale", "scale": [1.0, *[float(2**i)] * len(axes)]} for i in range(count)]
    found: dict[str, Any] = {
        "multiscales": [
            {
                "version": "0.4",
                "name": path.name.removesuffix(".ome.zarr"),
                "axes": [
                    {"name": "c", "type": "channel"},
                    *({"name": a, "type": "space"} for a in axes),
                ],
                "datasets": [
                    {"path": str(i), "coordinateTransformations": [scale]}
                    for i, scale in enumerate(scales)
                ],
                "type": "nearest" if meaning.classes else "mean",
            }
        ]
    }
    if meaning.classes:
        found["image-label"] = {
            "version": "0.4",
            "colors": [{"label-value": v, "rgba": [*c, 255]} for v, _, c in meaning.classes],
            "properties": [{"label-value": v, "class": name} for v, name, _ in meaning.classes],
        }
    (group / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (group / ".zattrs").write_text(json.dumps(found, indent=1))
