"""The order in which a reference program searched lower sets, which is why its optimum is higher.

The reference of the paper behind `policies._lower_sets` lists all lower sets of the U-Net by a
depth-first search, and looks only for steps to sets that are later in that list. Where a set is
listed before one of its subsets, a step is lost: it finds 5,717 MB, where 5,546 MB would do.
"""

from __future__ import annotations

import jaxtile
from policies._lower_sets import ForwardGraph, undominated


def forward_graph(operations: jaxtile.Operations) -> ForwardGraph:
    """Each operation is a value."""
    found = operations.operations
    index = {o.name: i for i, o in enumerate(found)}
    inputs = (sum(1 << index[t.name] for t in o.inputs if t.name in index) for o in found)
    sizes, work = (o.output.bytes for o in found), (o.flops for o in found)
    return ForwardGraph(tuple(index), tuple(inputs), tuple(sizes), tuple(work))


def depth_first_sets(graph: ForwardGraph) -> list[int]:
    """All lower sets, in the order in which a depth-first search lists them."""
    listed, stack = {0: None}, [0]
    while stack:
        low = stack.pop()
        for v, inputs in enumerate(graph.inputs):
            bigger = low | 1 << v
            if not inputs & ~low and bigger not in listed:
                listed[bigger] = None
                stack.append(bigger)
    return list(listed)


def smallest_budget_as_listed(graph: ForwardGraph, listed: list[int]) -> int:
    """The lowest peak, in bytes, over schedules whose sets are in the order of this list.

    A state of the search is what a schedule keeps up to a set, and its peak so far. One that
    another beats in both is left out.
    """
    reached: list[set[tuple[int, int]]] = [set() for _ in listed]
    reached[0] = {(0, 0)}
    totals = [graph.total(graph.bytes, low) for low in listed]
    boundaries = [graph.boundary(low) for low in listed]
    beyond = [graph.beyond(low) for low in listed]
    for i, low in enumerate(listed):
        best = undominated(reached[i])
        for j in range(i + 1, len(listed)):
            if not best or low & ~listed[j]:
                continue
            stage = 2 * (totals[j] - totals[i]) + beyond[j]
            new = graph.total(graph.bytes, boundaries[j] & ~low)
            reached[j] |= {(kept + new, max(peak, kept + stage)) for kept, peak in best}
    return min(peak for _, peak in reached[listed.index(graph.everything)])
