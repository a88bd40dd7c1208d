"""Batches, in an order that is a function of seed and step alone.

Position `p = step * batch_size + i` of a run is in epoch `p // n`. Its example is number
`default_rng([seed, epoch]).permutation(n)[p % n]`, with `default_rng([seed, p])` for what is random
in it; or a dataset's `chances` say which it is, with `default_rng([seed, p, 1])`. A run that starts
at step k thus sees at step k what an uninterrupted run sees there. A batch may cross from one epoch
to the next.

Threads make batches ahead of time. An error in one is raised where its batch would have come.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..images import ImageError
from ._dataset import DataError, Dataset
from ._lazy import Lazy, stacked

_MOST_THREADS = 16
_MOST_AHEAD = 2 * 2**30
"""Bytes of batches that are made ahead of time, if more than two are, to keep threads at work."""
_EARLY = 2**30, 2**14
"""And bytes and examples, so that the first steps need not wait."""


@dataclasses.dataclass(frozen=True)
class Batch:
    step: int
    images: np.ndarray | Lazy
    """(B, H, W, C), as a rule uint8."""
    labels: np.ndarray | Lazy
    """(B,), int32; or (B, h, w), uint8, where 255 does not count; or what another task has."""
    names: tuple[str, ...]
    count: int
    """How many examples are real; the rest fill up the last batch of an evaluation."""


class Batches:
    """An endless iterator of training batches; close it, or use it in `with`.

    Args:
      dataset: what `load` returns.
      batch_size: examples in a batch.
      seed: of the order, the windows and the augmentation.
      start: the first step.
      prefetch: batches that are made ahead of time, on threads, an example on each; 0: none. By
        default two, or so many more as keep all threads at work within 2 GiB, and up to an epoch
        within 1 GiB: what is drawn or decoded slowly is made while the step compiles.
      lazy: images, and what there is a label of for each position, stay on disk, and can be read by
        window until they are deleted.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        start: int = 0,
        prefetch: int | None = None,
        *,
        lazy: bool = False,
    ):
        if lazy:
            prefetch = 1
        if prefetch is None:
            held, examples = _EARLY
            early = min(len(dataset), held // _bytes(dataset), examples)
            prefetch = max(2, max(early, _ahead(dataset)) // max(1, batch_size))
        if batch_size < 1 or start < 0 or prefetch < 0:
            raise ValueError(
                f"`batch_size` (={batch_size}) must be positive, `start` (={start}) and `prefetch` "
                f"(={prefetch}) not negative"
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._step, self._prefetch, self.lazy = start, prefetch, lazy
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, int)
        self._made: collections.deque[_Made | _Lazily] = collections.deque()
        threads = min(_threads(), batch_size * max(1, prefetch))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "batches")
        self._closed = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise ValueError("these batches are closed")
        self.begin()
        batch = self._made[0].batch()  # if it fails, it fails again the next time
        self._made.popleft()
        return batch

    def begin(self) -> None:
        """Begin to make those that are made ahead of time, if that has not begun."""
        while len(self._made) <= self._prefetch:
            make = _Lazily if self.lazy else _Made
            self._made.append(make(self, self._step, self._pool))
            self._step += 1

    def index(self, position: int) -> int:
        """Which example is at a position of the run."""
        if self.dataset.chances is not None:
            generator = np.random.default_rng([self.seed, position, 1])
            return int(generator.choice(len(self.dataset), p=self.dataset.chances))
        epoch, place = divmod(position, len(self.dataset))
        if self._order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = epoch, generator.permutation(len(self.dataset))
        return int(self._order[1][place])

    def close(self) -> None:
        """Ends the threads, after the examples that they are at."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Made:
    """A batch that is being made: each example is written to its place by a thread."""

    def __init__(self, batches: Batches, step: int, pool: concurrent.futures.Executor):
        self.dataset, self.step = batches.dataset, step
        self.seed, self.first = batches.seed, step * batches.batch_size
        size, label_shape = batches.batch_size, batches.dataset.label_shape
        # A batch of one image is that image: to copy a gigapixel would take a second.
        self.images: np.ndarray | None = None
        if size > 1:
            self.images = np.empty((size, *batches.dataset.shape), batches.dataset.dtype)
        self.labels = np.empty((size, *label_shape), batches.dataset.label_dtype)
        self.futures = [
            pool.submit(self._make, i, batches.index(self.first + i)) for i in range(size)
        ]

    def _make(self, i: int, index: int) -> int:
        """Returns which example it was."""
        rng = np.random.default_rng([self.seed, self.first + i])
        image, self.labels[i], index = self.dataset.good_example(index, rng)
        if self.images is None:
            self.images = image[None]
        else:
            self.images[i] = image
        return index

    def batch(self) -> Batch:
        names = tuple(self.dataset.name(future.result()) for future in self.futures)
        return Batch(self.step, self.images, self.labels, names, len(names))


class _Lazily:
    """A batch of files that are being opened."""

    def __init__(self, batches: Batches, step: int, pool: concurrent.futures.Executor):
        self.dataset, self.step, self.seed = batches.dataset, step, batches.seed
        first = step * batches.batch_size
        self.futures = [
            pool.submit(self._open, i, batches.index(i))
            for i in range(first, first + batches.batch_size)
        ]

    def _open(self, position: int, index: int) -> tuple[Any, Any, int]:
        rng = np.random.default_rng([self.seed, position])
        return self.dataset.good_example(index, rng, lazy=True)

    def batch(self) -> Batch:
        images, labels, indices = zip(*(f.result() for f in self.futures), strict=True)
        dense = isinstance(labels[0], Lazy) or self.dataset.dense
        found = stacked(labels) if dense else np.array(labels, self.dataset.label_dtype)
        names = tuple(map(self.dataset.name, indices))
        return Batch(self.step, stacked(images), found, names, len(names))


def evaluation(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Every example once, in order; bad files that are skipped are left out.

    The last batch is filled up to the common shape with examples whose labels do not count (255 in
    masks, -1 for classes, NaN for numbers); `Batch.count` says how many are real.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` (={batch_size}) must be positive")
    step, examples = 0, []
    for index, read in enumerate(_in_order(dataset)):
        try:
            examples.append((*read.result(), index))
        except ImageError as error:
            if dataset.on_bad_file == "error":
                raise
            dataset.skipped[dataset.name(index)] = str(error)
        if len(examples) == batch_size:
            yield _stacked(dataset, step, examples)
            step, examples = step + 1, []
    if examples:
        image, _, index = examples[-1]
        nothing = np.full(dataset.label_shape, dataset.unlabelled, dataset.label_dtype)
        filled = examples + [(image, nothing, index)] * (batch_size - len(examples))
        yield _stacked(dataset, step, filled, count=len(examples))
    elif step == 0:
        raise DataError(dataset.name(0), f"this and all other {len(dataset) - 1} files are bad")


def _in_order(dataset: Dataset) -> Iterator[concurrent.futures.Future]:
    """Every example, read by threads ahead of time."""
    ahead = max(2, _ahead(dataset))
    pool = concurrent.futures.ThreadPoolExecutor(min(_threads(), ahead), "evaluation")
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for index in range(len(dataset)):
            waiting.append(pool.submit(dataset.read, index, None))
            if len(waiting) > ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _ahead(dataset: Dataset) -> int:
    """Examples that keep all threads at work, within the memory for them."""
    return min(_threads(), _MOST_AHEAD // _bytes(dataset))


def _bytes(dataset: Dataset) -> int:
    """Of an example."""
    image = math.prod(dataset.shape) * dataset.dtype.itemsize
    return image + math.prod(dataset.label_shape) * dataset.label_dtype.itemsize


def _stacked(dataset: Dataset, step: int, examples: list, count: int | None = None) -> Batch:
    images, labels, indices = zip(*examples, strict=True)
    return Batch(
        step,
        np.stack(images),
        np.stack(labels).astype(dataset.label_dtype, copy=False),
        tuple(dataset.name(index) for index in indices),
        len(examples) if count is None else count,
    )
