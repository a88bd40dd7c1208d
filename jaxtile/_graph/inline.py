"""Which equations of a jaxpr are calls, and the jaxpr that each calls.

Two kinds are told apart. A *plain call* (`jit`, `remat`, ...) means the equations inside it, and is
always looked through. A call *with a derivative rule* (`custom_jvp`, `custom_vjp`) may be looked
through only by those who will not differentiate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal as Constant

_PLAIN = dict.fromkeys(("jit", "remat2"), "jaxpr") | dict.fromkeys(
    ("call", "closed_call", "eval_jaxpr"), "call_jaxpr"
)
_WITH_RULE = ("custom_jvp_call", "custom_vjp_call")
_OBJECT = "call_hi_primitive"
"""One primitive for calls that are Python objects: JAX's newer `remat` and `custom_vjp`."""


def bodies(eqn: Any) -> list[Any]:
    """The jaxprs that a loop or a branch runs: of a `cond`, one of them; of anything else, none."""
    match eqn.primitive.name:
        case "scan":
            return [eqn.params["jaxpr"]]
        case "while":
            return [eqn.params["body_jaxpr"], eqn.params["cond_jaxpr"]]
        case "cond":
            return list(eqn.params["branches"])
    return []


def plain_call(eqn: Any) -> Any | None:
    """The jaxpr that a plain call stands for; None: it is no such call."""
    name = eqn.primitive.name
    if name in _PLAIN:
        return eqn.params[_PLAIN[name]]
    if name == _OBJECT:
        found = remat(eqn)
        return found and found["jaxpr"]
    return None


def remat(eqn: Any) -> Mapping[str, Any] | None:
    """The parameters of a `jax.checkpoint`; None: it is none."""
    name = eqn.primitive.name
    if name == _OBJECT:
        called = eqn.params["_prim"]
        return called.params if type(called).__name__ == "RematTraced" else None
    return eqn.params if name == "remat2" else None


def any_call(eqn: Any) -> Any | None:
    """The jaxpr that a call stands for, or None; if it has a derivative rule, without that."""
    if eqn.primitive.name in _WITH_RULE:
        return eqn.params["call_jaxpr"]
    found = plain_call(eqn)
    if found is None and eqn.primitive.name == _OBJECT:
        called = eqn.params["_prim"]

        def function(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(called.expand(*jax.tree.unflatten(called.in_tree, leaves)))

        found = jax.make_jaxpr(function)(*called.in_avals_flat)
    return found


def is_empty(eqn: Any) -> bool:
    """Has none of its results an element, so that they are known without it?"""
    plain = all(jnp.issubdtype(v.aval.dtype, np.generic) for v in eqn.outvars)
    return plain and not eqn.effects and all(0 in v.aval.shape for v in eqn.outvars)


def live(jaxpr: Any) -> list[Any]:
    """The equations that an output depends on, or that have an effect."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Constant)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            found.append(eqn)
            if is_empty(eqn):
                continue
            needed.update(v for v in eqn.invars if not isinstance(v, Constant))
    return found[::-1]
