"""Is a function linear in some of its arguments? Proved from its jaxpr, or not at all.

In a tile, a backward rule sees only this tile's share of the cotangent, and what it makes of the
shares is added up over tiles. That is right if the rule is linear: `f(a + b) = f(a) + f(b)`, so
that no cotangent in means no cotangent out. JAX's own test, transposing the rule, is weaker: it
also takes what is affine (`c + 0.1 * y`), whose constant would be added once per tile.

Every value of the jaxpr is one of four kinds, found by walking the equations once:

* *fixed*: does not depend on the arguments in question;
* *zero*: fixed, and known to be zero everywhere;
* *linear* in them;
* *other*: nothing is known.

A result that is rounded to fewer bits than the arguments and results have is *other*: shares that
are rounded apart do not add up to what is rounded once. A primitive without the trait
`linear` makes *other* of whatever is not fixed, so a missing trait costs memory, not exactness.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._graph.inline import any_call
from .._rules import traits
from .._rules.traits import Linear


class Kind(enum.Enum):
    FIXED = "fixed"
    ZERO = "zero"
    LINEAR = "linear"
    OTHER = "other"


_HELD = frozenset([Kind.FIXED, Kind.ZERO])
"""The kinds that the arguments have no part in."""


def is_linear(fun: Any, fixed: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Is `fun(fixed, arguments)`, which returns arrays, linear in the arguments?

    >>> shape = jax.ShapeDtypeStruct((3,), "float32")
    >>> is_linear(lambda x, c: [c[0] * x[0]], [shape], [shape])
    True
    >>> is_linear(lambda x, c: [c[0] + 0.1 * x[0]], [shape], [shape])
    False
    """
    closed = jax.make_jaxpr(fun)(list(fixed), list(arguments))
    precisions = [_precision(a.dtype) for a in (*arguments, *closed.out_avals)]
    least = tuple(map(min, zip(*precisions, strict=True))) if precisions else (0, 0)
    kinds = [Kind.FIXED] * len(fixed) + [Kind.LINEAR] * len(arguments)
    return {Kind.LINEAR, Kind.ZERO}.issuperset(_walk(closed, kinds, least))


def _walk(closed: Any, kinds: Sequence[Kind], least: tuple[int, int]) -> list[Kind]:
    """The kinds of a jaxpr's results, given those of its arguments.

    `least`: the precision below which a linear value counts as rounded.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.invars, kinds, strict=True))
    known.update(zip(jaxpr.constvars, map(_constant, getattr(closed, "consts", ())), strict=True))

    def read(var: Any) -> Kind:
        return _constant(var.val) if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        called = any_call(eqn)
        if called is not None:
            found = _walk(called, operands, least)
        else:
            kind = _kind(traits(eqn.primitive).linear, operands)
            if kind is Kind.LINEAR and _rounds(eqn, least):
                kind = Kind.OTHER
            found = [kind] * len(eqn.outvars)
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _kind(linear: Linear | None, operands: Sequence[Kind]) -> Kind:
    """The kind of a result, from how its primitive is linear in operands of these kinds."""
    found = set(operands)
    if found <= _HELD:
        return Kind.ZERO if found == {Kind.ZERO} and linear == "sum" else Kind.FIXED
    first, *rest = operands
    match linear:
        case "sum":
            proved = _adds_up(operands)
        case "product":
            proved = sum(kind not in _HELD for kind in operands) == 1 and Kind.LINEAR in found
        case "first":
            proved = first is Kind.LINEAR and _HELD.issuperset(rest)
        case "cases":
            proved = first in _HELD and _adds_up(rest)
        case _:
            proved = False
    return Kind.LINEAR if proved else Kind.OTHER


def _adds_up(operands: Sequence[Kind]) -> bool:
    return {Kind.LINEAR, Kind.ZERO}.issuperset(operands)


def _rounds(eqn: Any, least: tuple[int, int]) -> bool:
    if eqn.primitive.name == "reduce_precision":
        kept = eqn.params["mantissa_bits"], eqn.params["exponent_bits"]
    else:
        kept = _precision(eqn.outvars[0].aval.dtype)
    return any(k < n for k, n in zip(kept, least, strict=True))


def _precision(dtype: Any) -> tuple[int, int]:
    """Bits of the mantissa and of the exponent; an integer has none."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return -1, -1
    return jnp.finfo(dtype).nmant, jnp.finfo(dtype).nexp


def _constant(value: Any) -> Kind:
    if isinstance(value, jax.core.Tracer) or not jnp.issubdtype(
        jax.typeof(value).dtype, jnp.number
    ):
        return Kind.FIXED
    return Kind.FIXED if np.any(np.asarray(value)) else Kind.ZERO
