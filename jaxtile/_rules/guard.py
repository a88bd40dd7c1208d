"""An identity that must not be differentiated.

In the derivative of a `scan`, JAX before 0.12 forgets the rule of a `custom_jvp` that another rule
called, and the next derivative is then that of the function itself: a wrong number, silently. So
the functions that rules call in a tile end with this identity. Where their rule is used it is never
differentiated; where JAX forgot the rule it is, and says so. The derivative of a `scan` over layers
reads its operands through one that may be differentiated once. A loop that skips tiles has the
derivative of one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import TilingError

_guard_p = Primitive("jaxtile_guard")
_guard_p.def_impl(lambda x, message: x)
_guard_p.def_abstract_eval(lambda aval, message: aval)
mlir.register_lowering(_guard_p, lambda ctx, x, message: [x])


def _batch(operands: Any, dims: Any, message: str) -> Any:
    return _guard_p.bind(*operands, message=message), dims[0]


def _refuse(primals: Any, tangents: Any, message: str) -> Any:
    raise TilingError(message)


_RULE = (
    "cannot differentiate, in tiles, a function with a derivative rule that is called by the "
    "rule of another, and not for the first time: JAX before 0.12 forgets such rules in the "
    "derivative of a loop. What to do: use a newer JAX, or apply it outside "
    "`jaxtile.checkpoint` if such derivatives are needed"
)
_LAYERS = (
    "cannot differentiate, for the third time, a `scan` over layers that call functions with "
    "derivative rules, as `jax.nn.relu` is: JAX before 0.12 forgets such rules in the derivative "
    "of a loop. What to do: use a newer JAX, or write `unroll=True` in that `scan`"
)


_ALIKE = (
    "cannot differentiate a function whose tiles are skipped (`skip=True`) in this way: JAX before "
    "0.12 forgets, in the derivative of a loop, how. What to do: use a newer JAX, or leave out "
    "`skip` if second derivatives are needed"
)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


batching.primitive_batchers[_guard_p] = _batch
ad.primitive_jvps[_guard_p] = _refuse


def guarded(arrays: Any) -> Any:
    """The same arrays."""
    return jax.tree.map(lambda x: _guard_p.bind(x, message=_RULE), arrays)


def derived_from(like: Callable[..., Any], fun: Callable[..., Any], *args: Any) -> Any:
    """`fun(*args)`, whose derivatives are those of `like(*args)`, which has the same value.

    Both may use traced arrays from around them.
    """
    traced = jax.make_jaxpr(fun, return_shape=True)(*args), jax.make_jaxpr(like)(*args)
    (closed, shapes), closed_like = traced
    tree = jax.tree.structure(shapes)

    @jax.custom_jvp
    def call(known: Any, *leaves: Any) -> Any:
        found = jax.core.eval_jaxpr(closed.jaxpr, known[0], *leaves)
        return [_guard_p.bind(x, message=_ALIKE) if is_float(x) else x for x in found]

    @call.defjvp
    def call_jvp(primals: Any, tangents: Any) -> Any:
        def differentiated(known: Any, *leaves: Any) -> Any:
            return jax.core.eval_jaxpr(closed_like.jaxpr, known[1], *leaves)

        return jax.jvp(differentiated, primals, tangents)

    known = list(closed.consts), list(closed_like.consts)
    return jax.tree.unflatten(tree, call(known, *jax.tree.leaves(args)))


@jax.custom_jvp
def once(arrays: Any) -> Any:
    """The same arrays, whose readers may be differentiated once."""
    return arrays


@once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    def guard(x: Any) -> Any:
        return _guard_p.bind(x, message=_LAYERS) if is_float(x) else x

    return jax.tree.map(guard, primals[0]), tangents[0]
