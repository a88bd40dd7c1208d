"""Tiles that are not computed: they read what another one has read, or their cotangents are zero.

What a tile computes is a function of the windows that it reads, and of the positions in its program
(where the array ends, a coordinate, how much of it other tiles own). In the background of a slide
many tiles read the same. So a loop keeps what one tile has read, and what came of it, and gives
that to the next tile that reads the same, bit for bit. Backwards, cotangents are read too; and if
all of them are zero, so is what they are pulled back to.

One tile is kept at a time: the last one that reads next to nothing but constants, as any other is
not likely to come again; as long as there is none, the last one. Tiles with equal positions follow
each other, so that those at a border have their turn too. Those inside have a loop of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._graph.inline import any_call
from .kinds import Kind
from .work import Work

Body = Callable[[Any, Any], tuple[Any, Any]]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ROUNDING = 64  # units in the last place of what is constant but for rounding


def skipping(work: Work, kind: Kind, carry: Any, x: Any) -> tuple[Body, Any, list[int]]:
    """The body of a loop over tiles of one kind that skips some; what it has kept before the first
    one, `x`; and which positions it computes with.
    """

    def once(row: Any, own: Any) -> Any:
        found = work.found(carry, (kind.row(row), *x[1:]))
        return found, work.compute(found, (kind.row(own), *x[1:]))

    columns, (found, results) = positions(once, list(x[0]))

    def body(state: Any, x: Any) -> tuple[Any, Any]:
        carry, (filled, constant), kept = state
        x = (kind.row(x[0]), *x[1:])
        found = work.found(carry, x)
        key = found, [x[0][i] for i in columns]
        way = (filled & equal(key, kept[0])).astype(jnp.int32)
        ways = [lambda: work.compute(found, x), lambda: kept[1]]
        if (nothing := work.zero(found)) is not None:
            ways.append(lambda: jax.tree.map(jnp.zeros_like, kept[1]))
            way = jnp.where(nothing, 2, way)
        results = lax.switch(way, ways)
        blank = work.blank(found)
        keep = (way == 0) & replaces(blank, constant, equal(key[1], kept[0][1]))
        constant = jnp.where(keep, blank, constant)
        kept = jax.tree.map(lambda a, b: jnp.where(keep, a, b), (key, results), kept)
        carry, out = work.placed(carry, results, x)
        return (carry, (filled | keep, constant), kept), out

    kept = (found, [jnp.asarray(x[0][i]) for i in columns]), results
    kept = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), kept)
    return body, ((jnp.asarray(False), jnp.asarray(False)), kept), columns


def replaces(blank: Any, constant: Any, same_positions: Any) -> Any:
    """Is a tile kept instead of another? `blank`, `constant`: does it read, and did that one read,
    next to nothing but constants?
    """
    return blank | ~(constant & same_positions)


def positions(once: Callable[[Any, Any], Any], row: Sequence[Any]) -> tuple[list[int], Any]:
    """Which columns of a row the second of two results is computed with, if the first is given;
    and the shapes of both. `once` is a function of a row for the first, and one for the second.
    """
    traced, shapes = jax.make_jaxpr(once, return_shape=True)(row, row)
    first = len(jax.tree.leaves(shapes[0]))
    used = _used(traced.jaxpr, [i >= first for i in range(len(traced.jaxpr.outvars))])
    return [i for i, u in enumerate(used[len(row) :]) if u], shapes


def _used(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which inputs the wanted outputs are computed from."""
    live = {id(v) for v, w in zip(jaxpr.outvars, wanted, strict=True) if w}
    for eqn in reversed(jaxpr.eqns):
        outs = [id(v) in live for v in eqn.outvars]
        if any(outs):
            called, ins = any_call(eqn), [True for _ in eqn.invars]
            if called is not None:
                ins = _used(getattr(called, "jaxpr", called), outs)
            live.update(id(v) for v, u in zip(eqn.invars, ins, strict=True) if u)
    return [id(v) in live for v in jaxpr.invars]


def order(rows: np.ndarray, columns: Sequence[int]) -> np.ndarray:
    """The tiles, those with equal positions in these columns after each other."""
    return np.lexsort([np.arange(len(rows)), *rows.T[list(columns)]])


def equal(a: Any, b: Any) -> Any:
    """Are all arrays of two pytrees the same, bit for bit? Of NumPy or of JAX."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return _all((_bits(x) == _bits(y)).all() for x, y in pairs)


def zero(cotangents: Sequence[Any]) -> Any:
    return _all((x == 0).all() for x in cotangents if x is not None)


def nearly_constant(windows: Sequence[Any], dims: Sequence[tuple[int, ...]]) -> Any:
    """Along these dimensions of each window."""
    pairs = zip(windows, dims, strict=True)
    return _all(_nearly_constant(x, along) for x, along in pairs if x is not None and x.size)


def _nearly_constant(x: Any, dims: tuple[int, ...]) -> Any:
    """What lies along a dimension is compared with the first element of it, and these firsts along
    the next dimension. Maxima and minima of each channel take a GPU twice as long, NumPy 14 times.
    """
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    tolerance = _ROUNDING * float(jnp.finfo(x.dtype).eps) * abs(x).max() if inexact else 0
    found = []
    for dim in sorted(dims):
        first = x[(slice(None),) * dim + (slice(1),)]
        found.append((abs(x - first) <= tolerance).all() if inexact else (x == first).all())
        x = first
    return _all(iter(found))


def _all(each: Iterator[Any]) -> Any:
    found = next(each, np.True_)
    for one in each:
        found = found & one
    return found


def _bits(x: Any) -> Any:
    """What tells NaNs alike, and 0 from -0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = _BITS[x.dtype.itemsize]
    return x.view(bits) if isinstance(x, np.ndarray) else lax.bitcast_convert_type(x, bits)
