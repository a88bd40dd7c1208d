"""A `scan` whose body calls functions with derivative rules, differentiated here and not by JAX.

In the derivative of a `scan`, JAX before 0.12 forgets the rules of what the body computes, so that
a second derivative is that of the functions themselves: a wrong number, silently. Here both passes
are loops that are written down. JAX can differentiate these once more; the next time it would
forget, and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._rules.derivative import apply_backwards, only_backwards
from .._rules.guard import is_float, once
from .._rules.manual import as_varying_as

Arrays = list[Any]
Layer = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
"""A function of constants, of what is carried and of what is scanned over. It returns what is
carried on, and a result per layer."""


def scanned(
    layer: Layer, operands: Sequence[Arrays], options: Mapping[str, Any], again: bool
) -> tuple[Arrays, Arrays]:
    """What `lax.scan` returns. `again`: only operands are stored, and a layer runs once more before
    it is differentiated."""
    return apply_backwards(_Scanned(layer, options, again), *only_backwards(tuple(operands)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Notes:
    """What is known of operands, results and residuals of a layer while tracing."""

    sizes: tuple[int, ...]
    """How many constants, carries and others there are."""
    moving: tuple[bool, ...]
    """Which operands have cotangents."""
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    tree: Any
    origins: tuple[int | None, ...]
    """Which residuals are operands of the scan, and so are not stored for every layer."""

    def parts(self, items: Sequence[Any]) -> list[Arrays]:
        return _parts(items, self.sizes)


def _parts(items: Sequence[Any], sizes: Sequence[int]) -> list[Arrays]:
    """Those of constants, of carries and of others."""
    first, last = sizes[0], sizes[0] + sizes[1]
    return [list(items[:first]), list(items[first:last]), list(items[last:])]


@dataclasses.dataclass(frozen=True, eq=False)
class _Scanned:
    """The derivative of a scan, as `apply_backwards` wants it."""

    layer: Layer
    options: Mapping[str, Any]
    again: bool

    def value(self, consts: Arrays, carry: Arrays, xs: Arrays) -> Any:
        return lax.scan(lambda carry, xs: self.layer(consts, carry, xs), carry, xs, **self.options)

    def forward(self, wanted: Any, *operands: Arrays) -> tuple[Any, Any]:
        consts, carry, xs = once(list(operands))
        # What is not wanted of the first carry may be of the next.
        moving = (*wanted[0], *map(is_float, carry), *wanted[2])
        sizes = len(consts), len(carry), len(xs)
        found: list[_Notes] = []

        def body(carry: Arrays, xs: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            given = [*consts, *carry, *xs]
            results, residuals = self._pushed(given, moving, sizes)
            leaves, tree = jax.tree.flatten(residuals)
            outer = {id(x): i for i, x in enumerate(given) if not 0 <= i - sizes[0] < sizes[1]}
            origins = tuple(outer.get(id(x)) for x in leaves)
            read, made = (tuple(map(jax.typeof, arrays)) for arrays in (given, results))
            found[:] = [_Notes(sizes, moving, read, made, tree, origins)]
            kept = [x for x, i in zip(leaves, origins, strict=True) if i is None]
            return results[: sizes[1]], (results[sizes[1] :], kept)

        last, (ys, kept) = lax.scan(body, carry, xs, **self.options)
        (notes,) = found
        outer = [*consts, *carry, *xs]
        read = [x if i in notes.origins else None for i, x in enumerate(outer)]
        return (last, ys), (notes, read, kept)

    def backward(self, residuals: Any, cotangents: Any) -> Sequence[Arrays]:
        notes, read, kept = residuals
        consts, carry, xs = notes.parts(read)
        last, ys = cotangents
        arrays = jax.tree.leaves((residuals, cotangents))

        def filled(types: Sequence[Any], given: Sequence[Any], wanted: Sequence[bool]) -> Arrays:
            def one(t: Any, c: Any) -> Any:
                return as_varying_as(jnp.zeros(t.shape, t.dtype), arrays) if c is None else c

            found = zip(types, given, wanted, strict=True)
            return [one(t, c) if w else None for t, c, w in found]

        def body(state: Any, x: Any) -> tuple[Any, Arrays]:
            (sums, of_carry), (ys, xs, kept) = state, x
            own, outer = iter(kept), [*consts, *carry, *xs]
            leaves = [next(own) if i is None else outer[i] for i in notes.origins]
            floats = list(map(is_float, notes.results))
            given = filled(notes.results, [*of_carry, *ys], floats)
            found = iter(self._pulled(notes, leaves, given))
            of = notes.parts([next(found) if m else None for m in notes.moving])
            added = [s if s is None else s + c for s, c in zip(sums, of[0], strict=True)]
            return (added, of[1]), of[2]

        types, moving = notes.parts(notes.operands), notes.parts(notes.moving)
        start = (
            filled(types[0], [None] * len(consts), moving[0]),
            filled(types[1], last, moving[1]),
        )
        options = {**self.options, "reverse": not self.options["reverse"]}
        (sums, of_carry), of_xs = lax.scan(body, start, (ys, xs, kept), **options)
        return sums, of_carry, of_xs

    def _pushed(self, given: Arrays, moving: Sequence[bool], sizes: Any) -> tuple[Arrays, Any]:
        """All results of a layer, and the residuals."""
        function, some = self._function(given, moving, sizes)
        floats, pull, others = jax.vjp(function, *some, has_aux=True)
        results = [b if a is None else a for a, b in zip(floats, others, strict=True)]
        return results, given if self.again else pull

    def _pulled(self, notes: _Notes, leaves: Arrays, cotangents: Arrays) -> Sequence[Any]:
        """The cotangents of a layer's operands."""
        residuals = jax.tree.unflatten(notes.tree, leaves)
        if self.again:
            function, some = self._function(residuals, notes.moving, notes.sizes)
            _, residuals, _ = jax.vjp(function, *some, has_aux=True)
        return residuals(cotangents)

    def _function(self, given: Arrays, moving: Sequence[bool], sizes: Any) -> tuple[Any, Arrays]:
        """A layer as a function of the operands that have cotangents, and these."""

        def function(*some: Any) -> tuple[Arrays, Arrays]:
            there = iter(some)
            full = [next(there) if m else x for m, x in zip(moving, given, strict=True)]
            carry, ys = self.layer(*_parts(full, sizes))
            results = [*carry, *ys]
            return (
                [x if is_float(x) else None for x in results],
                [None if is_float(x) else x for x in results],
            )

        return function, [x for m, x in zip(moving, given, strict=True) if m]
