"""Calls and branches that read joint arrays: the arrays are merged inside of them.

There the equations are stated anew, one by one, if the function works by position or along other
dimensions. A result is taken to be merged as the operands are, wherever its size is theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from .inline import any_call
from .joint import Groups, Joint, Restated, bound, plain, reshaped, sizes
from .values import Value, is_float

Function = Callable[..., Sequence[Any]]


def call(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """A function with a derivative rule: `jax.nn.relu`, a straight-through estimator."""
    groups = _results(eqn, inputs)
    if groups is None:
        return None
    between = _between(inputs, groups)
    function, ruled = between(jaxpr_as_fun(any_call(eqn))), between(functools.partial(bound, eqn))
    if eqn.primitive.name == "custom_jvp_call":
        forwards = jax.custom_jvp(function)
        forwards.defjvp(lambda primals, tangents: jax.jvp(ruled, primals, tangents))
        return forwards, groups
    backwards = jax.custom_vjp(function)
    floats = [is_float(v) for v in inputs]

    def cotangents(pull: Callable[..., Any], given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(c if f else None for c, f in zip(pull(list(given)), floats, strict=True))

    backwards.defvjp(lambda *xs: jax.vjp(ruled, *xs), cotangents)
    return backwards, groups


def branch(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """A `cond` or `switch`."""
    groups = _results(eqn, inputs)
    if groups is None or isinstance(inputs[0], Joint) or eqn.params.get("branches_platforms"):
        return None
    between = _between(inputs[1:], groups)
    branches = [between(jaxpr_as_fun(b)) for b in eqn.params["branches"]]
    return lambda index, *xs: lax.switch(index, branches, *xs), groups


def _results(eqn: Any, inputs: Sequence[Value]) -> list[Groups] | None:
    """How the results are merged; None: operands are merged in different ways."""
    merged = {g for x in inputs if isinstance(x, Joint) for g in x.groups if len(g) > 1}
    by_size = {math.prod(g): g for g in merged}
    if len(by_size) < len(merged):
        return None
    return [
        tuple(by_size.get(n, own) for n, own in zip(shape, plain(shape), strict=True))
        for shape in (v.aval.shape for v in eqn.outvars)
    ]


def _between(inputs: Sequence[Value], groups: Sequence[Groups]) -> Callable[[Function], Function]:
    """A function of merged arrays, as one of these arrays as they are."""

    def wrap(function: Function) -> Function:
        def run(*xs: Any) -> list[Any]:
            merged = [reshaped(x, v.aval.shape) for x, v in zip(xs, inputs, strict=True)]
            return [reshaped(y, sizes(g)) for y, g in zip(function(*merged), groups, strict=True)]

        return run

    return wrap
