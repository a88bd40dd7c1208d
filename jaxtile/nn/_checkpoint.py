"""`jaxtile.checkpoint` and `jaxtile.operations` for functions of NNX modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .. import _checkpoint, _operations
from .._errors import TilingError
from .._targets import WHOLE


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Any = WHOLE,
    policy: Any = None,
    mesh: Any = None,
    mesh_axes: Any = None,
) -> Callable[..., Any]:
    """`jaxtile.checkpoint` of a function of NNX modules, as `nnx.remat` is of `jax.checkpoint`.

    What the function changes in its modules (running statistics, counts of random numbers) is
    changed in them afterwards, as without tiles. Modules have None in `in_axes`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxtile import nn
    >>> model = nn.Conv(3, 2, (3, 3), rngs=nnx.Rngs(0))
    >>> def loss(model, image):
    ...     return jnp.tanh(model(image)).mean()
    >>> tiled = nn.checkpoint(loss, in_axes=(None, (1, 2)), tiles=(4, 4))
    >>> nnx.grad(tiled)(model, jnp.ones((1, 16, 16, 3)))["kernel"].shape
    (3, 3, 3, 2)
    """

    @functools.wraps(fun)
    def tiled(*args: Any, **kwargs: Any) -> Any:
        pure = Pure(fun, args, kwargs)
        run = _checkpoint.checkpoint(
            pure, in_axes=in_axes, tiles=tiles, policy=policy, mesh=mesh, mesh_axes=mesh_axes
        )
        out, changed = run(*pure.args, **pure.kwargs)
        pure.update(changed)
        return out

    return tiled


def operations(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> _operations.Operations:
    """`jaxtile.operations` of a function of NNX modules, which it leaves as they are.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxtile import nn
    >>> model = nn.Conv(3, 2, (3, 3), rngs=nnx.Rngs(0))
    >>> nn.operations(lambda model, x: model(x), model, jnp.ones((1, 16, 16, 3))).macs
    13824
    """
    pure = Pure(fun, args, kwargs)
    return _operations.operations(pure.outputs, *pure.args, **pure.kwargs)


class Pure:
    """A function of modules as a function of their states.

    It returns what the function returns, and the leaves of the states that it changed.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        functools.update_wrapper(self, fun)
        self.fun, self.modules = fun, (args, kwargs)
        self.graphdefs: dict[int | str, Any] = {}
        self.args = tuple(self._split(i, a) for i, a in enumerate(args))
        self.kwargs = {k: self._split(k, a) for k, a in kwargs.items()}
        self.changed: list[int] = []

    def _split(self, key: int | str, argument: Any) -> Any:
        if not isinstance(argument, nnx.Pytree):
            return argument
        self.graphdefs[key], state = nnx.split(argument)
        return state

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, list[jax.Array]]:
        arguments = {**dict(enumerate(args)), **kwargs}
        before = jax.tree.leaves([arguments[key] for key in self.graphdefs])
        inner = {key: nnx.merge(g, arguments[key]) for key, g in self.graphdefs.items()}
        arguments |= inner
        out = self.fun(
            *(arguments[i] for i in range(len(args))), **{k: arguments[k] for k in kwargs}
        )
        after = jax.tree.leaves([nnx.state(module) for module in inner.values()])
        if len(before) != len(after):
            raise TilingError(
                "a function under `jaxtile.nn.checkpoint` may change the variables of its modules, "
                "but not add or remove any"
            )
        self.changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
        return out, [after[i] for i in self.changed]

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)[0]

    def update(self, leaves: list[jax.Array]) -> None:
        """Write the changed leaves into the modules."""
        args, kwargs = self.modules
        modules = [args[k] if isinstance(k, int) else kwargs[k] for k in self.graphdefs]
        flat, tree = jax.tree.flatten([nnx.state(module) for module in modules])
        for i, leaf in zip(self.changed, leaves, strict=True):
            flat[i] = leaf
        for module, state in zip(modules, jax.tree.unflatten(tree, flat), strict=True):
            nnx.update(module, state)
