"""A convolution that stays fast inside a loop on a CPU.

XLA's CPU backend brings convolutions into the dimension order that its fast kernels need, but only
in a program's entry computation, not in the body of a loop. JAX states the two gradients of a
convolution by permuting dimension numbers, so in a tile loop both take the slow path (a whole step
was six times slower). Here they are stated with explicit transposes instead. Other backends get
JAX's own convolution and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p

from .._derivative import transposing

Array = jax.Array


def convolve(lhs: Array, rhs: Array, params: Mapping[str, Any]) -> Array:
    """`conv_general_dilated` with these parameters of the primitive."""
    if transposing():
        return _as_given(params, lhs, rhs)
    return _convolve(tuple(params.items()), lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(params: tuple, lhs: Array, rhs: Array) -> Array:
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=functools.partial(_in_order, dict(params)),
        default=functools.partial(_as_given, dict(params)),
    )


def _forward(params, lhs, rhs):
    return _convolve(params, lhs, rhs), (lhs, rhs)


def _backward(params, residuals, cotangent):
    lhs, rhs = residuals
    conv = functools.partial(_as_given, dict(params))

    def gradients(lhs, rhs, cotangent):
        (lhs_bar,) = jax.linear_transpose(lambda x: conv(x, rhs), lhs)(cotangent)
        (rhs_bar,) = jax.linear_transpose(lambda w: conv(lhs, w), rhs)(cotangent)
        return lhs_bar, rhs_bar

    return lax.platform_dependent(lhs, rhs, cotangent, cpu=_reordered(gradients), default=gradients)


_convolve.defvjp(_forward, _backward)


def _as_given(params, lhs, rhs):
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def _in_order(params, lhs, rhs):
    """The same convolution with operands as (batch, space, feature) and (space, in, out)."""
    dims = params["dimension_numbers"]
    rank = lhs.ndim
    last = (0, rank - 1, *range(1, rank - 1))
    ordered = type(dims)(last, (rank - 1, rank - 2, *range(rank - 2)), last)
    batch, feature, *space = dims.lhs_spec
    out_feature, in_feature, *kernel_space = dims.rhs_spec
    lhs = lax.transpose(lhs, (batch, *space, feature))
    rhs = lax.transpose(rhs, (*kernel_space, in_feature, out_feature))
    out = _as_given({**params, "dimension_numbers": ordered}, lhs, rhs)
    batch, feature, *space = dims.out_spec
    return lax.transpose(out, tuple(np.argsort((batch, *space, feature))))


def _reordered(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` with every convolution that it traces to replaced by one in order."""

    def run(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        env = dict(zip(closed.jaxpr.invars, args, strict=True))
        env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def read(var):
            return var.val if isinstance(var, Literal) else env[var]

        for eqn in closed.jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            if eqn.primitive is conv_general_dilated_p:
                out = [_in_order(eqn.params, *operands)]
            else:
                out = eqn.primitive.bind(*operands, **eqn.params)
                out = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, out, strict=True))
        return jax.tree.unflatten(
            jax.tree.structure(shape), [read(v) for v in closed.jaxpr.outvars]
        )

    return run
