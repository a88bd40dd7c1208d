"""Convolutions, pools and paddings that read joint arrays, along dimensions that are not merged.

A batch of merged positions is a batch of several dimensions. A convolution has only one of these;
the others are taken along, with windows of one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .joint import Groups, Joint, Restated, bound, dims_of, groups_of, plain, reshaped, sizes
from .values import Value


def convolution(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (image, kernel), numbers = inputs, eqn.params["dimension_numbers"]
    batch, *others = numbers.lhs_spec
    full = _full(image)
    merged = isinstance(kernel, Joint) or any(len(full[d]) > 1 for d in others)
    if merged or eqn.params["batch_group_count"] > 1:
        return None
    out = list(_all(plain(eqn.outvars[0].aval.shape)))
    out[numbers.out_spec[0]] = full[batch]
    more = len(full[batch]) - 1
    changed = {
        name: (*(default,) * more, *eqn.params[name])
        for name, default in [
            ("window_strides", 1),
            ("padding", (0, 0)),
            ("lhs_dilation", 1),
            ("rhs_dilation", 1),
        ]
    }
    kernel_spec = [d + more for d in numbers.rhs_spec]
    changed["dimension_numbers"] = lax.ConvDimensionNumbers(
        _spec(numbers.lhs_spec, full),
        (*kernel_spec[:2], *range(more), *kernel_spec[2:]),
        _spec(numbers.out_spec, tuple(out)),
    )
    groups = tuple(() if g == (1,) else g for g in out)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        found = bound(eqn, reshaped(x, sizes(full)), w.reshape((1,) * more + w.shape), **changed)
        return reshaped(found, sizes(groups))

    return convolve, [groups]


def pool(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    full, params = _full(inputs[0]), eqn.params
    ones = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    ones |= {"base_dilation": 1, "window_dilation": 1}
    if _along_merged(full, [(params[name], one) for name, one in ones.items()]):
        return None
    changed = {
        name: tuple(n for n, group in zip(params[name], full, strict=True) for _ in group)
        for name in ones
    }
    groups = _groups(full, eqn.outvars[0].aval.shape)

    def run(x: jax.Array, *rest: jax.Array) -> Any:
        found = bound(eqn, reshaped(x, sizes(full)), *rest, **changed)
        several = found if eqn.primitive.multiple_results else [found]
        return [reshaped(y, sizes(groups)) for y in several]

    return run, [groups] * len(eqn.outvars)


def padding(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    full, sides = _full(inputs[0]), eqn.params["padding_config"]
    if isinstance(inputs[1], Joint) or _along_merged(full, [(sides, (0, 0, 0))]):
        return None
    each = [side for side, group in zip(sides, full, strict=True) for _ in group]
    groups = _groups(full, eqn.outvars[0].aval.shape)
    if 0 in eqn.outvars[0].aval.shape:
        return None

    def pad(x: jax.Array, value: jax.Array) -> jax.Array:
        return reshaped(lax.pad(reshaped(x, sizes(full)), value, each), sizes(groups))

    return pad, [groups]


def _all(groups: Groups) -> Groups:
    """With a size for each dimension of size 1, too."""
    return tuple(group or (1,) for group in groups)


def _full(value: Value) -> Groups:
    return _all(groups_of(value))


def _groups(full: Groups, shape: Sequence[int]) -> Groups:
    """Those of a result in which merged dimensions are as they were."""
    own = plain(shape)
    return tuple(g if len(g) > 1 else p for g, p in zip(full, own, strict=True))


def _along_merged(full: Groups, options: Sequence[tuple[Sequence[Any], Any]]) -> bool:
    """Does any of these options say something of a merged dimension?"""
    return any(
        len(group) > 1 and not np.array_equal(said, one)
        for each, one in options
        for group, said in zip(full, each, strict=True)
    )


def _spec(spec: Sequence[int], full: Groups) -> tuple[int, ...]:
    """The batch, the features, and the positions, the further dimensions of the batch first."""
    batch, *further = dims_of(full, spec[:1])
    return batch, *dims_of(full, spec[1:2]), *further, *dims_of(full, spec[2:])
