"""An identity that must not be differentiated.

In the derivative of a `scan`, JAX before 0.12 forgets the rule of a `custom_jvp` that another rule
called, and the next derivative is then that of the function itself: a wrong number, silently. So
the functions that rules call in a tile end with this identity. Where their rule is used it is never
differentiated; where JAX forgot the rule it is, and says so.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import TilingError

_guard_p = Primitive("jaxtile_guard")
_guard_p.def_impl(lambda x: x)
_guard_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_guard_p, lambda ctx, x: [x])


def _batch(operands: Any, dims: Any) -> Any:
    return _guard_p.bind(*operands), dims[0]


def _refuse(primals: Any, tangents: Any) -> Any:
    raise TilingError(
        "cannot differentiate, in tiles, a function with a derivative rule that is called by the "
        "rule of another, and not for the first time: JAX before 0.12 forgets such rules in the "
        "derivative of a loop. What to do: use a newer JAX, or apply it outside "
        "`jaxtile.checkpoint` if such derivatives are needed"
    )


batching.primitive_batchers[_guard_p] = _batch
ad.primitive_jvps[_guard_p] = _refuse


def guarded(arrays: Any) -> Any:
    """The same arrays."""
    return jax.tree.map(_guard_p.bind, arrays)
