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
from ._mesh import Devices, automatic, devices_of
from ._outline import GraphPolicy, apply, outlined
from ._recompute import Recomputed, Whole, evaluate, run, to_host
from ._regions import Region, Schedule, schedule
from ._sharded import Sharded
from ._targets import WHOLE, Grid, Tiles
from ._tile import lookup
from ._trace import Traced, inside, trace
from ._values import Value


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Tiles = WHOLE,
    policy: Policy | GraphPolicy | None = None,
    mesh: jax.sharding.Mesh | None = None,
    mesh_axes: Sequence[str | None] | None = None,
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
      mesh: devices to distribute tiled arrays over. Each device owns a block of every stored value,
        and runs `tiles` tiles of its own in every region; it receives what these read of other
        blocks before the region runs. `"whole"` and `None` are one piece per device. What is not
        tiled, weights for instance, is on every device.
      mesh_axes: per tiled axis, the name of the mesh axis that it is distributed over, or None.
        Tile the batch axis too for data parallelism: `in_axes=(None, (0, 1, 2))`,
        `mesh_axes=("data", "rows", "cols")`. Sizes need not divide.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> def blur(kernel, image):
    ...     return jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    >>> tiled = jaxtile.checkpoint(blur, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> kernel, image = jnp.ones((1, 1, 3, 3)) / 9, jnp.arange(256.0).reshape(1, 1, 16, 16)
    >>> bool(jnp.allclose(tiled(kernel, image), blur(kernel, image)))
    True

    On many devices the same call needs no other change (here on a mesh of one):

    >>> mesh = jax.make_mesh((1, 1), ("rows", "cols"))
    >>> tiled = jaxtile.checkpoint(
    ...     blur, in_axes=(None, (2, 3)), tiles=(4, 4), mesh=mesh, mesh_axes=("rows", "cols")
    ... )
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
        leaves, tree = jax.tree.flatten((args, kwargs))
        out_tree = None

        def run(*leaves):
            nonlocal out_tree
            args, kwargs = jax.tree.unflatten(tree, leaves)
            plan, traced = scheduled(fun, args, kwargs, in_axes, tiles, policy, mesh, mesh_axes)
            out_tree = traced.out_tree
            return execute(plan, traced.arguments), plan.specs

        results = run(*leaves)[0] if mesh is None else automatic(run, leaves)
        return jax.tree.unflatten(out_tree, results)

    return tiled


def scheduled(
    fun, args, kwargs, in_axes, tiles: Tiles, policy, mesh=None, mesh_axes=None
) -> tuple[Schedule, Traced]:
    """The schedule for these arguments, and the traced function."""
    traced = trace(fun, args, kwargs, in_axes)
    devices = devices_of(mesh, mesh_axes, traced.rank)
    if not hasattr(policy, "choose"):
        graph = build(traced.jaxpr, traced.consts, traced.in_axes, policy, names=traced.names)
        return schedule(graph, tiles, traced.rank, devices), traced
    view, values, graph = outlined(traced)
    grids = apply(policy.choose(view), values)
    if isinstance(tiles, Mapping):
        raise TilingError(
            f"`tiles` (={dict(tiles)}) must be one grid if `policy` sees the whole graph: it goes "
            "to everything that the policy recomputes whole"
        )
    grids = {
        key: tiles if grid == WHOLE else _per_device(grid, devices) for key, grid in grids.items()
    }
    return schedule(graph, grids, traced.rank, devices), traced


def _per_device(grid: Grid, devices: Devices | None) -> Grid:
    """A policy chooses tiles for whole arrays; on a mesh, tiles stay as large as it wants them."""
    if devices is None or not isinstance(grid, tuple):
        return grid
    return tuple(-(-n // devices.count(axis)) for axis, n in enumerate(grid))


def execute(plan: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """Run the regions and the global equations in order."""
    devices = plan.devices
    env: dict[Value, Any] = dict(zip(plan.graph.inputs, map(jax.numpy.asarray, flat), strict=True))
    if devices is not None:
        env = {v: devices.split(x, v.axes) for v, x in env.items()}
    hosted: dict[Value, jax.Array] = {}

    def whole(value: Value) -> Any:
        """A value that no region reads by window; on a mesh, tiled values are held as blocks."""
        array, x = value.array, lookup(env, value.array)
        return x if devices is None else devices.join(x, array.aval.shape, array.axes)

    for step in plan.steps:
        if not isinstance(step, Region):
            operands = [whole(v) for v in step.inputs]
            env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
            continue
        if step.grid is None and devices is None:
            # What these equations compute is held anyway, so other such regions use it too.
            results = evaluate(step, env)
        else:
            body = _body(step)
            inputs = [lookup(env, v.array) for v in step.inputs]
            globals_ = [whole(v) for v in step.globals]
            results = run(body, inputs, globals_, [hosted.get(v.array) for v in step.inputs])
        env.update(zip((t.result for t in step.targets), results, strict=True))
        hosted |= {t.value: to_host(env[t.value]) for t in step.targets if t.offloaded}
    return [_as_array(whole(v)) for v in plan.graph.outputs]


def _body(region: Region) -> Recomputed:
    if region.devices is not None:
        return Sharded(region)
    return Loop(region) if region.tiled else Whole(region)


def _as_array(x: Any) -> jax.Array:
    """A constant of the traced function may be a Python number."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


def _check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TilingError(f"`fun` (={fun!r}) must be callable")
