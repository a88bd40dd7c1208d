"""What must be known of a folder's files before training: is every value of the masks a class, how
many pixels does each class have, and which range of values becomes 8 bits?

One process looks at the files, and all get what it found, so that they come to the same. The range
is kept beside the run: when it goes on, and in prediction, pixels become the same bytes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..images import ImageError
from ..program.files import write_atomically
from ._dataset import DataError, Dataset
from ._folder import Folder
from ._scale import NOT_FINITE, Scale, not_listed
from ._scan import Found, Job, as_lists, from_lists, scan

_MOST_THREADS = 16
_MOST_NAMED = 20  # classes in a line
_MOST_EXAMPLES = 64  # for mean and deviation

Share = Callable[[Callable[[], str]], str]
"""Takes a function that makes a text, and returns the text in every process."""


def examine(
    train: Dataset,
    evaluation: Dataset,
    folder: Path,
    *,
    limits: Sequence[float] = (),
    weights: Sequence[float] = (),
    share: Share = lambda make: make(),
) -> list[str]:
    """Look at all files of both datasets, once; returns what to tell the user, as lines.

    Bad files are an error, or are dropped if they are to be skipped. A value of a mask that is
    neither a class nor ignored is always an error: it may be in every mask.

    Args:
      folder: of the run. `scanned.jsonl` there keeps what was found for the next time, and
        `data.json` the range.
      limits: the range of values, as the user gave it; (): that of the training images.
      weights: of classes, by which training examples are drawn; (): all are as likely.
    """
    if not (isinstance(train, Folder) and isinstance(evaluation, Folder)):
        return []
    look = functools.partial(_look, train, evaluation, folder, limits, bool(weights))
    found = json.loads(share(lambda: json.dumps(look())))
    if "error" in found:
        raise DataError(*found["error"])
    lines = _of_nodata(train, evaluation)
    if found["range"] is not None:
        train.scale = evaluation.scale = Scale(*found["range"])
        lines.append(f"values from {train.scale} become 8 bits: {found['origin']}")
    for dataset, which, counts in zip(
        (train, evaluation), ("training", "held-out"), found["counts"], strict=True
    ):
        kept = dataset.drop(found["bad"])
        if counts:
            numbers = np.array(counts["classes"])[kept]
            lines += _of_classes(dataset, which, numbers.sum(0).tolist(), counts["ignored"])
        if weights and dataset is train:
            places = {Path(p): from_lists("mask", lists) for p, lists in found["places"].items()}
            lines.append(train.weigh(weights, numbers, places))
    return lines


def _of_nodata(*datasets: Folder) -> list[str]:
    """A warning for the first file that names a value of pixels without data, if that counts."""
    warnings = (
        not_listed(item.image, header.nodata, header.dtype, dataset.nodata)
        for dataset in datasets
        for item, header in zip(dataset.items, dataset.headers, strict=True)
    )
    return [*filter(None, warnings)][:1]


def _of_classes(dataset: Folder, which: str, number: list[int], ignored: int) -> list[str]:
    """How often each class is there, and a warning for those that are not."""
    unit = "pixels" if dataset.masks else "images"
    shown = ", ".join(f"{n:,} of class {c}" for c, n in enumerate(number[:_MOST_NAMED]))
    shown += ", ..." if len(number) > _MOST_NAMED else ""
    lines = [f"{which} {unit}: {shown}{f'; {ignored:,} ignored' if ignored else ''}"]
    absent = [str(c) for c, n in enumerate(number) if n == 0]
    if absent:
        fields = "`data.classes`, `data.mask_values` and `data.ignored`"
        lines.append(
            f"warning: no {which} {unit[:-1]} is of class {', '.join(absent[:_MOST_NAMED])}: are "
            f"{fields if dataset.masks else '`data.classes` and the labels'} right?"
        )
    return lines


def _look(
    train: Folder, evaluation: Folder, folder: Path, limits: Sequence[float], weighted: bool
) -> Any:
    """What was found; or what is wrong, for all processes to raise."""
    try:
        began_with = read_range(folder) if any(folder.glob("checkpoints/[0-9]*")) else None
        given = began_with or limits
        jobs = [
            Job(item.label, "mask", header.pixels, len(header.size), dataset.geometry.level)
            for dataset in (train, evaluation)
            for item, header in zip(dataset.items, dataset.headers, strict=True)
            if dataset.masks and not dataset.targets
        ]
        jobs += [] if given else _to_scale(train, evaluation)
        found = scan(jobs, folder / "scanned.jsonl", min(_MOST_THREADS, os.cpu_count() or 1))
        bad = {str(path): error for path, error in found.items() if isinstance(error, ImageError)}
        for error in bad.values():
            if train.on_bad_file == "error" or isinstance(error, DataError):
                raise error
        counts = [None if d.targets else d.count_classes(found) for d in (train, evaluation)]
        limits, origin = (
            (given, "as when this run began" if began_with else "as `data.range` says")
            if given
            else _range(found)
        )
        note(folder, range=limits)
    except ImageError as error:
        return {"error": [str(error.path), error.reason]}
    texts = {path: str(error) for path, error in bad.items()}
    masks = {item.label for item in train.items if weighted and train.masks}
    places = {str(p): as_lists(found[p]) for p in masks if isinstance(found[p], dict)}
    return {"bad": texts, "counts": counts, "range": limits, "origin": origin, "places": places}


def _to_scale(train: Folder, evaluation: Folder) -> list[Job]:
    """The training images that are not of 8 bits. All such images must be of one type: one range
    would make those of another black.
    """
    types: dict[np.dtype, Path] = {}
    for dataset in (train, evaluation):
        for item, header in zip(dataset.items, dataset.headers, strict=True):
            if header.dtype != np.uint8:
                types.setdefault(header.dtype, item.image)
        if dataset is train and not types:
            types[np.dtype(np.uint8)] = train.items[0].image
    if train.dtype != np.uint8:
        return []
    if len(types) > 1:
        (first, path), (second, other) = list(types.items())[:2]
        raise DataError(
            other, f"its values are {second}, but those of {path} are {first}: set `data.range`"
        )
    return [
        Job(
            *(item.image, "image", header.pixels, len(header.size), train.geometry.level),
            nodata=train.nodata,
        )
        for item, header in zip(train.items, train.headers, strict=True)
        if header.dtype != np.uint8
    ]


def _range(found: dict[Path, Found]) -> tuple[tuple[float, float] | None, str]:
    ranges = {path: ends for path, ends in found.items() if isinstance(ends, tuple)}
    if not ranges:
        return None, ""
    low, high = min(r[0] for r in ranges.values()), max(r[1] for r in ranges.values())
    if low > high:
        raise DataError(
            next(iter(ranges)),
            "this and the other training images hold no data: is `data.nodata` right?",
        )
    if low == high:
        raise DataError(
            next(iter(ranges)),
            f"all values of this and the other training images are {low}: set `data.range`",
        )
    return (low, high), (
        f"the range of the {len(ranges)} training images that are not of 8 bits; `data.range` "
        "sets another"
    )


def read_range(folder: Path) -> tuple[float, float] | None:
    """The range with which a run was trained; None: on images of 8 bits."""
    found = noted(folder).get("range")
    try:
        return None if found is None else (Scale(*found).low, Scale(*found).high)
    except (ValueError, TypeError) as error:
        raise _damaged(folder) from error


def statistics(dataset: Dataset, seed: int) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel over some training examples; of 8 bits as 0 to 1.

    Pixels without data do not count.
    """
    sums, count = np.zeros((2, dataset.shape[-1])), 0
    unit = 255 if dataset.dtype == np.uint8 else 1
    order = np.random.default_rng(seed).permutation(len(dataset))[:_MOST_EXAMPLES].tolist()
    for index in order:
        pixels, found = dataset.counted(index, np.random.default_rng([seed, index]))
        values = pixels.astype(np.float64) / unit
        if not np.isfinite(values).all():
            raise DataError(
                dataset.name(found),
                NOT_FINITE,
            )
        sums += [values.sum(0), (values**2).sum(0)]
        count += len(values)
    if not count:
        raise DataError(
            dataset.name(order[0]),
            f"this and {len(order) - 1} other examples hold no data: is `data.nodata` right?",
        )
    mean, squares = sums / count
    deviation = np.sqrt(np.maximum(squares - mean**2, 0))
    return mean.tolist(), np.where(deviation > 0, deviation, 1).tolist()


def note(folder: Path, **found: Any) -> None:
    """Keep what was found out about the data, for prediction and for a run that goes on."""
    kept = {**noted(folder), **found}
    write_atomically(folder / "data.json", json.dumps(kept) + "\n")


def noted(folder: Path) -> dict[str, Any]:
    """What was found out about the data of a run."""
    file = folder / "data.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(folder) from error
    if not isinstance(found, dict):
        raise _damaged(folder)
    return found


def _damaged(folder: Path) -> DataError:
    return DataError(
        folder / "data.json",
        'is damaged: it must be {"range": [LOW, HIGH]}, the values that became 0 and 255 in '
        'training, or {"range": null} if the images were of 8 bits; and may hold their "shape" and '
        '"class_names"',
    )
