"""What is cut out of an array, but not before another array exists.

A gradient may rearrange an operand that has been there since the forward pass: the planes of a
volume side by side, rows of an image as channels. A compiler sees that this waits for nothing. So
it rearranges the operand as soon as that exists, and holds the result until the gradient is due; or
takes the one that the convolution itself has read, and holds that. If the slices begin at a number
that exists only with the cotangent, it can do neither. To let the operand itself wait would make an
array of it, where a window of another array is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

Array = jax.Array


def zero_after(array: Array) -> tuple[Array, Array]:
    """Zero, to begin slices at, and the array that it waits for."""
    zero, array = lax.optimization_barrier((np.int32(0), array))
    return zero, array


def slices(
    x: Array, starts: Sequence[int], length: int, axis: int, zero: Array | None, stride: int = 1
) -> Iterator[Any]:
    """Along an axis, from each of these positions; `zero`: of `zero_after`."""
    for start in starts:
        if zero is None:
            yield lax.slice_in_dim(x, start, start + length, stride, axis)
        else:
            cut = lax.dynamic_slice_in_dim(x, zero + start, length, axis)
            yield lax.slice_in_dim(cut, 0, length, stride, axis)
