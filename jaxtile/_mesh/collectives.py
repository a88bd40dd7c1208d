"""Reductions over tiled axes that are distributed over devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._geometry import Window, owned, partition
from .._graph.values import Node
from .._rules import Need, Reduction, Step, Windows
from .._rules.reductions import accumulation_dtype, masked
from .devices import Devices

Array = jax.Array


def merged(reduction: Reduction, state: tuple[Array, ...], names: Sequence[str]):
    """The state over all devices along these mesh axes, the same bits on each of them."""
    if not names:
        return state
    if reduction.adds:
        return tuple(lax.psum(s, tuple(names)) for s in state)
    for name in names:
        gathered = [lax.all_gather(s, name) for s in state]
        states = [tuple(g[i] for g in gathered) for i in range(gathered[0].shape[0])]
        state = functools.reduce(reduction.merge, states)
    return state


def first_only(x: Array, names: Sequence[str]) -> Array:
    """Zero but on the first device along these axes: the others have the same, to be added once."""
    if not names:
        return x
    first = functools.reduce(jnp.logical_and, [lax.axis_index(n) == 0 for n in names])
    return jnp.where(first, x, jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class _Across:
    """A reduction, and the mesh axes that matter to it."""

    reduction: Reduction
    over: tuple[str, ...]
    """Those it reduces over."""
    repeated: tuple[str, ...]
    """Those along which all devices of the region get the same result."""
    alike: tuple[str, ...]
    """Those along which all devices have the same operands."""


def reduction_step(devices: Devices, axes: Sequence[int], node: Node, wanted: Windows) -> Step:
    """How a reduction is computed inside a region of one tile per device, on these tiled axes.

    Its tile of the operands is what the device owns along the axes that are reduced, and what is
    wanted of the result along those that are not.
    """
    result = node.outputs[0]
    kept = {w.axis: w for w in wanted.values()}
    needs, counts, masks = [], [], []
    for value in node.inputs:
        windows: Windows = {}
        for d, (axis, n) in enumerate(zip(value.axes, value.aval.shape, strict=True)):
            if axis in kept:
                windows[d] = kept[axis]
            elif axis is not None:
                windows[d] = partition(axis, n, 1, devices.count(axis))
                own = owned(windows[d], n)
                if (own != windows[d].size).any():
                    masks.append((len(needs), d))
                    counts.append(Window(axis, own, 1))
        needs.append(Need(windows))

    def names(which) -> tuple[str, ...]:
        return tuple(devices.names[a] for a in axes if which(a) and devices.names[a] is not None)

    operand_axes = {a for v in node.inputs for a in v.axes if a is not None}
    across = _Across(
        node.reduction,
        over=names(lambda a: a in operand_axes and a not in result.axes),
        repeated=names(lambda a: a not in result.axes),
        alike=names(lambda a: a not in operand_axes),
    )

    def evaluate(scalars, *operands):
        mine: list[Array | None] = [None] * len(operands)
        for (k, d), count in zip(masks, scalars, strict=True):
            inside = lax.broadcasted_iota(np.int32, operands[k].shape, d) < count
            mine[k] = inside if mine[k] is None else mine[k] & inside
        if not jnp.issubdtype(result.aval.dtype, jnp.inexact):
            return [_reduced(across, mine, operands)[0]]
        return [_reduce(across, mine, list(operands))]

    return Step(needs, evaluate, positions=counts)


def _reduced(across: _Across, mine, operands) -> tuple[Array, Any]:
    share = across.reduction.partial(operands, mine)
    state = merged(across.reduction, share, across.over)
    return across.reduction.finish(state), (across.reduction.remember(share), state)


# Each device pulls its own share of all cotangents back. A result that devices have in common thus
# has a sum over them as its cotangent, and their shares of the operands follow from that.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(across: _Across, mine, operands) -> Array:
    return _reduced(across, mine, operands)[0]


def _reduce_forward(across, mine, operands):
    result, known = _reduced(across, mine, operands)
    return result, (mine, operands, known)


def _reduce_backward(across, residuals, cotangent):
    mine, operands, (remembered, state) = residuals
    if across.repeated:
        wide = cotangent.astype(accumulation_dtype(cotangent.dtype))
        cotangent = lax.psum(wide, across.repeated).astype(cotangent.dtype)
    pulled = across.reduction.pullback(operands, mine, remembered, state, cotangent)
    return [None for _ in mine], [
        first_only(masked(x, m, 0), across.alike) for x, m in zip(pulled, mine, strict=True)
    ]


_reduce.defvjp(_reduce_forward, _reduce_backward)
