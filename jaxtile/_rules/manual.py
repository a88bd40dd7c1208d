"""Arrays inside a `jax.shard_map` of the user.

There, JAX's types say over which axes of the mesh an array varies: it is another one on each
device. Operands of a primitive must agree on that. Functions of `jax.lax` see to it; where
primitives are applied one by one, and where a loop begins, it is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax


def alike(arrays: Sequence[Any], types: Iterable[Any]) -> Sequence[Any]:
    """The same arrays, all of them varying over all axes that one of them or of the types does."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    axes = [_varying(jax.typeof(x)) for x in arrays]
    union = frozenset().union(*axes, *map(_varying, types))
    return [
        x if have == union else lax.pcast(x, tuple(sorted(union - have)), to="varying")
        for x, have in zip(arrays, axes, strict=True)
    ]


def as_varying_as(tree: Any, arrays: Sequence[Any]) -> Any:
    """The same pytree of arrays, varying over all axes that one of the arrays varies over."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, alike(leaves, map(jax.typeof, arrays)))


def type_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What to trace a function with, instead of an array of this type."""
    manual = aval.manual_axis_type
    types = {} if manual.empty else {"sharding": aval.sharding, "manual_axis_type": manual}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, **types)


def _varying(aval: Any) -> frozenset[str]:
    return aval.manual_axis_type.varying
