"""Anybody's data: an object with a length, a shape, and windows or whole examples to read.

    class MyDataset:
        shape = (4096, 4096, 5)  # of every image; or a method: shape(index)
        def __init__(self, path, split): ...  # "train" or "eval"
        def __len__(self): ...
        def read(self, index, window): ...  # slices along the spatial axes -> image, label

The label is that of the window if it has positions. `dtype` (of pixels), `name(index)` and
`class_names` may be there too. Instead of `read` there may be `dataset[index]`, which returns image
and label whole, as a pair or under these names: so do Grain's `MapDataset` and many others. Windows
are cut of what it returns. `_grain.py` makes that of Grain's `DataLoader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._dataset import DataError, Dataset, Geometry
from ._grain import Loader, is_loader

_MOST = 2**40  # examples: Grain says that there are 2**63 - 1 of what is repeated for ever


class Own(Dataset):
    """A user's dataset as examples of one size."""

    def __init__(self, source: Any, geometry: Geometry, *, classes: int, name: str):
        self.source, self.kind = Loader(source, name) if is_loader(source) else source, name
        self._check()
        shape = (*(geometry.size or self._shape(0)[:-1]), geometry.channels)
        super().__init__(shape, shape[:-1], classes=classes, augment=geometry.augment)
        self.dtype = np.dtype(getattr(source, "dtype", np.uint8))
        self.class_names = list(getattr(source, "class_names", ())) or self.class_names
        for index in range(len(self)) if callable(getattr(source, "shape", None)) else (0,):
            self._check_shape(index)

    def _check(self) -> None:
        source = self.source
        if not hasattr(source, "__len__") or not (
            hasattr(source, "read") or hasattr(source, "__getitem__")
        ):
            raise DataError(
                self.kind,
                f"a {type(source).__name__} has no length, or no `read(index, window)` and no "
                "`[index]`. What only gives examples one after the other, in an order of its own, "
                "cannot go on where a run stopped: give what it reads from, as Grain's MapDataset",
            )
        if len(source) < 1:
            raise DataError(self.kind, "has no example")
        if len(source) > _MOST:
            raise DataError(
                self.kind,
                f"has {len(source)} examples: leave out what repeats them, as Grain's `repeat()`; "
                "a run goes through them as often as it needs to",
            )

    def _shape(self, index: int) -> tuple[int, ...]:
        found = getattr(self.source, "shape", None)
        if found is None:
            return np.shape(self._whole(index)[0])
        return tuple(found(index) if callable(found) else found)

    def _check_shape(self, index: int) -> None:
        found = self._shape(index)
        fits = len(found) == len(self.shape) and found[-1] == self.shape[-1]
        if not fits or any(n < m for n, m in zip(found, self.shape, strict=True)):
            raise DataError(
                self.name(index),
                f"has shape {found}, of which no window of {self.shape} can be taken: channels "
                "come last, and `data.channels`, `data.size` and `data.dimensions` say what is "
                "wanted",
            )

    def _whole(
        self, index: int, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        is_loader = isinstance(self.source, Loader)
        found = self.source.example(index, rng) if is_loader else self.source[index]
        told = f"is a {type(found).__name__}"
        if isinstance(found, Mapping):
            told = f"has {', '.join(map(repr, found))}"
            found = [found[n] for n in ("image", "label") if n in found]
        if isinstance(found, tuple | list) and len(found) == 2:
            return np.asarray(found[0]), np.asarray(found[1])
        raise DataError(
            self.name(index),
            f"an example must be (image, label), or have 'image' and 'label'; this one {told}",
        )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_whole(self) -> bool:
        return all(self._shape(i)[:-1] == self.shape[:-1] for i in range(len(self)))

    def name(self, index: int) -> str:
        if hasattr(self.source, "name"):
            return str(self.source.name(index))
        return f"{self.kind} {index}"

    def read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, Any]:
        size = self.shape[:-1]
        spare = [n - m for n, m in zip(self._shape(index)[:-1], size, strict=True)]
        starts = [n // 2 for n in spare] if rng is None else [rng.integers(n + 1) for n in spare]
        window = tuple(slice(int(a), int(a) + n) for a, n in zip(starts, size, strict=True))
        if hasattr(self.source, "read"):
            image, label = self.source.read(index, window)
        else:
            image, label = self._whole(index, rng)
            if label.shape[: len(size)] == image.shape[:-1]:
                label = label[window]
            image = image[window]
        return self._checked(index, np.asarray(image), np.asarray(label))

    def _checked(self, index: int, image: np.ndarray, label: np.ndarray) -> Any:
        if label.shape[: len(self.shape) - 1] == self.shape[:-1]:
            label = self.centre(label)
        for what, array, shape, dtype in (
            ("image", image, self.shape, self.dtype),
            ("label", label, self.label_shape, self.label_dtype),
        ):
            if array.shape != shape:
                raise DataError(
                    self.name(index), f"its {what} has shape {array.shape}, not {shape}"
                )
            if what == "image" and array.dtype != dtype:
                raise DataError(
                    self.name(index), f"its pixels are {array.dtype}, but `dtype` says {dtype}"
                )
        return image, self._typed(index, label)

    def _typed(self, index: int, label: np.ndarray) -> np.ndarray:
        """A label in the type of the task's, if that changes no value of it."""
        if self.label_dtype.kind == "f":
            return label.astype(self.label_dtype)
        if label.dtype.kind not in "biuf":
            raise DataError(self.name(index), f"its label is no number: {label.flat[0]!r}")
        values = self.label_values
        if values is not None:
            label = np.where(label == -1, self.unlabelled, label)
        with np.errstate(invalid="ignore"):
            found = label.astype(self.label_dtype)
        wrong = found != label
        if values is not None:
            wrong |= ~np.isin(found, [*values, self.unlabelled])
        if wrong.any():
            must = f"of type {self.label_dtype}" if values is None else f"from 0 to {values[-1]}"
            raise DataError(
                self.name(index),
                f"its label has the value {label[wrong].flat[0]}, where labels are {must}"
                + ("" if values is None else "; what does not count is -1"),
            )
        return found
