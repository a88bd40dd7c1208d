"""Slides of scanners that do not write TIFF, as MIRAX: by OpenSlide."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from ._base import Image, ImageError, Window, describe, require


def open_slide(path: Path, level: int) -> Image:
    """One resolution of a slide, RGB; where there is no tissue it is white."""
    openslide = require("openslide", path, "slides")
    try:
        slide = openslide.OpenSlide(str(path))
    except Exception as error:
        raise ImageError(path, f"OpenSlide cannot open it ({describe(error)})") from error
    if level >= slide.level_count:
        raise ImageError(path, f"has no level {level}: its levels are {slide.level_dimensions}")
    width, height = slide.level_dimensions[level]
    finer = slide.level_downsamples[level]
    lock = threading.Lock()

    def read(window: Window) -> np.ndarray:
        rows, columns = window
        size = columns.stop - columns.start, rows.stop - rows.start
        corner = round(columns.start * finer), round(rows.start * finer)
        with lock:
            region = np.asarray(slide.read_region(corner, level, size), np.uint16)
        alpha = region[..., 3:]  # the colours are not multiplied by it
        return ((region[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)

    side = int(slide.properties.get(f"openslide.level[{level}].tile-height", 256))
    shape = (height, width, 3)
    return Image(path, shape, np.uint8, read, close=slide.close, block=(side, side))
