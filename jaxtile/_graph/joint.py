"""Dimensions that stand for several: height and width merged by a `reshape`.

A tile of an image is no interval of its merged positions. But what is computed position by
position, and what is reduced over all positions, is the same function of the array before the
merge. So a merge is not done: the array stays as it was, and the equations that read it are stated
anew, for the dimensions that it has.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .. import _rules as rules
from .values import Value

Groups = tuple[tuple[int, ...], ...]
"""Per dimension, the sizes of those that it stands for; of a dimension of size 1, none."""

Restated = tuple[Callable[..., Any], Sequence[Groups]]
"""A function of the arrays as they are, and how its results are to be merged."""


class Joint(Value):
    """An array that is to be merged; it never becomes part of a graph. `value` is what it is now.

    Its own axes are for error messages: of each dimension, one of those that it stands for.
    """

    def __init__(self, aval: Any, value: Value, groups: Groups):
        axes = iter(value.axes)
        inside = [[next(axes) for _ in group] for group in groups]
        some = [next((a for a in each if a is not None), None) for each in inside]
        super().__init__(aval, tuple(some))
        self.value, self.groups = value, groups


def plain(shape: Sequence[int]) -> Groups:
    """Every dimension stands for itself."""
    return tuple(() if n == 1 else (n,) for n in shape)


def merge(shape: Sequence[int], new: Sequence[int]) -> Groups | None:
    """How `new` is made by merging, of sizes that `shape` can be split into; None: in no way.

    >>> merge((1, 12, 9, 2), (108, 2))
    ((12, 9), (2,))
    >>> merge((12, 9, 4), (108, 2, 2))
    ((12, 9), (2,), (2,))
    """
    if 0 in shape:
        return None
    ends = sorted({*_ends(shape), *_ends(new)})
    if any(b % a for a, b in itertools.pairwise(ends)):
        return None
    groups, before = [], 1
    for n in new:
        inside = [e for e in ends if before < e <= before * n]
        groups.append(tuple(b // a for a, b in zip([before, *inside], inside, strict=False)))
        before *= n
    return tuple(groups)


def _ends(shape: Sequence[int]) -> set[int]:
    return {math.prod(shape[: i + 1]) for i in range(len(shape))}


def sizes(groups: Groups) -> tuple[int, ...]:
    return tuple(n for group in groups for n in group)


def broadcast_to(eqn: Any, groups: Groups) -> Callable[[jax.Array], jax.Array] | None:
    """A `broadcast_in_dim` whose result is split into these sizes; None: it repeats none of them.

    Left as it is, and then split, it would be an array in memory.
    """
    places, shape = eqn.params["broadcast_dimensions"], eqn.out_avals[0].shape
    given = eqn.in_avals[0].shape
    joint = [d for d, g in enumerate(groups) if len(g) > 1]
    if len(shape) != len(groups) or any(
        math.prod(g) != n for g, n in zip(groups, shape, strict=True)
    ):
        return None
    if any(d in places and given[places.index(d)] != 1 for d in joint):
        return None
    kept = [p for n, p in zip(given, places, strict=True) if n != 1]
    dims = _dims(groups, kept)
    return lambda x: lax.broadcast_in_dim(
        lax.reshape(x, [n for n in given if n != 1]), sizes(groups), dims
    )


def restated(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """An equation that reads joint arrays, as a function of what these are now; None: it cannot."""
    rule, name = rules.find(eqn.primitive), eqn.primitive.name
    if rule is not None and rule.by_position:
        return _by_position(eqn, inputs)
    if name in _RESTATE:
        return _RESTATE[name](eqn, inputs)
    return None


def _groups(x: Value) -> Groups:
    return x.groups if isinstance(x, Joint) else plain(x.aval.shape)


def _dims(groups: Groups, wanted: Sequence[int]) -> list[int]:
    """The dimensions that these stand for."""
    starts = [sum(map(len, groups[:d])) for d in range(len(groups))]
    return [starts[d] + i for d in wanted for i in range(len(groups[d]))]


def _bound(eqn: Any, *operands: Any, **changed: Any) -> Any:
    params: Mapping[str, Any] = {**eqn.params, **changed}
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))


def _by_position(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    out = _common(eqn.outvars[0].aval.shape, inputs)
    if out is None or eqn.primitive.name == "optimization_barrier":
        return None
    shapes = [_spread(x, out) for x in inputs]
    return (
        lambda *xs: _bound(eqn, *map(_reshaped, xs, shapes)),
        [out] * len(eqn.outvars),
    )


def _common(shape: Sequence[int], inputs: Sequence[Value]) -> Groups | None:
    """How arrays that meet position by position are split; None: in different ways."""
    groups = list(plain(shape))
    joint = [x for x in inputs if isinstance(x, Joint)]
    for d in range(len(shape)):
        found = {x.groups[d] for x in joint if x.groups[d]} or {groups[d]}
        if len(found) > 1:
            return None
        (groups[d],) = found
    return tuple(groups)


def _spread(x: Value, out: Groups) -> tuple[int, ...]:
    """The shape of an operand among others that are split in this way: 1 where it is repeated."""
    if not x.aval.shape:
        return ()
    split = (
        group if n != 1 else (1,) * len(group) for n, group in zip(x.aval.shape, out, strict=True)
    )
    return tuple(n for group in split for n in group)


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else lax.reshape(x, shape)


def _reduction(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (x,), axes = map(_groups, inputs), eqn.params["axes"]
    dims = _dims(x, axes)
    kept = tuple(g for d, g in enumerate(x) if d not in axes)
    if eqn.primitive.name in ("argmax", "argmin") and len(dims) != 1:
        return None
    changed: dict[str, Any] = {"axes": tuple(dims)}
    if "out_sharding" in eqn.params:
        changed["out_sharding"] = None
    return lambda x: _bound(eqn, x, **changed), [kept]


def _broadcast(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    groups = list(plain(eqn.params["shape"]))
    (operand,) = map(_groups, inputs)
    places = eqn.params["broadcast_dimensions"]
    for group, place in zip(operand, places, strict=True):
        if group:
            groups[place] = group
    out = tuple(groups)
    dims = _dims(out, [p for g, p in zip(operand, places, strict=True) if g])
    return lambda x: lax.broadcast_in_dim(x, sizes(out), dims), [out]


def _transpose(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,), order = map(_groups, inputs), eqn.params["permutation"]
    return lambda x: lax.transpose(x, _dims(groups, order)), [tuple(groups[d] for d in order)]


def _squeeze(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (groups,), dropped = map(_groups, inputs), eqn.params["dimensions"]
    return lambda x: x, [tuple(g for d, g in enumerate(groups) if d not in dropped)]


def _reshape(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    new = eqn.params["new_sizes"]
    return lambda x: lax.reshape(x, new), [plain(new)]


def _dot(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    (contract, batch), found = eqn.params["dimension_numbers"], [*map(list, map(_groups, inputs))]
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
        (_dims(left, pair[0]), _dims(right, pair[1])) for pair in (contract, batch)
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
            _reshaped(x, sizes(left)), _reshaped(y, sizes(right)), (contracted, batched), **params
        ),
        [out],
    )


def _slice(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that leaves merged dimensions as they are: a channel of each position."""
    (groups,), (shape,) = map(_groups, inputs), [x.aval.shape for x in inputs]
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
    return lambda x: _reshaped(lax.slice(x, *zip(*bounds, strict=True)), sizes(after)), [after]


def _along(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that works along a dimension that was not merged: a split or a sort of channels."""
    name = "dimension" if "dimension" in eqn.params else "axis"
    shape, d = eqn.outvars[0].aval.shape, eqn.params[name]
    common = _common(shape, inputs)
    if common is None or len(common[d]) > 1 or 0 in shape:
        return None
    before, after = sizes(common[:d]), sizes(common[d + 1 :])
    out = [(*common[:d], *plain(v.aval.shape[d : d + 1]), *common[d + 1 :]) for v in eqn.outvars]

    def run(*xs: jax.Array) -> list[jax.Array]:
        lengths = [v.aval.shape[d] for v in inputs]
        split = [_reshaped(x, (*before, n, *after)) for x, n in zip(xs, lengths, strict=True)]
        found = _bound(eqn, *split, **{name: len(before)})
        several = found if eqn.primitive.multiple_results else [found]
        return [_reshaped(y, sizes(g)) for y, g in zip(several, out, strict=True)]

    return run, out


def _gather(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """One that takes, at each position, what is wanted there: `take_along_axis`, `x[..., 0]`."""
    numbers, given = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = ([g or (1,) for g in _groups(x)] for x in inputs)
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
        return tuple(_dims(tuple(groups), dims))

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
        split = _reshaped(x, sizes(tuple(operand))), _reshaped(i, sizes(tuple(indices)))
        return _reshaped(_bound(eqn, *split, **changed), sizes(groups))

    return gather, [groups]


def _call_with_rule(eqn: Any, inputs: Sequence[Value]) -> Restated | None:
    """A `custom_jvp` that works position by position or along other dimensions: `jax.nn.relu`.

    Between two `reshape`s it is the same function; its equations are then stated anew one by one.
    """
    found = [_common(v.aval.shape, inputs) if len(v.aval.shape) else () for v in eqn.outvars]
    if any(x.aval.shape != eqn.outvars[0].aval.shape for x in inputs) or None in found:
        return None
    groups = [g for g in found if g is not None]
    body = eqn.params["call_jaxpr"]

    def between(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*xs: jax.Array) -> list[jax.Array]:
            merged = [_reshaped(x, v.aval.shape) for x, v in zip(xs, inputs, strict=True)]
            return [_reshaped(y, sizes(g)) for y, g in zip(function(*merged), groups, strict=True)]

        return run

    value = jax.custom_jvp(between(jax.extend.core.jaxpr_as_fun(body)))
    with_rule = between(functools.partial(_bound, eqn))
    value.defjvp(lambda primals, tangents: jax.jvp(with_rule, primals, tangents))
    return value, groups


_RESTATE: dict[str, Callable[[Any, Sequence[Value]], Restated | None]] = {
    **dict.fromkeys(
        """
        reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin
        """.split(),
        _reduction,
    ),
    **dict.fromkeys(
        "split concatenate sort cumsum cumprod cummax cummin cumlogsumexp".split(), _along
    ),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "reshape": _reshape,
    "dot_general": _dot,
    "gather": _gather,
    "custom_jvp_call": _call_with_rule,
}
