"""The steps of a streamed function: passes over the tiles of a region, and equations between them.

Both run forwards and backwards. What a tile computes, in both directions, is what `_run.tile` says;
only the loop is here, on the host: it reads the windows of a tile, hands them to the device, and
writes what comes back, or adds it to what other tiles have found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.values import Value
from .._regions.region import Region
from .._regions.stages import RunStage
from .._regions.tile import at
from .._rules.reductions import accumulation_dtype
from .._run.alike import zero
from .._run.arrays import Wanted, added, select
from .._run.slots import add, filled
from .._run.tile import State, Tile, reducer
from .batches import Batch, batches, stacked
from .ends import Sink, Store, slices
from .held import Active, Held
from .pipeline import Once, Reads, run

Sinks = dict[Value, list[Sink | Store]]
Kept = tuple[list[State], list[Any]]
"""Of reductions: their final states, and what each tile remembers."""


class Pass:
    """A region whose loop runs on the host: all its tiles, one or some after the other.

    `batch_bytes`: what tiles that are computed at once may need.
    """

    def __init__(self, region: Region, run_stage: RunStage, active: Active, batch_bytes: int = 0):
        self.region, self.tile = region, Tile(region, run_stage)
        self.back = self.tile if region.again is None else Tile(region.again, run_stage)
        again = self.back.region
        n, m = len(region.inputs), len(region.globals)
        self.wanted: Wanted = (
            [v.array in active and i < n for i, v in enumerate(again.inputs)],
            [v.array in active and i < m for i, v in enumerate(again.globals)],
        )
        self.differentiated = any(v in active for v in region.results)
        self.reductions = [reducer(t) if t.reduction else None for t in region.targets]
        batched = not (self.differentiated or region.skips)
        self.batch_bytes = batch_bytes if batched else 0
        self.step, self.pull = jax.jit(self._step), jax.jit(self._pull, donate_argnums=0)
        self.steps = jax.jit(self._steps)
        # Where tiles may be skipped, in two programs each: what a tile computes, and adding it up.
        self.found, self.merge = jax.jit(self._found), jax.jit(self._merge)
        self.pulled, self.add = jax.jit(self._pulled), jax.jit(self._add, donate_argnums=0)
        self.skipped = 0
        self.together: list[Batch] = []

    def _skip(self) -> None:
        self.skipped += 1

    def forward(self, held: Held, sinks: Sinks, tick: Callable[[], Any]) -> Kept:
        """What is not written stays on the device: results of reductions, values of one position.

        Returned is what the backward pass must know besides.
        """
        inputs, targets = self.region.inputs, self.region.targets
        reads = Reads(inputs, held.sources(inputs), self.tile.input_slots)
        whole = [held.array(v) for v in inputs], [held.whole(v) for v in self.region.globals]
        rows, once = self.tile.rows, Once(self.tile, self._skip)
        states: list[Any] = [r.start() if r else None for r in self.reductions]
        shares: list[State] = []
        remembered: list[Any] = [None for _ in rows]
        missing = self._missing(sinks)
        for _ in range(len(rows) - len(missing)):
            tick()
        if not missing:
            return [], []

        def read(batch: Batch) -> Any:
            return stacked([reads.windows(rows[i]) for i in batch])

        def compute(batch: Batch, windows: Any) -> Any:
            nonlocal states, shares
            i = batch[0]
            if len(batch) > 1:
                shares, notes = self.steps(states, windows, whole, rows[list(batch)]), []
            elif not once.skips:
                shares, notes = self.step(states, windows, whole, rows[i])
            else:
                found = once(i, (windows,), lambda: self.found(windows, whole, rows[i]))
                shares, notes = self.merge(states, *found, rows[i])
            states = [s if r else None for r, s in zip(self.reductions, shares, strict=True)]
            return shares, notes

        def write(batch: Batch, found: Any) -> None:
            remembered[batch[0]] = jax.device_get(found[1])
            for n, i in enumerate(batch):
                if i in missing:
                    self._write(rows[i], found[0], sinks, n if len(batch) > 1 else ...)

        def done(batch: Batch) -> None:
            for _ in missing.intersection(batch):
                tick()

        order = self._order(once, (reads.shapes, whole))
        self._compile(order, (states, reads.shapes, whole))
        run([b for b in order if missing.intersection(b)], read, compute, write, done)
        for target, reduction, share in zip(targets, self.reductions, shares, strict=True):
            if reduction or target.result not in sinks:
                held.arrays[target.result] = reduction.finish(share) if reduction else share[0]
        return [s for s in states if s is not None], remembered

    def _order(self, once: Once, given: Any) -> list[Batch]:
        """All tiles, as they are computed: after each other, or some at once."""
        once.prepare(self._found, given)
        if once.skips:
            return [(i,) for i in once.order]
        if not self.together:
            self.together = batches(self._found, given, self.tile.rows, self.batch_bytes)
        return self.together

    def _compile(self, order: Sequence[Batch], given: tuple[Any, Any, Any]) -> None:
        """Compile what computes batches, so that the first of them takes as long as the others."""
        states, windows, whole = given
        size = max(map(len, order))
        if size > 1:
            several = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), windows
            )
            self.steps.lower(states, several, whole, self.tile.rows[:size]).compile()

    def _step(self, states: Sequence[State | None], windows: Any, whole: Any, row: Any) -> Any:
        return self._merge(states, *self._found(windows, whole, row), row)

    def _found(
        self,
        windows: Sequence[jax.Array | None],
        whole: tuple[Sequence[Any], Sequence[jax.Array]],
        row: Any,
    ) -> tuple[list[State], list[State]]:
        """What a tile gives to each target, and what reductions remember of it.

        Each input of the region is one of the `windows`, or a whole array on the device.
        """
        row, (arrays, globals_) = list(row), whole
        inputs = filled(windows, self.tile.windows(arrays, row))
        wanted = None
        if self.differentiated:
            wanted = self.wanted[0][: len(inputs)], self.wanted[1][: len(globals_)]
        found = self.tile.shares(inputs, globals_, row, wanted)
        reductions = zip(self.reductions, found, strict=True)
        notes = [r.remember(s) for r, s in reductions if r is not None and self.differentiated]
        return found, notes

    def _merge(
        self, states: Sequence[State | None], found: list[State], notes: list[State], row: Any
    ) -> tuple[list[State], list[State]]:
        """Per target its tile, or the state of a reduction with one more tile; and the notes."""
        shares = [
            share if state is None else self.tile.merged(k, state, share, list(row))
            for k, (state, share) in enumerate(zip(states, found, strict=True))
        ]
        return shares, notes

    def _steps(self, states: Sequence[Any], windows: Any, whole: Any, rows: Any) -> list[State]:
        """As `_step`, of tiles that differ in their windows alone: per target all their tiles, or
        the state of a reduction with so many tiles more.
        """
        found = jax.vmap(lambda windows: self._found(windows, whole, rows[0])[0])(windows)
        for n in range(len(rows)):
            own = [tuple(x[n] for x in share) for share in found]
            merged, _ = self._merge(states, own, [], rows[n])
            states = [None if s is None else m for s, m in zip(states, merged, strict=True)]
        return [f if s is None else s for f, s in zip(found, states, strict=True)]

    def _write(self, row: Any, shares: Sequence[State], sinks: Sinks, number: Any = ...) -> None:
        """Wait for a tile, and write what of it belongs to no other tile. `number`: in its batch,
        if it has one.
        """
        for k, target in enumerate(self.region.targets):
            if target.result not in sinks or target.reduction is not None:
                continue
            place = self._place(k, row)
            tile = np.asarray(shares[k][0])[number]
            tile = tile[tuple(slice(p.stop - p.start) for p in place)]
            for sink in sinks[target.result]:
                sink.write(place, tile)

    def _place(self, k: int, row: Any) -> tuple[slice, ...]:
        """Where the part of a target lies that belongs to this tile and no other."""
        place = list(slices(self.tile.result_slots[k], row))
        for d, slot in self.tile.ownership[self.region.targets[k].value]:
            place[d] = slice(place[d].start, place[d].start + int(at(slot, row)))
        return tuple(place)

    def _missing(self, sinks: Sinks) -> set[int]:
        """The tiles that have to be computed: all but those whose results are there already."""
        places = [sinks.get(t.result, ()) for t in self.region.targets]
        if not all(places) or any(self.reductions):
            return set(range(len(self.tile.rows)))

        def there(row: Any) -> bool:
            return all(s.has(self._place(k, row)) for k, found in enumerate(places) for s in found)

        return {i for i, row in enumerate(self.tile.rows) if not there(row)}

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
        region, tile, rows = self.back.region, self.back, self.back.rows
        results, inputs = region.results, region.inputs
        reads = Reads(inputs, held.sources(inputs), tile.input_slots)
        given = Reads(results, cotangents.sources(results), tile.result_slots)
        whole = (
            [held.array(v) for v in inputs],
            [held.whole(v) for v in region.globals],
            [cotangents.arrays.get(v) for v in results],
            kept[0],
        )
        into = self._into(held, cotangents, store)
        carry = self._zeros(into, whole[1])
        once = Once(tile, self._skip)
        nothing = once.skips and bool(zero(whole[2]))

        def read(i: int) -> Any:
            return reads.windows(rows[i]), given.windows(rows[i])

        def compute(i: int, windows: Any) -> Any:
            nonlocal carry
            note = kept[1][min(i, len(kept[1]) - 1)]  # with fewer tiles forwards, all are empty
            if not once.skips:
                carry, found = self.pull(carry, windows, whole, note, rows[i])
                return found
            if nothing and zero(windows[1]):
                self._skip()
                return []
            pulled = once(i, (*windows, note), lambda: self.pulled(windows, whole, note, rows[i]))
            carry, found = self.add(carry, pulled, rows[i])
            return found

        def write(i: int, found: Any) -> None:
            for k, x in enumerate(found):
                if (target := into[k]) is not None:
                    target.add(slices(tile.input_slots[k], rows[i]), np.asarray(x))

        once.prepare(self._pulled, ((reads.shapes, given.shapes), whole, kept[1][0]))
        run(once.order, read, compute, write, lambda _: tick())
        summed = [*inputs, *select(region.globals, self.wanted[1])]
        for value, x in zip(summed, [*carry[0], *carry[1]], strict=True):
            if x is not None:
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
        return self._add(carry, self._pulled(windows, whole, note, row), row)

    def _pulled(self, windows: Any, whole: Any, note: Any, row: Any) -> Any:
        """The cotangents of the wanted inputs' windows, and of the wanted globals."""
        row, tile = list(row), self.back
        (tiles, given), (arrays, globals_, cotangents, states) = windows, whole
        inputs = tile.with_passing(filled(tiles, tile.windows(arrays, row)), globals_, row)
        given = added(given, tile.result_windows(cotangents, row))
        given = [
            None if c is None else c.astype(t.result.aval.dtype)
            for c, t in zip(given, tile.region.targets, strict=True)
        ]
        values, pull = tile.pullback(inputs, globals_, self.wanted, row)
        return pull(tile.cotangent_shares(values, states, note, given, row))

    def _add(self, carry: Any, pulled: Any, row: Any) -> Any:
        """The sums with one more tile, and the cotangents of its windows."""
        sums, of_windows, rest = [], [], iter(pulled[0])
        slots_and_wanted = zip(carry[0], self.back.input_slots, self.wanted[0], strict=True)
        for total, slots, wanted in slots_and_wanted:
            share = next(rest) if wanted else None
            sums.append(None if total is None else add(total, cast(Any, share), slots, list(row)))
            of_windows.append(share if total is None else None)
        totals = [t + g.astype(t.dtype) for t, g in zip(carry[1], pulled[1], strict=True)]
        return (sums, totals), of_windows
