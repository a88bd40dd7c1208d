"""Functions with a derivative of our own, in both directions.

JAX's `custom_vjp` has no forward mode. Here the derivative of a function is a linear primitive,
beside a `custom_jvp` that binds it: evaluated, it maps tangents to tangents; transposed, cotangents
to cotangents. Each is traced only if it is used. What lies between is the residuals, which serve
both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, set_current_trace, take_current_trace
from jax.interpreters import ad, batching, mlir

from .._errors import TilingError

Array = jax.Array


class Derivative(Protocol):
    """A function of pytrees of arrays, and its derivative.

    Where a tangent or a cotangent is known to be zero, or is not wanted, there is None.
    """

    def value(self, *args: Any) -> Any:
        """What the function returns."""
        ...

    def forward(self, wanted: Any, *args: Any) -> tuple[Any, Any]:
        """What it returns if it is differentiated, and residuals.

        `wanted`: per argument, as its pytree, whether it has a tangent.
        """
        ...

    def tangents(self, residuals: Any, tangents: Sequence[Any]) -> Any:
        """The tangents of what it returns, from those of its arguments."""
        ...

    def backward(self, residuals: Any, cotangents: Any) -> Sequence[Any]:
        """The cotangents of its arguments, from those of what it returns."""
        ...


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def apply(function: Derivative, *args: Any) -> Any:
    return function.value(*args)


class Bilinear:
    """A `Derivative` of two arrays, linear in each: its tangents are its own values."""

    def value(self, lhs: Array, rhs: Array) -> Array:
        raise NotImplementedError

    def forward(self, wanted: Any, lhs: Array, rhs: Array) -> tuple[Array, tuple[Array, Array]]:
        return apply(self, lhs, rhs), (lhs, rhs)

    def tangents(self, residuals: tuple[Array, Array], tangents: Sequence[Array | None]) -> Array:
        (lhs, rhs), (of_lhs, of_rhs) = residuals, tangents
        found = [] if of_lhs is None else [apply(self, of_lhs, rhs)]
        found += [] if of_rhs is None else [apply(self, lhs, of_rhs)]
        return sum(found[1:], found[0])

    def backward(self, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
        raise NotImplementedError


@functools.partial(apply.defjvp, symbolic_zeros=True)
def _apply_jvp(function: Derivative, args: Any, tangents: Any) -> tuple[Any, Any]:
    leaves, in_tree = jax.tree.flatten(args)
    given = jax.tree.leaves(tangents)
    wanted = tuple(
        not isinstance(t, SymbolicZero) and jnp.issubdtype(x.dtype, jnp.inexact)
        for x, t in zip(leaves, given, strict=True)
    )
    with _known(leaves):
        results, residuals = function.forward(jax.tree.unflatten(in_tree, wanted), *args)
    flat, out_tree = jax.tree.flatten(results)
    kept, kept_tree = jax.tree.flatten(residuals)
    types = [jax.typeof(x).to_tangent_aval() for x in flat]
    floats = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in flat)
    found = iter(
        _linear_p.bind(
            *kept,
            *(t for t, w in zip(given, wanted, strict=True) if w),
            function=function,
            trees=(kept_tree, in_tree, out_tree),
            wanted=wanted,
            floats=floats,
            types=tuple(t for t, f in zip(types, floats, strict=True) if f),
        )
    )
    out = [next(found) if f else SymbolicZero(t) for t, f in zip(types, floats, strict=True)]
    return results, jax.tree.unflatten(out_tree, out)


@contextlib.contextmanager
def _known(arrays: Sequence[Any]) -> Iterator[None]:
    """Trace what is computed from these arrays where they are.

    To linearise, JAX traces a rule such that what depends on tangents is kept apart, and splits
    each loop and each call in it. What depends on none needs no such search.
    """
    with take_current_trace() as trace:
        separates = type(trace).__name__ == "JaxprTrace"
        among = any(getattr(x, "_trace", None) is trace for x in arrays)
        with set_current_trace(trace.parent_trace if separates and not among else trace):
            yield


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_backwards(function: Derivative, *args: Any) -> Any:
    """A function and its derivative, without forward mode: a `custom_vjp`.

    Before 0.12 JAX forgets the rule of a `custom_jvp` that is called by the rule of another, and a
    second derivative is then that of the function itself. So functions that call a user's
    `custom_jvp` are applied in this way there.
    """
    return function.value(*args)


@jax.custom_jvp
def only_backwards(tree: Any) -> Any:
    """The same arrays; forward mode is refused in words that say why, before JAX does."""
    return tree


@functools.partial(only_backwards.defjvp, symbolic_zeros=True)
def _only_backwards_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    def moved(t: Any) -> Any:
        return t if isinstance(t, SymbolicZero) else _transposed_p.bind(t)

    return primals[0], jax.tree.map(moved, tangents[0])


def _refuse(*_: Any, **__: Any) -> Any:
    raise TilingError(
        "forward mode (`jvp`, `jacfwd`, `linearize`) of a tiled function that calls one with a "
        "derivative rule is not defined. Of a `custom_jvp`, as `jax.nn.relu` is, that is a limit of"
        " jaxtile before jax 0.12; a `custom_vjp` has none in JAX either. What to do: use jax 0.12 "
        "or newer, or `jax.checkpoint` instead of `jaxtile.checkpoint`; reverse mode (`grad`, "
        "`vjp`), and forward mode over it (`hessian`), are defined"
    )


_transposed_p = Primitive("jaxtile_transposed")
_transposed_p.def_impl(_refuse)
_transposed_p.def_abstract_eval(lambda t: t)
mlir.register_lowering(_transposed_p, _refuse)
batching.primitive_batchers[_transposed_p] = lambda t, dims: (_transposed_p.bind(*t), *dims)
ad.primitive_jvps[_transposed_p] = _refuse
ad.primitive_transposes[_transposed_p] = lambda cotangent, _: [cotangent]


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _forward(function: Derivative, *args: Any) -> tuple[Any, Any]:
    wanted = jax.tree.map(
        lambda p: p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact),
        args,
        is_leaf=_is_primal,
    )
    return function.forward(wanted, *jax.tree.map(lambda p: p.value, args, is_leaf=_is_primal))


def _backward(function: Derivative, residuals: Any, cotangents: Any) -> Any:
    def given(c: Any) -> Any:
        return None if isinstance(c, SymbolicZero) or c.dtype == jax.dtypes.float0 else c

    return tuple(function.backward(residuals, jax.tree.map(given, cotangents)))


apply_backwards.defvjp(_forward, _backward, symbolic_zeros=True)


_linear_p = Primitive("jaxtile_derivative")
_linear_p.multiple_results = True


def _filled(tree: Any, there: Sequence[bool], found: Sequence[Any]) -> Any:
    """A pytree with None where nothing is there."""
    leaves = iter(found)
    return jax.tree.unflatten(tree, [next(leaves) if t else None for t in there])


def _evaluate(
    *operands: Any, function: Derivative, trees: Any, wanted: Any, floats: Any, types: Any
) -> list[Any]:
    kept_tree, in_tree, out_tree = trees
    n = kept_tree.num_leaves
    residuals = jax.tree.unflatten(kept_tree, operands[:n])
    tangents = function.tangents(residuals, _filled(in_tree, wanted, operands[n:]))
    found = zip(out_tree.flatten_up_to(tangents), floats, strict=True)
    some = [x for x, is_float in found if is_float]
    return [
        jnp.zeros(t.shape, t.dtype) if x is None else x for x, t in zip(some, types, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    (kept_tree, in_tree, out_tree), wanted = params["trees"], params["wanted"]
    n = kept_tree.num_leaves
    given = [None if type(c) is ad.Zero else c for c in cotangents]
    if all(c is None for c in given):
        return [None] * len(operands)
    residuals = jax.tree.unflatten(kept_tree, operands[:n])
    found = params["function"].backward(residuals, _filled(out_tree, params["floats"], given))
    pulled = [c for c, w in zip(in_tree.flatten_up_to(tuple(found)), wanted, strict=True) if w]
    linear = map(ad.is_undefined_primal, operands[n:])
    return [None] * n + [c if u else None for c, u in zip(pulled, linear, strict=True)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def function(*some: Any) -> list[Any]:
        operands = list(primals)
        for i, x in zip(moving, some, strict=True):
            operands[i] = x
        return _evaluate(*operands, **params)

    return jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])


class _Batched:
    """The derivative of a function that `vmap` was applied to; some residuals are not mapped."""

    def __init__(self, function: Derivative, residuals: Any):
        self.function, self.mapped = function, residuals

    def tangents(self, residuals: Any, tangents: Any) -> Any:
        return jax.vmap(self.function.tangents, in_axes=(self.mapped, 0))(residuals, tangents)

    def backward(self, residuals: Any, cotangents: Any) -> Any:
        return jax.vmap(self.function.backward, in_axes=(self.mapped, 0))(residuals, cotangents)


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    n = params["trees"][0].num_leaves
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    first = [
        jnp.moveaxis(x, d, 0)
        if d is not None
        else x
        if i < n
        else jnp.broadcast_to(x, (size, *x.shape))
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
    ]
    mapped = jax.tree.unflatten(params["trees"][0], [None if d is None else 0 for d in dims[:n]])
    types = [t.update(shape=(size, *t.shape)) for t in params["types"]]
    batched = _Batched(params["function"], mapped)
    out = _linear_p.bind(*first, **{**params, "function": batched, "types": tuple(types)})
    return out, [0] * len(out)


_linear_p.def_impl(_evaluate)
_linear_p.def_abstract_eval(lambda *operands, types, **params: list(types))
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
