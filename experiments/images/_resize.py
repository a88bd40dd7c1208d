"""An image at another size: for classes of whole images, which come in all sizes."""

from __future__ import annotations

import threading

import numpy as np

from ._base import Image, ImageError, WholeImage, Window, require
from ._open import LARGEST_WHOLE


def resized(image: Image, size: int) -> Image:
    """The whole image as `size` x `size` pixels: bilinear, and where it shrinks all pixels count.

    It is decoded whole when it is first read, and kept until it is closed.
    """
    pillow = require("PIL.Image", image.path)
    height, width, channels = image.shape
    if height * width > LARGEST_WHOLE:
        raise ImageError(image.path, f"{height} x {width} pixels are too many to be resized")
    lock, held = threading.Lock(), []

    def one(channel: np.ndarray) -> np.ndarray:
        exact = channel if image.dtype == np.uint8 else channel.astype(np.float32)
        found = np.asarray(pillow.fromarray(exact).resize((size, size), pillow.BILINEAR))
        return np.rint(found) if image.dtype.kind in "ui" else found

    def read(window: Window) -> np.ndarray:
        with lock:
            if not held:
                whole = image[0:height, 0:width]
                parts = [one(np.ascontiguousarray(whole[..., c])) for c in range(channels)]
                held.append(np.stack(parts, -1).astype(image.dtype))
            return held[0][window]

    def close() -> None:
        held.clear()
        image.close()

    shape = (size, size, channels)
    return WholeImage(image.path, shape, image.dtype, read, close=close, block=(size, size))
