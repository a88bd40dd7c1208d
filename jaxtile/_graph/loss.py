"""The loss of a function: the one number on which its first result depends.

A loss is often a sum over all positions: of what a classifier gives at each of them, say. The
derivative of such a number is known but for a factor, the cotangent of the sum, before the number
itself is. So a tile can be differentiated as soon as it is computed, and need not be computed
again.

A function of several sums (a Dice loss) or of a vector of them (a global pool, and then a dense
layer) has more than one factor, and has to wait for all tiles. So has one that computes in float16,
or in 8 bits, itself or in what it calls: its users scale the loss to keep gradients within the
range of that type, and the factor would come too late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from .._rules import Equation
from .inline import any_call, bodies
from .values import Graph, Node, Value

_EXPONENT = jnp.finfo(jnp.float32).nexp


def loss_of(graph: Graph) -> Node | None:
    """The sum over tiles by which weights reach the first result; None, if there is no such sum, or
    if there are several. Sums of labels and of masks alone do not count.
    """
    if not graph.outputs or graph.is_layer or not _is_number(graph.outputs[0].array):
        return None
    like = {id(node.like): node.like for node in graph.nodes}.values()
    if any(has_small_range(v.aval.dtype) for v in graph.weights) or any(map(_is_narrow, like)):
        return None
    found = {*_last_reductions(graph)}
    if len(found) != 1:
        return None
    (node,) = found
    if node is None or node.reduction is None:
        return None
    return node if node.reduction.adds and _is_number(node.outputs[0]) else None


def _last_reductions(graph: Graph) -> Iterator[Node | None]:
    """What the first result is computed from, back to where tiles come in: reductions of tiled
    values. None: something else that reads them.
    """
    dependent = graph.dependent(graph.weights)
    pending, seen = [graph.outputs[0].array], set[Value]()
    while pending:
        value = pending.pop()
        if value in seen or value not in dependent or value.node is None:
            continue
        seen.add(value)
        node = value.node
        if node.reduction is not None:
            yield node
        elif any(v.tiled for v in node.inputs):
            yield None
        elif not node.flat:
            pending += [v.array for v in node.inputs]


def has_small_range(dtype: Any) -> bool:
    """Is that of a type of floats smaller than that of float32?"""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nexp < _EXPONENT


def _is_narrow(eqn: Any) -> bool:
    """Does it compute in a type of small range, or what it calls, or a loop or branch in it?"""
    called = any_call(eqn)
    inside = bodies(eqn) if called is None else [called]
    avals = eqn.out_avals if isinstance(eqn, Equation) else [v.aval for v in eqn.outvars]
    return (
        any(has_small_range(aval.dtype) for aval in avals)
        or eqn.params.get("exponent_bits", _EXPONENT) < _EXPONENT
        or any(_is_narrow(e) for body in inside for e in getattr(body, "jaxpr", body).eqns)
    )


def _is_number(value: Value) -> bool:
    real = jnp.issubdtype(value.aval.dtype, jnp.floating)
    return real and not value.tiled and math.prod(value.aval.shape) == 1
