"""Recomputation over lower sets of a forward graph.

Kusumoto, Inoue, Watanabe, Akiba, Koyama: "A Graph Theoretic Framework of Recomputation Algorithms
for Memory-Efficient Backpropagation" (NeurIPS 2019). A lower set holds, with a value, all that the
value is computed from. A schedule is a growing chain of lower sets, from nothing to the whole.
Going forward, the values of a stage (what a set has more than the one before) are computed and then
dropped, but for the set's boundary: those that something outside the set reads. Going backward, the
stages are computed once more, last to first, and differentiated.

In the paper's memory model a stage takes: what earlier boundaries keep; twice its own values (they
and their gradients); the gradients of values outside the set that read from it; and the other
values that those are computed from. It counts every value in full, nothing is freed within a stage,
and the arguments of the function are not counted.

Sets of values are bit masks. The programme over all lower sets is exact and takes time quadratic in
their number, which grows exponentially with the graph's width (331 sets for the U-Net); over the
ancestor sets of single values it is approximate and fast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxtile._graph.operations import Operations


@dataclasses.dataclass(frozen=True)
class ForwardGraph:
    """Values in topological order, with what each is computed from (a mask), bytes, and work."""

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    bytes: tuple[int, ...]
    work: tuple[int, ...]

    @classmethod
    def of(cls, operations: Operations) -> ForwardGraph:
        """The graph of a function's operations, each a value."""
        index = {o.name: i for i, o in enumerate(operations.operations)}
        inputs = tuple(
            sum(1 << index[t.name] for t in o.inputs if t.name in index)
            for o in operations.operations
        )
        return cls(
            tuple(index),
            inputs,
            tuple(o.output.bytes for o in operations.operations),
            tuple(o.flops for o in operations.operations),
        )

    @property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    def total(self, amounts: Sequence[int], values: int) -> int:
        return sum(amounts[v] for v in _members(values))

    def boundary(self, low: int) -> int:
        """Values of a set that something outside it reads."""
        outside = self._read_by(self.everything & ~low)
        return low & outside

    def beyond(self, low: int) -> int:
        """Bytes outside a set that its last stage still needs in the backward pass."""
        readers = sum(1 << v for v in _members(self.everything & ~low) if self.inputs[v] & low)
        return self.total(self.bytes, readers) + self.total(
            self.bytes, self._read_by(readers) & ~low
        )

    def _read_by(self, values: int) -> int:
        read = 0
        for v in _members(values):
            read |= self.inputs[v]
        return read


def lower_sets(graph: ForwardGraph, most: int | None = None) -> list[int] | None:
    """All lower sets, smallest first; None if there are more than `most`."""
    found, layer = [0], [0]
    while layer:
        if most is not None and len(found) > most:
            return None
        layer = sorted(
            {
                low | 1 << v
                for low in layer
                for v in _members(graph.everything & ~low)
                if not graph.inputs[v] & ~low
            }
        )
        found += layer
    return found


def depth_first_sets(graph: ForwardGraph) -> list[int]:
    """All lower sets, in the order in which a depth-first search lists them."""
    listed, stack = {0: None}, [0]
    while stack:
        low = stack.pop()
        for v in _members(graph.everything & ~low):
            bigger = low | 1 << v
            if not graph.inputs[v] & ~low and bigger not in listed:
                listed[bigger] = None
                stack.append(bigger)
    return list(listed)


def ancestor_sets(graph: ForwardGraph) -> list[int]:
    """Of each value, it and all that it is computed from; nothing; and everything."""
    ancestors: list[int] = []
    for v, inputs in enumerate(graph.inputs):
        low = 1 << v
        for u in _members(inputs):
            low |= ancestors[u]
        ancestors.append(low)
    return sorted({0, graph.everything, *ancestors}, key=lambda low: (low.bit_count(), low))


class Chain(NamedTuple):
    """A schedule: its sets from the first stage to the last, and what it costs in the model."""

    sets: tuple[int, ...]
    peak: int
    recomputed: int

    def stored(self, graph: ForwardGraph) -> tuple[str, ...]:
        """The values that it keeps: the boundaries of its sets."""
        kept = 0
        for low in self.sets:
            kept |= graph.boundary(low)
        return tuple(graph.names[v] for v in _members(kept))


def smallest_budget(
    graph: ForwardGraph, family: Sequence[int], *, as_listed: bool = False
) -> Chain:
    """The schedule with the lowest peak.

    `as_listed`: consider only steps to sets that are later in the list, as some programs do; if a
    set is listed before one of its subsets, steps are lost.
    """

    def extend(state: tuple[int, ...], kept: int, peak: int, work: int) -> tuple[int, ...] | None:
        return state[0] + kept, max(state[1], state[0] + peak)

    sets = family if as_listed else sorted(family, key=int.bit_count)
    return _search(graph, sets, (0, 0), extend, lambda state: state[1])


def cheapest_within(graph: ForwardGraph, family: Sequence[int], budget: int) -> Chain | None:
    """The schedule that recomputes least with a peak of at most `budget` bytes; None: there is
    none.
    """

    def extend(state: tuple[int, ...], kept: int, peak: int, work: int) -> tuple[int, ...] | None:
        return (state[0] + kept, state[1] + work) if state[0] + peak <= budget else None

    sets = sorted(family, key=int.bit_count)
    return _search(graph, sets, (0, 0), extend, lambda state: state[1])


def square_root(graph: ForwardGraph) -> Chain:
    """Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost" (2016).

    Cuts are possible where one value carries everything on; with n such places, the values are cut
    into about sqrt(n) stages of equal bytes.
    """
    family = [
        low
        for low in ancestor_sets(graph)
        if low and (graph.boundary(low).bit_count() == 1 or low == graph.everything)
    ]
    share = graph.total(graph.bytes, graph.everything) / max(1, math.isqrt(len(family)))
    chain: list[int] = []
    before = 0
    for low in family:
        last = low == graph.everything
        if last or (not before & ~low and graph.total(graph.bytes, low & ~before) >= share):
            chain.append(low)
            before = low
    return _measured(graph, tuple(chain))


def _search(
    graph: ForwardGraph,
    sets: Sequence[int],
    start: tuple[int, ...],
    extend: Callable[[tuple[int, ...], int, int, int], tuple[int, ...] | None],
    cost: Callable[[tuple[int, ...]], int],
) -> Chain | None:
    """The cheapest chain, by labels (kept bytes, cost) of which no other is better in both."""
    boundaries = [graph.boundary(low) for low in sets]
    totals = [graph.total(graph.bytes, low) for low in sets]
    works = [graph.total(graph.work, low) for low in sets]
    beyond = [graph.beyond(low) for low in sets]
    labels: list[dict[tuple[int, ...], tuple[int, tuple[int, ...]] | None]] = [{} for _ in sets]
    labels[0][start] = None
    for i, low in enumerate(sets):
        best = _undominated(labels[i])
        for j in range(i + 1, len(sets)):
            if not best or low & ~sets[j]:
                continue
            new = boundaries[j] & ~low
            kept = graph.total(graph.bytes, new)
            peak = 2 * (totals[j] - totals[i]) + beyond[j]
            work = works[j] - works[i] - graph.total(graph.work, new)
            for state in best:
                after = extend(state, kept, peak, work)
                if after is not None:
                    labels[j].setdefault(after, (i, state))
    at = sets.index(graph.everything)
    ends = _undominated(labels[at])
    if not ends:
        return None
    state = min(ends, key=cost)
    chain = []
    while at:
        chain.append(sets[at])
        at, state = labels[at][state]
    return _measured(graph, tuple(chain[::-1]))


def _measured(graph: ForwardGraph, chain: tuple[int, ...]) -> Chain:
    kept = before = peak = work = 0
    for low in chain:
        stage, boundary = low & ~before, graph.boundary(low)
        live = graph.total(graph.bytes, kept) + 2 * graph.total(graph.bytes, stage)
        peak = max(peak, live + graph.beyond(low))
        work += graph.total(graph.work, stage & ~boundary)
        kept, before = kept | boundary, low
    return Chain(chain, peak, work)


def _undominated(labels) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for label in sorted(labels):
        if not found or label[1] < found[-1][1]:
            found.append(label)
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low
