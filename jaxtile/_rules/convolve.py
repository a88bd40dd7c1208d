"""Convolutions with gradients that are as fast as they can be.

On a CPU, XLA brings convolutions into the dimension order that its fast kernels need, but only in a
program's entry computation, not in the body of a loop. JAX states the two gradients of a
convolution by permuting dimension numbers, so in a tile loop both take the slow path (a whole step
was six times slower). Here they are stated with explicit transposes instead. Before jax 0.12 its
convolutions without padding, as those of tiles mostly are, take two to three times as long as with
it, and hold every window of the image apart. So they get a row of padding, whose result is dropped.

On a GPU, JAX states the kernel's gradient of a transposed convolution as a convolution of an image
with zeros between its pixels, for which there is no fast kernel (0.3 s where 1 ms would do). A
transposed convolution is the image's gradient of a strided one, with image and result exchanged, so
its kernel's gradient is that of the strided one, too; for that there is.

The kernel's gradient of a depthwise convolution runs on a GPU with as many blocks as there are
channels, however many positions each of them sums over. So its positions are cut into pieces, which
become channels, and what they give is added up.

A GPU multiplies channels in eights, so a strided convolution on the three of an image is mostly a
multiplication by zeros. There, the pixels of a block as large as a stride become channels, and the
kernel is one of blocks: of ResNet's first layer 2.4 ms become 1.1, and of its kernel's gradient 1.5
become 0.9 (H200, 4096 x 4096, bfloat16).

Convolutions of volumes (`planes`) and kernels as large as dense layers (`products`) have files of
their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .._platform import on_early_cpu
from .derivative import Bilinear, apply
from .dimension_order import as_ordered_by, operands_in_order, ordered
from .late import slices, zero_after
from .plainly import plain
from .planes import Planes, is_of_volumes
from .products import by_rows, gradients_by_rows, has_large_kernel
from .reductions import accumulation_dtype
from .transposes import Conv, as_given, gradients, of_image

Array = jax.Array

_FULL = 384
"""Channels with which the kernel's gradient of a depthwise convolution is about as fast as it gets:
of 512 x 512 positions, with 96 channels 1.2 ms, as 4 pieces 0.42 ms, as 16 pieces 0.43 ms (H200,
7 x 7, bfloat16)."""
_UNIT = 8
"""Channels that a GPU multiplies at once."""


def convolve(lhs: Array, rhs: Array, params: Mapping[str, Any], *, in_loop: bool) -> Array:
    """`conv_general_dilated` with these parameters of the primitive."""
    if is_of_volumes(params, lhs, rhs):
        planes = Planes(lambda p, lhs, rhs: convolve(lhs, rhs, p, in_loop=in_loop), params)
        return planes.value(lhs, rhs) if plain() else apply(planes, lhs, rhs)
    restated = _is_restated(params, lhs, rhs)
    if plain() == "transposed" or not (in_loop or restated):
        return as_given(params, lhs, rhs)
    if plain() == "undifferentiated":
        return _result(in_loop, params, lhs, rhs)
    return apply(_Convolution(in_loop, params), lhs, rhs)


def _result(in_loop: bool, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    conv = functools.partial(_by_platform, in_loop)
    if in_loop and _is_slow_unpadded(params, rhs):
        return _with_padding(conv, params, lhs, rhs)
    return conv(params, lhs, rhs)


def _by_platform(in_loop: bool, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    reordered = in_loop and params["dimension_numbers"] != ordered(params, lhs.ndim)
    cpu = _in_order if reordered else as_given
    default = as_given
    if has_large_kernel(params, lhs, rhs):
        default = by_rows
    elif _is_narrow(params, lhs):
        default = _by_blocks
    if cpu is default:
        return as_given(params, lhs, rhs)
    return lax.platform_dependent(
        lhs, rhs, cpu=functools.partial(cpu, params), default=functools.partial(default, params)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Convolution(Bilinear):
    in_loop: bool
    params: Mapping[str, Any]

    def value(self, lhs: Array, rhs: Array) -> Array:
        return _result(self.in_loop, self.params, lhs, rhs)

    def backward(self, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        return _gradients(self.in_loop, tuple(sorted(self.params.items())), *residuals, cotangent)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _gradients(
    in_loop: bool, given: tuple[tuple[str, Any], ...], lhs: Array, rhs: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Of both operands. Of convolutions that are alike, they are traced once."""
    params = dict(given)

    def restated(lhs: Array, rhs: Array, cotangent: Array) -> tuple[Array, Array]:
        if has_large_kernel(params, lhs, rhs):
            return gradients_by_rows(params, lhs, rhs, cotangent)
        if _is_narrow(params, lhs):
            of_lhs = jax.linear_transpose(lambda x: _by_blocks(params, x, rhs), lhs)
            of_rhs = jax.linear_transpose(lambda w: _by_blocks(params, lhs, w), rhs)
            return *of_lhs(cotangent), *of_rhs(cotangent)
        of_kernel = _of_strided_kernel if _is_transposed(params) else _of_depthwise_kernel
        image = of_image(as_given, params, lhs, rhs, cotangent)
        return image, of_kernel(params, lhs, rhs, cotangent)

    unchanged = functools.partial(gradients, as_given, params)
    return lax.platform_dependent(
        lhs,
        rhs,
        cotangent,
        cpu=functools.partial(gradients, _in_order, params) if in_loop else unchanged,
        default=restated if _is_restated(params, lhs, rhs) else unchanged,
    )


def _is_restated(params: Mapping[str, Any], lhs: Array, rhs: Array) -> bool:
    return (
        has_large_kernel(params, lhs, rhs)
        or _is_transposed(params)
        or _is_depthwise(params, rhs)
        or _is_narrow(params, lhs)
    )


def _is_slow_unpadded(params: Mapping[str, Any], rhs: Array) -> bool:
    """Has it a window of two dimensions, of more than one position, and no padding, on a CPU?"""
    kernel = [rhs.shape[d] for d in params["dimension_numbers"].rhs_spec[2:]]
    groups = params["feature_group_count"], params["batch_group_count"]
    undilated = {*params["lhs_dilation"], *params["rhs_dilation"], *groups} == {1}
    unpadded = not any(map(any, params["padding"]))
    return on_early_cpu() and len(kernel) == 2 and max(kernel) > 1 and undilated and unpadded


def _is_transposed(params: Mapping[str, Any]) -> bool:
    """Is it the gradient of a strided convolution?"""
    others = (*params["window_strides"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    return {*others, *groups} == {1} and any(d > 1 for d in params["lhs_dilation"])


def _is_depthwise(params: Mapping[str, Any], rhs: Array) -> bool:
    """Has every channel a kernel of its own?"""
    in_features = rhs.shape[params["dimension_numbers"].rhs_spec[1]]
    simple = {*params["lhs_dilation"], params["batch_group_count"], in_features} == {1}
    return simple and params["feature_group_count"] > 1


def _is_narrow(params: Mapping[str, Any], lhs: Array) -> bool:
    """Has it strides, and fewer channels than are multiplied at once?"""
    others = (*params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    strided = any(s > 1 for s in params["window_strides"])
    channels = lhs.shape[params["dimension_numbers"].lhs_spec[1]]
    return {*others, *groups} == {1} and strided and channels < _UNIT


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
    transposed = jax.linear_transpose(lambda w: as_given(strided, cotangent, w), rhs)
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
    zero, cotangent = zero_after(cotangent)

    def stacked(x: Array, dim: int, step: int, length: int, feature: int) -> Array:
        starts = [i * step for i in range(pieces)]
        return lax.concatenate([*slices(x, starts, length, dim, zero)], feature)

    lhs = stacked(lhs, image, size * stride, window, dims.lhs_spec[1])
    cotangent = stacked(cotangent, rows, size, size, dims.out_spec[1])
    wider = {
        **params,
        "padding": ((0, 0), *params["padding"][1:]),
        "feature_group_count": params["feature_group_count"] * pieces,
    }
    kernels = lax.concatenate([rhs] * pieces, out_feature)
    found = jax.linear_transpose(lambda w: as_given(wider, lhs, w), kernels)(cotangent)[0]
    shape = list(rhs.shape)
    shape[out_feature : out_feature + 1] = [pieces, shape[out_feature]]
    total: Array = found.reshape(shape).sum(out_feature, dtype=accumulation_dtype(rhs.dtype))
    return total.astype(rhs.dtype)


def _padded(x: Array, dim: int, low: int, high: int) -> Array:
    padding = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), padding)


def _in_order(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """The same convolution with operands as (batch, space, feature) and (space, in, out)."""
    in_order = {**params, "dimension_numbers": ordered(params, lhs.ndim)}
    return as_ordered_by(params, as_given(in_order, *operands_in_order(params, lhs, rhs)))


def _with_padding(conv: Conv, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """The same convolution with one more row of results, which is dropped."""
    rows, more = params["dimension_numbers"].out_spec[2], params["window_strides"][0]
    found = conv({**params, "padding": ((0, more), *params["padding"][1:])}, lhs, rhs)
    return lax.slice_in_dim(found, 0, found.shape[rows] - 1, axis=rows)


def _by_blocks(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """The same convolution, of blocks as large as a stride, whose pixels are channels.

    A window of the image begins `before` pixels ahead of a multiple of the stride. With so many
    zeros in front of the kernel that it begins with a block, it is a window of whole blocks.
    """
    strides = params["window_strides"]
    lhs, rhs = operands_in_order(params, lhs, rhs)
    padding, image, kernel = [], [(0, 0, 0)], []
    for k, (stride, (before, after)) in enumerate(zip(strides, params["padding"], strict=True)):
        length, taps, front = lhs.shape[1 + k], rhs.shape[k], -before % stride
        blocks, kernel_blocks = -(-length // stride), -(-(front + taps) // stride)
        windows = (length + before + after - taps) // stride + 1
        begin = (before + front) // stride
        padding.append((begin, windows + kernel_blocks - 1 - begin - blocks))
        image.append((0, blocks * stride - length, 0))
        kernel.append((front, kernel_blocks * stride - taps - front, 0))
    zero = np.zeros((), lhs.dtype)
    lhs = lax.pad(lhs, zero, [*image, (0, 0, 0)])
    rhs = lax.pad(rhs, zero.astype(rhs.dtype), [*kernel, (0, 0, 0), (0, 0, 0)])
    lhs, rhs = _pixels_as_channels(lhs, 1, strides), _pixels_as_channels(rhs, 0, strides)
    blocked = {
        **params,
        "window_strides": (1,) * len(strides),
        "padding": tuple(padding),
        "dimension_numbers": ordered(params, lhs.ndim),
    }
    return as_ordered_by(params, as_given(blocked, lhs, rhs))


def _pixels_as_channels(x: Array, first: int, sizes: Sequence[int]) -> Array:
    """Blocks of these sizes, along the dimensions from the `first` on; channels come after them."""
    last = first + len(sizes)
    blocks = [n // size for n, size in zip(x.shape[first:last], sizes, strict=True)]
    pairs = [n for pair in zip(blocks, sizes, strict=True) for n in pair]
    x = x.reshape(*x.shape[:first], *pairs, *x.shape[last:])
    outer, inner = (range(first + i, last + len(sizes), 2) for i in range(2))
    x = lax.transpose(x, (*range(first), *outer, *inner, *range(last + len(sizes), x.ndim)))
    return x.reshape(*x.shape[:last], -1, *x.shape[last + len(sizes) + 1 :])
