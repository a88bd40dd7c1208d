"""Which equations are alike, so that what is worked out for one of them need not be for the others.

Networks repeat themselves: of the 53 convolutions of a ResNet-50, only half differ in more than
their place and their weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .._rules import Equation, find
from .static import Static
from .values import Graph, Value, is_constant


def likeness(equation: Equation, inputs: Sequence[Value]) -> Hashable:
    """The same for equations that are alike, except for their operands."""
    rule = find(equation.primitive)
    if rule is None or equation.effects:
        return object()
    found = (
        equation.primitive,
        rule.likeness(equation),
        equation.in_avals,
        equation.in_axes,
        equation.out_avals,
        equation.out_axes,
        equation.inside,
        tuple(map(_constant, inputs)),
    )
    try:
        hash(found)
    except TypeError:
        return object()
    return found


def _constant(value: Value) -> Hashable:
    """What a rule may know of an operand while tracing."""
    value = value.array
    if value.known is None:
        return value if is_constant(value) else None
    if value.concrete and not value.aval.shape and hasattr(value.aval.dtype, "kind"):
        return np.asarray(value.known).tobytes()
    return Static(value.known)


def graph_likeness(graph: Graph) -> Hashable:
    """The same for graphs of alike equations with the same connections."""
    numbers: dict[Value, int] = {v: i for i, v in enumerate(graph.inputs)}

    def number(value: Value) -> Hashable:
        return numbers.get(value.array), value.axes, _constant(value)

    nodes = []
    for node in graph.nodes:
        nodes.append((likeness(node.equation, node.inputs), *map(number, node.inputs)))
        for value in node.outputs:
            numbers[value] = len(numbers)
    return tuple(nodes), tuple(map(number, graph.outputs))
