"""Arguments, and leaves of arguments, that are not arrays.

They are hidden from JAX while a function is traced, and the function sees them as they were given:
a name, an activation function, a flag that it branches on.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import TilingError

_NUMBERS = (int, float, complex)
_NEVER_ARRAYS = (bool, str, bytes, enum.Enum, np.dtype, type)


@jax.tree_util.register_static
class Static:
    """A value in the place of a leaf or of an argument: a pytree without leaves."""

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> Hashable:
        """Of numbers, the digits: `0.0 == -0.0`, and a program for the one is wrong for the other.

        What cannot be hashed is equal to itself only, as for `jax.checkpoint`.
        """
        if isinstance(self.value, _NUMBERS):
            return type(self.value), repr(self.value)
        try:
            hash(self.value)
        except TypeError:
            return id(self.value)
        return self.value

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key() == other._key()


def hide(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    static_argnums: Sequence[int] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with a `Static` for whatever is not an array.

    `names`: what the function calls its positional arguments. Python's integers and floats are
    arrays to JAX, unless they are attributes: those of a module are what it was made with.
    """
    if not all(-len(args) <= i < len(args) for i in static_argnums):
        raise TilingError(
            f"`static_argnums` (={tuple(static_argnums)}) must be numbers of positional arguments, "
            f"of which there are {len(args)} here"
        )
    whole = {i % len(args) for i in static_argnums}
    hidden = [
        _argument(x, name, static_argnums) if i in whole else _leaves(x, name)
        for i, (x, name) in enumerate(zip(args, names, strict=True))
    ]
    return tuple(hidden), {key: _leaves(x, key) for key, x in kwargs.items()}


def shown(tree: Any) -> Any:
    """The same pytree, with what was hidden in it."""
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Static) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Static),
    )


def _argument(x: Any, name: str, static_argnums: Sequence[int]) -> Static:
    if isinstance(x, Static):
        return x
    for path, leaf in jax.tree.leaves_with_path(x):
        if isinstance(leaf, jax.Array):
            raise TilingError(
                f"`{name}` is static by `static_argnums` (={tuple(static_argnums)}), but "
                f"`{name}{jax.tree_util.keystr(path)}` is an array ({jax.typeof(leaf)}): leave it "
                "out there; what is not an array in it is static anyway"
            )
    return Static(x)


def _leaves(argument: Any, name: str) -> Any:
    return jax.tree.map_with_path(
        lambda path, x: Static(x) if _is_static(path, x, name) else x, argument
    )


def _is_static(path: tuple[Any, ...], x: Any, name: str) -> bool:
    if isinstance(x, _NEVER_ARRAYS):
        return True
    if isinstance(x, _NUMBERS):
        return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
    if hasattr(x, "__jax_array__") or (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    if callable(x):
        return True
    try:
        jax.typeof(x)
    except TypeError:
        raise TilingError(
            f"`{name}{jax.tree_util.keystr(path)}` (={x!r}) is neither an array nor a pytree of "
            "arrays: register its class with `jax.tree_util`, or give the number of the argument "
            "in `static_argnums`"
        ) from None
    return False
