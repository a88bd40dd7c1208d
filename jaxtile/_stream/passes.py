"""The steps of a streamed function: passes over the sources, and equations between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from .._graph.values import Node, Value
from .._regions.regions import Region, Schedule
from .._regions.tile import at, lookup
from .._run.loop import Loop, window
from .ends import Sink, Source, slices

Share = tuple[jax.Array, ...]
"""What a tile gives to a target: its tile; or the state of a reduction, with this tile in it."""


class Globals:
    """Global equations that run between two passes, as one program."""

    def __init__(self, nodes: list[Node], plan: Schedule):
        made = dict.fromkeys(v for node in nodes for v in node.outputs)
        read = [v.array for node in nodes for v in node.inputs]
        elsewhere = {v.array for v in plan.graph.outputs}
        for step in plan.steps:
            if isinstance(step, Region):
                elsewhere.update(v.array for v in (*step.inputs, *step.globals))
            elif step not in nodes:
                elsewhere.update(v.array for v in step.inputs)
        self.nodes = nodes
        self.inputs = [v for v in dict.fromkeys(read) if v not in made and v.known is None]
        self.outputs = [v for v in made if v in elsewhere]
        self.evaluate = jax.jit(self._evaluate)

    def run(self, env: dict[Value, Any]) -> dict[Value, jax.Array]:
        results = self.evaluate([lookup(env, v) for v in self.inputs])
        return dict(zip(self.outputs, results, strict=True))

    def _evaluate(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))
        for node in self.nodes:
            operands = [lookup(env, v.array) for v in node.inputs]
            env.update(zip(node.outputs, node.equation.bind(*operands), strict=True))
        return [env[v] for v in self.outputs]


class Pass:
    """A region whose loop runs on the host: all its tiles, one after the other."""

    def __init__(self, region: Region):
        self.region, self.loop = region, Loop(region)
        self.reductions = [t.reduction.reduction if t.reduction else None for t in region.targets]
        self.step = jax.jit(self._step)

    def run(
        self,
        env: dict[Value, Any],
        sources: dict[Value, Source],
        sinks: dict[Value, list[Sink]],
        tick: Callable[[], Any],
    ) -> dict[Value, jax.Array]:
        """What the pass leaves on the device: results of reductions, and values of one position."""
        targets, rows = self.region.targets, self.loop.rows
        read = [sources.get(v.array) for v in self.region.inputs]
        arrays = [None if v.array in sources else lookup(env, v.array) for v in self.region.inputs]
        globals_ = [lookup(env, v.array) for v in self.region.globals]
        shares: list[Any] = [r.start() if r else None for r in self.reductions]
        before = None
        with ThreadPoolExecutor(1, "jaxtile-read") as reader:
            ahead = reader.submit(self._read, read, rows[0])
            for i, row in enumerate(rows):
                windows = ahead.result()
                if i + 1 < len(rows):
                    ahead = reader.submit(self._read, read, rows[i + 1])
                states = [s if r else None for r, s in zip(self.reductions, shares, strict=True)]
                shares = self.step(states, windows, arrays, globals_, row)
                if before is not None:
                    self._write(*before, sinks)
                    tick()
                before = row, shares
        self._write(row, shares, sinks)
        tick()
        return {
            t.result: r.finish(share) if r else share[0]
            for t, r, share in zip(targets, self.reductions, shares, strict=True)
            if r or t.result not in sinks
        }

    def _step(
        self,
        states: Sequence[Share | None],
        windows: Sequence[jax.Array | None],
        arrays: Sequence[Any],
        globals_: Sequence[jax.Array],
        row: Any,
    ) -> list[Share]:
        """Per target its tile, or the state of a reduction with one more tile.

        Each input of the region is one of the `windows`, or a whole array on the device.
        """
        row = list(row)
        inputs = [
            window(whole, slots, row) if tile is None else tile
            for tile, whole, slots in zip(windows, arrays, self.loop.input_slots, strict=True)
        ]
        return [
            share if state is None else self.loop.merged(k, state, share, row)
            for k, (state, share) in enumerate(
                zip(states, self.loop.shares(inputs, globals_, row), strict=True)
            )
        ]

    def _read(self, sources: Sequence[Source | None], row: Any) -> list[np.ndarray | None]:
        return [
            None if source is None else source.read(slices(slots, row))
            for source, slots in zip(sources, self.loop.input_slots, strict=True)
        ]

    def _write(self, row: Any, shares: Sequence[Share], sinks: dict[Value, list[Sink]]) -> None:
        """Wait for a tile, and write what of it belongs to no other tile."""
        jax.block_until_ready(shares)
        for k, target in enumerate(self.region.targets):
            if target.result not in sinks or target.reduction is not None:
                continue
            tile = np.asarray(shares[k][0])
            place = list(slices(self.loop.result_slots[k], row))
            for d, slot in self.loop.ownership[target.value]:
                place[d] = slice(place[d].start, place[d].start + int(at(slot, row)))
            tile = tile[tuple(slice(p.stop - p.start) for p in place)]
            for sink in sinks[target.result]:
                sink.write(tuple(place), tile)
