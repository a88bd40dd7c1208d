"""TIFF by segments: a window decodes only the tiles, or strips, that it touches.

A page is a grid of segments (tiles; or strips, as wide as the image), which are compressed one by
one; with separate planes, one such grid per channel. Of uncompressed pages that lie in one piece
only the bytes of the window are read. The last few megabytes of decoded segments are kept, for
windows that overlap.

Known inefficiency: a strip is as wide as the image, and some programs write one compressed strip
for the whole image; it has to be decoded whole. Tiled files do not have this trouble.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ._base import Image, ImageError, Window, describe, require
from ._colours import as_seen
from ._geo import georeference, nodata_of
from ._ome import level_of
from ._raw import RawArray

CACHE_BYTES = 32 * 2**20
"""Of decoded segments, per open image; the newest segment stays however large it is."""

_PLAIN_KINDS = ("generic", "uniform", "shaped")
"""Kinds of series that say nothing on what further pages are; microscopes' own kinds do."""

_JPEG_COMPRESSIONS = (6, 7, 33007, 34892)


def open_tiff(path: Path, dimensions: int, level: int, mask: bool) -> Image:
    """The first image of a TIFF, at a level of its pyramid; of a volume, a page is a plane.

    A mask has the numbers in the file, and an image what they look like.
    """
    tifffile = require("tifffile", path)
    try:
        file = tifffile.TiffFile(path)
    except Exception as error:
        raise ImageError(path, f"is not a TIFF, or is corrupt ({describe(error)})") from error
    try:
        pages = _pages(path, file, dimensions, (level, mask))
        if dimensions == 2 and _are_rows(file.series[0], pages):
            image = _of_rows(_Reader(path, file, pages, 3))
        else:
            image = _of_segments(_Reader(path, file, pages, dimensions), dimensions, level)
        return image if mask else as_seen(image, pages)
    except Exception as error:
        file.close()
        if isinstance(error, ImageError):
            raise
        raise ImageError(path, f"its header is corrupt ({describe(error)})") from error


def _of_segments(reader: _Reader, dimensions: int, level: int) -> Image:
    segment = (1, reader.shape[-2]) if reader.raw else reader.segment
    return Image(
        reader.path,
        reader.shape,
        reader.dtype,
        reader.read,
        close=reader.close,
        block=(1, *segment) if dimensions == 3 else segment,
        dimensions=dimensions,
        tags=georeference(reader.page) if level == 0 else (),
        nodata=nodata_of(reader.page),
    )


def _pages(path: Path, file: Any, dimensions: int, which: tuple[int, bool]) -> list[Any]:
    """The pages that make up the image: one, or one for each channel; or one for each plane.

    `which` level, and whether it may be the only one.
    """
    if not file.series:
        raise ImageError(path, "is a TIFF without an image in it")
    first, *others = file.series
    reduced = [series for series in others if series.keyframe.is_reduced]
    others = [series for series in others if not series.keyframe.is_reduced]
    if others and first.kind in _PLAIN_KINDS:
        shapes = ", ".join(str(tuple(series.shape)) for series in file.series[:4])
        raise ImageError(path, f"its pages differ ({shapes}); save the one to use in its own file")
    levels = first.levels if len(first.levels) > 1 else _pyramid(first, reduced)
    level = levels[level_of(path, which[0], len(levels), which[1])]
    pages = list(level.pages)
    page = level.keyframe
    separate, depth, *_, contiguous = page.shaped
    stack = math.prod(level.shape) != len(pages) * math.prod(page.shaped) or None in pages
    planes = dimensions == 3 and separate == 1
    if (
        dimensions == 1
        or depth > 1
        or stack
        or (len(pages) > 1 and separate * contiguous > 1 and not planes)
    ):
        raise ImageError(
            path,
            f"holds a stack of images, shape {tuple(level.shape)} (axes {level.axes}); save each "
            "image in its own file, or set `data.dimensions` to 3 if it is a volume",
        )
    return pages


def _are_rows(series: Any, pages: list[Any]) -> bool:
    """Whether pages are rows of one image, with its channels as their columns.

    `tifffile.imwrite(path, array)` writes that of an array (H, W, C), unless it is told otherwise
    or C is 3 or 4. The other way to read it has H channels, more than there are columns.
    """
    separate, _, _, width, contiguous = pages[0].keyframe.shaped
    return (
        series.kind == "shaped"
        and len(series.shape) == 3
        and separate * contiguous == 1
        and width < len(pages)
    )


def _of_rows(reader: _Reader) -> Image:
    height, width, channels, _ = reader.shape

    def read(window: Window) -> np.ndarray:
        return reader.read((*window, slice(0, channels)))[..., 0]

    shape = height, width, channels
    return Image(reader.path, shape, reader.dtype, read, close=reader.close, block=(1, width))


def _pyramid(first: Any, reduced: list[Any]) -> list[Any]:
    """Pages that follow each other, each half as large or less, with the same aspect."""
    levels = [first]
    for series in reduced:
        (h, w), (smaller_h, smaller_w) = (s.keyframe.shaped[2:4] for s in (levels[-1], series))
        if smaller_h < h and abs(h * smaller_w - w * smaller_h) <= max(h, w):
            levels.append(series)
    return levels


class _Reader:
    def __init__(self, path: Path, file: Any, pages: list[Any], dimensions: int):
        self.path, self.file, self.pages, self.volume = path, file, pages, dimensions == 3
        self.page = page = pages[0].keyframe
        self.separate, _, height, width, self.contiguous = page.shaped
        self.shape = (height, width, len(pages) * self.separate * self.contiguous)
        if self.volume:
            self.shape = (len(pages), height, width, self.contiguous)
        if page.dtype is None:
            raise ImageError(
                path, f"{page.bitspersample} bits per sample are not supported; use 8, 16 or 32"
            )
        self.dtype = page.dtype
        self.segment = (
            (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
        )
        self.rows = math.ceil(height / self.segment[0])
        self.columns = math.ceil(width / self.segment[1])
        self.cache: collections.OrderedDict[tuple[int, int], np.ndarray] = collections.OrderedDict()
        self.lock = threading.Lock()
        for page in pages:
            self._check_data(page)
        self.raw = self._raw()
        # Made here: tifffile reads tags of the file for them, which threads must not do later.
        self.decode = self.page.decode
        self.is_jpeg = self.page.compression in _JPEG_COMPRESSIONS
        self.header = self.page.jpegheader if self.is_jpeg else None

    def _check_data(self, page: Any) -> None:
        offsets, counts = page.dataoffsets, page.databytecounts
        expected = self.separate * self.rows * self.columns
        if min(len(offsets), len(counts)) < expected:
            raise ImageError(
                self.path,
                f"is corrupt: {expected} segments make up its {self.shape}, but it lists "
                f"{min(len(offsets), len(counts))}",
            )
        end = max(offset + count for offset, count in zip(offsets, counts, strict=False))
        if end > self.file.filehandle.size:
            raise ImageError(
                self.path,
                f"is truncated: its data reach to byte {end}, but the file has "
                f"{self.file.filehandle.size} bytes",
            )

    def _raw(self) -> list[RawArray] | None:
        """Per page, an array (planes, H, W, channels) in the file; None where that cannot be."""
        if not all(page.is_memmappable for page in self.pages):
            return None
        dtype = np.dtype(self.file.byteorder + self.dtype.char)
        shape = (self.separate, *self.shape[-3:-1], self.contiguous)
        return [RawArray(self.path, dtype, shape, page.dataoffsets[0]) for page in self.pages]

    def close(self) -> None:
        self.file.close()
        for array in self.raw or ():
            array.close()

    def read(self, window: Window) -> np.ndarray:
        *depth, rows, columns = window
        planes = range(len(self.pages) * self.separate)[depth[0] if depth else slice(None)]
        size = rows.stop - rows.start, columns.stop - columns.start
        values = np.empty((len(planes), *size, self.contiguous), self.dtype)
        for i, plane in enumerate(planes):
            page, sample = divmod(plane, self.separate)
            if self.raw is not None:
                bounds = [(p.start, p.stop) for p in (rows, columns)]
                slices = (sample, sample + 1), *bounds, (0, self.contiguous)
                values[i] = self.raw[page].read(*slices)[0]
            elif values.size:
                self._fill(values[i], (rows, columns), page, sample)
        if self.volume:
            return values
        return np.moveaxis(values, 0, 2).reshape(*size, self.shape[2])

    def _fill(self, values: np.ndarray, window: Window, page: int, sample: int) -> None:
        (y0, y1), (x0, x1) = ((p.start, p.stop) for p in window)
        height, width = self.segment
        places = [
            (row, column)
            for row in range(y0 // height, (y1 - 1) // height + 1)
            for column in range(x0 // width, (x1 - 1) // width + 1)
        ]

        def copy(place: tuple[int, int]) -> None:
            row, column = place
            segment = self._segment(page, (sample * self.rows + row) * self.columns + column)
            top, left = row * height, column * width
            bottom, right = top + segment.shape[0], left + segment.shape[1]
            rows, columns = (max(y0, top), min(y1, bottom)), (max(x0, left), min(x1, right))
            values[rows[0] - y0 : rows[1] - y0, columns[0] - x0 : columns[1] - x0] = segment[
                rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left
            ]

        if len(places) < 4:
            for place in places:
                copy(place)
        else:
            list(_decoders().map(copy, places))

    def _segment(self, page: int, index: int) -> np.ndarray:
        """One decoded tile or strip, (h, w, channels), cut at the image's edges.

        Several threads decode at the same time; the file is read by one of them at a time.
        """
        key = page, index
        with self.lock:
            if key in self.cache:
                self.cache.move_to_end(key)
                return self.cache[key]
            data = self._data(page, index)
        segment = self._decode(page, index, data)
        with self.lock:
            self.cache[key] = segment
            held = sum(value.nbytes for value in self.cache.values())
            while held > CACHE_BYTES and len(self.cache) > 1:
                held -= self.cache.popitem(last=False)[1].nbytes
        return segment

    def _data(self, page: int, index: int) -> bytes | None:
        """None: a segment without bytes was never written, and all of it has one value."""
        offset = self.pages[page].dataoffsets[index]
        count = self.pages[page].databytecounts[index]
        if not count:
            return None
        self.file.filehandle.seek(offset)
        data = self.file.filehandle.read(count)
        if len(data) < count:
            raise ImageError(
                self.path,
                f"is truncated: it was longer when it was opened, and ends before byte "
                f"{offset + count}",
            )
        return data

    def _decode(self, page: int, index: int, data: bytes | None) -> np.ndarray:
        arguments = {}
        if self.is_jpeg:
            arguments = {"jpegtables": self.pages[page].jpegtables, "jpegheader": self.header}
        try:
            segment, _, (_, *shape) = self.decode(data, index, **arguments)
        except Exception as error:
            kind = "tile" if self.page.is_tiled else "strip"
            raise ImageError(self.path, _undecodable(kind, index, error)) from error
        if segment is None:
            return np.full(shape, self.page.nodata, self.dtype)
        return segment[0]


@functools.cache
def _decoders() -> ThreadPoolExecutor:
    """For all images; libraries that decode let other threads run."""
    return ThreadPoolExecutor(os.cpu_count(), "decode")


def _undecodable(kind: str, index: int, error: Exception) -> str:
    if "imagecodecs" in str(error) and "requires" in str(error):
        return f"its compression needs another package: pip install imagecodecs ({error})"
    return f"{kind} {index} cannot be decoded: the file is corrupt ({describe(error)})"
