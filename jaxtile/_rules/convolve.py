"""Convolutions with gradients that are as fast as they can be.

On a CPU, XLA brings convolutions into the dimension order that its fast kernels need, but only in a
program's entry computation, not in the body of a loop. JAX states the two gradients of a
convolution by permuting dimension numbers, so in a tile loop both take the slow path (a whole step
was six times slower). Here they are stated with explicit transposes instead.

On a GPU, JAX states the kernel's gradient of a transposed convolution as a convolution of an image
with zeros between its pixels, for which there is no fast kernel (0.3 s where 1 ms would do). A
transposed convolution is the image's gradient of a strided one, with image and result exchanged, so
its kernel's gradient is that of the strided one, too; for that there is.

The kernel's gradient of a depthwise convolution runs on a GPU with as many blocks as there are
channels, however many positions each of them sums over. So its positions are cut into pieces, which
become channels, and what they give is added up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p

from .derivative import apply
from .plainly import plain
from .reductions import accumulation_dtype

Array = jax.Array

_FULL = 384
"""Channels with which the kernel's gradient of a depthwise convolution is about as fast as it gets:
of 512 x 512 positions, with 96 channels 1.2 ms, as 4 pieces 0.42 ms, as 16 pieces 0.43 ms (H200,
7 x 7, bfloat16)."""


def convolve(lhs: Array, rhs: Array, params: Mapping[str, Any], *, in_loop: bool) -> Array:
    """`conv_general_dilated` with these parameters of the primitive."""
    restated = _is_transposed(params) or _is_depthwise(params, rhs)
    if plain() == "transposed" or not (in_loop or restated):
        return _as_given(params, lhs, rhs)
    if plain() == "undifferentiated":
        return _result(in_loop, params, lhs, rhs)
    return apply(_Convolution(in_loop, params), lhs, rhs)


def _result(in_loop: bool, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    if not in_loop or params["dimension_numbers"] == _ordered(params, lhs.ndim):
        return _as_given(params, lhs, rhs)
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=functools.partial(_in_order, params),
        default=functools.partial(_as_given, params),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Convolution:
    in_loop: bool
    params: Mapping[str, Any]

    def value(self, lhs: Array, rhs: Array) -> Array:
        return _result(self.in_loop, self.params, lhs, rhs)

    def forward(self, wanted: Any, lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
        return apply(self, lhs, rhs), (lhs, rhs)

    def tangents(self, residuals: tuple[Array, Array], tangents: Sequence[Array | None]) -> Array:
        (lhs, rhs), (of_lhs, of_rhs) = residuals, tangents
        found = [] if of_lhs is None else [apply(self, of_lhs, rhs)]
        found += [] if of_rhs is None else [apply(self, lhs, of_rhs)]
        return sum(found[1:], found[0])

    def backward(self, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        params = self.params
        conv = functools.partial(_as_given, params)

        def of_image(lhs: Array, rhs: Array, cotangent: Array) -> Array:
            return jax.linear_transpose(lambda x: conv(x, rhs), lhs)(cotangent)[0]

        def of_kernel(lhs: Array, rhs: Array, cotangent: Array) -> Array:
            return jax.linear_transpose(lambda w: conv(lhs, w), rhs)(cotangent)[0]

        def gradients(lhs: Array, rhs: Array, cotangent: Array) -> tuple[Array, Array]:
            return of_image(lhs, rhs, cotangent), of_kernel(lhs, rhs, cotangent)

        def restated(lhs: Array, rhs: Array, cotangent: Array) -> tuple[Array, Array]:
            of = _of_strided_kernel if _is_transposed(params) else _of_depthwise_kernel
            return of_image(lhs, rhs, cotangent), of(params, lhs, rhs, cotangent)

        operands = (*residuals, cotangent)
        traced = jax.make_jaxpr(gradients)(*operands)
        plain = functools.partial(_evaluate, traced, _as_given)
        as_restated = _is_transposed(params) or _is_depthwise(params, residuals[1])
        return lax.platform_dependent(
            *operands,
            cpu=functools.partial(_evaluate, traced, _in_order) if self.in_loop else plain,
            default=restated if as_restated else plain,
        )


def _as_given(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """JAX's own convolution."""
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def _is_transposed(params: Mapping[str, Any]) -> bool:
    """Is it the gradient of a strided convolution?"""
    others = (*params["window_strides"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    return {*others, *groups} == {1} and any(d > 1 for d in params["lhs_dilation"])


def _is_depthwise(params: Mapping[str, Any], rhs: Array) -> bool:
    """Has every channel a kernel of its own?"""
    in_features = rhs.shape[params["dimension_numbers"].rhs_spec[1]]
    plain = {*params["lhs_dilation"], params["batch_group_count"], in_features} == {1}
    return plain and params["feature_group_count"] > 1


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


def _of_depthwise_kernel(
    params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> Array:
    """The kernel's gradient, with pieces of the first spatial dimension as channels."""
    dims = params["dimension_numbers"]
    out_feature, _, space, *_ = dims.rhs_spec
    rows, image = dims.out_spec[2], dims.lhs_spec[2]
    stride, (low, high) = params["window_strides"][0], params["padding"][0]
    extent = (rhs.shape[space] - 1) * params["rhs_dilation"][0] + 1
    wanted = -(-_FULL // rhs.shape[out_feature])
    pieces = max(1, min(wanted, cotangent.shape[rows] // extent))
    size = -(-cotangent.shape[rows] // pieces)
    # The last piece is as large as the others: beyond the end, cotangents are zero.
    short = pieces * size - cotangent.shape[rows]
    cotangent = _padded(cotangent, rows, 0, short)
    window = (size - 1) * stride + extent
    ends = (pieces - 1) * size * stride + window
    lhs = _padded(lhs, image, low, max(high, ends - low - lhs.shape[image]))

    def stacked(x: Array, dim: int, step: int, length: int, feature: int) -> Array:
        starts = [i * step for i in range(pieces)]
        cut = [lax.slice_in_dim(x, n, n + length, axis=dim) for n in starts]
        return lax.concatenate(cut, feature)

    lhs = stacked(lhs, image, size * stride, window, dims.lhs_spec[1])
    cotangent = stacked(cotangent, rows, size, size, dims.out_spec[1])
    wider = {
        **params,
        "padding": ((0, 0), *params["padding"][1:]),
        "feature_group_count": params["feature_group_count"] * pieces,
    }
    kernels = lax.concatenate([rhs] * pieces, out_feature)
    found = jax.linear_transpose(lambda w: _as_given(wider, lhs, w), kernels)(cotangent)[0]
    shape = list(rhs.shape)
    shape[out_feature : out_feature + 1] = [pieces, shape[out_feature]]
    total: Array = found.reshape(shape).sum(out_feature, dtype=accumulation_dtype(rhs.dtype))
    return total.astype(rhs.dtype)


def _padded(x: Array, dim: int, low: int, high: int) -> Array:
    padding = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), padding)


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
