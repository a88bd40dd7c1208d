"""Dimensions that stand for several: height and width merged by a `reshape`.

A tile of an image is no interval of its merged positions. But what is computed position by
position, and what is reduced over all positions, is the same function of the array before the
merge. So a merge is not done: the array stays as it was, and the equations that read it are stated
anew, for the dimensions that it has.
"""

from __future__ import annotations

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


def tiled_only(groups: Groups, axes: rules.Axes) -> Groups:
    """The same, with dimensions of which none is tiled as one.

    >>> tiled_only(((12, 9), (2, 3)), (0, 1, None, None))
    ((12, 9), (6,))
    """
    labels = iter(axes)
    inside = [[next(labels) for _ in group] for group in groups]
    return tuple(
        group if rules.tiled(tuple(found)) or not group else (math.prod(group),)
        for group, found in zip(groups, inside, strict=True)
    )


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
    dims = dims_of(groups, kept)
    return lambda x: lax.broadcast_in_dim(
        lax.reshape(x, [n for n in given if n != 1]), sizes(groups), dims
    )


def groups_of(x: Value) -> Groups:
    return x.groups if isinstance(x, Joint) else plain(x.aval.shape)


def dims_of(groups: Groups, wanted: Sequence[int]) -> list[int]:
    """The dimensions that these stand for."""
    starts = [sum(map(len, groups[:d])) for d in range(len(groups))]
    return [starts[d] + i for d in wanted for i in range(len(groups[d]))]


def bound(eqn: Any, *operands: Any, **changed: Any) -> Any:
    params: Mapping[str, Any] = {**eqn.params, **changed}
    return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))


def common_of(shape: Sequence[int], inputs: Sequence[Value]) -> Groups | None:
    """How arrays that meet position by position are split; None: in different ways."""
    groups = list(plain(shape))
    joint = [x for x in inputs if isinstance(x, Joint)]
    for d in range(len(shape)):
        found = {x.groups[d] for x in joint if x.groups[d]} or {groups[d]}
        if len(found) > 1:
            return None
        (groups[d],) = found
    return tuple(groups)


def spread(x: Value, out: Groups) -> tuple[int, ...]:
    """The shape of an operand among others that are split in this way: 1 where it is repeated."""
    if not x.aval.shape:
        return ()
    split = (
        group if n != 1 else (1,) * len(group) for n, group in zip(x.aval.shape, out, strict=True)
    )
    return tuple(n for group in split for n in group)


def reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else lax.reshape(x, shape)
