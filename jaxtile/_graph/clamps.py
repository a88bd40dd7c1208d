"""Which clamps of a graph get a derivative that reads their result (see `_rules.clamp`)."""

from __future__ import annotations

from collections.abc import Sequence

from .._rules.clamp import by_result
from .values import Node, Value


def ask_results(nodes: Sequence[Node]) -> list[Node]:
    """State clamps anew whose result is an array in any case, while nothing else needs their
    operand: those between two convolutions. A norm before them needs it, so there it is read.
    """
    arrays: set[Value] = set()
    changed = []
    for node in reversed(nodes):
        known = node.traits
        if known.view and not arrays.isdisjoint(node.outputs):
            arrays.add(node.inputs[0].array)
        elif not known.fuses and not node.is_call:
            arrays.update(v.array for v in node.inputs)
        before = node.inputs[0].array.node if node.inputs else None
        if before is None or not before.sums or arrays.isdisjoint(node.outputs):
            continue
        if (clamp := by_result(node.equation)) is not None:
            node.equation = clamp
            changed.append(node)
    return changed
