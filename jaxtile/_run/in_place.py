"""Which arrays a loop puts in the place of others.

In each tile a backward loop reads the result's cotangents and writes the inputs'. An input of a
skip connection is read where the result is written, and nowhere else. So nobody reads the result's
cotangents again once a tile has, and the input's take their place: one array for both. In the wide
maps of a residual network that is the largest array there is.

Forwards, the result takes the place of such an input if that is passing, that is, not kept. If
somebody reads it later all the same, the compiler copies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .._geometry import owned
from .._graph.values import Value
from .._regions.region import Region
from .._regions.targets import Target
from .._regions.tile import Cut, Offset, ReadView, TiledEquation
from .._rules import Windows

Places = Mapping[tuple[int, int], Cut | None]
"""Input and target, and how to cut the target's window out of the input's."""


def are_parts(region: Region, value: Value, windows: Windows) -> bool:
    """Does every element of an array belong to the window of one tile, and of one only?"""
    lengths = [(w, value.aval.shape[d]) for d, w in windows.items()]
    alone = all(w.starts[0] == 0 and (owned(w, n) == w.size).all() for w, n in lengths)
    looped = {axis for axis, n in region.split.items() if n > 1}
    return alone and looped <= {w.axis for w, _ in lengths}


def places(region: Region, cuts: Mapping[Value, Cut | None]) -> Places:
    """Inputs that are read where a target of the same kind is written, and nowhere else.

    `cuts`: how the targets' operands are cut out of their windows.
    """
    assert region.plan is not None
    table, windows = region.plan.table, region.plan.windows
    viewed = {i.base for i in region.plan.instructions if isinstance(i, ReadView)}
    found = {}
    for i, value in enumerate(region.inputs):
        for k, target in enumerate(region.targets):
            if value in viewed or not _alike(value, target):
                continue
            tile = region.windows(target.value)
            cut = Cut.of(table, windows[value], tile, 0)
            reads = [*_reads(region, value), *(c for v, c in cuts.items() if v is value)]
            together = all(_offsets(c) == _offsets(cut) for c in reads)
            if together and are_parts(region, value, tile):
                found[i, k] = cut
    return found


def chosen(places: Places, there: Sequence[bool], free: Sequence[bool]) -> dict[int, int]:
    """One input at most for each target that has cotangents, if it has none yet."""
    found: dict[int, int] = {}
    for i, k in places:
        if free[i] and there[k] and i not in found and k not in found.values():
            found[i] = k
    return found


def _alike(value: Value, target: Target) -> bool:
    if target.reduction is not None or value.base is not None:
        return False
    kind = [(v.aval.shape, v.aval.dtype, v.axes) for v in (value, target.value)]
    return kind[0] == kind[1]


def _reads(region: Region, value: Value) -> Iterator[Cut | None]:
    """What is cut out of an input by whatever is differentiated, and so not by what computes
    passing inputs.
    """
    assert region.plan is not None
    for instruction in region.plan.instructions:
        if isinstance(instruction, TiledEquation) and instruction.node in region.nodes:
            reads = zip(instruction.node.inputs, instruction.reads, strict=True)
            yield from (cut for v, cut in reads if v is value)


def _offsets(cut: Cut | None) -> tuple[Offset, ...]:
    return () if cut is None else cut.offsets
