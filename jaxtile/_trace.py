"""Trace a function, and find which axes of its arguments are tiled."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._errors import TilingError, describe
from ._rules import Axes, untiled

# True while a function is traced for tiling. A `checkpoint` inside another one then steps aside:
# the outermost schedule wins. Being a JAX context, it is part of the key of every `jit` cache, so a
# jitted inner function is traced anew.
inside = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of flat arguments, and how they are tiled."""

    jaxpr: Any
    consts: Sequence[Any]
    arguments: list[Any]
    names: list[str]
    in_axes: list[Axes]
    rank: int
    """The number of tiled axes."""
    out_tree: Any


def trace(fun, args, kwargs, in_axes) -> Traced:
    flat, in_tree = jax.tree.flatten((args, kwargs))
    axes, rank = flat_axes(in_axes, args, kwargs, flat)

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
    out_tree = jax.tree.structure(out_shape)
    return Traced(closed.jaxpr, closed.consts, flat, names, axes, rank, out_tree)


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


def flat_axes(in_axes, args, kwargs, flat) -> tuple[list[Axes], int]:
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
        if not aval.shape[dim]:
            raise TilingError(
                f"`in_axes` (={in_axes}) tiles axis {dim} of an argument of shape {aval.shape}, "
                "which has no elements"
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
