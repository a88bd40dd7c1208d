"""Schedules of spans of a network, and the fastest way to put them together.

Between two kept results that nothing else spans, the ends of a residual network's blocks for
example, what a schedule costs does not depend on what lies elsewhere. So for each such *span* a
local search (`descent`) finds schedules from the fastest to the smallest, among few operations; and
a dynamic programme (`solver`) finds the fastest sequence of spans that fits. Spans that are alike
are searched once, and another budget needs the dynamic programme only.

Limits: a span has at most so many operations, and statistics that could ride along with the last
result of the span before it are counted as a loop of their own. So what is found here is where the
search in the whole network begins.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .assignment import Assignments
from .descent import Descent
from .facts import Facts
from .found import Found
from .groups import Span
from .model import Stretches
from .solver import fastest
from .states import INSIDE, Assignment, Mode

_LONGEST = 36  # operations of a span
_SHORTEST = 6
_OPTIONS = 96  # schedules of a span


class Option(NamedTuple):
    """A schedule of a span: its cost, and the states and modes of its operations."""

    seconds: float
    peak: float
    kept: float
    states: np.ndarray
    modes: np.ndarray


class Spans:
    """All spans of an outline, with their schedules."""

    def __init__(self, costs: Assignments, grids: Sequence[tuple[int, ...]]):
        self.costs, self.facts, self.grids = costs, costs.facts, grids
        ends = _apart(self.facts)
        self.ends: list[int | None] = [None, *ends, None]
        starts = [0, *ends.values(), len(self.facts.parts)]
        self.spans: dict[tuple[int, int], Span] = {}
        self.options: dict[tuple[int, int], list[Option]] = {}
        known: dict[Any, list[Option]] = {}
        for a in range(len(starts) - 1):
            for b in range(a + 1, len(starts)):
                own = self.facts.parts[starts[a] : starts[b]]
                if not own or (len(own) > _LONGEST and b > a + 1):
                    break
                span = Span(self.ends[a], own, self.ends[b])
                key = self._kind(span)
                if key not in known:
                    known[key] = self._schedules(span)
                self.spans[a, b], self.options[a, b] = span, known[key]

    def fastest(self, allowed: float) -> Assignment | None:
        """The fastest sequence of spans within so many bytes."""
        n, m = len(self.ends), max(map(len, self.options.values()), default=0)
        seconds, peak, added = (np.full((m, n, n), x) for x in (np.inf, 0.0, 0.0))
        for (a, b), options in self.options.items():
            for k, option in enumerate(options):
                seconds[k, a, b], peak[k, a, b], added[k, a, b] = option[:3]
        tables = Stretches(tuple(range(n)), (None,) * m, seconds, peak, added)
        solution = fastest(tables, allowed, whole=allowed) if allowed > 0 else None
        if solution is None:
            return None
        found = self.costs.assignment([INSIDE] * self.facts.n, [Mode(None)] * self.facts.n)
        for k, a, b in solution.stages:
            span, option = self.spans[a, b], self.options[a, b][k]
            found.states[span.own] = option.states
            first = span.own[0] if a else 0
            last = span.own[-1] + 1 if b < n - 1 else self.facts.n
            for own in range(first, last):
                at = bisect.bisect_left(span.own, own)
                found.modes[own] = option.modes[min(at, len(span.own) - 1)]
        return found

    def _kind(self, span: Span) -> Any:
        """The same for spans that are alike."""
        facts, first = self.facts, span.own[0]
        operations = [
            (
                k - first,
                facts.forward[k],
                facts.backward[k],
                facts.held[k],
                facts.made[k],
                facts.bytes[k],
                facts.cotangent[k],
                facts.by_position[k],
                facts.ends_with_clamp[k],
                facts.elementwise[k],
                tuple(facts.outline.parts[k].lengths),
                tuple((i - first, line) for i, line in facts.reads[k]),
                tuple(i - first for i in facts.awaits[k]),
            )
            for k in span.own
        ]
        return span.begin is None, span.end is None, *operations

    def _schedules(self, span: Span) -> list[Option]:
        """Of all that a search has seen, what nothing beats in every respect."""
        descent = Descent(self.costs, self.grids, span)
        descent.smallest()
        found = _front(descent.seen())
        if len(found) > _OPTIONS:
            found = [found[i] for i in np.linspace(0, len(found) - 1, _OPTIONS).astype(int)]
        return [
            Option(
                f.seconds,
                f.peak,
                f.kept,
                f.assignment.states[span.own],
                f.assignment.modes[span.own],
            )
            for f in found
        ]


def _apart(facts: Facts) -> dict[int, int]:
    """Results that nothing else spans, not too near to each other; where, in `parts`, the next
    operations begin.
    """
    found: dict[int, int] = {}
    begin = 0
    for k, after in facts.joints.items():
        if after - begin >= _SHORTEST:
            found[k], begin = after, after
    return found


def _front(found: Sequence[Found]) -> list[Found]:
    """From the fastest to the slowest, what needs or keeps less than everything before it."""
    front: list[Found] = []
    for f in sorted(found, key=lambda f: (f.seconds, f.peak, f.kept)):
        if not any(g.peak <= f.peak and g.kept <= f.kept for g in front):
            front.append(f)
    return front
