"""Which equations of a graph are one function of one array (see `_rules.chain`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .. import _rules as rules
from .._rules import Equation
from .._rules.chain import Link, chain_p
from .._rules.elementwise import Elementwise
from .alike import likeness
from .nodes import constants
from .values import Node, Value, is_float


def chained(
    nodes: Sequence[Node], readers: Mapping[Value, Sequence[Node]], kept: Collection[Value]
) -> list[Node]:
    """The same nodes, with one in the place of each chain.

    A chain begins with what is an array in any case, a convolution's result or what is kept. What
    is computed inside of it nothing else reads or keeps. It is worth that if it has a function that
    is not linear, and two derivatives that read an array.
    """
    origins: dict[Value, list[Value]] = {}

    def starts(value: Value) -> list[Value]:
        """The arrays that it is computed from, each alone, the nearest first."""
        return [value] * _is_array(value, kept) + origins.get(value, [])

    for node in filter(_is_link, nodes):
        first, *others = map(starts, _arrays(node))
        origins[node.outputs[0]] = [v for v in first if all(v in other for other in others)]
    order = {node: i for i, node in enumerate(nodes)}
    found, inside = dict[Node, Node](), set[Node]()
    for node in reversed(nodes):
        if node in inside or not _is_link(node):
            continue
        for origin in reversed(origins[node.outputs[0]]):
            links = sorted(_between(origin, node), key=order.__getitem__)
            inner = [link.outputs[0] for link in links[:-1]]
            between = {*links}
            alone = all(reader in between for v in inner for reader in readers[v])
            if alone and not any(v in kept for v in inner):
                if inside.isdisjoint(links) and _is_worth_it(links):
                    found[node] = _chain(origin, links)
                    inside.update(links)
                break
    return [found.get(node, node) for node in nodes if node in found or node not in inside]


def _is_link(node: Node) -> bool:
    """Does it compute an array of floating-point numbers, position by position, from some that are
    as large, and perhaps smaller ones?
    """
    if not node.tiled or type(rules.find(node.equation.primitive)) is not Elementwise:
        return False
    (result, *others), arrays = node.outputs, _arrays(node)
    return (
        not others
        and not node.flat
        and not node.equation.effects
        and bool(arrays)
        and all(is_float(v) for v in (*node.inputs, result))
        and all(v.axes == result.axes for v in arrays)
    )


def _arrays(node: Node) -> list[Value]:
    """The operands that are as large as the result."""
    return [v for v in node.inputs if v.aval.shape == node.outputs[0].aval.shape]


def _is_array(value: Value, kept: Collection[Value]) -> bool:
    return value.node is None or value in kept or not value.node.fuses


def _is_worth_it(nodes: Sequence[Node]) -> bool:
    bends = any(node.traits.linear is None for node in nodes)
    return bends and sum(map(_reads, nodes)) > 1


def _reads(node: Node) -> bool:
    """Does its derivative read an array: its operand, or its result?"""
    linear = node.traits.linear
    return linear != "sum" and (linear is None or not any(map(_is_number, node.inputs)))


def _is_number(value: Value) -> bool:
    return value.concrete and not value.aval.shape


def _between(origin: Value, last: Node) -> set[Node]:
    """The nodes that compute the result of `last` from `origin`."""
    found, ahead = {last}, [last]
    while ahead:
        for value in _arrays(ahead.pop()):
            if value is not origin and value.node not in found:
                assert value.node is not None
                found.add(value.node)
                ahead.append(value.node)
    return found


def _chain(origin: Value, nodes: Sequence[Node]) -> Node:
    inner = {node.outputs[0] for node in nodes}
    read = dict.fromkeys(v for node in nodes for v in node.inputs)
    operands = [origin, *(v for v in read if v not in (*inner, origin) and not _is_number(v))]
    numbers = {v: i for i, v in enumerate([*operands, *(node.outputs[0] for node in nodes)])}
    links = [
        Link(
            node.equation,
            [v.known for v in node.inputs],
            [numbers.get(v) for v in node.inputs],
            likeness(node.equation, node.inputs),
        )
        for node in nodes
    ]
    last = nodes[-1]
    equation = Equation(
        primitive=chain_p,
        params={"links": links},
        in_avals=tuple(v.aval for v in operands),
        in_axes=tuple(v.axes for v in operands),
        out_avals=last.equation.out_avals,
        out_axes=last.equation.out_axes,
        constant=constants(operands),
        source_infos=last.equation.source_infos,
        inside=last.equation.inside,
    )
    node = Node(equation, tuple(operands))
    node.outputs = last.outputs
    for value in node.outputs:
        value.node = node
    return node
