"""Grain's `DataLoader` as numbered examples, so that a run can go on where it stopped.

A loader has a source with numbers, a sampler that says in which order they come, and operations on
each. The order is ours, a function of seed and step. Operations are the loader's: `Map` and, with
random numbers that are a function of seed and step too, `RandomMap`. `Batch` is left out, since
`train.batch_size` says how many examples are in one. What makes more or fewer examples, as
`Filter`, has no number for them, and is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._dataset import DataError


def is_loader(source: Any) -> bool:
    """If Grain is not imported, nothing is of it."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(source, grain.DataLoader)


class Loader:
    """What a loader reads from, and what it does with it."""

    def __init__(self, loader: Any, name: str):
        transforms = sys.modules["grain"].transforms
        self.source = loader._data_source
        self.operations = [o for o in loader._operations if not isinstance(o, transforms.Batch)]
        for operation in self.operations:
            if not isinstance(operation, transforms.Map | transforms.RandomMap):
                raise DataError(
                    name,
                    f"its DataLoader has a {type(operation).__name__}, with which examples have no "
                    "numbers, so that a run could not go on where it stopped. `Map`, `RandomMap` "
                    "and `Batch` work; do the rest in the source",
                )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.example(index, None)

    def example(self, index: int, rng: np.random.Generator | None) -> Any:
        """Without a generator, that of evaluation: the same whenever it is read."""
        rng = rng or np.random.default_rng(index)
        found = self.source[index]
        for operation in self.operations:
            has_random = hasattr(operation, "random_map")
            found = operation.random_map(found, rng) if has_random else operation.map(found)
        return found
