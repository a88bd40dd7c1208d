"""Which equations of a graph are one function of one array (see `_rules.chain`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .. import _rules as rules
from .._rules import Equation
from .._rules.chain import Link, chain_p
from .._rules.elementwise import Elementwise
from .alike import likeness
from .values import Node, Value, is_float


def chained(
    nodes: Sequence[Node], readers: Mapping[Value, Sequence[Node]], kept: Collection[Value]
) -> list[Node]:
    """The same nodes, with one in the place of each chain. Nothing else reads, and nothing keeps,
    what is computed inside of it; and two of its equations have derivatives that read something.
    """
    origins: dict[Value, list[Value]] = {}
    for node in filter(_is_link, nodes):
        first, *others = [origins.get(v, [v]) for v in node.inputs if v.tiled]
        origins[node.outputs[0]] = [
            node.outputs[0],
            *(v for v in first if all(v in other for other in others)),
        ]
    found, inside = dict[Node, Node](), set[Node]()
    for node in reversed(nodes):
        if node in inside or not _is_link(node):
            continue
        for origin in reversed(origins[node.outputs[0]][1:]):
            links = _between(origin, node)
            inner = [link.outputs[0] for link in links[:-1]]
            read = all(reader in links for v in inner for reader in readers[v])
            if read and inside.isdisjoint(links) and not any(v in kept for v in inner):
                if sum(map(_reads, links)) > 1:
                    found[node] = _chain(origin, links)
                    inside.update(links)
                break
    return [found.get(node, node) for node in nodes if node in found or node not in inside]


def _is_link(node: Node) -> bool:
    """Does it compute, of floating-point arrays and numbers, another array of their shape?"""
    if not node.tiled or type(rules.find(node.equation.primitive)) is not Elementwise:
        return False
    arrays = [v for v in (*node.inputs, *node.outputs) if v.tiled]
    return (
        len(node.outputs) == 1
        and not node.flat
        and not node.equation.effects
        and all(is_float(v) and v.aval.shape == node.outputs[0].aval.shape for v in arrays)
        and all(v.tiled or _is_number(v) for v in node.inputs)
        and any(v.tiled for v in node.inputs)
    )


def _is_number(value: Value) -> bool:
    return value.concrete and not value.aval.shape


def _reads(node: Node) -> bool:
    """Does its derivative read its operand or its result?"""
    linear = node.traits.linear
    return linear != "sum" and (linear is None or all(v.tiled for v in node.inputs))


def _between(origin: Value, last: Node) -> list[Node]:
    """The nodes that compute the result of `last` from `origin`, in order."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for value in node.inputs:
            if value.tiled and value is not origin and value.node not in found:
                assert value.node is not None
                visit(value.node)
        found[node] = None

    visit(last)
    return list(found)


def _chain(origin: Value, nodes: Sequence[Node]) -> Node:
    numbers = {origin: 0} | {node.outputs[0]: k for k, node in enumerate(nodes, start=1)}
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
        in_avals=(origin.aval,),
        in_axes=(origin.axes,),
        out_avals=last.equation.out_avals,
        out_axes=last.equation.out_axes,
        source_infos=last.equation.source_infos,
        inside=last.equation.inside,
    )
    node = Node(equation, (origin,))
    node.outputs = last.outputs
    for value in node.outputs:
        value.node = node
    return node
