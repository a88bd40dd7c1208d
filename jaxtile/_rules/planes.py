"""Convolutions of volumes, as convolutions of planes.

XLA has no fast kernel for a CPU that convolves three spatial dimensions, and on a GPU it brings
channels first for them, and back. A plane of the result depends on as many planes of the volume as
the kernel is deep. With these side by side, as channels, it is a convolution of planes:

    y[z] = conv(wide[z], w),    wide[z] = x[z], x[z + 1], x[z + 2]  as the channels of one plane

and all planes together are a batch. The array of wide planes is as many times larger than the
volume as the kernel is deep (not as it has elements). So it is made in pieces, each as large as
convolutions should be, and it is not kept for the gradients: that of the kernel makes it again, and
that of the volume is a convolution of the cotangents.

In a transposed convolution there are zeros between the planes of the volume. These are not
multiplied. Each plane gives planes of the result, as channels, and they are added up in their
places:

    y[2 z + p - i] += conv(x[z], w)[i]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .derivative import Bilinear
from .dimension_order import as_ordered_by, operands_in_order, ordered
from .late import slices, zero_after
from .reductions import accumulation_dtype
from .transposes import Conv, as_given, of_image

Array = jax.Array

_DEEPEST = 8
"""Planes of a kernel. Layers have up to 7; deeper ones are gradients, with an image as kernel."""
_LARGEST = 2**30
"""Bytes of a piece. From 2**31 elements on, fast kernels are missing on a GPU; from as many bytes
on, the compiler tries some that are slow."""
_BY_DIMENSION = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")


def is_of_volumes(params: Mapping[str, Any], lhs: Array, rhs: Array) -> bool:
    """Has it three spatial dimensions, no groups, a kernel of few planes, and a result?"""
    dims, groups = params["dimension_numbers"], {params["feature_group_count"]}
    if len(dims.rhs_spec) != 5 or groups | {params["batch_group_count"]} != {1}:
        return False
    planes, deep = lhs.shape[dims.lhs_spec[2]], rhs.shape[dims.rhs_spec[2]]
    empty = 0 in (*lhs.shape, *rhs.shape)
    return deep <= _DEEPEST and not empty and _count(params, planes, deep) > 0


def wide_bytes(params: Mapping[str, Any], lhs: Array, rhs: Array) -> int:
    """Of all wide planes that a convolution makes; 0: it makes none."""
    if not is_of_volumes(params, lhs, rhs) or _adds(params):
        return 0
    dims = params["dimension_numbers"]
    planes, deep = lhs.shape[dims.lhs_spec[2]], rhs.shape[dims.rhs_spec[2]]
    count = _count(params, planes, deep)
    return lhs.size // planes * count * deep * lhs.dtype.itemsize if deep > 1 else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Planes(Bilinear):
    """A convolution of volumes by `conv`, which knows all others; and its derivative."""

    conv: Conv
    params: Mapping[str, Any]

    def value(self, lhs: Array, rhs: Array) -> Array:
        found = [self._piece(params, lhs, rhs) for params in self._pieces(lhs, rhs)]
        return lax.concatenate(found, self.params["dimension_numbers"].out_spec[2])

    def backward(self, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        lhs, rhs = residuals
        image = of_image(self.conv, self.params, lhs, rhs, cotangent)
        dim, start = self.params["dimension_numbers"].out_spec[2], 0
        total = jnp.zeros((), accumulation_dtype(rhs.dtype))
        zero, cotangent = zero_after(cotangent)
        for params in self._pieces(lhs, rhs):
            found, pull = jax.vjp(functools.partial(self._piece, params, lhs, zero=zero), rhs)
            stop = start + found.shape[dim]
            of_kernel = pull(lax.slice_in_dim(cotangent, start, stop, axis=dim))
            total, start = total + of_kernel[0], stop
        return image, total.astype(rhs.dtype)

    def _pieces(self, lhs: Array, rhs: Array) -> Iterator[Mapping[str, Any]]:
        """Parameters of convolutions that give some planes of the result each, one after another:
        their padding leaves out of the volume what they do not read.
        """
        params, dims = self.params, self.params["dimension_numbers"]
        planes, deep = lhs.shape[dims.lhs_spec[2]], rhs.shape[dims.rhs_spec[2]]
        (low, high), stride = params["padding"][0], params["window_strides"][0]
        count = length = _count(params, planes, deep)
        if wide := wide_bytes(params, lhs, rhs):
            result = jax.eval_shape(functools.partial(as_given, params), lhs, rhs)
            size = max(wide, result.size * result.dtype.itemsize)
            length = -(-count // -(-size // _LARGEST))
        for start in range(0, count, length):
            after = count - min(start + length, count)
            padding = (low - start * stride, high - after * stride), *params["padding"][1:]
            yield {**params, "padding": padding}

    def _piece(
        self, params: Mapping[str, Any], lhs: Array, rhs: Array, zero: Array | None = None
    ) -> Array:
        """`zero`: where wide planes begin, if they are to wait for something."""
        lhs, rhs = operands_in_order(params, lhs, rhs)
        if _adds(params):
            return as_ordered_by(params, self._added(params, lhs, rhs))
        return as_ordered_by(params, self._wide(params, lhs, rhs, zero))

    def _wide(self, params: Mapping[str, Any], lhs: Array, rhs: Array, zero: Array | None) -> Array:
        """With the planes that a plane of the result depends on as its channels."""
        deep, *window, channels, out = rhs.shape
        (low, high), step = params["padding"][0], params["lhs_dilation"][0]
        stride, dilation = params["window_strides"][0], params["rhs_dilation"][0]
        reach = (_count(params, lhs.shape[1], deep) - 1) * stride + 1
        lhs, starts = _padded(lhs, low, high, step), [i * dilation for i in range(deep)]
        cut = [*slices(lhs, starts, reach, 1, zero, stride)]
        kernel = lax.transpose(rhs, (1, 2, 0, 3, 4)).reshape(*window, deep * channels, out)
        return self._of_planes(params, lax.concatenate(cut, 4), kernel)

    def _added(self, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
        """With the planes of the result that a plane gives as its channels, added up."""
        deep, *window, channels, out = rhs.shape
        low, planes = params["padding"][0][0], lhs.shape[1]
        step, dilation = params["lhs_dilation"][0], params["rhs_dilation"][0]
        kernel = lax.transpose(rhs, (1, 2, 3, 0, 4)).reshape(*window, channels, deep * out)
        found, count = self._of_planes(params, lhs, kernel), _count(params, planes, deep)
        parts = []
        for i in range(deep):
            part = lax.slice_in_dim(found, i * out, (i + 1) * out, axis=4)
            before = low - i * dilation
            after = count - before - (planes - 1) * step - 1
            part = part.astype(accumulation_dtype(found.dtype))
            parts.append(_padded(part, before, after, step))
        return sum(parts[1:], parts[0]).astype(found.dtype)

    def _of_planes(self, params: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
        volumes, planes, *plane = lhs.shape
        flat = {name: tuple(params[name][1:]) for name in _BY_DIMENSION}
        numbers = {"dimension_numbers": ordered(params, 4)}
        found = self.conv({**params, **flat, **numbers}, lhs.reshape(-1, *plane), rhs)
        return found.reshape(volumes, planes, *found.shape[1:])


def _adds(params: Mapping[str, Any]) -> bool:
    """Are there zeros between the planes of the volume, and no planes of the result left out?"""
    return bool(params["lhs_dilation"][0] > 1 and params["window_strides"][0] == 1)


def _count(params: Mapping[str, Any], planes: int, deep: int) -> int:
    """Planes of the result."""
    padded = (planes - 1) * params["lhs_dilation"][0] + 1 + sum(params["padding"][0])
    extent = (deep - 1) * params["rhs_dilation"][0] + 1
    return (padded - extent) // params["window_strides"][0] + 1


def _padded(x: Array, low: int, high: int, step: int) -> Array:
    padding = [(0, 0, 0), (low, high, step - 1), *[(0, 0, 0)] * (x.ndim - 2)]
    return lax.pad(x, np.zeros((), x.dtype), padding)
