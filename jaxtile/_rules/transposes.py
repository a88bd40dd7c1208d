"""The gradients of a convolution as JAX states them, with another function for its convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p
from jax.interpreters import ad

Array = jax.Array
Conv = Callable[[Mapping[str, Any], Array, Array], Array]


def as_given(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """JAX's own convolution."""
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def gradients(
    conv: Conv, params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Of the image and of the kernel."""

    def both(lhs: Array, rhs: Array, cotangent: Array) -> list[Array]:
        return [
            _transposed(cotangent, _unknown(lhs), rhs, **params)[0],
            _transposed(cotangent, lhs, _unknown(rhs), **params)[1],
        ]

    image, kernel = _with(conv, both, lhs, rhs, cotangent)
    return image, kernel


def of_image(
    conv: Conv, params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> Array:
    def image(rhs: Array, cotangent: Array) -> list[Array]:
        return [_transposed(cotangent, _unknown(lhs), rhs, **params)[0]]

    return _with(conv, image, rhs, cotangent)[0]


def _transposed(cotangent: Array, lhs: Any, rhs: Any, **params: Any) -> Sequence[Any]:
    """JAX's rule, of which `jax.linear_transpose` would trace the convolution first."""
    return ad.get_primitive_transpose(conv_general_dilated_p)(cotangent, lhs, rhs, **params)


def _unknown(x: Array) -> Any:
    return ad.UndefinedPrimal(jax.typeof(x))


def _with(conv: Conv, function: Callable[..., list[Array]], *args: Array) -> list[Array]:
    """What a function returns, with this one for its convolutions."""
    return (
        function(*args)
        if conv is as_given
        else _evaluate(jax.make_jaxpr(function)(*args), conv, *args)
    )


def _evaluate(closed: Any, conv: Conv, *args: Array) -> list[Array]:
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
    return list(map(read, closed.jaxpr.outvars))
