"""Examples from files: windows of images and of their masks, and nothing more, are read.

All headers are read at the start, so that most bad files are found before training begins.

What is read becomes uint8 with 1 or 3 channels by these rules: 16-bit values are divided by 256;
other dtypes are an error; alpha is dropped; grey is repeated for three channels; three channels
become grey as their mean, to the nearest integer.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..images import Image, ImageError, open_image
from ._dataset import IGNORED, DataError, Dataset, Geometry
from ._listing import Item, Listing

_OPEN_IMAGES = 8
"""Kept open by each thread, with the parts of them that were decoded last."""

_MASKS_LOOKED_AT = 8


class Folder(Dataset):
    def __init__(
        self,
        found: Listing,
        geometry: Geometry,
        *,
        classes: int,
        mask_values: Sequence[int] = (),
        on_bad_file: str = "error",
    ):
        self.path, self.geometry, self.masks = found.path, geometry, found.masks
        self.mask_values = np.asarray(mask_values or range(classes), np.int64)
        if len(self.mask_values) != classes:
            raise ValueError(
                f"`mask_values` (={tuple(mask_values)}) must have {classes} values, one for each "
                "class"
            )
        self._of_thread = threading.local()  # an open file has a position: one reader each
        size = geometry.size or (1, 1)  # until the images have been looked at
        label_shape = (geometry.label_size or size) if found.masks else ()
        super().__init__(
            (*size, geometry.channels),
            label_shape,
            classes=classes,
            augment=geometry.augment,
            on_bad_file=on_bad_file,
        )
        self.ignored = found.ignored
        self.items, shapes = self._checked(found)
        if geometry.size is None:
            size = self._common_shape(shapes)
            self.shape = (*size, geometry.channels)
            self.label_shape = (geometry.label_size or size) if found.masks else ()
        self.border = geometry.border(size) if found.masks else (0, 0)
        if found.masks and not mask_values:
            self._check_not_black_and_white()

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self._name(self.items[index].image)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.path) if path.is_relative_to(self.path) else path)

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        item = self.items[index]
        image = self._image(item.image)
        height, width = self.shape[:2]
        spare = image.shape[0] - height, image.shape[1] - width
        if min(spare) < 0:
            raise DataError(item.image, f"was changed, and is now smaller: {image.shape}")
        y, x = [n // 2 for n in spare] if rng is None else [rng.integers(n + 1) for n in spare]
        values = as_bytes(image[y : y + height, x : x + width], self.shape[2])
        if not self.masks:
            return values, np.int32(item.label)
        mask = self._image(item.label)
        y, x = y + self.border[0], x + self.border[1]
        height, width = self.label_shape
        return values, self._classes(item.label, mask[y : y + height, x : x + width][..., 0])

    def _classes(self, path: Path, mask: np.ndarray) -> np.ndarray:
        classes = np.full(mask.shape, IGNORED, np.uint8)
        for index, value in enumerate(self.mask_values):
            classes[mask == value] = index
        wrong = (classes == IGNORED) & (mask != IGNORED)
        if wrong.any():
            values = ", ".join(map(str, self.mask_values[:10]))
            raise DataError(
                path,
                f"holds the value {mask[wrong][0]}; with {self.classes} classes a mask has {values}"
                f" and, for what does not count, {IGNORED}. Set `data.classes`, or "
                "`data.mask_values` to the value of each class",
            )
        return classes

    def _check_not_black_and_white(self) -> None:
        """Masks of 0 and 255 would train on nothing but background."""
        values: set[int] = set()
        for index in range(min(_MASKS_LOOKED_AT, len(self))):
            with contextlib.suppress(ImageError):  # reported when it is its turn
                values |= set(np.unique(self.read(index, None)[1]).tolist())
        if IGNORED in values and values <= {0, IGNORED}:
            raise DataError(
                self.items[0].label,
                f"this mask and others hold only 0 and {IGNORED}, and {IGNORED} stands for what "
                f"does not count. If it is a class, set `data.mask_values` to (0, {IGNORED}); if "
                f"not, to {tuple(range(self.classes))}",
            )

    def _image(self, path: Path) -> Image:
        """Opened, or still open. Formats without windows are not kept: they hold all pixels."""
        if not hasattr(self._of_thread, "images"):
            self._of_thread.images = collections.OrderedDict()
        images: collections.OrderedDict[Path, Image] = self._of_thread.images
        image = images.pop(path, None) or open_image(path)
        if not image.whole:
            images[path] = image
            while len(images) > _OPEN_IMAGES:
                images.popitem(last=False)[1].close()
        return image

    def _checked(self, found: Listing) -> tuple[list[Item], list[tuple[int, int]]]:
        items, shapes = [], []
        for item in found.items:
            try:
                shapes.append(self._check(item))
                items.append(item)
            except ImageError as error:
                if self.on_bad_file == "error":
                    raise
                self.skipped[self._name(item.image)] = str(error)
        if not items:
            first = next(iter(self.skipped.values()))
            raise DataError(self.path, f"all {len(self.skipped)} files are bad; first, {first}")
        return items, shapes

    def _check(self, item: Item) -> tuple[int, int]:
        """What the headers say, of one image and its mask."""
        with open_image(item.image) as image:
            shape, dtype = image.shape, image.dtype
        if dtype not in (np.uint8, np.uint16):
            raise DataError(
                item.image,
                f"its values are {dtype}; convert them to uint8, or to uint16, which is divided by "
                "256",
            )
        if shape[2] > 4:
            raise DataError(item.image, f"has {shape[2]} channels, {shape}, where at most 4 can be")
        size = self.geometry.size
        if size is not None and (shape[0] < size[0] or shape[1] < size[1]):
            raise DataError(item.image, f"its shape {shape} is smaller than `size`, {size}")
        if isinstance(item.label, Path):
            self._check_mask(item.image, shape, item.label)
        return shape[:2]

    def _check_mask(self, image: Path, shape: tuple[int, int, int], path: Path) -> None:
        with open_image(path) as mask:
            if mask.shape[2] != 1:
                raise DataError(
                    path,
                    f"a mask has one channel, a class for each pixel, but this has {mask.shape[2]}",
                )
            if mask.dtype.kind not in "ui":
                raise DataError(path, f"a mask has integers, but this has {mask.dtype}")
            if mask.shape[:2] != shape[:2]:
                raise DataError(
                    path, f"its shape {mask.shape} is not that of its image {image}, {shape}"
                )

    def _common_shape(self, shapes: list[tuple[int, int]]) -> tuple[int, int]:
        for item, shape in zip(self.items, shapes, strict=True):
            if shape != shapes[0]:
                raise DataError(
                    item.image,
                    f"is {shape} but {self.items[0].image} is {shapes[0]}: whole images must have "
                    "one shape; set `size` to take windows of them",
                )
        return shapes[0]


def as_bytes(values: np.ndarray, channels: int) -> np.ndarray:
    """uint8 with 1 or 3 channels, by the rules above.

    >>> as_bytes(np.array([[[0x1234, 0x2000, 0x31FF, 0xFFFF]]], np.uint16), 1)
    array([[[33]]], dtype=uint8)
    """
    if values.dtype == np.uint16:
        values = (values >> 8).astype(np.uint8)
    values = values[..., : 1 if values.shape[2] < 3 else 3]  # without alpha
    if values.shape[2] == channels:
        return values
    if channels == 3:
        return np.repeat(values, 3, axis=2)
    return ((values.astype(np.uint16).sum(2, keepdims=True) + 1) // 3).astype(np.uint8)
