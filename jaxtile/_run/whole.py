"""Equations on whole arrays, and once more in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from .._graph.values import Node, Value
from .._regions.region import Group, Region
from .._regions.tile import lookup, with_value
from .._rules.clamp import clamped
from .._rules.manual import alike
from .arrays import (
    Array,
    Arrays,
    Cotangents,
    Tangents,
    Wanted,
    added,
    cotangent_of,
    like,
    pulled,
    pushed,
    select,
)
from .ordering import after, one_array, settled
from .recompute import RECOMPUTED, Given, Saved

Statistics = Mapping[Value, Array]
"""Results, of reductions for example, that are known from the first time."""
_NONE: Statistics = MappingProxyType({})
_LARGE = 2**24  # bytes; smaller arrays are added in one piece
Compute = Callable[[dict[Value, Any], Statistics], list[Array]]
"""Extends a mapping from values to arrays by all that is computed, and returns the results."""


class Whole:
    """A region, or a group of them, that runs in one go, and once more in the backward pass.

    What its reductions give, the statistics of norms for example, is small. So it is kept, and the
    backward pass need not read all positions for it again.
    """

    def __init__(self, region: Region | Group, compute: Compute, first: Compute | None = None):
        """`first`: the same, for the forward pass."""
        self.region, self.compute, self.first = region, compute, first or compute
        self.statistics = region.statistics

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        if wanted is not None and self.region.changes_value:
            return pulled(self._evaluated(_NONE), (inputs, globals_), wanted)[0], None
        env = environment(self.region, inputs, globals_)
        return self.first(env, _NONE), [env[v] for v in self.statistics]

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        # Sums that others have begun are complete first: their loops would run beside this.
        before = [*given.cotangents, *given.begun]
        inputs, globals_ = after((saved.inputs, saved.globals), before)
        kept = () if saved.kept is None else zip(self.statistics, saved.kept, strict=True)
        with jax.named_scope(RECOMPUTED):
            inputs = with_passing(self.region, inputs, globals_)
            run = self._evaluated(dict(kept))
            results, pull = pulled(run, (inputs, globals_), given.wanted)
        of_inputs, of_globals = pull(list(map(cotangent_of, results, given.cotangents)))
        want_inputs, want_globals = given.wanted
        return (
            added(like(self.region.inputs, want_inputs, of_inputs), given.begun, _added_into),
            like(self.region.globals, want_globals, of_globals),
        )

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        inputs = with_passing(self.region, saved.inputs, saved.globals)
        found = pushed(self._evaluated(_NONE), (inputs, saved.globals), tangents)[1]
        return [None if t.dtype == jax.dtypes.float0 else t for t in found]

    def _evaluated(self, statistics: Statistics) -> Callable[[Arrays, Arrays], list[Array]]:
        def evaluated(inputs: Arrays, globals_: Arrays) -> list[Array]:
            return self.compute(environment(self.region, inputs, globals_), statistics)

        return evaluated


def _computed(node: Node, operands: Arrays) -> Sequence[Array]:
    """The results of an equation. The gradient of a maximum goes to the elements that equal it. XLA
    may compute these once for the maximum and once for the comparison, and round in two ways; then
    none of them does, and the gradient is 0 / 0. So they are arrays first.
    """
    if node.reduction is not None and not node.reduction.adds:
        operands = list(map(one_array, operands))
    return node.equation.bind(*operands)


def _added_into(begun: Array, cotangent: Array) -> Array:
    """The sum, in the place of what was begun. On a GPU, XLA adds results of libraries to a third
    array, but for loops.
    """
    if begun.nbytes < _LARGE:
        return begun + cotangent
    begun, cotangent = alike([begun, cotangent], ())
    return lax.platform_dependent(begun, cotangent, cpu=lax.add, default=by_halves)


def by_halves(total: Array, x: Array) -> Array:
    """The sum of two arrays, of which the first is written over if a dimension can be halved."""
    dim = next((d for d, n in enumerate(total.shape) if n % 2 == 0), None)
    if dim is None:
        return total + x
    size = total.shape[dim] // 2

    def half(i: Any, total: Array) -> Array:
        one, other = (lax.dynamic_slice_in_dim(a, i * size, size, dim) for a in (total, x))
        return lax.dynamic_update_slice_in_dim(total, one + other, i * size, dim)

    return lax.fori_loop(0, 2, half, total)


def environment(
    region: Region | Group, inputs: Sequence[Any], globals_: Arrays
) -> dict[Value, Any]:
    """The values that a region knows at its beginning, and so not those that are passing."""
    env = {v: x for v, x in zip(region.inputs, inputs, strict=True) if x is not None}
    env.update(zip(region.globals, globals_, strict=True))
    return env


def with_passing(region: Region | Group, inputs: Arrays, globals_: Arrays) -> Arrays:
    """The inputs, and those that are passing computed again, whole."""
    if not region.before:
        return inputs
    env = environment(region, inputs, globals_)
    _apply(region.before, env)
    passing = select(region.inputs, region.passing)
    # Otherwise the compiler may hold what they are computed from, to compute them once per reader.
    env.update(zip(passing, settled([env[v] for v in passing]), strict=True))
    return [env[v] for v in region.inputs]


def evaluate(region: Region, env: dict[Value, Any], statistics: Statistics) -> list[Array]:
    """The equations of a region, whole; `env` is extended by all that they compute.

    Results that are among its inputs are known: only their derivatives are those of the equations.
    """
    given = {v: env.pop(v) for v in region.results if v in env and v in region.inputs}
    given |= {v.clamp.outputs[0]: x for v, x in given.items() if v.clamp is not None}
    read = _apply(region.nodes, env, {**statistics, **given})
    return [
        read(t.result)
        if t.reduction is None or t.result in env
        else _computed(t.reduction, [read(v) for v in t.operands])[0]
        for t in region.targets
    ]


def _apply(
    nodes: Iterable[Node], env: dict[Value, Any], statistics: Statistics = _NONE
) -> Callable[[Value], Array]:
    """Extend `env` by what these equations compute, whole; and how to read in it."""

    def read(value: Value) -> Array:
        return lookup(env, value if value in env else value.array)

    for node in nodes:
        if any(v not in env for v in node.outputs):
            operands = [*map(read, node.inputs)]
            result = statistics.get(node.outputs[0])
            if node.forgets_operand and result is not None:
                env[node.outputs[0]] = clamped(node.equation.params, operands[0], result)
                continue
            results = _computed(node, operands)
            for value, x in zip(node.outputs, results, strict=True):
                env[value] = with_value(x, statistics[value]) if value in statistics else x
    return read
