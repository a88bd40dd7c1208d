"""From a function and the user's options to a schedule, and to the function that runs it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from . import _derivatives as _derivatives  # enters its rules into the table
from ._errors import TilingError
from ._graph.build import build
from ._graph.nodes import Policy
from ._graph.static import shown
from ._graph.trace import Traced, inside, only_arrays, trace
from ._graph.values import Graph, Storage
from ._layered import layered
from ._mesh.devices import Devices, devices_of, without_shardings
from ._regions.grid import Grid, GridSpec, Tiles
from ._regions.regions import Running, Schedule, schedule_of
from ._run.execute import execute
from .policy import GraphPolicy, resolve
from .policy._outline import apply, outlined


@dataclasses.dataclass(frozen=True)
class Options:
    """How a function is to be tiled: the keywords of `jaxtile.checkpoint`."""

    in_axes: Any
    tiles: Tiles = "whole"
    policy: Policy | GraphPolicy | None = None
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    mesh_axes: Sequence[str | None] | None = None
    static_argnums: tuple[int, ...] = ()
    skip: bool = False

    @classmethod
    def of(
        cls,
        in_axes: Any,
        tiles: Tiles = "whole",
        policy: Policy | GraphPolicy | str | None = None,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
        mesh_axes: Sequence[str | None] | None = None,
        static_argnums: int | Sequence[int] = (),
        skip: bool = False,
    ) -> Options:
        """As the user says them: a policy may be a name."""
        if isinstance(policy, str):
            policy = resolve(policy)
        if not (policy is None or callable(policy) or isinstance(policy, GraphPolicy)):
            raise TilingError(
                f"`policy` (={policy!r}) must be the name of a policy, a function of "
                "`jax.checkpoint_policies`, or an object with a method `choose`"
            )
        numbers = static_argnums if isinstance(static_argnums, Sequence) else (static_argnums,)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in numbers):
            raise TilingError(
                f"`static_argnums` (={static_argnums!r}) must be the number of an argument, or a "
                "tuple of numbers"
            )
        if skip and mesh is not None:
            raise TilingError("`skip` is not for a `mesh`, whose devices would wait for each other")
        return cls(in_axes, tiles, policy, mesh, mesh_axes, tuple(numbers), skip)


def tiled(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """`fun`, evaluated and differentiated by a schedule."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if inside.value:
            return fun(*args, **kwargs)
        args, kwargs = only_arrays(fun, args, kwargs, options.static_argnums)
        leaves, tree = jax.tree.flatten((args, kwargs))
        out_tree = None

        def run_flat(*leaves: Any) -> tuple[list[jax.Array], list[Any]]:
            nonlocal out_tree
            args, kwargs = jax.tree.unflatten(tree, leaves)
            schedule, traced = scheduled(fun, args, kwargs, options)
            out_tree = traced.out_tree
            return execute(schedule, traced.arguments), schedule.specs

        def plain(*leaves: Any) -> Any:
            args, kwargs = shown(jax.tree.unflatten(tree, leaves))
            with inside(True):
                return fun(*args, **kwargs)

        results = without_shardings(run_flat, leaves, plain if options.mesh is None else None)
        return jax.tree.unflatten(out_tree, results)

    return run


def scheduled(
    fun: Callable[..., Any], args: Any, kwargs: Any, options: Options
) -> tuple[Schedule, Traced]:
    """The schedule for these arguments, and the traced function."""
    traced = trace(fun, args, kwargs, options.in_axes, options.static_argnums)
    devices = devices_of(options.mesh, options.mesh_axes, traced.rank)
    if devices is None and not isinstance(options.policy, GraphPolicy):
        return layered(traced, options.policy, options.tiles, options.skip), traced
    graph, stored, tiles = decided(traced, options, devices)
    running = Running(devices, options.skip)
    return schedule_of(graph, stored, tiles, traced.rank, running), traced


def decided(
    traced: Traced, options: Options, devices: Devices | None = None
) -> tuple[Graph, Storage, Tiles]:
    """The graph, what of it the policy stores, and on which grids it is computed."""
    policy, tiles = options.policy, options.tiles
    if not isinstance(policy, GraphPolicy):
        graph = build(traced, policy)
        return graph, graph.stored, tiles
    view, values, graph = outlined(traced)
    try:
        choices = policy.choose(view)
    except Exception as error:
        if not jax.sharding.get_abstract_mesh().manual_axes:
            raise
        raise TilingError(
            "no budget can be planned for inside `jax.shard_map`: make a plan outside, for the "
            f"arrays of one device, with `jaxtile.plan`, and give it as `policy` ({error})"
        ) from error
    stored, chosen = apply(choices, values)
    if isinstance(tiles, Mapping):
        raise TilingError(
            f"`tiles` (={dict(tiles)}) must be one grid if `policy` sees the whole graph: it goes "
            "to everything that the policy recomputes whole"
        )
    grids: Tiles = {
        key: tiles if grid == "whole" else _per_device(grid, devices)
        for key, grid in chosen.items()
    }
    return graph, {**graph.stored, **stored}, grids


def _per_device(grid: GridSpec | Grid, devices: Devices | None) -> GridSpec | Grid:
    """A policy chooses tiles for whole arrays; on a mesh, tiles stay as large as it wants them."""
    if devices is not None and isinstance(grid, Grid):
        grid = grid.tiles
    if devices is None or not isinstance(grid, tuple):
        return grid
    return tuple(-(-n // devices.count(axis)) for axis, n in enumerate(grid))
