"""What the model asks of an outline first: which operations take time, and which grids to try."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._graph.operations import Operation
from ..policy import Outline
from .costs import Costs, Duration

_COUNTS = [2, 3, 4, 6, 8, 12, 16]  # tiles along an axis
_FEW = [1, 2, 3, 4]
_THIN = 64  # positions along the first axis of a strip of the largest array
_LARGE = 1024  # positions of a tile, along an axis: if so many are left, finer grids are tried too


def kernels(outline: Outline) -> list[Operation | None]:
    """The operations with what they read from memory; None for those that take no extra time.

    A compiler computes some operations together with others. A change of type, or a sum that
    nothing but one further elementwise operation reads, is done by whoever reads it, and so that
    operation reads what the first one reads. Small results, such as a norm's statistics, and a
    second sum over one array, such as that of its squares, are not counted either.
    """
    found: list[Operation | None] = []
    read_as: dict[str, tuple[Any, ...]] = {}
    summed: set[Any] = set()
    readers = Counter(i for part in outline.parts for i in part.inputs)
    for k, part in enumerate(outline.parts):
        operation = part.operation
        reads = tuple(r for t in operation.inputs for r in read_as.get(t.name, (t,)))
        moves = operation.kind == "movement" and len(reads) == 1
        moves = moves and operation.inputs[0].shape == operation.output.shape
        fused = operation.kind == "elementwise" and not part.held_bytes and readers[k] == 1
        if moves or (fused and part.tiled and k not in outline.outputs):
            read_as[operation.output.name] = reads
            found.append(None)
            continue
        small = operation.kind in ("elementwise", "movement") and not part.tiled
        another = operation.kind == "reduction" and reads in summed
        own = not (small or another)
        found.append(dataclasses.replace(operation, inputs=reads) if own else None)
        if operation.kind == "reduction":
            summed.add(reads)
    if not any(found):  # nothing but changes of type, say
        found[-1] = outline.parts[-1].operation
    return found


def durations(outline: Outline, costs: Costs) -> dict[int, tuple[Duration, Duration]]:
    """Of the operations that take time, and of their gradients."""
    found = {
        k: costs.durations(kernel, part.sample)
        for k, (kernel, part) in enumerate(zip(kernels(outline), outline.parts, strict=True))
        if kernel is not None
    }
    if costs.applies_clamps:
        none = Duration(0.0, (0.0, 1.0), (0.0, 0.0))
        found |= {k: (none, found[k][1]) for k in found if outline.parts[k].clamps}
    return found


def grids(outline: Outline) -> list[tuple[int, ...]]:
    """Grids to try: along axes without a halo (a batch) first, then along all."""
    parts = [p for p in outline.parts if p.tiled]
    if not parts:
        return []
    longest = np.array([p.lengths for p in parts]).max(0)
    halo = [
        any(line[a].scale not in (0, 1) or line[a].halo for p in parts for line in p.demands)
        for a in range(outline.rank)
    ]

    def grid(along_free: int, along_halo: int) -> tuple[int, ...]:
        wanted = [along_halo if h else along_free for h in halo]
        # Along an axis of one position nothing is tiled, and its length is 0.
        return tuple(max(1, int(min(n, m))) for n, m in zip(wanted, longest, strict=True))

    free = max((int(n) for n, h in zip(longest, halo, strict=True) if not h), default=1)
    powers = [2**i for i in range(1, 11)]
    found = [grid(n, 1) for n in powers if n < free] + [grid(free, 1)]
    finer = [n * 2**i for i in range(2, 9) for n in (5, 6, 7, 8)]
    counts = _COUNTS + [n for n in finer if n * _LARGE <= longest.max()]
    found += [grid(free, n) for n in counts]
    # Where tiles are few, one more along one axis is a step between.
    found += [(*grid(free, n)[:-1], *grid(free, m)[-1:]) for n, m in itertools.pairwise(_FEW)]
    return [g for g in dict.fromkeys(found) if any(n > 1 for n in g)]


def sides(grid: Any) -> np.ndarray:
    """On how many sides a tile has a halo, of two: along an axis with two tiles on one.

    >>> sides((1, 2, 8))
    array([1. , 0.5, 1. ])
    """
    return np.where(np.asarray(grid) == 2, 0.5, 1.0)


def strips(outline: Outline) -> list[tuple[int, ...]]:
    """Grids of tiles from edge to edge, if such a tile is one piece of memory: not with a batch, or
    with channels in front.
    """
    parts = [p for p in outline.parts if p.tiled]
    largest = max(parts, key=lambda p: np.prod(p.operation.output.shape), default=None)
    if largest is None or largest.lengths[0] != _first(largest.operation.output.shape):
        return []
    longest = max(p.lengths[0] for p in parts)
    counts = [n * 2**i for i in range(2, 9) for n in (2, 3)]
    fits = [n for n in counts if n * _THIN <= longest] or [min(counts[0], longest)]
    return [(n, *[1] * (outline.rank - 1)) for n in fits if n > 1]


def _first(shape: Sequence[int]) -> int:
    """The length of the first dimension that has more than one position."""
    return next((n for n in shape if n != 1), 1)
