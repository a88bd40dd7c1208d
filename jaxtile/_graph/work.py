"""Work of an equation: floating-point operations on given shapes.

A multiplication and an addition count one each, so a convolution costs twice its multiply-adds;
zeros that a transposed convolution inserts between its inputs are not counted. Reductions and pools
cost one operation per element they read, data movement nothing.

Elementwise equations are counted as a compiler runs them, fused: a cluster of equations of one
shape that reads n arrays costs n - 1 operations per element, and at least one. So `relu(x + bias)`
costs one, `exp(x)` one, `a * x + b` two; scaling by a constant alone costs nothing, because it can
be folded into what comes before or after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._rules import Equation, traits
from .build import build_untiled
from .inline import bodies
from .values import Node, Value

Shape = Sequence[int]


def multiply_adds(eqn: Equation, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> int:
    """Multiply-adds of convolutions and contractions; 0 of anything else."""
    if bodies(eqn):
        return _inside(eqn, lambda node, _: whole_macs(node))
    kind = traits(eqn.primitive).kind
    if kind == "convolution":
        kernel = [eqn.in_avals[1].shape[d] for d in eqn.params["dimension_numbers"].rhs_spec]
        inserted = math.prod(eqn.params["lhs_dilation"])
        return math.prod(out_shapes[0]) * math.prod(kernel[1:]) // inserted
    if kind == "contraction":
        contracted, _ = eqn.params["dimension_numbers"]
        return math.prod(out_shapes[0]) * math.prod(in_shapes[0][d] for d in contracted[0])
    return 0


def flops(
    node: Node,
    per_element: Mapping[Node, int],
    in_shapes: Sequence[Shape],
    out_shapes: Sequence[Shape],
) -> int:
    """Operations on operands and results of these shapes: those of a tile, or the whole.

    `per_element`: what `fused` says of the graph that the node is in.
    """
    eqn, kind = node.equation, node.traits.kind
    if bodies(eqn):
        return _inside(eqn, whole_flops)
    if node in per_element:
        return per_element[node] * math.prod(out_shapes[0])
    if not out_shapes or kind in ("movement", "random") or not _floating(eqn):
        return 0
    if kind in ("convolution", "contraction"):
        return 2 * multiply_adds(eqn, in_shapes, out_shapes)
    if "window_dimensions" in eqn.params:
        return math.prod(out_shapes[0]) * math.prod(eqn.params["window_dimensions"])
    return math.prod(in_shapes[0] if kind in ("reduction", "window") else out_shapes[0])


def whole_flops(node: Node, per_element: Mapping[Node, int]) -> int:
    """Operations of the untiled equation."""
    return flops(node, per_element, *_whole(node))


def whole_macs(node: Node) -> int:
    """Multiply-adds of the untiled equation."""
    return multiply_adds(node.equation, *_whole(node))


def _whole(node: Node) -> tuple[list[Shape], list[Shape]]:
    eqn = node.equation
    return [a.shape for a in eqn.in_avals], [a.shape for a in eqn.out_avals]


def _inside(eqn: Equation, count: Callable[[Node, Mapping[Node, int]], int]) -> int:
    """Work of a loop or a branch: of every iteration of a `scan`; of one of a `while`, whose number
    is not known; of the most expensive branch of a `cond`.
    """

    def body(closed: Any) -> int:
        nodes = build_untiled(closed).nodes
        costs = fused(nodes)
        return sum(count(node, costs) for node in nodes)

    found = [body(closed) for closed in bodies(eqn)]
    return max(found) if "branches" in eqn.params else eqn.params.get("length", 1) * sum(found)


def fused(nodes: Sequence[Node]) -> dict[Node, int]:
    """Operations per element of each elementwise equation: a cluster's cost is on its last one."""
    cluster: dict[Node, list[Node]] = {}
    for node in nodes:
        if not _elementwise(node):
            continue
        members = [node]
        for value in node.inputs:
            other = cluster.get(value.array.node) if value.array.node is not None else None
            if other is not None and other is not members and _shape(other[0]) == _shape(node):
                members = other + members if len(other) < len(members) else [*other, *members]
        for member in members:
            cluster[member] = members
    order = {node: i for i, node in enumerate(nodes)}
    costs: dict[Node, int] = {}
    for members in {id(m): m for m in cluster.values()}.values():
        inside = set(members)
        costs.update(dict.fromkeys(members, 0))
        if not all(_free(m) for m in members):
            read = {
                v.array
                for m in members
                for v in m.inputs
                if v.array.node not in inside and not _scalar_constant(v)
            }
            costs[max(members, key=order.__getitem__)] = max(1, len(read) - 1)
    return costs


def _elementwise(node: Node) -> bool:
    """Does it work position by position, on floating-point numbers?"""
    known = node.traits
    return (known.kind == "elementwise" or known.free) and _floating(node.equation)


def _floating(eqn: Equation) -> bool:
    return any(jnp.issubdtype(a.dtype, jnp.inexact) for a in (*eqn.in_avals, *eqn.out_avals))


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node.outputs[0].aval.shape)


def _free(node: Node) -> bool:
    known = node.traits
    scales = known.linear in ("product", "first") and any(map(_scalar_constant, node.inputs))
    return known.free or scales


def _scalar_constant(value: Value) -> bool:
    value = value.array
    if value.known is not None:
        return value.concrete and math.prod(value.aval.shape) == 1
    if value.node is None:
        return False
    primitive = value.node.equation.primitive
    passes = traits(primitive).free or primitive.name == "broadcast_in_dim"
    return passes and _scalar_constant(value.node.inputs[0])
