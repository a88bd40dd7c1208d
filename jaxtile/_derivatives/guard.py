"""An identity that must not be differentiated.

In the derivative of a `scan`, JAX before 0.12 forgets the rule of a `custom_jvp` that another rule
called, and the next derivative is then that of the function itself: a wrong number, silently. So
the functions that rules call in a tile end with this identity. Where their rule is used it is never
differentiated; where JAX forgot the rule it is, and says so. What a user's `scan` over layers reads
has it in its forward rule, and so can be differentiated once.
"""

from __future__ import annotations

from typing import Any

import jax
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
    "cannot differentiate, for the second time, a `scan` over rematerialised layers that call "
    "functions with derivative rules, as `jax.nn.relu` is: JAX before 0.12 forgets such rules in "
    "the derivative of a loop. What to do: use a newer JAX, or scan over the layers without "
    "`jax.checkpoint`: then they are unrolled, and not stored"
)


batching.primitive_batchers[_guard_p] = _batch
ad.primitive_jvps[_guard_p] = _refuse


def guarded(arrays: Any) -> Any:
    """The same arrays."""
    return jax.tree.map(lambda x: _guard_p.bind(x, message=_RULE), arrays)


@jax.custom_vjp
def once(arrays: Any) -> Any:
    """The same arrays, whose readers may be differentiated once."""
    return arrays


def _once_forward(arrays: Any) -> tuple[Any, None]:
    return jax.tree.map(lambda x: _guard_p.bind(x, message=_LAYERS), arrays), None


once.defvjp(_once_forward, lambda _, cotangents: (cotangents,))
