"""Equations that read joint arrays, stated anew for the dimensions that these have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .. import _rules as rules
from .joint import (
    Joint,
    Restated,
    bound,
    common_of,
    dims_of,
    groups_of,
    plain,
    reshaped,
    sizes,
    spread,
)
from .merged_calls import branch, call
from .merged_windows import convolution, padding, pool
from .values import Value


def restated(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """An equation that reads joint arrays, as a function of what these are now; None: it cannot."""
    rule, name = rules.find(eqn.primitive), eqn.primitive.name
    if rule is not None and rule.by_position:
        return _by_position(eqn, inputs)
    if name in _RESTATE:
        return _RESTATE[name](eqn, inputs)
    return None


def _by_position(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    out = common_of(eqn.outvars[0].aval.shape, inputs)
    if out is None or eqn.primitive.name == "optimization_barrier":
        return None
    shapes = [spread(x, out) for x in inputs]
    return (
        lambda *xs: bound(eqn, *map(reshaped, xs, shapes)),
        [out] * len(eqn.outvars),
    )


def _reduction(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (x,), axes = map(groups_of, inputs), eqn.params["axes"]
    dims = dims_of(x, axes)
    kept = tuple(g for d, g in enumerate(x) if d not in axes)
    if eqn.primitive.name in ("argmax", "argmin") and len(dims) != 1:
        return None
    changed: dict[str, Any] = {"axes": tuple(dims)}
    if "out_sharding" in eqn.params:
        changed["out_sharding"] = None
    return lambda x: bound(eqn, x, **changed), [kept]


def _broadcast(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    groups = list(plain(eqn.params["shape"]))
    (operand,) = map(groups_of, inputs)
    places = eqn.params["broadcast_dimensions"]
    for group, place in zip(operand, places, strict=True):
        if group:
            groups[place] = group
    out = tuple(groups)
    dims = dims_of(out, [p for g, p in zip(operand, places, strict=True) if g])
    return lambda x: lax.broadcast_in_dim(x, sizes(out), dims), [out]


def _transpose(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,), order = map(groups_of, inputs), eqn.params["permutation"]
    return lambda x: lax.transpose(x, dims_of(groups, order)), [tuple(groups[d] for d in order)]


def _squeeze(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,), dropped = map(groups_of, inputs), eqn.params["dimensions"]
    return lambda x: x, [tuple(g for d, g in enumerate(groups) if d not in dropped)]


def _reshape(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    new = eqn.params["new_sizes"]
    return lambda x: lax.reshape(x, new), [plain(new)]


def _dot(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (contract, batch), found = eqn.params["dimension_numbers"], [*map(list, map(groups_of, inputs))]
    for pairs in (contract, batch):
        for left, right in zip(*pairs, strict=True):
            if found[0][left] == found[1][right]:
                continue
            # Only one that was not merged can be split as the other one is.
            free = [not isinstance(x, Joint) for x in inputs]
            if not any(free):
                return None
            side = free.index(True)
            found[side][(left, right)[side]] = found[1 - side][(left, right)[1 - side]]
    left, right = map(tuple, found)
    contracted, batched = (
        (dims_of(left, pair[0]), dims_of(right, pair[1])) for pair in (contract, batch)
    )
    rest = [
        g
        for side, groups in enumerate((left, right))
        for d, g in enumerate(groups)
        if d not in contract[side] and d not in batch[side]
    ]
    out = (*(left[d] for d in batch[0]), *rest)
    params = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
    return (
        lambda x, y: lax.dot_general(
            reshaped(x, sizes(left)), reshaped(y, sizes(right)), (contracted, batched), **params
        ),
        [out],
    )


def _slice(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that leaves merged dimensions as they are: a channel of each position."""
    (groups,), (shape,) = map(groups_of, inputs), [x.aval.shape for x in inputs]
    out = eqn.outvars[0].aval.shape
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(shape)
    if 0 in out or any(len(g) > 1 and n != m for g, n, m in zip(groups, shape, out, strict=True)):
        return None
    bounds = [
        (a, b, s) if len(group) == 1 else (0, n, 1)
        for group, a, b, s in zip(groups, starts, stops, steps, strict=True)
        for n in group
    ]
    after = tuple(g if len(g) > 1 else p for g, p in zip(groups, plain(out), strict=True))
    return lambda x: reshaped(lax.slice(x, *zip(*bounds, strict=True)), sizes(after)), [after]


def _along(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that works along a dimension that was not merged: a split or a sort of channels."""
    name = next((k for k in ("dimension", "axis") if k in eqn.params), None)
    shape = eqn.outvars[0].aval.shape
    d = (eqn.params[name] if name else -1) % len(shape)
    common = common_of(shape, inputs)
    if common is None or len(common[d]) > 1 or 0 in shape:
        return None
    before, after = sizes(common[:d]), sizes(common[d + 1 :])
    out = [(*common[:d], *plain(v.aval.shape[d : d + 1]), *common[d + 1 :]) for v in eqn.outvars]

    def run(*xs: jax.Array) -> list[jax.Array]:
        lengths = [v.aval.shape[d] for v in inputs]
        split = [reshaped(x, (*before, n, *after)) for x, n in zip(xs, lengths, strict=True)]
        found = bound(eqn, *split, **({name: len(before)} if name else {}))
        several = found if eqn.primitive.multiple_results else [found]
        return [reshaped(y, sizes(g)) for y, g in zip(several, out, strict=True)]

    return run, out


def _concatenate(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    parts = [i for i, x in enumerate(inputs) if 0 not in x.aval.shape]
    if len(parts) > 1:
        return _along(eqn, inputs)
    return lambda *xs: xs[parts[0]], [groups_of(inputs[parts[0]])]


def _reverse(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,) = map(groups_of, inputs)
    dims = [d for d in eqn.params["dimensions"] if groups[d]]
    if any(len(groups[d]) > 1 for d in dims):
        return None
    return lambda x: lax.rev(x, dims_of(groups, dims)), [groups]


def _stack(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    common, axis = common_of(inputs[0].aval.shape, inputs), eqn.params["axis"]
    if common is None:
        return None
    (new,) = plain([len(inputs)])
    before = len(sizes(common[:axis]))
    out = (*common[:axis], new, *common[axis:])

    def run(*xs: jax.Array) -> jax.Array:
        split = [lax.expand_dims(reshaped(x, sizes(common)), [before]) for x in xs]
        return reshaped(lax.concatenate(split, before), sizes(out))

    return run, [out]


def _unstack(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,), axis = map(groups_of, inputs), eqn.params["axis"]
    if len(groups[axis]) > 1:
        return None
    before, after = sizes(groups[:axis]), sizes(groups[axis + 1 :])
    n = len(eqn.outvars)

    def run(x: jax.Array) -> list[jax.Array]:
        split = reshaped(x, (*before, n, *after))
        return [lax.index_in_dim(split, i, len(before), keepdims=False) for i in range(n)]

    return run, [(*groups[:axis], *groups[axis + 1 :])] * n


def _gather(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that takes, at each position, what is wanted there: `take_along_axis`, `x[..., 0]`."""
    numbers, given = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = ([g or (1,) for g in groups_of(x)] for x in inputs)
    batched, of_indices = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    for o, i in zip(batched, of_indices, strict=True):
        common = {g for g in (operand[o], indices[i]) if len(g) > 1} or {operand[o]}
        if len(common) > 1:
            return None
        operand[o] = indices[i] = common.pop()
    slices = [
        group if size == n else (size,) * len(group)
        for size, n, group in zip(given, inputs[0].aval.shape, operand, strict=True)
    ]
    moved = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
    for d, group in enumerate(operand):
        if len(group) > 1 and d not in batched and (d in moved or slices[d] != group):
            return None
    if any(len(g) > 1 for d, g in enumerate(indices) if d not in of_indices):
        return None
    taken = {*numbers.collapsed_slice_dims, *batched}
    windows, batch = iter([s for d, s in enumerate(slices) if d not in taken]), iter(indices[:-1])
    shape = eqn.outvars[0].aval.shape
    out = [next(windows if d in numbers.offset_dims else batch) for d in range(len(shape))]

    def of(groups: Sequence[tuple[int, ...]], dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(dims_of(tuple(groups), dims))

    changed = {
        "dimension_numbers": lax.GatherDimensionNumbers(
            offset_dims=of(out, numbers.offset_dims),
            collapsed_slice_dims=of(operand, numbers.collapsed_slice_dims),
            start_index_map=of(operand, numbers.start_index_map),
            operand_batching_dims=of(operand, batched),
            start_indices_batching_dims=of(indices, of_indices),
        ),
        "slice_sizes": tuple(
            1 if d in batched else n for d, group in enumerate(slices) for n in group
        ),
    }
    groups = tuple(() if n == 1 else g for n, g in zip(shape, out, strict=True))

    def gather(x: jax.Array, i: jax.Array) -> jax.Array:
        split = reshaped(x, sizes(tuple(operand))), reshaped(i, sizes(tuple(indices)))
        return reshaped(bound(eqn, *split, **changed), sizes(groups))

    return gather, [groups]


_RESTATE: dict[str, Callable[[Any, Sequence[Value]], Restated | None]] = {
    **dict.fromkeys(
        """
        reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin
        """.split(),
        _reduction,
    ),
    **dict.fromkeys("split sort cumsum cumprod cummax cummin cumlogsumexp".split(), _along),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "reshape": _reshape,
    "dot_general": _dot,
    "gather": _gather,
    "top_k": _along,
    "concatenate": _concatenate,
    "rev": _reverse,
    "stack": _stack,
    "unstack": _unstack,
    "pad": padding,
    "conv_general_dilated": convolution,
    **dict.fromkeys(
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum".split(), pool
    ),
    **dict.fromkeys("custom_jvp_call custom_vjp_call call_hi_primitive".split(), call),
    "cond": branch,
}
