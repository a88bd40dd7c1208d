"""Which results to keep, by lower sets of the forward graph.

Problem: of all results of a forward pass, keep some, and compute the others again in the backward
pass, with the least work for a given number of bytes.

Idea (Kusumoto, Inoue, Watanabe, Akiba, Koyama: "A Graph Theoretic Framework of Recomputation
Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019). A *lower set* holds, with each
value, all that the value is computed from. A schedule is a chain of growing lower sets, from the
empty one to the whole graph. What one set has more than the one before it is a *stage*. In the
forward pass a stage is computed, and of it only the set's *boundary* is kept: the values that
something outside the set reads. In the backward pass the stages are computed once more, from the
last to the first, and differentiated. For values `a -> b -> c -> d`, the chain `{a, b}`,
`{a, b, c, d}` keeps `b`, and computes `a`, then `c`, again.

Memory, in the paper's model, is the largest sum over the stages of: what earlier boundaries keep;
twice the stage's values (they and their gradients); the gradients of values outside the set that
read from it; and the other values that those are computed from.

Limits: the model counts every value in full, frees nothing within a stage, and does not count the
arguments of the function. The search over all lower sets is exact and takes time quadratic in their
number, which grows exponentially with the width of the graph (331 sets for the U-Net); over the
ancestor sets of single values it is approximate and fast.

Sets of values are bit masks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class ForwardGraph:
    """Values in topological order: names, what each is computed from (a mask), bytes and work."""

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    bytes: tuple[int, ...]
    work: tuple[int, ...]

    @property
    def everything(self) -> int:
        return (1 << len(self.names)) - 1

    def total(self, amounts: Sequence[int], values: int) -> int:
        return sum(amounts[v] for v in _members(values))

    def boundary(self, low: int) -> int:
        """Values of a set that something outside it reads."""
        return low & self._read_by(self.everything & ~low)

    def beyond(self, low: int) -> int:
        """Bytes outside a set that its last stage still needs in the backward pass."""
        readers = sum(1 << v for v in _members(self.everything & ~low) if self.inputs[v] & low)
        others = self._read_by(readers) & ~low
        return self.total(self.bytes, readers) + self.total(self.bytes, others)

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


def ancestor_sets(graph: ForwardGraph) -> list[int]:
    """Of each value, it and all that it is computed from; nothing; and everything."""
    ancestors: list[int] = []
    for v, inputs in enumerate(graph.inputs):
        low = 1 << v
        for u in _members(inputs):
            low |= ancestors[u]
        ancestors.append(low)
    return sorted({0, graph.everything, *ancestors}, key=lambda low: (low.bit_count(), low))


Label = tuple[int, int]
"""Of the first stages of a schedule: the bytes that they keep, and the cost to be minimised."""


class Stage(NamedTuple):
    """What one stage adds to a schedule, in bytes and in operations that are done again."""

    kept: int
    peak: int
    work: int


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


def smallest_budget(graph: ForwardGraph, family: Sequence[int]) -> Chain:
    """The schedule with the lowest peak."""

    def extend(label: Label, stage: Stage) -> Label:
        return label[0] + stage.kept, max(label[1], label[0] + stage.peak)

    found = _search(graph, family, extend)
    assert found is not None  # one stage with everything in it is a schedule
    return found


def cheapest_within(graph: ForwardGraph, family: Sequence[int], budget: int) -> Chain | None:
    """The schedule that recomputes least with a peak of at most `budget` bytes; None: there is
    none.
    """

    def extend(label: Label, stage: Stage) -> Label | None:
        fits = label[0] + stage.peak <= budget
        return (label[0] + stage.kept, label[1] + stage.work) if fits else None

    return _search(graph, family, extend)


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
    graph: ForwardGraph, family: Sequence[int], extend: Callable[[Label, Stage], Label | None]
) -> Chain | None:
    """The chain whose label has the lowest second number.

    Per set, labels of the chains that end there; those that another beats in both numbers are left
    out. `extend` gives the label of a chain with one more stage, None if that must not be.
    """
    sets = sorted(family, key=int.bit_count)
    boundaries = [graph.boundary(low) for low in sets]
    totals = [graph.total(graph.bytes, low) for low in sets]
    works = [graph.total(graph.work, low) for low in sets]
    beyond = [graph.beyond(low) for low in sets]
    # Per set and label, the set before it in the chain, and the label there.
    labels: list[dict[Label, tuple[int, Label]]] = [{} for _ in sets]
    labels[0][0, 0] = 0, (0, 0)
    for i, low in enumerate(sets):
        best = undominated(labels[i])
        for j in range(i + 1, len(sets)):
            if not best or low & ~sets[j]:
                continue
            new = boundaries[j] & ~low
            stage = Stage(
                kept=graph.total(graph.bytes, new),
                peak=2 * (totals[j] - totals[i]) + beyond[j],
                work=works[j] - works[i] - graph.total(graph.work, new),
            )
            for label in best:
                after = extend(label, stage)
                if after is not None:
                    labels[j].setdefault(after, (i, label))
    at = sets.index(graph.everything)
    if not labels[at]:
        return None
    label = min(undominated(labels[at]), key=lambda label: label[1])
    chain = []
    while at:
        chain.append(sets[at])
        at, label = labels[at][label]
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


def undominated(labels: Iterable[Label]) -> list[Label]:
    """Labels that no other one beats in both numbers."""
    found: list[Label] = []
    for label in sorted(labels):
        if not found or label[1] < found[-1][1]:
            found.append(label)
    return found


def _members(values: int) -> Iterator[int]:
    while values:
        low = values & -values
        yield low.bit_length() - 1
        values ^= low
