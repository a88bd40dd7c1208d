"""What a dataset is: numbered examples of one shape, each a function of its number and a generator.

A bad file is an error, or with `on_bad_file="skip"` it is recorded and the next good example takes
its place. Whether it was bad before is not asked: an example must not depend on what was read
earlier, or a run that was interrupted would not see what an uninterrupted one sees.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..images import ImageError
from ._lazy import Lazy
from ._scale import Scale

IGNORED = 255
"""In the mask of an example: this position does not count. What it is in a file, the user says."""


class DataError(ImageError):
    """What is wrong with a dataset; the message names the file or folder."""


def sizes(size: int | Sequence[int] | None, dimensions: int = 2) -> tuple[int, ...] | None:
    """A size along each axis, as (H, W); None and 0 are None."""
    if not size:
        return None
    found = (size,) * dimensions if np.ndim(size) == 0 else tuple(size)
    if len(found) != dimensions or min(found) < 1:
        raise ValueError(
            f"a size (={size}) must be positive, and one number or {dimensions}; 0 stands for "
            "whole images"
        )
    return tuple(int(n) for n in found)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Which part of an image is an example."""

    size: tuple[int, ...] | None
    """Of the window; None: the whole image."""
    channels: int
    augment: bool = False
    dimensions: int = 2
    resize: int = 0
    """Pixels along a side that whole images get first; 0: as they are."""
    level: int = 0
    """Of a pyramid; 0 is the finest."""

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"`channels` (={self.channels}) must be positive")


class Dataset:
    """Numbered examples.

    Attributes:
      classes: how many there are; their names are in `class_names`.
      shape: (H, W, C) of an example's image, of type `dtype`; a volume's is (D, H, W, C).
      label_shape: () if the label is a class, (h, w) if it is a mask.
      dense: whether there is a label for each position.
      label_dtype, unlabelled: of labels, and the value of one that does not count.
      label_values: what a label of anybody's own can be beside that; None: anything of its type.
      border: along each axis, how far the label's window lies inside the image's.
      skipped: the bad files met so far, each with its error.
      ignored: how many files of a folder are no images, by their names.
      scale: of values that are not of 8 bits; `examine` finds it out.
      chances: of each example to be the next in training; None: all come once in each epoch.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        label_shape: tuple[int, ...],
        *,
        classes: int,
        augment: bool,
        on_bad_file: str = "error",
    ):
        if on_bad_file not in ("error", "skip"):
            raise ValueError(f"`on_bad_file` (={on_bad_file!r}) must be 'error' or 'skip'")
        self.shape, self.label_shape, self.classes = shape, label_shape, classes
        self.class_names = [str(c) for c in range(classes)]
        self.augment, self.on_bad_file = augment, on_bad_file
        self.dense = bool(label_shape)
        self.dtype = np.dtype(np.uint8)
        self.label_dtype = np.dtype(np.uint8 if label_shape else np.int32)
        self.unlabelled: float = IGNORED if label_shape else -1
        self.label_values: range | None = None
        self.border = (0,) * (len(shape) - 1)
        self.skipped: dict[str, str] = {}
        self.ignored = 0
        self.scale: Scale | None = None
        self.chances: np.ndarray | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether every example for evaluation is a whole image."""
        return True

    def name(self, index: int) -> str:
        """For messages."""
        raise NotImplementedError

    def take_labels(self, shape: tuple[int, ...], *, dense: bool = True) -> None:
        """Labels of this shape: if they are dense, the centre of the image's window."""
        size = self.shape[:-1]
        given = shape[: len(size)] if dense else size
        differences = [n - m for n, m in zip(size, given, strict=True)]
        if min(differences) < 0 or any(d % 2 for d in differences):
            raise ValueError(
                f"a label of {given} does not lie in the centre of a window of {size}: it must be "
                "smaller by an even number, or as large"
            )
        self.border, self.label_shape = tuple(d // 2 for d in differences), shape

    def centre(self, label: np.ndarray) -> np.ndarray:
        """The part of a label of the image's window that the model has scores for."""
        parts = zip(self.border, self.label_shape, strict=False)
        return label[tuple(slice(start, start + n) for start, n in parts)]

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        """One example, not augmented; a bad file is an `ImageError`."""
        raise NotImplementedError

    def lazily(self, index: int, rng: np.random.Generator | None) -> tuple[Any, Any]:
        """`read`, but of arrays that are on disk, windows can be read later."""
        return self.read(index, rng)

    def example(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        """Image and label; without a generator, those for evaluation."""
        return self.good_example(index, rng)[:2]

    def good_example(
        self, index: int, rng: np.random.Generator | None, *, lazy: bool = False
    ) -> tuple[Any, Any, int]:
        """`example`, and the index it has: another one, where the file was bad and is skipped.

        `lazy`: what is on disk stays there. What is bad inside a file is then seen by who reads it.
        """
        read = self.lazily if lazy else self.read
        (image, label), found, generator = self._first_good(index, rng, read)
        if generator is not None and self.augment:
            image, label = augmented(image, label, generator)
        return image if lazy else np.ascontiguousarray(image), label, found

    def counted(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, int]:
        """The pixels of an example that hold data, (number, C), and the index it has."""
        return self._first_good(index, rng, self.read_counted)[:2]

    def read_counted(self, index: int, rng: np.random.Generator | None) -> np.ndarray:
        """The pixels of an example that hold data; a bad file is an `ImageError`."""
        image = np.asarray(self.read(index, rng)[0])
        return image.reshape(-1, image.shape[-1])

    def _first_good(
        self, index: int, rng: np.random.Generator | None, read: Callable[..., Any]
    ) -> tuple[Any, int, np.random.Generator | None]:
        """What is read of the first good example from `index` on, its index, and its generator."""
        for offset in range(len(self)):
            found = (index + offset) % len(self)
            generator = copy.deepcopy(rng)  # each attempt draws the same numbers
            try:
                return read(found, generator), found, generator
            except ImageError as error:
                if self.on_bad_file == "error":
                    raise
                self.skipped[self.name(found)] = str(error)
        raise DataError(
            self.name(index),
            f"this and all other {len(self) - 1} files are bad; this one: "
            f"{self.skipped[self.name(index)]}",
        )


def augmented(image: Any, label: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Flips along any axis and, if the last two are as long as each other, a quarter turn there,
    each or none.

    In the plane these are the eight symmetries of the square, with equal chances. They move pixels
    and compute none, so the mask stays exact.
    """
    axes = image.ndim - 1
    *flips, turn = rng.integers(0, 2, axes + 1)

    flipped = [d for d, flip in enumerate(flips) if flip]
    turned = turn and axes > 1 and image.shape[axes - 2] == image.shape[axes - 1]

    def move(array: Any) -> Any:
        if isinstance(array, Lazy):
            array = array.flipped(flipped)
            return array.swapped(axes - 2, axes - 1) if turned else array
        array = np.flip(array, flipped)
        return np.ascontiguousarray(np.swapaxes(array, axes - 2, axes - 1) if turned else array)

    dense = (label.ndim if isinstance(label, Lazy) else np.ndim(label)) >= axes
    return move(image), move(label) if dense else label
