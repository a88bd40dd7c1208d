"""`jaxtile.checkpoint` for functions of an NNX module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from .. import _checkpoint as functional
from .._errors import TilingError


def checkpoint(
    fun: Callable[..., Any], *, in_axes: Any, tiles: Any, policy: Any = None
) -> Callable[..., Any]:
    """`jaxtile.checkpoint` of a function whose first argument is a module, as `nnx.remat` is of
    `jax.checkpoint`.

    What the function changes in the module (running statistics, counts of random numbers) is
    changed in it afterwards, as without tiles. `in_axes` begins with None, for the module.

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
    def tiled(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(module, nnx.Module):
            raise TilingError(
                f"the first argument of a function given to `jaxtile.nn.checkpoint` is an NNX "
                f"module, not {type(module).__name__}; for other functions use `jaxtile.checkpoint`"
            )
        graphdef, state = nnx.split(module)

        def pure(state, *args, **kwargs):
            inner = nnx.merge(graphdef, state)
            out = fun(inner, *args, **kwargs)
            return out, nnx.state(inner, nnx.Not(nnx.Param))

        run = functional.checkpoint(pure, in_axes=in_axes, tiles=tiles, policy=policy)
        out, changed = run(state, *args, **kwargs)
        nnx.update(module, changed)
        return out

    return tiled
