"""Trace a function, and find which axes of its arguments are tiled."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import TilingError, check_callable, describe
from .._rules import Axes, tiled, untiled
from .static import Static, hide, shown

# True while a function is traced for tiling. A `checkpoint` inside another one then steps aside:
# the outermost schedule wins. Being a JAX context, it is part of the key of every `jit` cache, so a
# jitted inner function is traced anew.
inside = jax.make_user_context(False)


_ended: weakref.WeakSet[Any] = weakref.WeakSet()
"""The traces that functions were traced in. An array of one of them is gone when it has ended."""


def is_gone(tracer: jax.core.Tracer) -> bool:
    """Was it made inside a function that has been traced?"""
    return tracer._trace in _ended


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What JAX raises when a function wants to know the elements of a traced array."""

Entry = int | np.integer | Sequence[int | None] | None
"""The tiled axes of one array, as users say them in `in_axes`; None: it is not tiled."""


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


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_axes: Any,
    static_argnums: Sequence[int] = (),
) -> Traced:
    """Trace a function; `in_axes` says which axes of its positional arguments are tiled."""
    args, kwargs = only_arrays(fun, args, kwargs, static_argnums)
    flat, in_tree = jax.tree.flatten((args, kwargs))
    names = argument_names(fun, args, kwargs)
    refuse_references(zip(names, flat, strict=True))
    axes, rank = flat_axes(in_axes, args, flat)

    def flat_fun(*leaves: Any) -> Any:
        _ended.update(leaf._trace for leaf in leaves if isinstance(leaf, jax.core.Tracer))
        call_args, call_kwargs = shown(jax.tree.unflatten(in_tree, leaves))
        return call_unchanged(fun, call_args, call_kwargs)

    with inside(True):
        try:
            types = [_on_device(x, labels) for x, labels in zip(flat, axes, strict=True)]
            closed, out_shape = jax.make_jaxpr(flat_fun, return_shape=True)(*types)
        except _NEEDS_VALUES as error:
            error.add_note(
                "`jaxtile` traces its function. What the function branches on must be static: see "
                "`static_argnums` of `jaxtile.checkpoint`; a `jit` around it must not trace it."
            )
            raise
        except TypeError as error:
            if "incompatible shapes" not in str(error):
                raise
            arguments = [
                f"{name} {describe(jax.typeof(leaf), labels)}"
                for name, leaf, labels in zip(names, flat, axes, strict=True)
                if tiled(labels)
            ]
            raise TilingError(
                f"{error}. The tiled arguments are {', '.join(arguments)} (* marks a tiled "
                "dimension): arrays that meet position by position must have equal sizes; resize "
                "or crop one"
            ) from error
    refuse_references((f"constant {i}", x) for i, x in enumerate(closed.consts))
    out_tree = jax.tree.structure(out_shape)
    return Traced(closed.jaxpr, closed.consts, flat, names, axes, rank, out_tree)


def _on_device(x: Any, axes: Axes) -> Any:
    """What to trace with instead of a tiled array in host memory: tiles of it are on the device."""
    aval = jax.typeof(x)
    if not tiled(axes) or aval.memory_space is not jax.memory.Space.Host:
        return x
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def only_arrays(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as a pytree of arrays: what is none is hidden, and `trace` finds it."""
    check_callable(fun)
    return hide(args, kwargs, _parameters(fun, args, kwargs), static_argnums)


def refuse_references(values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        kind = jax.typeof(value)
        if isinstance(value, jax.Ref) or not hasattr(kind, "shape"):
            raise TilingError(
                f"{name} of the function is a mutable array ({kind}): tiles have no order in which "
                "it could be read and written; give its value, and return the new one (an NNX "
                "variable: make it without `ref` and `hijax`)"
            )


def call_unchanged(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_leaf: Callable[[Any], bool] = lambda x: False,
) -> Any:
    """Call `fun`, and refuse if it changes its arguments in place: these are copies.

    Only the states of NNX modules may change: they are values. `nnx.merge` makes modules that share
    variables with them, so a merged module writes into the state that it was made of; the function
    returns what is wanted of that.
    """

    def is_whole(x: Any) -> bool:
        nnx = sys.modules.get("flax.nnx")
        return is_leaf(x) or (nnx is not None and isinstance(x, nnx.State))

    def flatten(x: Any) -> tuple[list[Any], Any]:
        return jax.tree.flatten_with_path(x, is_leaf=is_whole)

    def changes(name: str, x: Any, before: tuple[list, Any], again: tuple[list, Any]) -> list[str]:
        try:
            after = flatten(x)
        except Exception:  # an object that is used up, as a state of Equinox after `set`
            return []
        if before[1] != after[1]:
            return [name]
        leaves = zip(before[0], again[0], after[0], strict=True)
        return [
            name + jax.tree_util.keystr(p) for (p, a), (_, b), (_, c) in leaves if a is b is not c
        ]

    arguments = [*args, *(kwargs[name] for name in sorted(kwargs))]
    names = argument_names(fun, args, kwargs, lambda x: any(x is a for a in arguments))
    # Twice, because some pytrees compute their leaves: these are other ones each time.
    before = [(flatten(x), flatten(x)) for x in arguments]
    out = fun(*args, **kwargs)
    found = zip(names, arguments, before, strict=True)
    changed = [change for name, x, twice in found for change in changes(name, x, *twice)]
    if changed:
        raise TilingError(
            f"the function changes its arguments in place: {', '.join(changed)}. This would be "
            "lost. If they are NNX modules or parts of them, use what has the same name in "
            "`jaxtile.nn`: `jaxtile.nn.checkpoint`, after `import jaxtile.nn`; otherwise copy what "
            "you change, and return it"
        )
    return out


def argument_names(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[str]:
    """What the function calls each flat argument: `image`, `params['conv1']['kernel']`."""
    parameters = _parameters(fun, args, kwargs)
    paths, _ = jax.tree.flatten_with_path((args, kwargs), is_leaf=is_leaf)
    return [
        parameters[path[1].idx] + jax.tree_util.keystr(path[2:])
        if path[0].idx == 0
        else jax.tree_util.keystr(path[1:])
        for path, _ in paths
    ]


def _parameters(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """What the function calls each positional argument."""
    parameters: list[str] = []
    try:
        signature = inspect.signature(fun)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            parameters += [f"{name}[{i}]" for i in range(len(value))] if several else [name]
    except (TypeError, ValueError):
        pass
    parameters = parameters[: len(args)]
    return parameters + [f"argument {i}" for i in range(len(parameters), len(args))]


def flat_axes(in_axes: Any, args: Sequence[Any], flat: Sequence[Any]) -> tuple[list[Axes], int]:
    """Per flat argument, the axis that each dimension carries; and the number of tiled axes.

    `flat` is what `args` flattens to, and after it keyword arguments, which are not tiled.
    """
    entries = _entries(in_axes, args)
    entries += [None] * (len(flat) - len(entries))
    ranks = {len(_as_tuple(entry)) for entry in entries if entry is not None}
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
    labels = [_labels(in_axes, entry, leaf) for entry, leaf in zip(entries, flat, strict=True)]
    return labels, ranks.pop()


def _entries(in_axes: Any, args: Sequence[Any]) -> list[Entry]:
    """What `in_axes` says of each flat positional argument.

    It is one entry for all of them, or a tuple of pytree prefixes, one per argument.
    """
    per_argument = isinstance(in_axes, tuple | list) and len(in_axes) == len(args)
    if per_argument and len(args) > 1 and _is_several(in_axes):
        raise TilingError(
            f"`in_axes` (={in_axes}) may mean these axes of every argument, or one axis of each of "
            f"the {len(args)} arguments: write {(tuple(in_axes),) * len(args)}, or "
            f"{tuple((axis,) for axis in in_axes)}"
        )
    if _is_axes(in_axes) and not per_argument:
        return [in_axes] * len(jax.tree.leaves(args))
    if not isinstance(in_axes, tuple | list):
        raise TilingError(
            f"`in_axes` (={in_axes!r}) must be a tuple with one entry per argument, as (None, (1, "
            "2))"
        )
    if not per_argument:
        raise TilingError(
            f"`in_axes` (={in_axes}) has {len(in_axes)} entries for {len(args)} positional "
            "arguments: give one entry to each; what is passed by keyword is not tiled, and has "
            "none, so pass by position what is to be tiled"
        )
    try:
        return [
            entry
            for prefix, arg in zip(in_axes, args, strict=True)
            for entry in _spread(prefix, arg, in_axes)
        ]
    except TilingError:
        raise
    except ValueError as error:
        raise TilingError(
            f"`in_axes` (={in_axes}) is not a pytree prefix of the arguments: {error}"
        ) from None


def _spread(prefix: Any, argument: Any, in_axes: Any = None) -> list[Entry]:
    """A pytree prefix's entries, one per leaf of the argument.

    >>> _spread({"image": (1, 2), "weights": None}, {"image": 0.0, "weights": [0.0, 0.0]})
    [(1, 2), None, None]
    """
    entries: list[Entry] = []

    def add(entry: Entry, part: Any) -> None:
        if not _is_axes(entry):
            raise TilingError(
                f"`in_axes` (={in_axes}) has the entry {entry!r}: it must be None, an axis, or a "
                "tuple of axes"
            )
        if isinstance(part, Static) and entry is not None:
            raise TilingError(
                f"`in_axes` (={in_axes}) tiles axes {entry} of {part.value!r}, which is static, "
                "and no array: its entry is None"
            )
        entries.extend([entry] * len(jax.tree.leaves(part)))

    jax.tree.map(add, prefix, argument, is_leaf=_is_axes)
    return entries


def _labels(in_axes: Any, entry: Entry, leaf: Any) -> Axes:
    aval = jax.typeof(leaf)
    labels: list[int | None] = list(untiled(aval))
    for axis, dim in enumerate(_as_tuple(entry)):
        if dim is None:
            continue
        if not -aval.ndim <= dim < aval.ndim:
            raise TilingError(
                f"`in_axes` (={in_axes}) tiles axis {dim} of an argument of shape {aval.shape}, "
                f"which has no such axis: its axes are {tuple(range(aval.ndim))}"
            )
        if labels[dim] is not None:
            raise TilingError(
                f"`in_axes` (={in_axes}) names axis {dim} of an argument of shape {aval.shape} "
                "twice: name each once"
            )
        if not aval.shape[dim]:
            raise TilingError(
                f"`in_axes` (={in_axes}) tiles axis {dim} of an argument of shape {aval.shape}, "
                "which has no elements: there is nothing to tile; call the function itself, or "
                "tile another axis"
            )
        labels[dim] = axis
    return tuple(labels)


def _as_tuple(entry: Entry) -> tuple[int | None, ...]:
    if entry is None:
        return ()
    return (int(entry),) if isinstance(entry, int | np.integer) else tuple(entry)


def _is_several(entry: Any) -> bool:
    """Axes of one array: all there, and all different."""
    return all(isinstance(e, int | np.integer) for e in entry) and len({*entry}) == len(entry)


def _is_axes(entry: Any) -> bool:
    """A leaf of `in_axes`: None, an axis, or a tuple of axes."""
    if entry is None or isinstance(entry, int | np.integer):
        return True
    return (
        isinstance(entry, tuple | list)
        and any(isinstance(e, int | np.integer) for e in entry)
        and all(e is None or isinstance(e, int | np.integer) for e in entry)
    )
