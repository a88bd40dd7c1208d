"""All tiles of a region, one after the other: which loops there are, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._rules.guard import derived_from
from .._rules.manual import as_varying_as
from .alike import order, skipping
from .beside import line, run
from .kinds import Kind
from .work import Work

Loop = Callable[[Kind, Any, Any], tuple[Any, Any]]
"""Over tiles of a kind: from a carry, and what there is per tile."""


def over_tiles(
    work: Work, carry: Any, xs: Any, rows: np.ndarray, kinds: Sequence[Kind]
) -> tuple[Any, Any]:
    """A loop for each kind of tiles; for most of them one with transfers beside it, if arrays are
    in host memory.
    """
    found = line(rows, max((kind.tiles for kind in kinds), key=len), work.hosted(carry))
    if found is None:
        return _each_kind(_plain(work), carry, xs, kinds)
    carry, out = run(work, found, carry, _of(xs, found.kind))
    others = np.setdiff1d(np.arange(len(rows)), found.kind.tiles)
    if not len(others):
        return carry, out
    rest = Kind.of(rows, others)
    carry, last = _each_kind(_plain(work), carry, xs, [rest])
    return carry, _sorted([found.kind, rest], [out, last])


def skipping_some(
    work: Work, carry: Any, xs: Any, rows: np.ndarray, kinds: Sequence[Kind]
) -> tuple[Any, Any]:
    """A loop for each kind of tiles, in which those that are alike follow each other, and are
    computed once.

    Tiles that read the same may have other tangents, and zeros may have some that are not zero. So
    if this loop is differentiated, for a second derivative, no tile is skipped.
    """

    def loop(kind: Kind, carry: Any, xs: Any) -> tuple[Any, Any]:
        body, kept, columns = skipping(work, kind, carry, jax.tree.map(lambda x: x[0], xs))
        kept = as_varying_as(kept, jax.tree.leaves(carry))
        turns = order(rows[kind.tiles], columns)
        (carry, *_), out = scan(body, (carry, *kept), jax.tree.map(lambda x: x[turns], xs))
        return carry, jax.tree.map(lambda x: x[np.argsort(turns)], out)

    some = functools.partial(_each_kind, loop, kinds=kinds)
    return derived_from(functools.partial(scan, work.body), some, carry, xs)


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """Without a loop if there is but one tile."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def _plain(work: Work) -> Loop:
    def loop(kind: Kind, carry: Any, xs: Any) -> tuple[Any, Any]:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            return work.body(carry, (kind.row(x[0]), *x[1:]))

        return scan(body, carry, xs)

    return loop


def _each_kind(loop: Loop, carry: Any, xs: Any, kinds: Sequence[Kind]) -> tuple[Any, Any]:
    outs = []
    for kind in kinds:
        carry, out = loop(kind, carry, _of(xs, kind))
        outs.append(out)
    return carry, _sorted(kinds, outs)


def _of(xs: Any, kind: Kind) -> Any:
    return jax.tree.map(lambda x: x[kind.tiles] if len(kind.tiles) < len(x) else x, xs)


def _sorted(kinds: Sequence[Kind], outs: Sequence[Any]) -> Any:
    """What is remembered of tiles, in their order."""
    if len(kinds) == 1:
        return outs[0]
    back = np.argsort(np.concatenate([kind.tiles for kind in kinds]))
    return jax.tree.map(lambda *out: jnp.concatenate(out)[back], *outs)
