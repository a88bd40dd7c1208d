"""Reductions over tiled axes that are distributed over devices.

The mean of an image whose rows lie on several devices needs all of them. Each device reduces what
it owns, the devices combine their results, and every device goes on with the same number. In the
backward pass each device has a share of the cotangent of that number, from what it did with it: the
shares are added up over the devices first, and then each device pulls the sum back to its own part
of the operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._geometry import Window, owned, partition
from .._graph.values import Node, is_float
from .._rules import Masks, Need, Reduction, Share, State, Step, Windows
from .._rules.accumulation import masked
from .._rules.reductions import accumulation_dtype
from .devices import Devices

Array = jax.Array


def merged(reduction: Reduction, state: State, names: Sequence[str]) -> State:
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
    """`x` on the first device along these axes, zeros on the others.

    All of them have the same `x`, and it is going to be added up over devices.
    """
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

    Along axes that are reduced, a device reads what it owns of the operands; along the others, what
    is wanted of the result.
    """
    result = node.outputs[0]
    kept = {w.axis: w for w in wanted.values()}
    needs: list[Need] = []
    counts: list[Window] = []
    masks: list[tuple[int, int]] = []
    for value in node.inputs:
        windows: Windows = {}
        for d, (axis, n) in enumerate(zip(value.axes, value.aval.shape, strict=True)):
            if axis is None:
                continue
            if axis in kept:
                windows[d] = kept[axis]
            else:
                windows[d] = partition(axis, n, 1, devices.count(axis))
                own = owned(windows[d], n)
                if (own != windows[d].size).any():
                    masks.append((len(needs), d))
                    counts.append(Window(axis, own, 1))
        needs.append(Need(windows))

    def names(which: Callable[[int], bool]) -> tuple[str, ...]:
        return tuple(name for a in axes if which(a) and (name := devices.names[a]) is not None)

    operand_axes = {a for v in node.inputs for a in v.axes if a is not None}
    assert node.reduction is not None
    across = _Across(
        node.reduction,
        over=names(lambda a: a in operand_axes and a not in result.axes),
        repeated=names(lambda a: a not in result.axes),
        alike=names(lambda a: a not in operand_axes),
    )

    def evaluate(scalars: Sequence[Array], *operands: Array) -> list[Array]:
        mine: list[Array | None] = [None] * len(operands)
        for (k, d), count in zip(masks, scalars, strict=True):
            inside, before = lax.broadcasted_iota(np.int32, operands[k].shape, d) < count, mine[k]
            mine[k] = inside if before is None else before & inside
        if not is_float(result):
            return [_reduced(across, mine, operands)[0]]
        return [_reduce(across, mine, list(operands))]

    return Step(needs, evaluate, positions=counts)


def _reduced(across: _Across, mine: Masks, operands: Sequence[Array]) -> tuple[Array, Any]:
    """The result, and what its derivative must know."""
    share = across.reduction.partial(operands, mine)
    state = merged(across.reduction, share, across.over)
    return across.reduction.finish(state), (across.reduction.remember(share), state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(across: _Across, mine: Masks, operands: Sequence[Array]) -> Array:
    return _reduced(across, mine, operands)[0]


def _reduce_forward(
    across: _Across, mine: Masks, operands: Sequence[Array]
) -> tuple[Array, tuple[Masks, Sequence[Array], Any]]:
    result, known = _reduced(across, mine, operands)
    return result, (mine, operands, known)


def _reduce_backward(
    across: _Across, residuals: tuple[Masks, Sequence[Array], Any], cotangent: Array
) -> tuple[list[None], list[Array]]:
    mine, operands, (remembered, state) = residuals
    if across.repeated:
        wide = cotangent.astype(accumulation_dtype(cotangent.dtype))
        cotangent = lax.psum(wide, across.repeated).astype(cotangent.dtype)
    pulled = across.reduction.pullback(Share(operands, mine, remembered, state), cotangent)
    return [None for _ in mine], [
        first_only(masked(x, m, 0), across.alike) for x, m in zip(pulled, mine, strict=True)
    ]


_reduce.defvjp(_reduce_forward, _reduce_backward)
