"""What the numbers of a TIFF look like: palettes, grey values of few bits, and 0 that is white.

Images are converted, window by window. Masks are not: their numbers are classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._base import Image, ImageError, Window

_MEANING = 262  # the tag
_MIN_IS_WHITE, _MIN_IS_BLACK, _PALETTE = 0, 1, 3


def as_seen(image: Image, pages: list[Any]) -> Image:
    """Colours for the indices of a palette, 0 to 255 for 1, 2 and 4 bits, and 0 for black.

    Args:
      image: with the numbers of the file.
      pages: of the file, which make up the image.
    """
    page = pages[0].keyframe
    meaning = page.tags.valueof(_MEANING)
    if meaning == _PALETTE:
        return _coloured(image, _palette(image, page, pages))
    few = meaning in (_MIN_IS_WHITE, _MIN_IS_BLACK) and page.bitspersample in (1, 2, 4)
    if meaning == _MIN_IS_WHITE:
        _check_white(image, page)
    elif not few:
        return image
    largest = 2**page.bitspersample - 1
    factor, dtype = 255 // largest if few else 1, image.dtype

    def grey(values: np.ndarray) -> np.ndarray:
        values = values.astype(dtype)
        values = dtype.type(largest) - values if meaning == _MIN_IS_WHITE else values
        return values * dtype.type(factor)

    return _converted(image, image.shape, dtype, grey)


def _coloured(image: Image, palette: np.ndarray) -> Image:
    def colours(values: np.ndarray) -> np.ndarray:
        return palette[values[..., 0].astype(np.intp)]

    return _converted(image, (*image.shape[:-1], 3), palette.dtype, colours)


def _palette(image: Image, page: Any, pages: list[Any]) -> np.ndarray:
    """The colours, (number, 3); all pages must have the same."""
    if image.shape[-1] != 1:
        raise ImageError(
            image.path,
            f"has a palette, and {image.shape[-1]} channels of indices: save it with its colours",
        )
    others = [other for other in pages[1:] if not other.is_virtual]  # these have no header
    found = [page.colormap, *(other.aspage().colormap for other in others)]
    if any(palette is None for palette in found):
        raise ImageError(image.path, "is corrupt: its pixels are indices, but it has no palette")
    if not all(np.array_equal(palette, found[0]) for palette in found):
        raise ImageError(image.path, "its pages have different palettes: save it with its colours")
    palette = np.asarray(found[0]).T
    return (palette if palette.max() < 256 else palette >> 8).astype(np.uint8)


def _check_white(image: Image, page: Any) -> None:
    if image.dtype.kind != "u" or page.samplesperpixel != 1:
        raise ImageError(
            image.path,
            f"says that 0 is white (MinIsWhite), of {page.samplesperpixel} x {image.dtype} for a "
            "pixel; that is read of one unsigned integer only. Save it with 0 as black",
        )


def _converted(
    image: Image,
    shape: tuple[int, ...],
    dtype: np.dtype,
    convert: Callable[[np.ndarray], np.ndarray],
) -> Image:
    def read(window: Window) -> np.ndarray:
        return convert(image[window])

    return Image(
        image.path,
        shape,
        dtype,
        read,
        close=image.close,
        block=image.block,
        dimensions=len(shape) - 1,
        tags=image.tags,
    )
