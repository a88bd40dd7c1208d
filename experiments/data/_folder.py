"""Examples from files: windows of images and of their masks, and nothing more, are read.

All headers are read at the start, so that most bad files are found before training begins; what
whole files hold, `_examine.py` finds out. How pixels become 8 bits, `_scale.py` says.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..images import Image, ImageError, open_image, resized
from ._dataset import IGNORED, DataError, Dataset, Geometry
from ._lazy import Lazy, all_of, moved
from ._listing import Item, Listing
from ._regions import Region
from ._regions import starts as starts_in
from ._scale import check_channels, is_nodata, read_pixels
from ._weighted import OfClasses, chances, described

_OPEN_IMAGES = 8
"""Kept open by each thread, with the parts of them that were decoded last."""


@dataclasses.dataclass(frozen=True)
class Header:
    """Of an image."""

    size: tuple[int, ...]
    dtype: np.dtype
    nodata: float | None = None

    @property
    def pixels(self) -> int:
        return math.prod(self.size)


class Folder(Dataset):
    """Files.

    Attributes:
      items: the files, and their masks or classes.
      headers: of the images.
    """

    def __init__(
        self,
        found: Listing,
        geometry: Geometry,
        *,
        classes: int,
        dtype: Any = np.uint8,
        mask_values: Sequence[int] = (),
        ignored_values: Sequence[int] = (),
        nodata: Sequence[float] = (),
        on_bad_file: str = "error",
    ):
        self.path, self.geometry = found.path, geometry
        self.masks, self.targets = found.labels in ("masks", "targets"), found.labels == "targets"
        self.mask_values = tuple(mask_values or range(classes))
        self.ignored_values, self.nodata = tuple(ignored_values), tuple(nodata)
        if len(self.mask_values) != classes or len(set(self.mask_values)) != classes:
            raise ValueError(
                f"`mask_values` (={tuple(mask_values)}) must have {classes} values, one for each "
                "class"
            )
        if both := set(self.mask_values) & set(self.ignored_values):
            raise ValueError(
                f"in masks, {min(both)} cannot be a class (`mask_values` are {self.mask_values}) "
                f"and be ignored (`ignored` is {self.ignored_values})"
            )
        self.regions: dict[Path, Region] = {}
        """In which training windows lie; none: anywhere."""
        self._of_thread = threading.local()  # an open file has a position: one reader each
        size = geometry.size or (1,) * geometry.dimensions  # until the images have been looked at
        label_shape = size if self.masks else ()
        super().__init__(
            (*size, geometry.channels),
            label_shape,
            classes=classes,
            augment=geometry.augment,
            on_bad_file=on_bad_file,
        )
        self.dtype = np.dtype(dtype)
        self.ignored = found.ignored
        self.items, self.headers = self._checked(found)
        if geometry.size is None:
            size = self._common_size()
            self.shape = (*size, geometry.channels)
            self.label_shape = size if self.masks else ()
        if self.targets:
            self.label_shape += (classes,)
            self.label_dtype, self.unlabelled = np.dtype(np.float32), np.nan
        if found.labels == "tags":
            self.label_shape, self.label_dtype, self.unlabelled = (
                (classes,),
                np.dtype("u1"),
                IGNORED,
            )
        self.class_names[: len(found.class_names)] = found.class_names

    def __len__(self) -> int:
        return len(self.items)

    @property
    def is_whole(self) -> bool:
        return all(header.size == self.shape[:-1] for header in self.headers)

    def name(self, index: int) -> str:
        return self._name(self.items[index].image)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.path) if path.is_relative_to(self.path) else path)

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        image, label = self._example(self.items[index], rng, self._image)
        label = label[all_of(label)] if isinstance(label, Lazy) else label
        return image[all_of(image)], label

    def lazily(self, index: int, rng: np.random.Generator | None) -> tuple[Lazy, Any]:
        return self._example(self.items[index], rng, self._open)

    def _example(
        self, item: Item, rng: np.random.Generator | None, opened: Callable[..., Image]
    ) -> tuple[Lazy, Any]:
        """The window of an example, and its label; both are read when they are asked for."""
        image = opened(item.image)
        starts = self._starts(item, image, rng)

        def pixels(place: tuple[slice, ...]) -> np.ndarray:
            return self._pixels(image, moved(place, starts))

        values = Lazy(self.shape, self.dtype, pixels, image.close)
        if not self.masks:
            return values, self._of_image(item)
        mask = opened(item.label, mask=True)
        inside = [a + b for a, b in zip(starts, self.border, strict=True)]

        def labels(place: tuple[slice, ...]) -> np.ndarray:
            return self.labels(image, mask, moved(place, inside))

        return values, Lazy(self.label_shape, self.label_dtype, labels, mask.close)

    def _starts(self, item: Item, image: Image, rng: np.random.Generator | None) -> Sequence[int]:
        """Where the window of an example begins."""
        size = self.shape[:-1]
        spare = [n - m for n, m in zip(image.shape[:-1], size, strict=True)]
        if min(spare) < 0:
            raise DataError(item.image, f"was changed, and is now smaller: {image.shape}")
        if rng is None:
            return [n // 2 for n in spare]
        if item.image in self.regions:
            return starts_in(self.regions[item.image], rng, image.shape[:-1], size)
        return [rng.integers(n + 1) for n in spare]

    def _pixels(self, image: Image, place: Sequence[slice]) -> np.ndarray:
        return read_pixels(image, place, self.shape[-1], self.scale, self.dtype, self.nodata)

    def read_counted(self, index: int, rng: np.random.Generator | None) -> np.ndarray:
        item = self.items[index]
        image = self._image(item.image)
        sizes = [slice(0, n) for n in self.shape[:-1]]
        place = moved(sizes, self._starts(item, image, rng))
        values = self._pixels(image, place)
        if self.nodata:
            values = values[~is_nodata(image[place], self.nodata)]
        return values.reshape(-1, self.shape[-1])

    def _of_image(self, item: Item) -> Any:
        """The label of a whole image: its class, or 0 and 1 for each class."""
        if isinstance(item.label, tuple):
            return np.isin(np.arange(self.classes), item.label).astype(np.uint8)
        return np.int32(item.label)

    def labels(self, image: Image, mask: Image, place: tuple[slice, ...]) -> np.ndarray:
        """What a window of a mask, or of targets, means; where the image has no data, nothing."""
        values = mask[place]
        if self.targets:
            ignored = np.isin(values, self.ignored_values)
            found = np.where(ignored, np.nan, values).astype(np.float32)
        else:
            found = self._classes(mask.path, values[..., 0])
        if self.nodata:
            found[is_nodata(image[place], self.nodata)] = self.unlabelled
        return found

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[tuple[Image, Any]]:
        """A whole image, to be read by windows; and its class, or `mask[y0:y1, x0:x1]`."""
        item = self.items[index]
        with contextlib.ExitStack() as stack:
            image = stack.enter_context(self._open(item.image))
            if not self.masks:
                yield image, self._of_image(item)
                return
            mask = stack.enter_context(self._open(item.label, mask=True))
            if mask.shape[:-1] != image.shape[:-1]:
                raise DataError(item.label, f"was changed, and is no longer of {item.image}'s size")
            yield image, _Mask(self, image, mask)

    def _classes(self, path: Path, mask: np.ndarray) -> np.ndarray:
        classes = np.full(mask.shape, IGNORED, np.uint8)
        known = np.isin(mask, self.ignored_values)
        for index, value in enumerate(self.mask_values):
            there = mask == value
            classes[there] = index
            known |= there
        if not known.all():
            self._refuse(path, dict(zip(*np.unique(mask[~known], return_counts=True), strict=True)))
        return classes

    def _refuse(self, path: Path, unknown: dict[int, int]) -> None:
        named = [f"{value} ({count:,} pixels)" for value, count in list(unknown.items())[:5]]
        more = f" and {len(unknown) - 5} other values" if len(unknown) > 5 else ""
        classes = ", ".join(map(str, self.mask_values[:10]))
        classes += ", ..." if self.classes > 10 else ""
        ignored = ", ".join(map(str, self.ignored_values)) or "nothing"
        raise DataError(
            path,
            f"holds {', '.join(named)}{more}, but the {self.classes} classes are {classes}, and "
            f"{ignored} is ignored. Set `data.mask_values` to the value of each class, or "
            "`data.ignored` to the values that do not count",
        )

    def count_classes(self, masks: dict[Path, Any]) -> dict[str, Any]:
        """How many pixels of each whole mask each class has; or 1 for the class of an image."""
        counts, ignored = np.zeros((len(self.items), self.classes), int), 0
        for of_item, item in zip(counts, self.items, strict=True):
            if not self.masks:
                of_item[list(item.label) if isinstance(item.label, tuple) else item.label] = 1
                continue
            if not isinstance(masks[item.label], dict):  # it is bad
                continue
            values = {v: sum(cells.values()) for v, cells in masks[item.label].items()}
            known = {*self.mask_values, *self.ignored_values}
            if unknown := {v: n for v, n in values.items() if v not in known}:
                self._refuse(item.label, unknown)
            of_item[:] = [values.get(value, 0) for value in self.mask_values]
            ignored += sum(values.get(value, 0) for value in self.ignored_values)
        return {"classes": counts.tolist(), "ignored": ignored}

    def weigh(self, weights: Sequence[float], counts: np.ndarray, masks: dict[Path, Any]) -> str:
        """Draw examples by class; returns what to tell the user.

        Args:
          counts: of each image and class, as `count_classes` has them.
          masks: where each mask has which values.
        """
        shares = chances(counts, weights)
        self.chances = shares.sum(1)
        for item, of_classes in zip(self.items, shares, strict=True):
            if self.masks and of_classes.any():
                opened = functools.partial(self._image, item.label, mask=True)
                found = masks[item.label]
                self.regions[item.image] = OfClasses(opened, found, self.mask_values, of_classes)
        return described(weights, shares, self.masks)

    def drop(self, bad: dict[str, str]) -> list[int]:
        """Leave out files, each with its error; returns which of the items stay."""
        kept = []
        for position, item in enumerate(self.items):
            errors = [bad[str(p)] for p in (item.image, item.label) if str(p) in bad]
            if errors:
                self.skipped[self._name(item.image)] = errors[0]
            else:
                kept.append(position)
        self._check_some(kept)
        self.items, self.headers = [[of[i] for i in kept] for of in (self.items, self.headers)]
        return kept

    def _open(self, path: Path, mask: bool = False) -> Image:
        image = open_image(path, self.geometry.dimensions, self.geometry.level, mask=mask)
        return resized(image, self.geometry.resize) if self.geometry.resize else image

    def _image(self, path: Path, mask: bool = False) -> Image:
        """Opened, or still open. Formats without windows are not kept: they hold all pixels."""
        if not hasattr(self._of_thread, "images"):
            self._of_thread.images = collections.OrderedDict()
        images: collections.OrderedDict[Path, Image] = self._of_thread.images
        image = images.pop(path, None) or self._open(path, mask)
        if not image.whole:
            images[path] = image
            while len(images) > _OPEN_IMAGES:
                images.popitem(last=False)[1].close()
        return image

    def _checked(self, found: Listing) -> tuple[list[Item], list[Header]]:
        items, headers = [], []
        for item in found.items:
            try:
                headers.append(self._check(item))
                items.append(item)
            except ImageError as error:
                if self.on_bad_file == "error":
                    raise
                self.skipped[self._name(item.image)] = str(error)
        self._check_some(items)
        return items, headers

    def _check_some(self, items: Sequence[Any]) -> None:
        if not items:
            first = next(iter(self.skipped.values()))
            raise DataError(self.path, f"all {len(self.skipped)} files are bad; first, {first}")

    def _check(self, item: Item) -> Header:
        """What the headers say, of one image and its mask."""
        with self._open(item.image) as image:
            shape, header = image.shape, Header(image.shape[:-1], image.dtype, image.nodata)
        check_channels(item.image, shape[-1], self.geometry.channels)
        size = self.geometry.size
        if size is not None and any(n < m for n, m in zip(shape, size, strict=False)):
            hint = "" if self.masks else "; `data.resize` makes images of classes as large"
            raise DataError(item.image, f"its shape {shape} is smaller than `size`, {size}{hint}")
        if isinstance(item.label, Path):
            self._check_mask(item.image, shape, item.label)
        return header

    def _check_mask(self, image: Path, shape: tuple[int, ...], path: Path) -> None:
        with self._open(path, mask=True) as mask:
            channels = self.classes if self.targets else 1
            if self.targets and mask.shape[-1] != channels:
                raise DataError(
                    path, f"has {mask.shape[-1]} channels, where `data.classes` wants {channels}"
                )
            if mask.shape[-1] != channels:
                raise DataError(
                    path,
                    "a mask has one channel, a class for each pixel, but this has "
                    f"{mask.shape[-1]}",
                )
            if mask.dtype.kind not in "ui" and not self.targets:
                raise DataError(path, f"a mask has integers, but this has {mask.dtype}")
            if mask.shape[:-1] != shape[:-1]:
                raise DataError(
                    path, f"its shape {mask.shape} is not that of its image {image}, {shape}"
                )

    def _common_size(self) -> tuple[int, ...]:
        first = self.headers[0].size
        for item, header in zip(self.items, self.headers, strict=True):
            if header.size != first:
                raise DataError(
                    item.image,
                    f"is {header.size} but {self.items[0].image} is {first}: whole images must "
                    "have one shape; set `size` to take windows of them",
                )
        return first


class _Mask:
    """A whole mask as classes, `mask[y0:y1, x0:x1]`."""

    def __init__(self, folder: Folder, image: Image, mask: Image):
        self.folder, self.image, self.mask = folder, image, mask

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        return self.folder.labels(self.image, self.mask, place)
