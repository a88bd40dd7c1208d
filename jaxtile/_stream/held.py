"""What is there between the passes of a streamed function, and the equations that run there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._graph.values import Node, Value
from .._regions.region import Region
from .._regions.regions import Schedule
from .._regions.tile import lookup
from .._run.arrays import cotangent_of, pulled, select
from .ends import Source, Store, all_of

Active = set[Value]
"""The arrays that have cotangents."""


@dataclasses.dataclass
class Held:
    """What is there while passes run: arrays on the device, and arrays that are read by window."""

    arrays: dict[Value, Any] = dataclasses.field(default_factory=dict)
    by_window: dict[Value, Source | Store] = dataclasses.field(default_factory=dict)

    def array(self, value: Value) -> Any:
        """On the device; None if it is read by window, or not there."""
        value = value.array
        if value in self.by_window or (value not in self.arrays and value.known is None):
            return None
        return lookup(self.arrays, value)

    def sources(self, values: Sequence[Value]) -> list[Source | Store | None]:
        """Per value, what it is read from by window, if it is."""
        return [self.by_window.get(v.array) for v in values]

    def whole(self, value: Value) -> Any:
        """On the device, for equations that mix positions of what is stored."""
        store = self.by_window.get(value.array)
        if store is None:
            return lookup(self.arrays, value.array)
        return jnp.asarray(store.read(all_of(value.array)))

    def add(self, value: Value, x: jax.Array) -> None:
        """Add to a cotangent on the device."""
        there = self.arrays.get(value.array)
        self.arrays[value.array] = x if there is None else there + x

    def drop(self, values: Sequence[Value]) -> None:
        """Nobody reads these any more."""
        for value in values:
            found = self.by_window.pop(value, None)
            if isinstance(found, Store):
                found.close()


class Globals:
    """Global equations that run between two passes, as one program."""

    def __init__(self, nodes: list[Node], schedule: Schedule, active: Active):
        made = dict.fromkeys(v for node in nodes for v in node.outputs)
        read = [v.array for node in nodes for v in node.inputs]
        elsewhere = {v.array for v in schedule.graph.outputs}
        for step in schedule.flat:
            if isinstance(step, Region):
                for region in filter(None, (step, step.again)):
                    elsewhere.update(v.array for v in (*region.inputs, *region.globals))
            elif step not in nodes:
                elsewhere.update(v.array for v in step.inputs)
        self.nodes = nodes
        self.inputs = [v for v in dict.fromkeys(read) if v not in made and v.known is None]
        self.outputs = [v for v in made if v in elsewhere]
        self.wanted = [v in active for v in self.inputs]
        self.active = [v in active for v in self.outputs]
        self.evaluate = jax.jit(self._evaluate)
        self.pull = jax.jit(self._pull)

    def forward(self, held: Held) -> None:
        results = self.evaluate([held.whole(v) for v in self.inputs])
        held.arrays.update(zip(self.outputs, results, strict=True))

    def backward(self, held: Held, cotangents: Held) -> None:
        given = [cotangents.arrays.get(v) for v in select(self.outputs, self.active)]
        if any(self.wanted) and any(c is not None for c in given):
            found = self.pull([held.whole(v) for v in self.inputs], given)
            for value, x in zip(select(self.inputs, self.wanted), found, strict=True):
                cotangents.add(value, x)

    def _evaluate(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))
        for node in self.nodes:
            operands = [lookup(env, v.array) for v in node.inputs]
            env.update(zip(node.outputs, node.equation.bind(*operands), strict=True))
        return [env[v] for v in self.outputs]

    def _pull(
        self, arrays: Sequence[jax.Array], cotangents: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        def some(arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return select(self._evaluate(arrays), self.active)

        results, pull = pulled(some, (arrays,), (self.wanted,))
        return pull(list(map(cotangent_of, results, cotangents)))[0]
