"""`jaxtile.checkpoint`, `jaxtile.explain` and `jaxtile.operations` for functions of NNX modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from .._checkpoint import Tiled, policy_within
from .._errors import check_callable
from .._explanation import Explanation
from .._graph.operations import Operations
from .._graph.operations import operations as operations_of_function
from .._graph.trace import Traced
from .._modules import Pure
from .._regions.regions import Schedule
from .._schedule import Options, scheduled, tiled

_TAG = "jaxtile.nn.checkpoint"


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Any = "whole",
    policy: Any = None,
    budget: int | str | None = None,
    mesh: Any = None,
    mesh_axes: Any = None,
    static_argnums: Any = (),
    skip: bool = False,
) -> Tiled:
    """`jaxtile.checkpoint` of a function of NNX modules, as `nnx.remat` is of `jax.checkpoint`.

    What the function changes in its modules (running statistics, counts of random numbers) is
    changed in them afterwards, as without tiles. Modules and variables may be anywhere in the
    arguments and results, also several times, and share parts; they have None in `in_axes`. A
    module that the function closes over can be read; to change it is an error of NNX.

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

    check_callable(fun)
    chosen = policy_within(budget, policy, skip)
    options = Options.of(in_axes, tiles, chosen, mesh, mesh_axes, static_argnums, skip)

    def run(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(_TAG):
            pure = Pure(fun, args, kwargs, _TAG)
            return pure.update(*tiled(pure, options)(*pure.args, **pure.kwargs))

    def schedule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Schedule, Traced]:
        pure = Pure(fun, args, kwargs)
        return scheduled(pure, pure.args, pure.kwargs, options)

    return Tiled(fun, run, schedule)


def explain(fun: Callable[..., Any], *args: Any, in_axes: Any, **options: Any) -> Explanation:
    """`jaxtile.explain` of what `checkpoint` does, for a function of NNX modules.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxtile import nn
    >>> model, image = nn.BatchNorm(3, rngs=nnx.Rngs(0)), jnp.ones((1, 16, 16, 3))
    >>> found = nn.explain(lambda m, x: m(x), model, image, in_axes=(None, (1, 2)), tiles=(4, 4))
    >>> [region.grid for region in found.regions]
    [(4, 4), (4, 4)]
    """
    return checkpoint(fun, in_axes=in_axes, **options).explain(*args)


def operations(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Operations:
    """`jaxtile.operations` of a function of NNX modules, which it leaves as they are.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxtile import nn
    >>> model = nn.Conv(3, 2, (3, 3), rngs=nnx.Rngs(0))
    >>> nn.operations(lambda model, x: model(x), model, jnp.ones((1, 16, 16, 3))).macs
    13824
    """
    pure = Pure(fun, args, kwargs)
    return operations_of_function(pure.outputs, *pure.args, **pure.kwargs)
