"""Where in an image training windows lie: in regions that people drew, or where a mask is not 0.

Beside `images/NAME.tif` there is, in a folder that `data.regions` names, one of

* `NAME.geojson` (or `.json`): polygons, as QuPath and others write them, in (x, y) pixels;
* `NAME.csv`: boxes, with the columns `top,left,bottom,right`, in pixels;
* `NAME.png` or another image: what is not 0; it may be smaller than the image, as a thumbnail is.

Pixels are those of the resolution that is read. The centre of each window is a point of a region,
all points being as likely. A window at the edge of the image is moved inside.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..images import ImageError, is_image_name, open_image, suffix_of
from ._dataset import DataError

_LARGEST_MASK = 2**27  # pixels
_TRIES = 10_000  # points of a box until one lies in its polygon


class Region(Protocol):
    def draw(self, rng: np.random.Generator, size: Sequence[int]) -> Sequence[float]:
        """A point of it, in an image of this size."""

    def misfit(self, size: Sequence[int]) -> str | None:
        """Why it is no region of an image of this size, up to that image's name."""


def starts(
    region: Region, rng: np.random.Generator, size: Sequence[int], window: Sequence[int]
) -> list[int]:
    """The first pixel of a window whose centre lies in the region, but that lies in the image."""
    centre = region.draw(rng, size)
    found = [math.floor(c - n / 2 + 0.5) for c, n in zip(centre, window, strict=True)]
    return [min(max(a, 0), n - m) for a, n, m in zip(found, size, window, strict=True)]


def read_regions(
    folder: Path, sizes: dict[Path, Sequence[int]], dimensions: int
) -> dict[Path, Region]:
    """Of each image, of such a size, its region; one without, or outside of it, is an error."""
    if not folder.is_dir():
        raise DataError(folder, "there is no such folder; `data.regions` names it")
    by_name: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        stem = file.name[: -len(suffix_of(file)) or None]
        if stem in by_name and not file.name.startswith("."):
            raise DataError(folder, f"{by_name[stem].name} and {file.name} are of one image")
        by_name[stem] = file
    found: dict[Path, Region] = {}
    for image, size in sizes.items():
        name = image.name if image.is_dir() else image.name[: -len(suffix_of(image))]
        file = by_name.get(name.removesuffix(".zarr").removesuffix(".ome"))
        if file is None:
            raise DataError(folder, f"has no regions for {image.name}: a .geojson, .csv or image")
        found[image] = _read(file, dimensions)
        if reason := found[image].misfit(size):
            raise DataError(file, f"{reason} {image.name}, which is {_times(size)} pixels")
    return found


def _times(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _read(file: Path, dimensions: int) -> Region:
    if is_image_name(file):
        return Where(file, dimensions)
    if dimensions != 2:
        raise DataError(file, "regions of volumes are masks, as .nii or .zarr")
    try:
        polygons = _from_csv(file) if suffix_of(file) == ".csv" else _from_geojson(file)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(file, f"are no regions: {type(error).__name__} {error}") from error
    if not polygons:
        raise DataError(file, "has no region")
    if not all(np.isfinite(ring).all() for polygon in polygons for ring in polygon):
        raise DataError(file, "has corners that are not finite")
    return Polygons(polygons)


def _from_csv(file: Path) -> list[list[np.ndarray]]:
    with open(file, newline="") as lines:
        rows = [{k.strip(): float(v) for k, v in row.items()} for row in csv.DictReader(lines)]
    corners = [(r["top"], r["left"], r["bottom"], r["right"]) for r in rows]
    return [[np.array([[t, l], [t, r], [b, r], [b, l]])] for t, l, b, r in corners]  # noqa: E741


def _from_geojson(file: Path) -> list[list[np.ndarray]]:
    """Polygons, each a ring and its holes, of any nesting that GeoJSON has."""
    found: list[list[np.ndarray]] = []

    def take(thing: Any) -> None:
        if isinstance(thing, list):
            for each in thing:
                take(each)
        elif thing["type"] == "Polygon":
            found.append([np.array(ring, float)[:, 1::-1] for ring in thing["coordinates"]])
        elif thing["type"] == "MultiPolygon":
            take([{"type": "Polygon", "coordinates": c} for c in thing["coordinates"]])
        else:
            inside = ("features", "geometry", "geometries")
            take([thing[name] for name in inside if thing.get(name)])

    take(json.loads(file.read_text()))
    return found


class Polygons:
    """Regions with corners (y, x); further rings of one are its holes."""

    def __init__(self, polygons: Sequence[Sequence[np.ndarray]]):
        self.polygons = polygons
        areas = np.array([abs(_area(p[0])) - sum(abs(_area(h)) for h in p[1:]) for p in polygons])
        areas = np.maximum(areas, 0)
        self.shares = (
            areas / areas.sum() if areas.sum() > 0 else np.full(len(areas), 1 / len(areas))
        )

    def misfit(self, size: Sequence[int]) -> str | None:
        corners = np.concatenate([polygon[0] for polygon in self.polygons])
        low, high = corners.min(0), corners.max(0)
        boxes = [(p[0].min(0), p[0].max(0)) for p in self.polygons]
        if any((a < size).all() and (b > 0).all() for a, b in boxes):
            return None
        (top, left), (bottom, right) = low, high
        return (
            f"lies in rows {top:g} to {bottom:g} and columns {left:g} to {right:g}, outside of "
            "the image (are these pixels of the resolution that is read?):"
        )

    def draw(self, rng: np.random.Generator, size: Sequence[int]) -> Sequence[float]:
        """What lies outside of the image is no part of it."""
        for _ in range(_TRIES):
            point = self._point(rng)
            if (point >= 0).all() and (point < size).all():
                break
        return point

    def _point(self, rng: np.random.Generator) -> np.ndarray:
        polygon = self.polygons[rng.choice(len(self.polygons), p=self.shares)]
        low, high = polygon[0].min(0), polygon[0].max(0)
        point = (low + high) / 2
        for _ in range(_TRIES):
            point = rng.uniform(low, high)
            if sum(_is_inside(ring, point) for ring in polygon) % 2:
                break
        return point


def _area(ring: np.ndarray) -> float:
    """
    >>> _area(np.array([[0, 0], [0, 3], [2, 3], [2, 0]]))
    -6.0
    """
    (y, x), (v, u) = ring.T, np.roll(ring, -1, 0).T
    return float((x * v - u * y).sum() / 2) * -1


def _is_inside(ring: np.ndarray, point: np.ndarray) -> bool:
    """Whether a line from the point to the right crosses the ring an odd number of times."""
    (y, x), (v, u) = ring.T, np.roll(ring, -1, 0).T
    crosses = (y > point[0]) != (v > point[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        at = x + (point[0] - y) / (v - y) * (u - x)
    return bool((crosses & (point[1] < at)).sum() % 2)


class Where:
    """Where a mask, which may be smaller than the image, is not 0."""

    def __init__(self, file: Path, dimensions: int):
        with open_image(file, dimensions, mask=True) as mask:
            *self.shape, _ = mask.shape
            if math.prod(self.shape) > _LARGEST_MASK:
                raise ImageError(file, f"{self.shape} is too large for regions: make it smaller")
            values = mask[tuple(slice(0, n) for n in self.shape)]
        self.places = np.flatnonzero((values != 0).any(-1))
        if not len(self.places):
            raise DataError(file, "is 0 everywhere: no window can lie there")

    def misfit(self, size: Sequence[int]) -> str | None:
        """A thumbnail has the shape of its image, to a pixel and a hundredth."""
        factors = [
            (n / (1.01 * m + 1), n / max(0.99 * m - 1, 1e-9))
            for n, m in zip(size, self.shape, strict=True)
        ]
        if max(least for least, _ in factors) <= min(most for _, most in factors):
            return None
        return f"is {_times(self.shape)} pixels, which is not the shape of"

    def draw(self, rng: np.random.Generator, size: Sequence[int]) -> Sequence[float]:
        place = np.unravel_index(self.places[rng.integers(len(self.places))], self.shape)
        within = rng.random(len(self.shape))
        return [(a + r) * n / m for a, r, n, m in zip(place, within, size, self.shape, strict=True)]
