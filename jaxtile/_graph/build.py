"""From a traced function to a graph whose values know which of their dimensions are tiled.

The work is done by a `Walk` over the jaxpr (in `walk`), which makes the nodes (in `nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._rules import Axes
from .clamps import ask_results
from .inline import plain_call
from .nodes import Policy
from .values import Graph, Value
from .walk import Walk, known


def build(
    jaxpr: Any,
    consts: Sequence[Any],
    in_axes: Sequence[Axes],
    policy: Policy | None = None,
    look_through: Callable[[Any], Any] = plain_call,
    names: Sequence[str] | None = None,
) -> Graph:
    """The graph of a jaxpr whose arguments carry `in_axes`.

    `look_through`: the jaxpr that an equation calls, if it is to be inlined. `names`: what the
    function calls its arguments.
    """
    return _graph(Walk(policy, look_through), jaxpr, consts, in_axes, names)


def build_storing(
    jaxpr: Any, consts: Sequence[Any], in_axes: Sequence[Axes], names: Sequence[str]
) -> Graph:
    """The graph of a jaxpr in which it is no error that an equation cannot be tiled.

    Its operands are stored, and it runs once, on whole arrays.
    """
    return _graph(Walk(store_mixed=True), jaxpr, consts, in_axes, names)


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


def _graph(
    walk: Walk,
    jaxpr: Any,
    consts: Sequence[Any],
    in_axes: Sequence[Axes],
    names: Sequence[str] | None,
) -> Graph:
    """What a walk makes of a jaxpr; its outputs are stored."""
    known_as: Sequence[str | None] = names or [None] * len(jaxpr.invars)
    arguments = [
        Value(var.aval, axes, name=name)
        for var, axes, name in zip(jaxpr.invars, in_axes, known_as, strict=True)
    ]
    outputs = [walk.merged(v) for v in walk.walk(jaxpr, known(consts), arguments)]
    nodes = walk.nodes
    for value in outputs:
        nodes.stored.setdefault(value.array, "device")
    for node in ask_results(nodes.list):
        nodes.classify(node)
    return Graph(arguments, outputs, nodes.list, nodes.stored)
