"""Branches: a `cond` on a number that all tiles share.

A tile runs the branch that is taken, and no other. What needs all tiles, a reduction over a tiled
axis or a value to be stored, cannot be inside a tile's `cond`. So a `cond` with such a thing in a
branch is stated as several: one up to the reductions, which gives zeros for those of branches that
are not taken; then the reductions; then one with the rest. Results without a tiled axis get a
`cond` of their own, which runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._rules.manual import as_varying_as
from .values import Graph, Node, Value

Column = Sequence[Value | None]
"""Per branch, what it gives for one result; None: zeros, which nobody reads."""
Platforms = Sequence[Sequence[str] | None]
"""Per branch of a `platform_dependent`, where it is taken; None: everywhere else."""


def choose(
    platforms: Platforms | None, read: Sequence[Any], branches: Sequence[Callable[[], list[Any]]]
) -> list[Any]:
    """What the branch gives that is taken; `read`: the index, and what branches may read."""
    alike = [lambda b=b: as_varying_as(b(), read) for b in branches]
    if platforms is None:
        return lax.switch(read[0], alike)
    named = {p: b for ps, b in zip(platforms, alike, strict=True) for p in ps or ()}
    default = alike[-1] if platforms[-1] is None else None
    return lax.platform_dependent(default=default, **named)


def mixes(node: Node) -> bool:
    """Does it reduce over a tiled axis, or drop one that has a single position?"""
    return node.reduction is not None or (not node.tiled and any(v.tiled for v in node.inputs))


def in_parts(
    graphs: Sequence[Graph], is_cut: Callable[[Node], bool], platforms: Platforms | None
) -> Callable[..., list[Any]] | None:
    """A `cond` with these branches, as a function with what `is_cut` says outside of them.

    None: the `cond` can stay as it is.
    """
    results: list[Column] = list(zip(*(g.outputs for g in graphs), strict=True))
    parts = [_Part(graph, is_cut) for graph in graphs]
    last = max(p.last for p in parts)
    if last == 0 and len({_tiled(column) for column in results}) == 1:
        return None

    def restated(*read: jax.Array) -> list[jax.Array]:
        for part in parts:
            part.begin(read[1:])

        def taken(columns: Sequence[Column]) -> list[jax.Array]:
            found: list[Any] = [None] * len(columns)
            for kind in (True, False):
                places = [i for i, column in enumerate(columns) if _tiled(column) == kind]
                some = [columns[i] for i in places]
                branches = [lambda b=b, p=p: p.run(b, some) for b, p in enumerate(parts)]
                arrays = choose(platforms, read, branches) if places else []
                for i, x in zip(places, arrays, strict=True):
                    found[i] = x
            return found

        for level in range(last):
            handed = [(b, v) for b, p in enumerate(parts) for v in p.handed_on(level)]
            columns = [[v if b == i else None for i in range(len(parts))] for b, v in handed]
            for (b, value), x in zip(handed, taken(columns), strict=True):
                parts[b].there[value] = x
            for part in parts:
                part.apply(part.cuts.get(level, []), part.there)
        return taken(results)

    return restated


def _tiled(column: Column) -> bool:
    return any(v is not None and v.tiled for v in column)


class _Part:
    """One branch: its equations by level, the number of cuts that are before them."""

    def __init__(self, graph: Graph, is_cut: Callable[[Node], bool]):
        self.graph = graph
        self.there: dict[Value, Any] = {}
        """What is known outside the branch."""
        self.cuts: dict[int, list[Node]] = {}
        self._made: dict[Value, int] = {}
        self._read: dict[Value, int] = {}
        """The last level that reads a value."""
        for node in graph.nodes:
            level = max((self._made.get(v.array, 0) for v in node.inputs), default=0)
            if is_cut(node):
                self.cuts.setdefault(level, []).append(node)
                level += 1
            self._made.update(dict.fromkeys(node.outputs, level))
            for value in node.inputs:
                self._read[value.array] = max(level, self._read.get(value.array, 0))
        self.last = max(self.cuts, default=-1) + 1
        self._read.update((v.array, self.last) for v in graph.outputs)

    def begin(self, operands: Sequence[jax.Array]) -> None:
        self.there = dict(zip(self.graph.inputs, operands, strict=True))

    def handed_on(self, level: int) -> list[Value]:
        """What is made at a level, and read by cuts or after them. Keys are made again."""
        return [
            v
            for v, made in self._made.items()
            if made == level
            and self._read.get(v, 0) > level
            and v not in self.there
            and jnp.issubdtype(v.aval.dtype, np.generic)
        ]

    def run(self, branch: int, columns: Sequence[Column]) -> list[jax.Array]:
        """What this branch gives for some results, from what is known outside."""
        there, wanted = dict(self.there), [column[branch] for column in columns]
        needed = {v.array for v in wanted if v is not None}
        nodes = []
        for node in reversed(self.graph.nodes):
            if any(v in needed and v not in there for v in node.outputs):
                nodes.append(node)
                needed.update(v.array for v in node.inputs)
        self.apply(nodes[::-1], there)
        return [
            jnp.zeros(*_shape(column)) if v is None else _strong(_read(there, v))
            for v, column in zip(wanted, columns, strict=True)
        ]

    @staticmethod
    def apply(nodes: Sequence[Node], there: dict[Value, Any]) -> None:
        for node in nodes:
            operands = [_read(there, v) for v in node.inputs]
            there.update(zip(node.outputs, node.equation.bind(*operands), strict=True))


def _read(there: dict[Value, Any], value: Value) -> Any:
    value = value.array
    return there.get(value, value.known)


def _shape(column: Column) -> tuple[Any, Any]:
    return next((v.aval.shape, v.aval.dtype) for v in column if v is not None)


def _strong(x: Any) -> Any:
    """Branches must agree in types, also in whether these are weak."""
    generic = jnp.issubdtype(jax.typeof(x).dtype, np.generic)
    return lax.convert_element_type(x, jax.typeof(x).dtype) if generic else x
