"""A function with a derivative rule, and its rules, as graphs: all are traced at full size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._errors import TilingError, user_line
from .._graph.alike import graph_likeness
from .._graph.build import build_inside, build_untiled
from .._graph.inline import any_call
from .._graph.trace import inside, is_gone
from .._graph.values import Graph
from .._rules import Axes, Equation, untiled
from .._rules.manual import type_of

T = TypeVar("T")
Arrays = Sequence[jax.Array]


class ClosureError(TilingError):
    """A rule closes over a traced array: it can be run neither in tiles nor whole."""


def body_of(eqn: Equation, in_axes: Sequence[Axes]) -> Graph:
    """The function itself."""
    return eqn.once((body_of, tuple(in_axes)), lambda: build_inside(any_call(eqn), in_axes))


def _of_floats(eqn: Equation, primals: Arrays) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its float operands."""
    return lambda *diff: eqn.bind(*replace(primals, inexact(eqn.in_avals), diff))


def differentiable(eqn: Equation, primals: Arrays) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its float operands that returns its float results only."""
    function, diff_out = _of_floats(eqn, primals), inexact(eqn.out_avals)

    def floats(*diff: jax.Array) -> list[jax.Array]:
        out = function(*diff)
        return [out[i] for i in diff_out]

    return floats


def pick(eqn: Equation, primals: Sequence[T]) -> list[T]:
    """Those of the operands that are floats."""
    return [primals[i] for i in inexact(eqn.in_avals)]


def tangents_of(eqn: Equation) -> Graph:
    """The tangents of a `custom_jvp`'s float results, from operands and their tangents."""

    def found() -> Graph:
        closed, n = _traced_jvp(eqn), len(eqn.out_avals)
        tangents = closed.replace(jaxpr=closed.jaxpr.replace(outvars=closed.jaxpr.outvars[n:]))
        in_axes = [*eqn.in_axes, *(eqn.in_axes[i] for i in inexact(eqn.in_avals))]
        out_axes = [eqn.out_axes[i] for i in inexact(eqn.out_avals)]
        return build_inside(tangents, in_axes, out_axes)

    return eqn.once(tangents_of, found)


def values_of(eqn: Equation) -> Graph:
    """All results of a `custom_jvp`, as they are when it is differentiated: what its rule says."""

    def found() -> Graph:
        return build_inside(_traced_values(eqn), eqn.in_axes, eqn.out_axes)

    return eqn.once(values_of, found)


def gives_itself(eqn: Equation) -> bool:
    """Does a `custom_jvp`'s rule say that its value is the function's, by calling it again?

    Most rules do. Others compute it in another way. What they give may be another number, and its
    derivative, which matters to second ones, is not by this rule.
    """
    return eqn.once(gives_itself, lambda: _is_call_of(eqn, _traced_values(eqn)))


def _is_call_of(eqn: Equation, closed: Any) -> bool:
    """Does a jaxpr call the function of this equation, and nothing else?"""
    graph = build_inside(closed, [untiled(a) for a in eqn.in_avals])
    if [n.equation.primitive for n in graph.nodes] != [eqn.primitive]:
        return False
    (node,) = graph.nodes
    return (
        [*node.inputs] == graph.inputs
        and [*node.outputs] == graph.outputs
        and _function_likeness(node.equation) == _function_likeness(eqn)
    )


def _function_likeness(eqn: Equation) -> Hashable:
    return graph_likeness(build_untiled(any_call(eqn)))


def _traced_values(eqn: Equation) -> Any:
    jaxpr = (closed := _traced_jvp(eqn)).jaxpr
    invars, outvars = jaxpr.invars[: len(eqn.in_avals)], jaxpr.outvars[: len(eqn.out_avals)]
    return closed.replace(jaxpr=jaxpr.replace(invars=invars, outvars=outvars))


def _traced_jvp(eqn: Equation) -> Any:
    """A `custom_jvp`'s results and the tangents of those that are floats."""

    def jvp(primals: Arrays, tangents: Arrays) -> list[jax.Array]:
        values, found = jax.jvp(_of_floats(eqn, primals), pick(eqn, primals), tangents)
        return [*values, *(found[i] for i in inexact(eqn.out_avals))]

    shapes = types_of(eqn.in_avals)
    return eqn.once(_traced_jvp, lambda: _traced(eqn, jvp, shapes, pick(eqn, shapes)))


def differentiated(eqn: Equation) -> Graph:
    """All results of a `custom_vjp`, as they are when it is differentiated: what `fwd` returns."""

    def forward(primals: Arrays) -> list[jax.Array]:
        return jax.vjp(_of_floats(eqn, primals), *pick(eqn, primals))[0]

    def found() -> Graph:
        closed = _traced(eqn, forward, types_of(eqn.in_avals))
        return build_inside(closed, eqn.in_axes, eqn.out_axes)

    return eqn.once(differentiated, found)


def pullback_of(eqn: Equation) -> Callable[[Arrays, Arrays], tuple[jax.Array, ...]]:
    """From operands and the cotangents of float results to those of float operands."""

    def pullback(primals: Arrays, cotangents: Arrays) -> tuple[jax.Array, ...]:
        pull = jax.vjp(differentiable(eqn, primals), *pick(eqn, primals))[1]
        return pull(list(cotangents))

    return pullback


def cotangents_of(eqn: Equation) -> Graph:
    """The graph of a `custom_vjp`'s pullback."""

    def found() -> Graph:
        diff_in, diff_out = inexact(eqn.in_avals), inexact(eqn.out_avals)
        shapes = types_of(eqn.in_avals), types_of([eqn.out_avals[i] for i in diff_out])
        closed = _traced(eqn, pullback_of(eqn), *shapes)
        in_axes = [*eqn.in_axes, *(eqn.out_axes[i] for i in diff_out)]
        return build_inside(closed, in_axes, [eqn.in_axes[i] for i in diff_in])

    return eqn.once(cotangents_of, found)


def _traced(eqn: Equation, rule: Callable[..., Any], *shapes: Any) -> Any:
    with inside(True):
        closed = jax.make_jaxpr(rule)(*shapes)
    if any(isinstance(c, jax.core.Tracer) and is_gone(c) for c in closed.consts):
        raise ClosureError(
            f"the derivative rule of the `{eqn.primitive.name}` function at "
            f"{user_line(*eqn.source_infos)} closes over an array that was made inside the tiled "
            "function, which is gone when the rule is traced (as under `jax.checkpoint`). What to "
            "do: make that array outside, or pass it to the function as an operand"
        )
    return closed


def inexact(avals: Sequence[Any]) -> list[int]:
    """Which of these arrays have derivatives."""
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def types_of(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [type_of(a) for a in avals]


def replace(items: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
    replaced = list(items)
    for i, value in zip(indices, values, strict=True):
        replaced[i] = value
    return replaced
