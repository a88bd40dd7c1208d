"""Anybody's data: an object with a length, a shape, and windows or whole examples to read.

    class MyDataset:
        shape = (4096, 4096, 5)  # of every image; or a method: shape(index)
        def __init__(self, path, split): ...  # "train" or "eval"
        def __len__(self): ...
        def read(self, index, window): ...  # slices along the spatial axes -> image, label

The label is that of the window if it has positions. `dtype` (of pixels), `name(index)` and
`class_names` may be there too. Instead of `read` there may be `dataset[index]`, which returns image
and label whole, as a pair or under these names: so do Grain's `MapDataset` and many others. Windows
are cut of what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._dataset import DataError, Dataset, Geometry


class Own(Dataset):
    """A user's dataset as examples of one size."""

    def __init__(self, source: Any, geometry: Geometry, *, classes: int, name: str):
        self.source, self.kind = source, name
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

    def _whole(self, index: int) -> tuple[np.ndarray, Any]:
        found = self.source[index]
        if isinstance(found, Mapping):
            return np.asarray(found["image"]), found["label"]
        image, label = found
        return np.asarray(image), label

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
            image, label = self._whole(index)
            image = image[window]
            if np.shape(label)[: len(size)] == self._shape(index)[:-1]:
                label = np.asarray(label)[window]
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
        return image, label.astype(self.label_dtype)
