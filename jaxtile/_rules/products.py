"""Convolutions with kernels as large as dense layers, as products of matrices.

VGG16's first dense layer, applied to images of any size, is a convolution of 7 x 7 positions from
512 to 4096 channels. For it cuDNN's first choice is a kernel without tensor cores: 1.06 s for
a tile of 340 x 340 positions on an H200, where the multiplications take 40 ms; and XLA, if it tries
all choices, runs such kernels for minutes. A product of matrices has no such cliff.

With the columns of a window side by side as channels, each row of the kernel is one product:

    y[r, c] = sum over i of  wide[r + i, c] @ w[i],    wide[r, c] = x[r, c : c + 7] as one vector

The array of wide pixels is as many times larger than the image as the kernel has columns (not as it
has elements). Sums are accumulated in float32 at least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dimension_order import (
    as_ordered_by,
    cotangent_in_order,
    gradients_as_ordered_by,
    operands_in_order,
)
from .reductions import accumulation_dtype

Array = jax.Array

LARGE = 2**24
"""Elements of a kernel. Between convolutions (3 x 3, 512 to 512: 2.4 million) and dense layers
(AlexNet's first: 38 million, VGG16's: 103 million) is a wide gap."""


def has_large_kernel(params: Mapping[str, Any], lhs: Array, rhs: Array) -> bool:
    others = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    taps = [rhs.shape[d] for d in params["dimension_numbers"].rhs_spec[2:]]
    types = {lhs.dtype, rhs.dtype, np.dtype(params["preferred_element_type"] or lhs.dtype)}
    return (
        rhs.size >= LARGE
        and math.prod(taps) > 1
        and {*others, *groups} == {1}
        and len(types) == 1
        and jnp.issubdtype(lhs.dtype, jnp.floating)
    )


def by_rows(params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """The convolution with these parameters of the primitive."""
    image, kernel = operands_in_order(params, lhs, rhs)
    wide = _wide(_padded(params, image), kernel)
    rows = wide.shape[1] - kernel.shape[0] + 1
    total = sum(
        _product(params, lax.slice_in_dim(wide, i, i + rows, axis=1), row, ((wide.ndim - 1,), (0,)))
        for i, row in enumerate(_rows(kernel))
    )
    return as_ordered_by(params, jnp.asarray(total).astype(lhs.dtype))


def gradients_by_rows(
    params: Mapping[str, Any], lhs: Array, rhs: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Of the image and of the kernel."""
    image, kernel = operands_in_order(params, lhs, rhs)
    cotangent = cotangent_in_order(params, cotangent)
    of_image = _of_image(params, _padded(params, image).shape, kernel, cotangent)
    inner = [(-low, -high, 0) for low, high in params["padding"]]
    of_image = lax.pad(of_image, _zero(of_image), [(0, 0, 0), *inner, (0, 0, 0)])
    of_kernel = _of_kernel(params, _padded(params, image), kernel, cotangent)
    return gradients_as_ordered_by(params, of_image.astype(lhs.dtype), of_kernel.astype(rhs.dtype))


def _of_image(
    params: Mapping[str, Any], shape: Sequence[int], kernel: Array, cotangent: Array
) -> Array:
    """Of the padded image: what each row of the kernel gives, each column at its place."""
    channels, last = kernel.shape[-2], cotangent.ndim - 1
    total = jnp.zeros(shape, accumulation_dtype(kernel.dtype))
    for i, row in enumerate(_rows(kernel)):
        found = _product(params, cotangent, row, ((last,), (1,)))
        for number, offsets in enumerate(_columns(kernel)):
            piece = lax.slice_in_dim(found, number * channels, (number + 1) * channels, axis=last)
            sides = [
                (offset, taps - 1 - offset, 0)
                for offset, taps in zip((i, *offsets), kernel.shape, strict=False)
            ]
            total += lax.pad(piece, _zero(piece), [(0, 0, 0), *sides, (0, 0, 0)])
    return total


def _of_kernel(params: Mapping[str, Any], image: Array, kernel: Array, cotangent: Array) -> Array:
    wide, rows = _wide(image, kernel), cotangent.shape[1]
    positions = tuple(range(cotangent.ndim - 1))
    found = [
        _product(
            params,
            lax.slice_in_dim(wide, i, i + rows, axis=1),
            cotangent,
            (positions, positions),
        )
        for i in range(kernel.shape[0])
    ]
    return jnp.stack(found).reshape(kernel.shape)


def _wide(image: Array, kernel: Array) -> Array:
    """The positions of a window along all axes but the first, as channels."""
    sizes = [n - taps + 1 for n, taps in zip(image.shape[2:-1], kernel.shape[1:], strict=False)]
    pieces = []
    for offsets in _columns(kernel):
        ends = [offset + n for offset, n in zip(offsets, sizes, strict=True)]
        limits = (*image.shape[:2], *ends, image.shape[-1])
        pieces.append(lax.slice(image, (0, 0, *offsets, 0), limits))
    return lax.concatenate(pieces, image.ndim - 1)


def _rows(kernel: Array) -> Iterator[Array]:
    """Of each position along the first axis, all others and the channels as one dimension."""
    for i in range(kernel.shape[0]):
        yield kernel[i].reshape(-1, kernel.shape[-1])


def _columns(kernel: Array) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, kernel.shape[1:-2]))


def _product(params: Mapping[str, Any], lhs: Array, rhs: Array, contracted: Any) -> Array:
    return lax.dot_general(
        lhs,
        rhs,
        (contracted, ((), ())),
        precision=params["precision"],
        preferred_element_type=accumulation_dtype(lhs.dtype),
    )


def _padded(params: Mapping[str, Any], image: Array) -> Array:
    sides = [(low, high, 0) for low, high in params["padding"]]
    return lax.pad(image, _zero(image), [(0, 0, 0), *sides, (0, 0, 0)])


def _zero(x: Array) -> np.ndarray:
    return np.zeros((), x.dtype)
