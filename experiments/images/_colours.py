"""What the numbers of a TIFF look like: palettes, YCbCr, grey of few bits, and 0 that is white.

Images are converted, window by window. Masks are not: their numbers are classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._base import Image, ImageError, Window

_MEANING = 262  # the tag
_MIN_IS_WHITE, _MIN_IS_BLACK, _PALETTE, _INKS, _YCBCR = 0, 1, 3, 5, 6
_LAB = (8, 9, 10)
_INK_SET, _NOT_CMYK = 332, 2
_APERIO_YCBCR = 33003  # JPEG 2000 that is not said to be YCbCr anywhere else
_OF_BYTES = (1, 5, 8, 32773, 32946, 34925, 50000)  # codecs that know nothing of colours


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
    _check_colours(image, page, meaning)
    is_ycbcr = meaning == _YCBCR and page.compression in _OF_BYTES
    if is_ycbcr or page.compression == _APERIO_YCBCR:
        return _from_ycbcr(image, page)
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


def _check_colours(image: Image, page: Any, meaning: int) -> None:
    """Colours that would be taken for red, green and blue."""
    cmyk = meaning == _INKS and page.tags.valueof(_INK_SET) != _NOT_CMYK
    if cmyk or meaning in _LAB:
        raise ImageError(
            image.path,
            f"its colours are {'CMYK' if cmyk else 'CIE L*a*b*'}, and not red, green and blue: "
            "save it as RGB",
        )


def _from_ycbcr(image: Image, page: Any) -> Image:
    """As ITU-R BT.601 says, in the full range of 8 bits; libraries convert that of JPEGs alone."""
    if image.dtype != np.uint8 or page.samplesperpixel != 3:
        raise ImageError(
            image.path,
            f"its colours are YCbCr, of {page.samplesperpixel} x {image.dtype} for a pixel; that "
            "is read of 3 x uint8. Save it as RGB",
        )
    matrix = np.array([[1, 1, 1], [0, -0.344136, 1.772], [1.402, -0.714136, 0]], np.float32)

    def colours(values: np.ndarray) -> np.ndarray:
        centred = values.astype(np.float32) - np.array([0, 128, 128], np.float32)
        return (centred @ matrix).round().clip(0, 255).astype(np.uint8)

    return _converted(image, image.shape, image.dtype, colours)


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
