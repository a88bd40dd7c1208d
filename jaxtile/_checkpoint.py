"""The public face: `jaxtile.checkpoint`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import _calls as _calls
from ._errors import TilingError, describe
from ._graph import Policy, build
from ._loop import Loop
from ._regions import Region, Schedule, Tiles, schedule
from ._rules import Axes, untiled
from ._tile import lookup
from ._values import Value

# True while a function is traced for tiling. A `checkpoint` inside another one then steps aside:
# the outermost schedule wins. Being a JAX context, it is part of the key of every `jit` cache, so a
# jitted inner function is traced anew.
inside = jax.make_user_context(False)


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Tiles,
    policy: Policy | None = None,
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
        The grid `None` leaves a region untiled and unrecomputed, as plain JAX.
      policy: any function of `jax.checkpoint_policies` that saves; `None` stores nothing inside.

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

    @functools.wraps(fun)
    def tiled(*args: Any, **kwargs: Any) -> Any:
        if inside.value:
            return fun(*args, **kwargs)
        plan, flat, out_tree = trace(fun, args, kwargs, in_axes, tiles, policy)
        return jax.tree.unflatten(out_tree, execute(plan, flat))

    return tiled


def trace(fun, args, kwargs, in_axes, tiles, policy) -> tuple[Schedule, list[Any], Any]:
    """The schedule for these arguments, the flat arguments, and the result's structure."""
    flat, in_tree = jax.tree.flatten((args, kwargs))
    axes, rank = _flat_axes(in_axes, args, kwargs, flat)

    def flat_fun(*leaves):
        call_args, call_kwargs = jax.tree.unflatten(in_tree, leaves)
        return fun(*call_args, **call_kwargs)

    names = argument_names(fun, args, kwargs)
    with inside(True):
        try:
            closed, out_shape = jax.make_jaxpr(flat_fun, return_shape=True)(*flat)
        except TypeError as error:
            if "incompatible shapes" not in str(error):
                raise
            tiled = [
                f"{name} {describe(jax.typeof(leaf), labels)}"
                for name, leaf, labels in zip(names, flat, axes, strict=True)
                if any(a is not None for a in labels)
            ]
            raise TilingError(
                f"{error}. The tiled arguments are {', '.join(tiled)} (* marks a tiled dimension): "
                "arrays that meet position by position must have equal sizes; resize or crop one"
            ) from error
    graph = build(closed.jaxpr, closed.consts, axes, policy, names=names)
    return schedule(graph, tiles, rank), flat, jax.tree.structure(out_shape)


def argument_names(fun, args, kwargs) -> list[str]:
    """What the function calls each flat argument: `image`, `params['conv1']['kernel']`."""
    parameters: list[str] = []
    try:
        signature = inspect.signature(fun)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            parameters += [f"{name}[{i}]" for i in range(len(value))] if several else [name]
    except (TypeError, ValueError):
        pass
    parameters = parameters[: len(args)]
    parameters += [f"argument {i}" for i in range(len(parameters), len(args))]
    paths, _ = jax.tree.flatten_with_path((args, kwargs))
    return [
        parameters[path[1].idx] + jax.tree_util.keystr(path[2:])
        if path[0].idx == 0
        else jax.tree_util.keystr(path[1:])
        for path, _ in paths
    ]


def execute(plan: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """Run the regions and the global equations in order."""
    env: dict[Value, Any] = dict(zip(plan.graph.inputs, map(jax.numpy.asarray, flat), strict=True))
    for step in plan.steps:
        if isinstance(step, Region):
            run = _untiled if step.grid is None else _tiled
            env.update(zip((t.result for t in step.targets), run(step, env), strict=True))
        else:
            operands = [lookup(env, v.array) for v in step.inputs]
            env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
    return [lookup(env, v.array) for v in plan.graph.outputs]


def _tiled(region: Region, env: dict[Value, Any]) -> list[jax.Array]:
    inputs, globals_ = (
        [lookup(env, v.array) for v in values] for values in (region.inputs, region.globals)
    )
    return Loop(region)(inputs, globals_)


def _untiled(region: Region, env: dict[Value, Any]) -> list[jax.Array]:
    """A region whose grid is None: its equations, whole, as plain JAX.

    What they compute is held anyway, so other such regions use it too.
    """

    def read(value: Value) -> jax.Array:
        return lookup(env, value if value in env else value.array)

    for node in region.nodes:
        if any(v not in env for v in node.outputs):
            env.update(zip(node.outputs, node.equation.bind(*map(read, node.inputs)), strict=True))
    return [
        read(t.value)
        if t.reduction is None
        else t.reduction.equation.bind(*map(read, t.operands))[0]
        for t in region.targets
    ]


def _flat_axes(in_axes, args, kwargs, flat) -> tuple[list[Axes], int]:
    """Per flat argument, the axis that each dimension carries; and the number of tiled axes."""
    per_argument = isinstance(in_axes, tuple | list) and len(in_axes) == len(args)
    if _is_axes(in_axes) and not per_argument:
        leaves = [in_axes] * len(jax.tree.leaves(args))
    elif not isinstance(in_axes, tuple | list):
        raise TilingError(
            f"`in_axes` (={in_axes!r}) must be a tuple with one entry per argument, as (None, (1, "
            "2))"
        )
    else:
        prefix = tuple(in_axes)
        if len(prefix) != len(args):
            raise TilingError(
                f"`in_axes` (={in_axes}) has {len(prefix)} entries for {len(args)} positional "
                "arguments"
            )
        leaves = []
        try:
            jax.tree.map(
                lambda axes, tree: leaves.extend([axes] * len(jax.tree.leaves(tree))),
                prefix,
                tuple(args),
                is_leaf=_is_axes,
            )
        except ValueError as error:
            raise TilingError(
                f"`in_axes` (={in_axes}) is not a pytree prefix of the arguments: {error}"
            ) from None
    leaves += [None] * (len(flat) - len(leaves))
    ranks = {len(_as_tuple(entry)) for entry in leaves if entry is not None}
    if not ranks:
        raise TilingError(
            f"`in_axes` (={in_axes}) tiles nothing: give the tiled axes of at least one argument, "
            "as (1, 2)"
        )
    if len(ranks) > 1:
        raise TilingError(
            f"`in_axes` (={in_axes}) must name the same number of axes everywhere, with None for "
            "one that is absent"
        )
    return [
        _labels(in_axes, entry, leaf) for entry, leaf in zip(leaves, flat, strict=True)
    ], ranks.pop()


def _labels(in_axes, entry, leaf) -> Axes:
    aval = jax.typeof(leaf)
    labels: list[int | None] = list(untiled(aval))
    for axis, dim in enumerate(_as_tuple(entry)):
        if dim is None:
            continue
        if not -aval.ndim <= dim < aval.ndim:
            raise TilingError(
                f"`in_axes` (={in_axes}) tiles axis {dim} of an argument of shape {aval.shape}, "
                "which has no such axis"
            )
        if labels[dim] is not None:
            raise TilingError(
                f"`in_axes` (={in_axes}) names axis {dim} of an argument of shape {aval.shape} "
                "twice"
            )
        labels[dim] = axis
    return tuple(labels)


def _as_tuple(entry) -> tuple[int | None, ...]:
    return (
        () if entry is None else (entry,) if isinstance(entry, int | np.integer) else tuple(entry)
    )


def _is_axes(entry: Any) -> bool:
    """A leaf of `in_axes`: None, an axis, or a tuple of axes."""
    if entry is None or isinstance(entry, int | np.integer):
        return True
    return (
        isinstance(entry, tuple | list)
        and any(isinstance(e, int | np.integer) for e in entry)
        and all(e is None or isinstance(e, int | np.integer) for e in entry)
    )


def _check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TilingError(f"`fun` (={fun!r}) must be callable")
