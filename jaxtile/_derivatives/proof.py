"""The proof that a function with a backward rule of its own may run on tiles."""

from __future__ import annotations

import numpy as np

from .._errors import Mixes, TilingError
from .._geometry import Window
from .._graph.branches import mixes
from .._graph.values import Graph, Value
from .._rules import Equation, find
from .call_tile import CallTile, along
from .graphs import (
    ClosureError,
    body_of,
    cotangents_of,
    differentiated,
    inexact,
    pullback_of,
    types_of,
)
from .linear import is_linear


def any_mixes(graph: Graph) -> bool:
    return any(map(mixes, graph.nodes))


def unproved(eqn: Equation) -> str | None:
    """Why a `custom_vjp` may not run on tiles; None: it is proved that it may.

    It works position by position, forwards and backwards, and its pullback is linear in the
    cotangent. The pullback may add up positions to make the cotangent of an untiled operand.
    """
    try:
        body, forward = body_of(eqn, eqn.in_axes), differentiated(eqn)
        backward = cotangents_of(eqn)
        if any_mixes(body) or any_mixes(forward):
            return "it reduces over a tiled axis"
        if not _sums_last(backward):
            return "its backward rule uses a reduction over a tiled axis"
        by_axis = {
            a: Window(a, np.arange(n, dtype=np.int64), 1) for a, n in lengths_of(eqn).items()
        }
        tile = CallTile(eqn, [along(a, by_axis) for a in (*eqn.in_axes, *eqn.out_axes)])
        for graph in (body, forward, backward):
            tile.check_pointwise(graph)
    except ClosureError:
        raise
    except (Mixes, TilingError) as error:
        return str(error)
    cotangents = types_of([eqn.out_avals[i] for i in inexact(eqn.out_avals)])
    if not is_linear(pullback_of(eqn), types_of(eqn.in_avals), cotangents):
        return "its backward rule is not linear in the cotangent, or rounds it"
    return None if eqn.inside else calls_unproved(forward) or calls_unproved(backward)


def calls_unproved(rule: Graph) -> str | None:
    """Why a rule may not run on tiles because of a function that it calls.

    It matters to second derivatives, which this cannot know of. Rules that those call in turn are
    left to `_rule_evaluators`, or a rule that calls itself would never be proved.
    """
    for node in rule.nodes:
        found = find(node.equation.primitive)
        if found is not None and found.pulls_back and (reason := unproved(node.equation)):
            return f"its rule calls a function with a rule that may not run on tiles: {reason}"
    return None


def _sums_last(graph: Graph) -> bool:
    """Are sums the only reductions over tiled axes, and is what they lead to never tiled again?"""
    summed: set[Value] = set()
    for node in graph.nodes:
        after = any(v.array in summed for v in node.inputs)
        if node.reduction is not None and (not node.reduction.adds or after):
            return False
        if node.reduction is None and node.tiled and after:
            return False
        if node.reduction is None and not node.tiled and any(v.tiled for v in node.inputs):
            return False
        if node.reduction is not None or after:
            summed.update(node.outputs)
    return True


def lengths_of(eqn: Equation) -> dict[int, int]:
    """Positions along each tiled axis, of a function that works position by position."""
    lengths: dict[int, set[int]] = {}
    for aval, axes in zip(
        (*eqn.in_avals, *eqn.out_avals), (*eqn.in_axes, *eqn.out_axes), strict=True
    ):
        for n, a in zip(aval.shape, axes, strict=True):
            if a is not None:
                lengths.setdefault(a, set()).add(n)
    if any(len(found) > 1 for found in lengths.values()):
        raise Mixes("its results have other sizes than its operands")
    return {a: found.pop() for a, found in lengths.items()}
