"""The gradients of a convolution as JAX states them, with another function for its convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p

Array = jax.Array
Conv = Callable[[Mapping[str, Any], Array, Array], Array]


def as_given(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """JAX's own convolution."""
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def gradients(
    conv: Conv, params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Of the image and of the kernel."""

    def of_kernel(lhs: Array, cotangent: Array) -> Any:
        return jax.linear_transpose(lambda w: as_given(params, lhs, w), rhs)(cotangent)

    image = of_image(conv, params, lhs, rhs, cotangent)
    return image, _evaluate(jax.make_jaxpr(of_kernel)(lhs, cotangent), conv, lhs, cotangent)


def of_image(
    conv: Conv, params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> Array:
    def transposed(rhs: Array, cotangent: Array) -> Any:
        return jax.linear_transpose(lambda x: as_given(params, x, rhs), lhs)(cotangent)

    return _evaluate(jax.make_jaxpr(transposed)(rhs, cotangent), conv, rhs, cotangent)


def _evaluate(closed: Any, conv: Conv, *args: Array) -> Array:
    """The one result of what was traced, with this function for its convolutions."""
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in closed.jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive is conv_general_dilated_p:
            out = [conv(eqn.params, *operands)]
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    (found,) = map(read, closed.jaxpr.outvars)
    return found
