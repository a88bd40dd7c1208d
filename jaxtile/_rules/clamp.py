"""ReLU and its like, with a derivative that reads the result instead of the operand.

The derivative rule of `jax.nn.relu` asks where `x > 0`. After a convolution `x` is needed for
nothing else, and yet it waits for the backward pass beside `relu(x)`, which the next convolution
needs: twice the memory. But `x > 0` exactly where `relu(x) > 0`; and `x < 6` exactly where
`relu6(x) < 6`. So here the result is asked, and the gradients are the same, bit for bit. There is a
barrier behind the result, since XLA would compute it again from `x` for every reader that it fuses.

A function is taken for a clamp by what it was traced to, and its derivative rule as well: a
function with another rule, a surrogate gradient say, is left alone.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal as Constant
from jax.extend.core import Primitive

from .elementwise import Elementwise
from .registry import Equation, register

_clamp_p = Primitive("clamp_by_result")
"""Known to the graph only; it is never bound."""

Bounds = dict[str, float]
"""`max` with one number, and then perhaps `min` with a larger one."""

_INSIDE = {"max": "gt", "min": "lt"}
_known: weakref.WeakKeyDictionary[Any, tuple[Any, Bounds | None]] = weakref.WeakKeyDictionary()


@register("clamp_by_result", kind="elementwise", reads_result=True)
class Clamp(Elementwise):
    is_call = True

    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        return [_clamp(tuple(params.items()), *operands)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _clamp(bounds: tuple[tuple[str, float], ...], x: jax.Array) -> jax.Array:
    for name, bound in bounds:
        x = (lax.max if name == "max" else lax.min)(x, x.dtype.type(bound))
    return x


@_clamp.defjvp
def _clamp_jvp(
    bounds: tuple[tuple[str, float], ...], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    y = lax.optimization_barrier(_clamp(bounds, *primals))
    return y, _where_inside(bounds, y, *tangents)


def clamped(params: Mapping[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """The clamp of `x`, which is known to be `y`: only derivatives are computed."""
    return _clamped(tuple(params.items()), x, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _clamped(bounds: tuple[tuple[str, float], ...], x: jax.Array, y: jax.Array) -> jax.Array:
    return y


@_clamped.defjvp
def _clamped_jvp(
    bounds: tuple[tuple[str, float], ...], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    return primals[1], _where_inside(bounds, primals[1], tangents[0])


def _where_inside(
    bounds: tuple[tuple[str, float], ...], y: jax.Array, tangent: jax.Array
) -> jax.Array:
    """The tangent of a clamp with result `y`."""
    compare = {"max": lax.gt, "min": lax.lt}
    inside = [compare[name](y, y.dtype.type(bound)) for name, bound in bounds]
    return lax.select(functools.reduce(lax.bitwise_and, inside), tangent, jnp.zeros_like(tangent))


def by_result(eqn: Equation) -> Equation | None:
    """An equation that says the same as the call of a clamp; None: it is no such call."""
    if eqn.primitive.name != "custom_jvp_call" or len(eqn.in_avals) != 1:
        return None
    body, rule = eqn.params["call_jaxpr"].jaxpr, eqn.params["jvp_jaxpr_fun"]
    if body not in _known or _known[body][0] is not rule:
        bounds = _bounds(body)
        _known[body] = rule, bounds if bounds and _asks_inside(eqn, bounds) else None
    found = _known[body][1]
    return None if found is None else dataclasses.replace(eqn, primitive=_clamp_p, params=found)


def _bounds(jaxpr: Any) -> Bounds | None:
    """Of a function that is nothing but a maximum with a number, and perhaps a minimum."""
    (x,) = jaxpr.invars
    found: Bounds = {}
    if not jnp.issubdtype(x.aval.dtype, jnp.floating):
        return None
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit" and len(jaxpr.eqns) == 1 and eqn.invars == [x]:
            return _bounds(eqn.params["jaxpr"].jaxpr)
        bound = _number(eqn, x)
        if eqn.primitive.name not in ("max", "min")[len(found) :] or bound is None:
            return None
        found[eqn.primitive.name] = bound
        (x,) = eqn.outvars
    values = list(found.values())
    return found if "max" in found and jaxpr.outvars == [x] and values == sorted(values) else None


def _number(eqn: Any, x: Any) -> float | None:
    """The second operand of an equation whose first is `x`, if it is a number."""
    if len(eqn.invars) != 2 or eqn.invars[0] is not x or not isinstance(eqn.invars[1], Constant):
        return None
    return None if jnp.ndim(eqn.invars[1].val) else float(eqn.invars[1].val)


def _asks_inside(eqn: Equation, bounds: Bounds) -> bool:
    """Is the value, by the rule, that of the clamp, and the tangent that of the operand where it
    lies inside, and 0 elsewhere?
    """

    def jvp(x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(lambda x: eqn.bind(x)[0], (x,), (t,))

    shape = jax.ShapeDtypeStruct(eqn.in_avals[0].shape, eqn.in_avals[0].dtype)
    jaxpr = jax.make_jaxpr(jvp)(shape, shape).jaxpr
    (x, t), (value, tangent) = jaxpr.invars, jaxpr.outvars
    called = next((at for at in jaxpr.eqns if at.outvars == [value]), None)
    if called is None or called.primitive is not eqn.primitive or called.invars != [x]:
        return False
    if _bounds(called.params["call_jaxpr"].jaxpr) != bounds:
        return False
    wanted = frozenset((_INSIDE[name], bound) for name, bound in bounds.items())
    masks: dict[Any, frozenset[tuple[str, float]]] = {}
    zeros, masked = set(), None
    for at in jaxpr.eqns:
        if len(at.outvars) != 1 or any(isinstance(v, Constant) for v in at.invars[:1]):
            zeros |= set(at.outvars) if _makes_zeros(at) else set()
            continue
        name, (out,) = at.primitive.name, at.outvars
        if name in _INSIDE.values() and (bound := _number(at, x)) is not None:
            masks[out] = frozenset([(name, bound)])
        elif any(isinstance(v, Constant) for v in at.invars):
            continue
        elif name == "and" and masks.keys() >= set(at.invars):
            masks[out] = masks[at.invars[0]] | masks[at.invars[1]]
        elif name == "select_n" and at.invars[0] in masks and at.invars[1] in zeros:
            masked = out if at.invars[2] is t and masks[at.invars[0]] == wanted else masked
    return masked is tangent


def _makes_zeros(eqn: Any) -> bool:
    (first, *_), name = eqn.invars or [None], eqn.primitive.name
    return name == "broadcast_in_dim" and isinstance(first, Constant) and first.val == 0
