"""What whole files hold: the values of masks and how often, the range of images.

A window says little: lesions are rarely in the centre. So files are looked at whole, window by
window, once; what was found is kept, a line for each file, and holds as long as its size and time
of modification do.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from ..images import Image, ImageError, open_image
from ..program.progress import Bar
from ._dataset import DataError
from ._scale import colours, is_nodata
from ._weighted import Places, in_cells

_AT_ONCE = 2**22  # pixels of a window
_MOST_VALUES = 1024  # of a mask, which has at most 255 classes
_QUIET_SECONDS = 3.0  # before progress is shown


@dataclasses.dataclass(frozen=True)
class Job:
    path: Path
    kind: str
    """`"mask"`: where which values are. `"image"`: the smallest and the largest value."""
    pixels: int
    dimensions: int = 2
    level: int = 0
    nodata: tuple[float, ...] = ()
    """Values of pixels that do not count in the range."""

    @property
    def key(self) -> tuple[str, str]:
        """Under which what was found is written down."""
        without = f" without {self.nodata}" if self.nodata else ""
        return f"{self.kind}{self.level or ''}{without}", str(self.path.absolute())


Found = Places | tuple[float, float] | ImageError


def scan(jobs: Sequence[Job], kept: Path | None, threads: int) -> dict[Path, Found]:
    """What each file holds, or what is wrong with it; `kept` is where that is written down."""
    known = _read_kept(kept)
    found: dict[Path, Found] = {}
    new = []
    for job in jobs:
        state, held = known.get(job.key, (None, None))
        if state is not None and state == _state(job.path):
            found[job.path] = held
        else:
            new.append(job)
    with contextlib.ExitStack() as stack:
        file = _opened(kept, stack) if new else None
        progress = stack.enter_context(_Progress(sum(job.pixels for job in new)))
        pool = stack.enter_context(ThreadPoolExecutor(threads, "scan"))
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        stack.callback(progress.stop)  # if this thread is interrupted, the others are too
        looks = {pool.submit(_look, job, progress): job for job in new}
        for look in as_completed(looks):
            job = looks[look]
            state, found[job.path] = look.result()
            if file is not None and not isinstance(found[job.path], ImageError):
                _keep(file, job, state, found[job.path])
    return found


def _look(job: Job, progress: _Progress) -> tuple[list[int], Found]:
    try:
        state = _state(job.path)  # before it is read: a file that is changed meanwhile is read anew
        with open_image(job.path, job.dimensions, job.level, mask=job.kind == "mask") as image:
            if job.kind == "mask":
                return state, count_values(image, progress)
            return state, value_range(image, progress, job.nodata)
    except ImageError as error:
        return [], error
    except ConnectionError:  # the file is not to blame
        raise
    except OSError as error:
        return [], ImageError(job.path, f"cannot be read ({error})")


def count_values(image: Image, progress: Callable[[int], Any]) -> Places:
    """How many pixels of a mask have each value, in each cell of it."""
    found: Places = collections.defaultdict(collections.Counter)
    for window in windows(image.shape, image.block):
        values = image[window][..., 0]
        for cell, part in in_cells(window, image.shape[:-1]):
            for value, number in _counts(values[part]):
                found[value][cell] += number
        if len(found) > _MOST_VALUES:
            raise DataError(
                image.path,
                f"holds more than {_MOST_VALUES} different values, from {min(found)} to "
                f"{max(found)}: a mask holds a class for each pixel, and no numbers of objects",
            )
        progress(values.size)
    return {value: dict(found[value]) for value in sorted(found)}


def _counts(values: np.ndarray) -> Iterator[tuple[int, int]]:
    low, high = int(values.min()), int(values.max())
    if high - low < 2**16:
        numbers = np.bincount((values.astype(np.int64) - low).ravel())
        there = np.flatnonzero(numbers)
        unique, numbers = there + low, numbers[there]
    else:
        unique, numbers = np.unique(values, return_counts=True)
    return zip(unique.tolist(), numbers.tolist(), strict=True)


def value_range(
    image: Image, progress: Callable[[int], Any], nodata: Sequence[float] = ()
) -> tuple[float, float]:
    """The smallest and the largest value of an image, without alpha and pixels without data.

    If no pixel has data they are infinity and minus infinity.
    """
    low, high = math.inf, -math.inf
    for window in windows(image.shape, image.block):
        found = image[window]
        progress(found[..., 0].size)
        values = colours(found)
        if nodata:
            values = values[~is_nodata(found, nodata)]
        if not values.size:
            continue
        ends = values.min().item(), values.max().item()
        if not np.isfinite(ends).all():
            raise ImageError(image.path, "holds values that are not finite")
        low, high = min(low, ends[0]), max(high, ends[1])
    return low, high


def range_of(image: Image, nodata: Sequence[float] = ()) -> tuple[float, float]:
    """The same, with progress; there must be some pixel with data."""
    with _Progress(math.prod(image.shape[:-1])) as progress:
        low, high = value_range(image, progress, nodata)
    if low > high:
        raise ImageError(image.path, f"has no pixel with data: all are {tuple(nodata)}")
    return low, high


def windows(
    shape: Sequence[int], block: Sequence[int], at_once: int = _AT_ONCE
) -> Iterator[tuple[slice, ...]]:
    """Windows that cover an image, made of whole blocks where these are not too large.

    >>> [(y.stop, x.stop) for y, x in windows((3000, 4000), (1, 4000))]
    [(1048, 4000), (2096, 4000), (3000, 4000)]
    >>> [(y.stop, x.stop) for y, x in windows((4096, 3000), (2048, 2048))]
    [(2048, 2048), (2048, 3000), (4096, 2048), (4096, 3000)]
    """
    if len(block) == 1:  # a trace is one row
        yield from (window[1:] for window in windows((1, *shape), (1, *block), at_once))
        return
    if len(block) == 3:  # a volume's planes, block by block
        for z in range(0, shape[0], block[0]):
            planes = slice(z, min(z + block[0], shape[0]))
            for window in windows(shape[1:], block[1:], max(1, at_once // block[0])):
                yield planes, *window
        return
    height, width = shape[:2]
    rows, columns = block
    columns = min(width, columns * max(1, at_once // (rows * columns)))
    if columns == width:
        fitting = max(1, at_once // width)
        rows = fitting if fitting < rows else rows * (fitting // rows)
    for y in range(0, height, rows):
        for x in range(0, width, columns):
            yield slice(y, min(y + rows, height)), slice(x, min(x + columns, width))


class _Progress:
    """Counts pixels, and shows them if it takes long."""

    def __init__(self, pixels: int):
        self.pixels, self.began = pixels, time.monotonic()
        self.lock = threading.Lock()
        self.stopped, self.done, self.bar = False, 0, None

    def __call__(self, pixels: int) -> None:
        with self.lock:
            if self.stopped:
                raise CancelledError
            self.done += pixels
            if self.bar is None and time.monotonic() - self.began > _QUIET_SECONDS:
                total, start = (int(n / 1e6) for n in (self.pixels, self.done))
                every = max(1, total // 10)
                self.bar = Bar("megapixels of files looked at", total, start=start, every=every)
            elif self.bar is not None:
                self.bar.advance(count=int(self.done / 1e6) - self.bar.done)

    def stop(self) -> None:
        self.stopped = True

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*exception)


def _state(path: Path) -> list[int]:
    """Size and time of a file; of a folder, those of all files in it."""
    files = [path]
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    found = [file.stat() for file in files]
    return [sum(s.st_size for s in found), max((s.st_mtime_ns for s in found), default=0)]


def _read_kept(kept: Path | None) -> dict[tuple[str, str], tuple[list[int], Found]]:
    """The lines of earlier runs; one that cannot be read is left out, and its file read anew."""
    known = {}
    with contextlib.suppress(OSError):
        for text in kept.read_text(errors="replace").splitlines() if kept is not None else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                line = json.loads(text)
                held = from_lists(line["kind"], line["found"])
                known[line["kind"], line["file"]] = line["state"], held
    return known


def _opened(kept: Path | None, stack: contextlib.ExitStack) -> Any:
    with contextlib.suppress(OSError):
        return None if kept is None else stack.enter_context(open(kept, "a"))


def _keep(file: Any, job: Job, state: list[int], found: Found) -> None:
    kind, name = job.key
    line = {"file": name, "kind": kind, "state": state, "found": as_lists(found)}
    with contextlib.suppress(OSError):  # what cannot be kept is looked at again
        file.write(f"\n{json.dumps(line)}\n")  # a line that a killed process left may have no end
        file.flush()


def as_lists(found: Found) -> list[Any]:
    """As JSON can hold it."""
    if not isinstance(found, dict):
        return list(found)
    return [[value, list(numbers.items())] for value, numbers in found.items()]


def from_lists(kind: str, found: Any) -> Found:
    if kind.startswith("mask"):
        return {int(v): {int(cell): int(n) for cell, n in numbers} for v, numbers in found}
    low, high = found
    return low, high
