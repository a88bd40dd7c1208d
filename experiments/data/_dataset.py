"""What a dataset is: numbered examples of one shape, each a function of its number and a generator.

A bad file is an error, or with `on_bad_file="skip"` it is recorded and the next good example takes
its place. Whether it was bad before is not asked: an example must not depend on what was read
earlier, or a run that was interrupted would not see what an uninterrupted one sees.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from ..images import ImageError
from ._scale import Scale

IGNORED = 255
"""In the mask of an example: this position does not count. What it is in a file, the user says."""


class DataError(ImageError):
    """What is wrong with a dataset; the message names the file or folder."""


def pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """A size as (H, W); None and 0 are None."""
    if not size:
        return None
    height, width = (size, size) if np.ndim(size) == 0 else size
    if min(height, width) < 1:
        raise ValueError(f"a size (={size}) must be positive; 0 stands for whole images")
    return int(height), int(width)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Which part of an image is an example."""

    size: tuple[int, int] | None
    """Of the window; None: the whole image."""
    label_size: tuple[int, int] | None
    """Of the mask, in the centre of the window; None: all of it."""
    channels: int
    augment: bool = False

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ValueError(f"`channels` (={self.channels}) must be 1 or 3")

    def border(self, size: tuple[int, int]) -> tuple[int, int]:
        """How far the label's window lies inside the image's, of this size."""
        if self.label_size is None:
            return 0, 0
        differences = [n - m for n, m in zip(size, self.label_size, strict=True)]
        if min(differences) < 0 or any(d % 2 for d in differences):
            raise ValueError(
                f"`label_size` (={self.label_size}) does not lie in the centre of a window of "
                f"{size}: it must be smaller by an even number, or as large"
            )
        return differences[0] // 2, differences[1] // 2


class Dataset:
    """Numbered examples.

    Attributes:
      classes: how many there are.
      shape: (H, W, C) of an example's image.
      label_shape: () if the label is a class, (h, w) if it is a mask.
      skipped: the bad files met so far, each with its error.
      ignored: how many files of a folder are no images, by their names.
      scale: of values that are not of 8 bits; `examine` finds it out.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        label_shape: tuple[int, ...],
        *,
        classes: int,
        augment: bool,
        on_bad_file: str = "error",
    ):
        if on_bad_file not in ("error", "skip"):
            raise ValueError(f"`on_bad_file` (={on_bad_file!r}) must be 'error' or 'skip'")
        self.shape, self.label_shape, self.classes = shape, label_shape, classes
        self.augment, self.on_bad_file = augment, on_bad_file
        self.skipped: dict[str, str] = {}
        self.ignored = 0
        self.scale: Scale | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether every example for evaluation is a whole image."""
        return True

    def name(self, index: int) -> str:
        """For messages."""
        raise NotImplementedError

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        """One example, not augmented; a bad file is an `ImageError`."""
        raise NotImplementedError

    def example(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        """Image, uint8, and label; without a generator, the one for evaluation."""
        return self.good_example(index, rng)[:2]

    def good_example(
        self, index: int, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, Any, int]:
        """`example`, and the index it has: another one, where the file was bad and is skipped."""
        for offset in range(len(self)):
            found = (index + offset) % len(self)
            generator = copy.deepcopy(rng)  # each attempt draws the same numbers
            try:
                image, label = self.read(found, generator)
            except ImageError as error:
                if self.on_bad_file == "error":
                    raise
                self.skipped[self.name(found)] = str(error)
                continue
            if generator is not None and self.augment:
                image, label = augmented(image, label, generator)
            return np.ascontiguousarray(image), label, found
        raise DataError(
            self.name(index),
            f"this and all other {len(self) - 1} files are bad; this one: "
            f"{self.skipped[self.name(index)]}",
        )


def augmented(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """Flips along either axis and, if the image is square, a quarter turn, each or none.

    These make the eight symmetries of the square, with equal chances; they move pixels and
    compute none, so the mask stays exact.
    """
    flip_rows, flip_columns, turn = rng.integers(0, 2, 3)

    def move(array: np.ndarray) -> np.ndarray:
        if flip_rows:
            array = array[::-1]
        if flip_columns:
            array = array[:, ::-1]
        if turn and image.shape[0] == image.shape[1]:
            array = np.swapaxes(array, 0, 1)
        return np.ascontiguousarray(array)

    return move(image), move(label) if np.ndim(label) == 2 else label
