"""Which operations get one state, or one grid, together: those of a kind, and neighbours.

The local search (`descent.py`) decides about them instead of about each operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from .facts import Facts


class Span(NamedTuple):
    """Operations between two results that nothing else spans, and that are kept."""

    begin: int | None
    """The first of them; None: the network begins here."""
    own: Sequence[int]
    end: int | None


def groups(facts: Facts, span: Span) -> dict[object, list[int]]:
    """Operations whose results may be whole, by kind and shape."""
    found: dict[object, list[int]] = {}
    for k in span.own:
        operation = facts.outline.parts[k].operation
        if facts.tiled[k] and facts.held[k] > 0 and k != span.end:
            key = (
                operation.kind,
                operation.output.shape,
                operation.macs,
                len(facts.inputs[k]),
            )
            found.setdefault(key, []).append(k)
    return found


def zones(facts: Facts, span: Span) -> Iterator[list[int]]:
    """Neighbouring operations on arrays of one size; a small one works on those before it."""
    whole = len(span.own) == len(facts.parts)
    operations = range(facts.n) if whole else range(span.own[0], span.own[-1] + 1)
    lengths: dict[int, tuple[int, ...]] = {}
    last: tuple[int, ...] = ()
    for k in operations:
        if facts.tiled[k] or facts.reduces[k]:
            last = facts.outline.parts[k].lengths
        lengths[k] = last
    for _, zone in itertools.groupby(operations, lengths.__getitem__):
        yield list(zone)


def split(zone: list[int], ends: Collection[int]) -> Iterator[list[int]]:
    """The parts of a zone between results that nothing spans."""
    block: list[int] = []
    for k in zone:
        block.append(k)
        if k in ends:
            yield block
            block = []
    if block:
        yield block
