"""The public face: `jaxtile.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from . import _calls as _calls
from ._errors import TilingError
from ._graph import Policy, build
from ._loop import Loop
from ._outline import GraphPolicy, apply, outlined
from ._recompute import Whole, evaluate, run, to_host
from ._regions import Region, Schedule, schedule
from ._targets import WHOLE, Tiles
from ._tile import lookup
from ._trace import Traced, inside, trace
from ._values import Value


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Tiles = WHOLE,
    policy: Policy | GraphPolicy | None = None,
) -> Callable[..., Any]:
    """Evaluate and differentiate `fun` tile by tile, with exact halos.

    The result has the signature, the value and the gradients of `fun`. What differs is the memory:
    values that `policy` saves are held as whole arrays, and everything else exists only inside one
    tile at a time, where the backward pass computes it again. For a function that works pixel by
    pixel this is, in plain Python::

        def tiled(params, image):
            return concatenate([jax.checkpoint(fun)(params, tile) for tile in split(image)])

    For convolutions, pools, skips, resizing and the rest, each tile reads as much of its neighbours
    as it needs (the halo); reductions over a tiled axis (batch statistics, a global pool, a loss)
    are accumulated over all tiles first.

    Args:
      fun: any JAX function of pytrees; it is traced, not rewritten.
      in_axes: as in `jax.vmap`, a pytree prefix of the arguments. `None`: not tiled. A tuple: the
        array axes that are tiled, in order. All tuples have the same length; `None` in a tuple
        stands for an axis that this array does not have.
      tiles: tiles per tiled axis; sizes need not divide. Or a mapping from the name of a stored
        value to the grid of the region that computes it, with the key `...` for all other regions.
        The grid `"whole"`, the default, recomputes a region untiled, as `jax.checkpoint` does; the
        grid `None` leaves it untiled and unrecomputed, as plain JAX.
      policy: what is stored: any function of `jax.checkpoint_policies` that saves or offloads;
        `None` stores nothing inside. Or one that sees the whole graph, from `policies`: a plan, or
        what `policies.resolve` returns; `tiles` then goes to what it recomputes whole.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> def blur(kernel, image):
    ...     return jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    >>> tiled = jaxtile.checkpoint(blur, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> kernel, image = jnp.ones((1, 1, 3, 3)) / 9, jnp.arange(256.0).reshape(1, 1, 16, 16)
    >>> bool(jnp.allclose(tiled(kernel, image), blur(kernel, image)))
    True

    Put `jit` outermost: each call traces `fun` anew. Inside another `jaxtile.checkpoint` the
    result is traced as the plain `fun`; the outermost schedule wins. Forward mode (`jvp`) of a
    tiled function is not defined; `grad`, `vjp` and `vmap` are.
    """
    _check_callable(fun)
    if isinstance(policy, str):
        raise TilingError(
            f"`policy` (={policy!r}) must not be a string: use `policies.resolve({policy!r})`"
        )

    @functools.wraps(fun)
    def tiled(*args: Any, **kwargs: Any) -> Any:
        if inside.value:
            return fun(*args, **kwargs)
        plan, traced = scheduled(fun, args, kwargs, in_axes, tiles, policy)
        return jax.tree.unflatten(traced.out_tree, execute(plan, traced.arguments))

    return tiled


def scheduled(fun, args, kwargs, in_axes, tiles: Tiles, policy) -> tuple[Schedule, Traced]:
    """The schedule for these arguments, and the traced function."""
    traced = trace(fun, args, kwargs, in_axes)
    if not hasattr(policy, "choose"):
        graph = build(traced.jaxpr, traced.consts, traced.in_axes, policy, names=traced.names)
        return schedule(graph, tiles, traced.rank), traced
    view, values, graph = outlined(traced)
    grids = apply(policy.choose(view), values)
    if isinstance(tiles, Mapping):
        raise TilingError(
            f"`tiles` (={dict(tiles)}) must be one grid if `policy` sees the whole graph: it goes "
            "to everything that the policy recomputes whole"
        )
    grids = {key: tiles if grid == WHOLE else grid for key, grid in grids.items()}
    return schedule(graph, grids, traced.rank), traced


def execute(plan: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """Run the regions and the global equations in order."""
    env: dict[Value, Any] = dict(zip(plan.graph.inputs, map(jax.numpy.asarray, flat), strict=True))
    hosted: dict[Value, jax.Array] = {}
    for step in plan.steps:
        if not isinstance(step, Region):
            operands = [lookup(env, v.array) for v in step.inputs]
            env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
            continue
        if step.grid is None:
            # What these equations compute is held anyway, so other such regions use it too.
            results = evaluate(step, env)
        else:
            body = Loop(step) if step.tiled else Whole(step)
            inputs, globals_ = (
                [lookup(env, v.array) for v in values] for values in (step.inputs, step.globals)
            )
            results = run(body, inputs, globals_, [hosted.get(v.array) for v in step.inputs])
        env.update(zip((t.result for t in step.targets), results, strict=True))
        hosted |= {t.value: to_host(env[t.value]) for t in step.targets if t.offloaded}
    return [_as_array(lookup(env, v.array)) for v in plan.graph.outputs]


def _as_array(x: Any) -> jax.Array:
    """A constant of the traced function may be a Python number."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


def _check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TilingError(f"`fun` (={fun!r}) must be callable")
