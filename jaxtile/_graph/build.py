"""From a traced function to a graph whose values know which of their dimensions are tiled.

The work is done by a `Walk` over the jaxpr (in `walk`), which makes the nodes (in `nodes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .._rules import Axes, untiled
from .chains import chained
from .clamps import ask_results
from .inline import any_call, plain_call
from .layers import InTiles
from .nodes import Policy
from .trace import Traced
from .values import Graph, constants_of
from .walk import Walk, arguments


def build(
    traced: Traced,
    policy: Policy | None = None,
    look_through: Callable[[Any], Any] = plain_call,
) -> Graph:
    """The graph of a traced function; its outputs are stored.

    `look_through`: the jaxpr that an equation calls, if it is to be inlined.
    """
    return _graph(Walk(policy, look_through), traced, traced.in_axes, traced.names)


def build_layers(traced: Traced, policy: Policy | None, in_tiles: InTiles) -> Graph:
    """The graph of a function in which scans over layers stay scans."""
    return _graph(Walk(policy, make_layer=in_tiles), traced, traced.in_axes, traced.names)


def build_storing(traced: Traced) -> Graph:
    """The graph of a traced function in which it is no error that an equation cannot be tiled.

    Its operands are stored, and it runs once, on whole arrays.
    """
    return _graph(Walk(store_mixed=True), traced, traced.in_axes, traced.names)


def build_untiled(closed: Any, names: Sequence[str | None] | None = None) -> Graph:
    """The graph of a jaxpr in which nothing is tiled, to count what is in it.

    `names`: what the function calls its arguments.
    """
    in_axes = [untiled(v.aval) for v in closed.jaxpr.invars]
    return _graph(Walk(look_through=any_call), closed, in_axes, names or [None] * len(in_axes))


def build_inside(
    closed: Any,
    in_axes: Sequence[Axes],
    out_axes: Sequence[Axes] | None = None,
    in_rule: bool = True,
) -> Graph:
    """The graph of a jaxpr that is evaluated inside a tile: a function with a derivative rule, that
    rule, or, not `in_rule`, a branch.

    Nothing in it can be stored. Its results carry `out_axes`, if they are given.
    """
    walk = Walk(in_tile=True, in_rule=in_rule)
    graph = walk.inside(closed, in_axes)
    if out_axes is not None:
        graph.outputs[:] = map(walk.nodes.promote, graph.outputs, out_axes)
    return graph


def _graph(walk: Walk, closed: Any, in_axes: Sequence[Axes], names: Sequence[str | None]) -> Graph:
    inputs, nodes = arguments(closed.jaxpr, in_axes, names), walk.nodes
    outputs = [walk.merged(v) for v in walk.walk(closed.jaxpr, constants_of(closed.consts), inputs)]
    for value in outputs:
        nodes.stored.setdefault(value.array, "device")
    for node in ask_results(nodes.list):
        nodes.classify(node)
    graph = Graph(inputs, outputs, nodes.list, nodes.stored)
    chains = chained(graph.nodes, graph.readers, {*graph.stored, *(v.array for v in outputs)})
    for node in chains:
        if node.op == "chain":
            nodes.classify(node)
    return dataclasses.replace(graph, nodes=chains)
