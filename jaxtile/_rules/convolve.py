"""Convolutions with gradients that are as fast as they can be.

On a CPU, XLA brings convolutions into the dimension order that its fast kernels need, but only in a
program's entry computation, not in the body of a loop. JAX states the two gradients of a
convolution by permuting dimension numbers, so in a tile loop both take the slow path (a whole step
was six times slower). Here they are stated with explicit transposes instead.

On a GPU, JAX states the kernel's gradient of a transposed convolution as a convolution of an image
with zeros between its pixels, for which there is no fast kernel (0.3 s where 1 ms would do). A
transposed convolution is the image's gradient of a strided one, with image and result exchanged, so
its kernel's gradient is that of the strided one, too; for that there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p, copy_p

from .plainly import plain

Array = jax.Array


def convolve(lhs: Array, rhs: Array, params: Mapping[str, Any], *, in_loop: bool) -> Array:
    """`conv_general_dilated` with these parameters of the primitive."""
    if plain() == "transposed" or not (in_loop or _is_transposed(params)):
        return _as_given(params, lhs, rhs)
    if plain() == "undifferentiated":
        return _result(in_loop, params, lhs, rhs)
    return _convolve((in_loop, *params.items()), lhs, rhs)


def _result(in_loop: bool, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    if not in_loop or params["dimension_numbers"] == _ordered(params, lhs.ndim):
        return _as_given(params, lhs, rhs)
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=functools.partial(_in_order, params),
        default=functools.partial(_as_given, params),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(call: tuple, lhs: Array, rhs: Array) -> Array:
    in_loop, *params = call
    return _result(in_loop, dict(params), lhs, rhs)


def _forward(call: tuple, lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
    # JAX forwards residuals that are operands, and in a third derivative it takes the wrong ones.
    # A copy is no operation in the compiled program.
    return _convolve(call, lhs, rhs), (copy_p.bind(lhs), copy_p.bind(rhs))


def _backward(call: tuple, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    in_loop, *items = call
    params = dict(items)
    conv = functools.partial(_as_given, params)

    def of_image(lhs: Array, rhs: Array, cotangent: Array) -> Array:
        return jax.linear_transpose(lambda x: conv(x, rhs), lhs)(cotangent)[0]

    def of_kernel(lhs: Array, rhs: Array, cotangent: Array) -> Array:
        return jax.linear_transpose(lambda w: conv(lhs, w), rhs)(cotangent)[0]

    def gradients(lhs: Array, rhs: Array, cotangent: Array) -> tuple[Array, Array]:
        return of_image(lhs, rhs, cotangent), of_kernel(lhs, rhs, cotangent)

    def with_strided(lhs: Array, rhs: Array, cotangent: Array) -> tuple[Array, Array]:
        return of_image(lhs, rhs, cotangent), _of_strided_kernel(params, lhs, rhs, cotangent)

    operands = (*residuals, cotangent)
    traced = jax.make_jaxpr(gradients)(*operands)
    plain = functools.partial(_evaluate, traced, _as_given)
    return lax.platform_dependent(
        *operands,
        cpu=functools.partial(_evaluate, traced, _in_order) if in_loop else plain,
        default=with_strided if _is_transposed(params) else plain,
    )


_convolve.defvjp(_forward, _backward)


def _as_given(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """JAX's own convolution."""
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def _is_transposed(params: Mapping[str, Any]) -> bool:
    """Is it the gradient of a strided convolution?"""
    others = (*params["window_strides"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    return {*others, *groups} == {1} and any(d > 1 for d in params["lhs_dilation"])


def _of_strided_kernel(
    params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> Array:
    """The kernel's gradient, by the strided convolution that takes `cotangent` to `lhs`.

    With the image dilated by d and padded by p, `y[i] = sum_k x[(i + k - p) / d] w[k]`, so
    `dw[k] = sum_j x[j] dy[d j + p - k]`: a convolution's gradient, with the kernel reversed.
    """
    dims = params["dimension_numbers"]
    out, in_, *space = dims.rhs_spec
    padding = []
    for k, (low, _) in enumerate(params["padding"]):
        size, stride = rhs.shape[space[k]], params["lhs_dilation"][k]
        image, windows = cotangent.shape[dims.out_spec[2 + k]], lhs.shape[dims.lhs_spec[2 + k]]
        before = size - 1 - low
        padding.append((before, (windows - 1) * stride + size - image - before))
    strided = {
        **params,
        "window_strides": params["lhs_dilation"],
        "lhs_dilation": (1,) * len(space),
        "padding": tuple(padding),
        "dimension_numbers": type(dims)(dims.out_spec, (in_, out, *space), dims.lhs_spec),
    }
    transposed = jax.linear_transpose(lambda w: _as_given(strided, cotangent, w), rhs)
    return lax.rev(transposed(lhs)[0], tuple(space))


def _ordered(params: Mapping[str, Any], rank: int) -> Any:
    """The dimension numbers of operands as (batch, space, feature) and (space, in, out)."""
    last = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    return type(params["dimension_numbers"])(last, kernel, last)


def _in_order(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """The same convolution with operands as (batch, space, feature) and (space, in, out)."""
    dims = params["dimension_numbers"]
    ordered = _ordered(params, lhs.ndim)
    batch, feature, *space = dims.lhs_spec
    out_feature, in_feature, *kernel_space = dims.rhs_spec
    lhs = lax.transpose(lhs, (batch, *space, feature))
    rhs = lax.transpose(rhs, (*kernel_space, in_feature, out_feature))
    out = _as_given({**params, "dimension_numbers": ordered}, lhs, rhs)
    batch, feature, *space = dims.out_spec
    return lax.transpose(out, tuple(np.argsort((batch, *space, feature))))


def _evaluate(closed: Any, convolution: Callable[..., Array], *args: Array) -> tuple[Array, ...]:
    """What was traced, with this function for its convolutions."""
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else env[var]

    for eqn in closed.jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive is conv_general_dilated_p:
            out = [convolution(eqn.params, *operands)]
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return tuple(read(v) for v in closed.jaxpr.outvars)
