"""The steps of a streamed function: passes over the tiles of a region, and equations between them.

Both run forwards and backwards. What a tile computes, in both directions, is what `_run.loop` says;
only the loop is here, on the host: it reads the windows of a tile, hands them to the device, and
writes what comes back, or adds it to what other tiles have found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.values import Node, Value
from .._regions.regions import Region, Schedule
from .._regions.stages import RunStage
from .._regions.tile import at, lookup
from .._rules.reductions import accumulation_dtype
from .._run.loop import Loop, Slots, add, reducer
from .._run.recompute import Wanted, added, partly, select, zero_cotangent
from .ends import Sink, Source, Store, all_of, slices

Share = tuple[jax.Array, ...]
"""What a tile gives to a target: its tile; or the state of a reduction, with this tile in it."""
Active = set[Value]
"""The arrays that have cotangents."""
Kept = tuple[list[Share], list[Any]]
"""Of reductions: their final states, and what each tile remembers."""


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

    def __init__(self, nodes: list[Node], plan: Schedule, active: Active):
        made = dict.fromkeys(v for node in nodes for v in node.outputs)
        read = [v.array for node in nodes for v in node.inputs]
        elsewhere = {v.array for v in plan.graph.outputs}
        for step in plan.flat:
            if isinstance(step, Region):
                for region in filter(None, (step, step.again)):
                    elsewhere.update(v.array for v in (*region.inputs, *region.globals))
            elif step not in nodes:
                elsewhere.update(v.array for v in step.inputs)
        self.nodes = nodes
        self.inputs = [v for v in dict.fromkeys(read) if v not in made and v.known is None]
        self.outputs = [v for v in made if v in elsewhere]
        self.wanted = [v in active for v in self.inputs]
        self.evaluate = jax.jit(self._evaluate)
        self.pull = jax.jit(self._pull)

    def forward(self, held: Held) -> None:
        results = self.evaluate([held.whole(v) for v in self.inputs])
        held.arrays.update(zip(self.outputs, results, strict=True))

    def backward(self, held: Held, cotangents: Held) -> None:
        given = [cotangents.arrays.get(v) for v in self.outputs]
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
        function, primals = partly(self._evaluate, (arrays,), (self.wanted,))
        results, pull = jax.vjp(function, *primals)
        found: list[jax.Array] = pull(
            [
                zero_cotangent(x) if c is None else c.astype(x.dtype)
                for x, c in zip(results, cotangents, strict=True)
            ]
        )[0]
        return found


class Pass:
    """A region whose loop runs on the host: all its tiles, one after the other."""

    def __init__(self, region: Region, run_stage: RunStage, active: Active):
        self.region, self.loop = region, Loop(region, run_stage)
        self.back = self.loop if region.again is None else Loop(region.again, run_stage)
        again = self.back.region
        n, m = len(region.inputs), len(region.globals)
        self.wanted: Wanted = (
            [v.array in active and i < n for i, v in enumerate(again.inputs)],
            [v.array in active and i < m for i, v in enumerate(again.globals)],
        )
        self.differentiated = any(v in active for v in region.results)
        self.reductions = [reducer(t) if t.reduction else None for t in region.targets]
        self.step = jax.jit(self._step)
        self.pull = jax.jit(self._pull, donate_argnums=0)

    def forward(
        self, held: Held, sinks: dict[Value, list[Sink | Store]], tick: Callable[[], Any]
    ) -> Kept:
        """What is not written stays on the device: results of reductions, values of one position.

        Returned is what the backward pass must know besides.
        """
        inputs, targets = self.region.inputs, self.region.targets
        sources = [held.by_window.get(v.array) for v in inputs]
        whole = [held.array(v) for v in inputs], [held.whole(v) for v in self.region.globals]
        states: list[Any] = [r.start() if r else None for r in self.reductions]
        shares: list[Share] = []
        remembered: list[Any] = []
        rows = self._missing(sinks)
        for _ in range(len(self.loop.rows) - len(rows)):
            tick()
        if not len(rows):
            return [], []

        def read(row: Any) -> Any:
            return _windows(sources, self.loop.input_slots, row)

        def compute(i: int, windows: Any) -> Any:
            nonlocal states, shares
            shares, notes = self.step(states, windows, whole, rows[i])
            states = [s if r else None for r, s in zip(self.reductions, shares, strict=True)]
            return shares, notes

        def write(row: Any, found: Any) -> None:
            remembered.append(jax.device_get(found[1]))
            self._write(row, found[0], sinks)

        _run(rows, read, compute, write, tick)
        for target, reduction, share in zip(targets, self.reductions, shares, strict=True):
            if reduction or target.result not in sinks:
                held.arrays[target.result] = reduction.finish(share) if reduction else share[0]
        return [s for s in states if s is not None], remembered

    def _step(
        self,
        states: Sequence[Share | None],
        windows: Sequence[jax.Array | None],
        whole: tuple[Sequence[Any], Sequence[jax.Array]],
        row: Any,
    ) -> tuple[list[Share], list[Share]]:
        """Per target its tile, or the state of a reduction with one more tile; and what reductions
        remember of this tile.

        Each input of the region is one of the `windows`, or a whole array on the device.
        """
        row, (arrays, globals_) = list(row), whole
        inputs = _filled(windows, self.loop.windows(arrays, row))
        wanted = None
        if self.differentiated:
            wanted = self.wanted[0][: len(inputs)], self.wanted[1][: len(globals_)]
        found = self.loop.shares(inputs, globals_, row, wanted)
        shares = [
            share if state is None else self.loop.merged(k, state, share, row)
            for k, (state, share) in enumerate(zip(states, found, strict=True))
        ]
        reductions = zip(self.reductions, found, strict=True)
        notes = [r.remember(s) for r, s in reductions if r is not None and self.differentiated]
        return shares, notes

    def _write(
        self, row: Any, shares: Sequence[Share], sinks: dict[Value, list[Sink | Store]]
    ) -> None:
        """Wait for a tile, and write what of it belongs to no other tile."""
        for k, target in enumerate(self.region.targets):
            if target.result not in sinks or target.reduction is not None:
                continue
            place = self._place(k, row)
            tile = np.asarray(shares[k][0])[tuple(slice(p.stop - p.start) for p in place)]
            for sink in sinks[target.result]:
                sink.write(place, tile)

    def _place(self, k: int, row: Any) -> tuple[slice, ...]:
        """Where the part of a target lies that belongs to this tile and no other."""
        place = list(slices(self.loop.result_slots[k], row))
        for d, slot in self.loop.ownership[self.region.targets[k].value]:
            place[d] = slice(place[d].start, place[d].start + int(at(slot, row)))
        return tuple(place)

    def _missing(self, sinks: dict[Value, list[Sink | Store]]) -> np.ndarray:
        """The tiles that have to be computed: all but those whose results are there already."""
        places = [sinks.get(t.result, ()) for t in self.region.targets]
        if not all(places) or any(self.reductions):
            return self.loop.rows

        def there(row: Any) -> bool:
            return all(s.has(self._place(k, row)) for k, found in enumerate(places) for s in found)

        return self.loop.rows[[not there(row) for row in self.loop.rows]]

    def backward(
        self,
        held: Held,
        cotangents: Held,
        kept: Kept,
        store: Callable[[Value], Store],
        tick: Callable[[], Any],
    ) -> None:
        """Add to the cotangents of what the region reads, from those of what it computes.

        `store` makes room for the cotangents of a value that is read by window.
        """
        region, loop = self.back.region, self.back
        results, inputs = region.results, region.inputs
        sources = [held.by_window.get(v.array) for v in inputs]
        given = [cotangents.by_window.get(v) for v in results]
        whole = (
            [held.array(v) for v in inputs],
            [held.whole(v) for v in region.globals],
            [cotangents.arrays.get(v) for v in results],
            kept[0],
        )
        into = self._into(held, cotangents, store)
        carry = self._zeros(into, whole[1])

        def read(row: Any) -> Any:
            return (
                _windows(sources, loop.input_slots, row),
                _windows(given, loop.result_slots, row),
            )

        def compute(i: int, windows: Any) -> Any:
            nonlocal carry
            note = kept[1][min(i, len(kept[1]) - 1)]  # with fewer tiles forwards, all are empty
            carry, found = self.pull(carry, windows, whole, note, loop.rows[i])
            return found

        def write(row: Any, found: Any) -> None:
            for i, x in enumerate(found):
                if (target := into[i]) is not None:
                    target.add(slices(loop.input_slots[i], row), np.asarray(x))

        _run(loop.rows, read, compute, write, tick)
        for value, x in zip(inputs, carry[0], strict=True):
            if x is not None:
                cotangents.add(value, x)
        for value, x in zip(select(region.globals, self.wanted[1]), carry[1], strict=True):
            cotangents.add(value, x)

    def _into(
        self, held: Held, cotangents: Held, store: Callable[[Value], Store]
    ) -> list[Store | None]:
        """Per input, where its cotangents are added up; None: on the device, or nowhere."""
        found: list[Store | None] = []
        for value, wanted in zip(self.back.region.inputs, self.wanted[0], strict=True):
            array = value.array
            if not wanted or held.array(array) is not None:
                found.append(None)
                continue
            if array not in cotangents.by_window:
                cotangents.by_window[array] = store(array)
            there = cotangents.by_window[array]
            assert isinstance(there, Store)
            found.append(there)
        return found

    def _zeros(self, into: Sequence[Store | None], globals_: Sequence[jax.Array]) -> Any:
        """What cotangents are added up in on the device: of whole inputs, and of globals."""
        sums = [
            jnp.zeros(v.aval.shape, accumulation_dtype(v.aval.dtype)) if w and s is None else None
            for v, w, s in zip(self.back.region.inputs, self.wanted[0], into, strict=True)
        ]
        wanted = select(globals_, self.wanted[1])
        return sums, [jnp.zeros(x.shape, accumulation_dtype(x.dtype)) for x in wanted]

    def _pull(self, carry: Any, windows: Any, whole: Any, note: Any, row: Any) -> Any:
        """The sums with one more tile, and the cotangents of its windows."""
        row, loop = list(row), self.back
        (tiles, given), (arrays, globals_, cotangents, states) = windows, whole
        inputs = _filled(tiles, loop.windows(arrays, row))
        given = added(given, loop.result_windows(cotangents, row))
        given = [
            None if c is None else c.astype(t.result.aval.dtype)
            for c, t in zip(given, loop.region.targets, strict=True)
        ]
        values, pull = loop.tile(inputs, globals_, self.wanted, row)
        pulled, of_globals = pull(loop.cotangent_shares(values, states, note, given, row))
        sums, of_windows, rest = [], [], iter(pulled)
        for total, slots, wanted in zip(carry[0], loop.input_slots, self.wanted[0], strict=True):
            share = next(rest) if wanted else None
            sums.append(None if total is None else add(total, cast(Any, share), slots, row))
            of_windows.append(share if total is None else None)
        totals = [t + g.astype(t.dtype) for t, g in zip(carry[1], of_globals, strict=True)]
        return (sums, totals), of_windows


def _run(
    rows: np.ndarray,
    read: Callable[[Any], Any],
    compute: Callable[[int, Any], Any],
    write: Callable[[Any, Any], None],
    tick: Callable[[], Any],
) -> None:
    """While the device computes a tile, one thread reads the next, and another writes the last."""
    with (
        ThreadPoolExecutor(1, "jaxtile-read") as reader,
        ThreadPoolExecutor(1, "jaxtile-write") as writer,
    ):
        ahead, behind = reader.submit(read, rows[0]), None
        for i, row in enumerate(rows):
            windows = ahead.result()
            if i + 1 < len(rows):
                ahead = reader.submit(read, rows[i + 1])
            found = compute(i, windows)
            if behind is not None:
                behind.result()
                tick()
            behind = writer.submit(write, row, found)
        if behind is not None:
            behind.result()
            tick()


def _windows(
    sources: Sequence[Source | Store | None], slots: Sequence[Slots], row: Any
) -> list[np.ndarray | None]:
    return [
        None if source is None else source.read(slices(where, row))
        for source, where in zip(sources, slots, strict=True)
    ]


def _filled(windows: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The windows that were read, and those of whole arrays."""
    return [o if w is None else w for w, o in zip(windows, others, strict=True)]
