"""Run a group of regions, and once more in the backward pass, before they are differentiated."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from .._graph.values import Value
from .._regions.region import Group, Region
from .recompute import (
    RECOMPUTED,
    Array,
    Arrays,
    Cotangents,
    Tangents,
    Wanted,
    added,
    after,
    environment,
    fill_in,
    like,
    pushed,
    select,
    with_passing,
    zero_cotangent,
)


class RunSteps(Protocol):
    """Extends a mapping from values to arrays by what steps compute."""

    def __call__(self, steps: Any, env: dict[Value, Any], *, statistics: Any = None) -> None: ...


class Grouped:
    """A group: its residuals are its inputs, and the statistics of norms, which are small."""

    def __init__(self, group: Group, run: RunSteps):
        self.region, self.run = group, run
        regions = [step for step in group.steps if isinstance(step, Region)]
        self.statistics = [
            t.result for r in regions for t in r.targets if t.reduction and not t.result.tiled
        ]

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        env = environment(self.region, inputs, globals_)
        self.run(self.region.steps, env)
        return [env[v] for v in self.region.results], [env[v] for v in self.statistics]

    def backward(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        begun: Cotangents,
        wanted: Wanted,
    ) -> tuple[Cotangents, Cotangents]:
        inputs, globals_ = after((inputs, globals_), [c for c in cotangents if c is not None])
        known = dict(zip(self.statistics, kept, strict=True))

        def evaluate(some_inputs: Arrays, some_globals: Arrays) -> list[Array]:
            env = environment(
                self.region,
                fill_in(inputs, wanted[0], some_inputs),
                fill_in(globals_, wanted[1], some_globals),
            )
            self.run(self.region.steps, env, statistics=known)
            return [env[v] for v in self.region.results]

        with jax.named_scope(RECOMPUTED):
            inputs = with_passing(self.region, inputs, globals_)
            results, pull = jax.vjp(
                evaluate, select(inputs, wanted[0]), select(globals_, wanted[1])
            )
        of_inputs, of_globals = pull(
            [
                zero_cotangent(x) if c is None or c.dtype == jax.dtypes.float0 else c
                for x, c in zip(results, cotangents, strict=True)
            ]
        )
        return (
            added(like(self.region.inputs, wanted[0], of_inputs), begun),
            like(self.region.globals, wanted[1], of_globals),
        )

    def tangents(
        self, inputs: Arrays, globals_: Arrays, kept: Any, tangents: Tangents
    ) -> Cotangents:
        def evaluate(inputs: Arrays, globals_: Arrays) -> list[Array]:
            env = environment(self.region, inputs, globals_)
            self.run(self.region.steps, env)
            return [env[v] for v in self.region.results]

        inputs = with_passing(self.region, inputs, globals_)
        return pushed(evaluate, (inputs, globals_), tangents)
