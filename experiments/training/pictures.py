"""Pictures of a run: the loss, predictions beside truth, tiles with their halos."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxtile import Explanation

from ..program.files import write_figure
from ..tasks import Task

_SMOOTH = 0.9  # of the last value in a smoothed curve
_MOST_PIXELS = 1024  # along a side of what is drawn
_CROP = 256  # pixels along a side of a crop, which shows them all


def limits(values: Sequence[float | None], also: Sequence[float]) -> tuple[float, float]:
    """Of an axis that shows all these values with some room, and `also` these.

    >>> limits([2.0, None, 5.0], (0,))
    (0, 5.25)
    """
    found = [*also, *(v for v in values if v is not None and np.isfinite(v))] or [0]
    low, high = min(found), max(found)
    room = 0.05 * (high - low) or 0.05
    return low if low in also else low - room, high + room


def loss_curve(lines: Sequence[dict[str, Any]], quality: str, path: pathlib.Path) -> None:
    """Training loss by step, and the evaluation's loss and quality."""
    train = [line for line in lines if "split" not in line]
    evals = [line for line in lines if line.get("split") == "eval"]
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    losses, smooth = [x["loss"] for x in train], []
    for loss in losses:
        smooth.append(loss if not smooth else _SMOOTH * smooth[-1] + (1 - _SMOOTH) * loss)
    at = [x["step"] for x in train]
    left.plot(at, losses, color="C0", lw=0.6, alpha=0.4)
    left.plot(at, smooth, color="C0", lw=1.2, label="training loss, smoothed")
    steps = [x["step"] for x in evals]
    evaluated, qualities = ([x.get(name) for x in evals] for name in ("loss", quality))
    left.plot(steps, evaluated, "o-", color="C1", label="evaluation loss")
    left.set(xlabel="step", ylabel="loss", ylim=limits([*losses, *evaluated], (0,)))
    right = left.twinx()
    right.plot(steps, qualities, "s--", color="C2", label=quality)
    are_shares = all(0 <= v <= 1 for v in qualities if v is not None)
    right.set(ylabel=quality, ylim=limits(qualities, (0, 1) if are_shares else ()))
    handles = [h for axis in (left, right) for h in axis.get_legend_handles_labels()[0]]
    left.legend(handles=handles, loc="center right")
    _save(figure, path)


def predictions(rows: Sequence[tuple[Any, Any, Any]], task: Task, path: pathlib.Path) -> None:
    """Image, truth and prediction, a row each; the task knows how to draw the latter two. Of maps,
    also where they differ. An image that is too large for a row has a second one, with a crop.
    """
    titles = ["truth", "prediction", *(["error"] if task.dense else [])]
    crops = _crops if task.dense else _middles
    named = [shown for row in rows for shown in (("image", *row), *crops(*row))]
    size = (3 * len(titles) + 3, 3 * len(named))
    figure, axes = plt.subplots(
        len(named), len(titles) + 1, figsize=size, squeeze=False, layout="constrained"
    )
    for row, (name, image, truth, predicted) in zip(axes, named, strict=True):
        for axis, title in zip(row, [name, *titles], strict=True):
            axis.axis("off")
            axis.set_title(title, fontsize=9)
        _show(row[0], image)
        if image.ndim == 3:
            _scale_bar(row[0], image)
        for axis, value in zip(row[1:], (truth, predicted), strict=False):
            task.draw(axis, _thinned(_plane(value, image.ndim - 1)) if task.dense else value)
        if task.dense:
            _show_error(row[3], truth, predicted, image.ndim - 1)
    _save(figure, path)


def _show_error(axis: Axes, truth: np.ndarray, predicted: np.ndarray, dimensions: int) -> None:
    """Of classes, where they differ, in black; of numbers, by how much."""
    if truth.shape != predicted.shape:
        return
    shown = _thinned(_plane(_error(truth, predicted), dimensions))
    shown = shown.mean(-1) if shown.ndim == 3 else shown
    axis.imshow(shown, cmap="gray_r", vmin=0, interpolation="nearest")


def _error(truth: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    if truth.dtype.kind in "ui":
        wrong = (truth != predicted) & (truth != np.iinfo(truth.dtype).max)
        return wrong.astype(np.float32)
    return np.nan_to_num(np.abs(truth - predicted.astype(np.float32)))


def _crops(image: np.ndarray, truth: np.ndarray, predicted: np.ndarray) -> Iterator[Any]:
    """The square with the most errors, if the image is shown with fewer pixels than it has."""
    if image.ndim != 3 or max(image.shape[:2]) <= 2 * _CROP or truth.shape != predicted.shape:
        return
    size = truth.shape[:2]
    error = _error(truth, predicted).reshape(*size, -1).sum(-1)
    edges = [np.arange(0, n, _CROP) for n in size]
    sums = np.add.reduceat(np.add.reduceat(error, edges[0], 0), edges[1], 1)
    found = np.unravel_index(sums.argmax(), sums.shape)
    starts = [max(0, min(int(i) * _CROP, n - _CROP)) for i, n in zip(found, size, strict=True)]
    window = tuple(slice(a, a + _CROP) for a in starts)
    border = [(n - m) // 2 for n, m in zip(image.shape[:2], size, strict=True)]
    seen = tuple(slice(a + b, a + b + _CROP) for a, b in zip(starts, border, strict=True))
    name = f"crop at row {seen[0].start}, column {seen[1].start}"
    yield name, image[seen], truth[window], predicted[window]


def _middles(image: np.ndarray, truth: Any, predicted: Any) -> Iterator[Any]:
    """The square in the middle of an image that has a label as a whole, if it is as large."""
    if image.ndim == 3 and max(image.shape[:2]) > 2 * _CROP:
        starts = [max(0, (n - _CROP) // 2) for n in image.shape[:2]]
        seen = tuple(slice(a, a + _CROP) for a in starts)
        yield f"crop at row {starts[0]}, column {starts[1]}", image[seen], truth, predicted


def _scale_bar(axis: Axes, image: np.ndarray) -> None:
    """A round number of pixels, below the image: at most a third of its width."""
    width = image.shape[-2]
    power = 10 ** int(np.log10(max(1, width / 3)))
    length = next(n * power for n in (5, 2, 1) if n * power <= max(1, width / 3))
    shown = length / width
    axis.plot([0, shown], [-0.02, -0.02], "k", lw=2, transform=axis.transAxes, clip_on=False)
    axis.text(0, -0.04, f"{length} pixels", fontsize=7, va="top", transform=axis.transAxes)


def tile_grid(image: np.ndarray, explained: Explanation, path: pathlib.Path) -> bool:
    """The tiles of the first loop that reads the image, and what two of them read.

    Returns whether there is such a loop.
    """
    found = [
        (region, use)
        for region in explained.regions
        if isinstance(region.grid, tuple)
        for use in region.reads
        if image.ndim == 3 and image.shape[:2] == tuple(use.shape[-3:-1])
    ]
    if not found:
        return False
    region, use = found[0]
    (rows, columns), size = region.grid[-2:], image.shape[:2]
    figure, axis = plt.subplots(figsize=(7, 7 * size[0] / size[1] + 0.4), layout="constrained")
    _show(axis, image, extent=(0, size[1], size[0], 0))
    edges = [np.linspace(0, n, k + 1) for n, k in zip(size, (rows, columns), strict=True)]
    axis.hlines(edges[0], 0, size[1], color="w", lw=0.8)
    axis.vlines(edges[1], 0, size[0], color="w", lw=0.8)
    halo = use.halo[-2:]
    for color, (i, j) in (("C1", (rows // 2, columns // 2)), ("C3", (0, 0))):
        top, bottom = edges[0][i], edges[0][i + 1]
        left, right = edges[1][j], edges[1][j + 1]
        axis.add_patch(_box((left, top, right, bottom), color, "-"))
        outer = (
            max(0, left - halo[1][0]),
            max(0, top - halo[0][0]),
            min(size[1], right + halo[1][1]),
            min(size[0], bottom + halo[0][1]),
        )
        axis.add_patch(_box(outer, color, "--"))
    sides = " and ".join(f"{a}+{b}" for a, b in halo)
    axis.set_title(
        f"{rows} x {columns} tiles (solid) and what they read (dashed); halo {sides} pixels"
    )
    _save(figure, path)
    return True


def _box(edges: tuple[float, float, float, float], color: str, style: str) -> Rectangle:
    left, top, right, bottom = edges
    size = right - left, bottom - top
    return Rectangle((left, top), *size, fill=False, ec=color, ls=style, lw=1.8)


def _show(axis: Axes, image: np.ndarray, **options: Any) -> None:
    """Three channels of 8 bits are colours; of anything else the first channel is shown in grey."""
    image = _thinned(_plane(image, image.ndim - 1))
    if image.shape[-1] == 3 and image.dtype == np.uint8:
        axis.imshow(image, **options)
        return
    limits = {"vmin": 0, "vmax": 255} if image.dtype == np.uint8 else {}
    axis.imshow(image[..., 0].astype(float), cmap="gray", **limits, **options)


def _plane(array: np.ndarray, dimensions: int) -> np.ndarray:
    """Of a volume, its three middle planes side by side; of a trace, a band."""
    if dimensions == 1:
        return np.repeat(array[None], max(1, len(array) // 8), axis=0)
    if dimensions == 2:
        return array
    middle = [array.take(n // 2, axis=d) for d, n in enumerate(array.shape[:3])]
    height = max(plane.shape[0] for plane in middle)
    padded = [
        np.pad(p, [(0, height - p.shape[0]), (0, 2), *[(0, 0)] * (p.ndim - 2)]) for p in middle
    ]
    return np.concatenate(padded, axis=1)


def _thinned(image: np.ndarray) -> np.ndarray:
    step = max(1, -(-max(image.shape[:2]) // _MOST_PIXELS))
    return image[::step, ::step]


def _save(figure: Figure, path: pathlib.Path) -> None:
    write_figure(figure, path, dpi=110)
    plt.close(figure)
