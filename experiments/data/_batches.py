"""Batches, in an order that is a function of seed and step alone.

Position `p = step * batch_size + i` of a run is in epoch `p // n`. Its example is number
`default_rng([seed, epoch]).permutation(n)[p % n]`, with `default_rng([seed, p])` for what is random
in it. A run that starts at step k thus sees at step k what an uninterrupted run sees there. A batch
may cross from one epoch to the next.

One thread makes batches ahead of time. An error in it is raised where its batch would have come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator

import numpy as np

from ..images import ImageError
from ._dataset import IGNORED, DataError, Dataset


@dataclasses.dataclass(frozen=True)
class Batch:
    step: int
    images: np.ndarray
    """(B, H, W, C), uint8."""
    labels: np.ndarray
    """(B,), int32; or (B, h, w), uint8, where 255 does not count."""
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
      prefetch: batches that are made ahead of time; 0: none, and no thread.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, seed: int, start: int = 0, prefetch: int = 2
    ):
        if batch_size < 1 or start < 0 or prefetch < 0:
            raise ValueError(
                f"`batch_size` (={batch_size}) must be positive, `start` (={start}) and `prefetch` "
                f"(={prefetch}) not negative"
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._step = start
        self._order: tuple[int, np.ndarray] = -1, np.empty(0, int)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = None
        if prefetch:
            self._made: queue.Queue[Batch | BaseException] = queue.Queue(prefetch)
            self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise ValueError("these batches are closed")
        if self._thread is None:
            self._step += 1
            return self.batch(self._step - 1)
        made = self._made.get()
        if isinstance(made, BaseException):
            self._error = made
            raise made
        return made

    def batch(self, step: int) -> Batch:
        """The batch of any step."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        examples = [
            self.dataset.good_example(self.index(p), np.random.default_rng([self.seed, p]))
            for p in positions
        ]
        return _stacked(self.dataset, step, examples)

    def index(self, position: int) -> int:
        """Which example is at a position of the run."""
        epoch, place = divmod(position, len(self.dataset))
        if self._order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = epoch, generator.permutation(len(self.dataset))
        return int(self._order[1][place])

    def close(self) -> None:
        """Ends the thread, after the batch that it is at."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                made = self.batch(self._step)
            except BaseException as error:  # the consumer's to handle, whatever it is
                made = error
            self._step += 1
            while not self._stop.is_set():
                with contextlib.suppress(queue.Full):
                    self._made.put(made, timeout=0.05)
                    break
            if isinstance(made, BaseException):
                return


def evaluation(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Every example once, in order; bad files that are skipped are left out.

    The last batch is filled up to the common shape with examples whose labels do not count (255 in
    masks, -1 for classes); `Batch.count` says how many are real.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` (={batch_size}) must be positive")
    step, examples = 0, []
    for index in range(len(dataset)):
        try:
            examples.append((*dataset.read(index, None), index))
        except ImageError as error:
            if dataset.on_bad_file == "error":
                raise
            dataset.skipped[dataset.name(index)] = str(error)
        if len(examples) == batch_size:
            yield _stacked(dataset, step, examples)
            step, examples = step + 1, []
    if examples:
        image, label, index = examples[-1]
        nothing = np.full_like(label, IGNORED) if dataset.label_shape else np.int32(-1)
        filled = examples + [(image, nothing, index)] * (batch_size - len(examples))
        yield _stacked(dataset, step, filled, count=len(examples))
    elif step == 0:
        raise DataError(dataset.name(0), f"this and all other {len(dataset) - 1} files are bad")


def _stacked(dataset: Dataset, step: int, examples: list, count: int | None = None) -> Batch:
    images, labels, indices = zip(*examples, strict=True)
    return Batch(
        step,
        np.stack(images),
        np.stack(labels),
        tuple(dataset.name(index) for index in indices),
        len(examples) if count is None else count,
    )
