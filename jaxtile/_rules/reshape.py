"""`reshape`: nearest upsampling, space to depth, grouped channels, new and dropped dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jax import lax

from .._errors import Mixes
from .._geometry import Window
from .registry import Axes, Equation, Need, Rule, Step, Windows, register, sole
from .shape import local_shape


@register("reshape", kind="movement", linear="sum", view=True)
class Reshape(Rule):
    """A tiled dimension may be split or merged with the dimensions after it, but not folded under
    another one.

    Rows of a tiled dimension of size `p`, each of `P` elements, become rows of size-`q` dimension
    of `Q` elements. If one of `P` and `Q` divides the other, rows map to whole groups of rows:
    nearest upsampling, space-to-depth, grouped channels.
    """

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        shape, other = eqn.in_avals[0].shape, eqn.out_avals[0].shape
        return eqn.in_axes, [_carried(eqn.in_axes[0], shape, other, [None] * len(other))]

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        shape, other = eqn.in_avals[0].shape, eqn.out_avals[0].shape
        single = [a if n == 1 else None for a, n in zip(eqn.in_axes[0], shape, strict=True)]
        try:
            return [_carried(out_axes, other, shape, single)]
        except Mixes:
            return None

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window = sole(windows)
        need: Windows = {}
        produced: Windows = {}
        for dim, axis in enumerate(eqn.in_axes[0]):
            if axis is None:
                continue
            out, rows, out_rows = _counterpart(eqn.in_avals[0].shape, eqn.out_avals[0].shape, dim)
            if out is None or eqn.out_axes[0][out] is None:
                continue
            need[dim], produced[out] = _regrouped(window[out], rows, out_rows)
        # A dimension of size 1 that is new here has no counterpart, and one position.
        produced |= {d: w for d, w in window.items() if d not in produced}
        shape = local_shape(eqn.out_avals[0].shape, produced)
        return Step([Need(need)], lambda scalars, x: [lax.reshape(x, shape)], produced=[produced])


def _carried(
    axes: Axes, shape: Sequence[int], other: Sequence[int], others: list[int | None]
) -> Axes:
    """The axes of the dimensions of `other`, from those of `shape`; of some they are known."""
    for dim, axis in enumerate(axes):
        if axis is not None and (found := _counterpart(shape, other, dim)[0]) is not None:
            others[found] = axis
    return tuple(others)


def _regrouped(window: Window, elements: int, out_elements: int) -> tuple[Window, Window]:
    """The input rows of `elements` each that make up output rows of `out_elements` each."""
    if out_elements % elements == 0:
        k = out_elements // elements
        return window.moved(window.starts * k, window.size * k), window
    k = elements // out_elements
    first = window.starts // k
    count = int(((window.stops - 1) // k + 1 - first).max())
    return window.moved(first, count), window.moved(first * k, count * k)


def _counterpart(
    shape: Sequence[int], other: Sequence[int], dim: int
) -> tuple[int | None, int, int]:
    """The dimension of `other` that holds the rows of `shape`'s `dim`, and the elements per row on
    either side.

    Both shapes are split into the shortest runs of dimensions with equal products; `dim` must be
    the first of its run. A dimension of size 1 matches one of size 1 in the same place, or none (it
    was squeezed away).
    """
    if shape[dim] == 1:
        ones, other_ones = (_ones_beside(s, math.prod(shape[:dim])) for s in (shape, other))
        place = ones.index(dim)
        return (other_ones[place] if place < len(other_ones) else None), 1, 1
    left = [d for d, n in enumerate(shape) if n != 1]
    right = [d for d, n in enumerate(other) if n != 1]
    for run, other_run in _runs(shape, other, left, right):
        if dim not in run:
            continue
        rows = math.prod(shape[d] for d in run[1:])
        other_rows = math.prod(other[d] for d in other_run[1:])
        if run[0] != dim or (rows % other_rows and other_rows % rows):
            break
        return other_run[0], rows, other_rows
    raise Mixes(
        f"`reshape` from {tuple(shape)} to {tuple(other)} folds tiled dimension {dim} into "
        "another one",
        "keep the tiled axis a dimension of its own, or the first of those that are merged",
    )


def _ones_beside(shape: Sequence[int], before: int) -> list[int]:
    """Dimensions of size 1 that have this many elements before them."""
    return [d for d, n in enumerate(shape) if n == 1 and math.prod(shape[:d]) == before]


def _runs(
    shape: Sequence[int], other: Sequence[int], left: list[int], right: list[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of shortest runs of dimensions (of sizes other than 1) with equal products."""
    while left:
        i = j = 1
        while (a := math.prod(shape[d] for d in left[:i])) != (
            b := math.prod(other[d] for d in right[:j])
        ):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield left[:i], right[:j]
        left, right = left[i:], right[j:]
