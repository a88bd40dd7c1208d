"""Look-ups that each position makes for itself: `log_probabilities[jnp.arange(n), labels]`.

A `gather` may read anywhere. One of whose indices is the position itself reads there only, along
that dimension: it is a batch of look-ups, as `jnp.take_along_axis` states it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .values import Value


def at_own_position(
    eqn: Any, operand: Value, columns: Sequence[Value]
) -> tuple[Callable[..., jax.Array], list[Value]] | None:
    """A `gather` by indices concatenated from these, without those that are the position itself
    along a tiled dimension: a function of the operand and the other columns. None: there are none.
    """
    numbers, last = eqn.params["dimension_numbers"], eqn.invars[1].aval.ndim - 1
    wanted = len(numbers.start_index_map)
    if len(columns) != wanted or any(c.aval.shape[last] != 1 for c in columns):
        return None
    batched, others = {}, []
    for d, column in zip(numbers.start_index_map, columns, strict=True):
        i = _counted(column) if operand.axes[d] is not None else None
        if i in (None, last) or column.aval.shape[i] != operand.aval.shape[d]:
            others.append((d, column))
        else:
            batched[d] = i
    taken = {*batched} <= {*numbers.collapsed_slice_dims}
    both = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    pairs = sorted([*both, *batched.items()])
    if not (batched and others and taken) or len({i for _, i in pairs}) < len(pairs):
        return None

    def gather(x: jax.Array, *columns: jax.Array) -> jax.Array:
        return lax.gather(
            x,
            lax.concatenate(columns, last) if len(columns) > 1 else columns[0],
            lax.GatherDimensionNumbers(
                numbers.offset_dims,
                tuple(d for d in numbers.collapsed_slice_dims if d not in batched),
                tuple(d for d, _ in others),
                *zip(*pairs, strict=True),
            ),
            **{k: eqn.params[k] for k in ("slice_sizes", "mode", "fill_value")},
        )

    return gather, [column for _, column in others]


def _counted(value: Value) -> int | None:
    """The dimension along which the elements of an array are 0, 1, 2 and so on, if there is one."""
    value = value.array
    if not np.issubdtype(value.aval.dtype, np.integer):
        return None
    if value.concrete:
        known = np.asarray(value.known)
        counts = enumerate(np.ogrid[tuple(slice(n) for n in known.shape)])
        return next((d for d, count in counts if np.all(known == count)), None)
    if value.node is None or max(value.aval.shape, default=0) > np.iinfo(value.aval.dtype).max:
        return None
    params, operands = value.node.equation.params, value.node.inputs
    match value.node.op:
        case "iota":
            return int(params["dimension"])
        case "broadcast_in_dim":
            d = _counted(operands[0])
            return None if d is None else int(params["broadcast_dimensions"][d])
        case "convert_element_type":
            return _counted(operands[0])
        case "select_n" if _never(operands[0].array):
            return _counted(operands[1])
    return None


def _never(value: Value) -> bool:
    """Is it false: does it ask whether what counts from 0 on is negative?"""
    node = value.node
    if value.concrete:
        return not np.any(value.known)
    if node is None or node.op != "lt":
        return False
    counts, zero = node.inputs
    return _counted(counts) is not None and zero.concrete and not np.any(zero.known)
