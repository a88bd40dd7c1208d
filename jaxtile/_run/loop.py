"""Run a region: one loop over its tiles, and one more loop for its derivative.

The forward loop reads windows of the inputs, computes a tile, and writes the targets' tiles in
place. It keeps nothing else, but for what a reduction must remember (`Reduction.remember`). The
backward loop reads the same windows, recomputes the tile, takes this tile's share of the targets'
cotangents, pulls it back through the tile, and adds the result into place. Each element of a target
belongs to one tile, so nothing is counted twice.

`Loop.forward` and `Loop.backward` are called by `recompute`, `Loop.at_once` for a loss. The steps
of a loop for a tile are in `forwards` and `backwards`, what they have in common in `tile`, and the
order of tiles in `scans`.

The sum of the cotangents of a stored array is one array of its size, however many regions read it:
each adds to what the others have begun. Where every tile reads its own part of an input, and writes
the same part of a result (a skip connection), the backward loop puts the input's cotangents where
it has just read the result's: one array for both. So does the forward loop with such an input that
is passing.

Known inefficiency: the backward loop holds the residuals of a whole tile, not of a part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax import lax

from .._graph.values import Value, is_float
from .._platform import on_early_cpu
from .._regions.region import Region
from .._regions.stages import RunStage
from .._regions.targets import Target
from .._rules.manual import as_varying_as
from .._rules.reductions import accumulation_dtype
from .arrays import Array, Arrays, Cotangents, Tangents, Wanted, like, select, there
from .backwards import Backwards, Into, Sums, put_in
from .both import Both
from .forwards import Forwards, Written
from .in_place import are_parts, chosen, places
from .ordering import after, on_host, zeros_after
from .recompute import Given, Saved
from .scans import over_tiles, scan, skipping_some
from .slots import Row, Zeros, add, allocated_on_host, write, zeros_on_host
from .tile import Layout, State, Tile, reducer
from .work import Work


class Loop:
    """The function of a region: inputs and globals to results, tile by tile, and its derivative."""

    def __init__(
        self,
        region: Region,
        run_stage: RunStage,
        layout: Layout | None = None,
        hosted: Collection[Value] = (),
        passing: Collection[Value] = (),
    ):
        """`hosted`: results that are written to host memory, and nowhere else; `passing`: values
        that are not kept.
        """
        self.region, self.tile, self.passing = region, Tile(region, run_stage, layout), passing
        self.hosted = [t.reduction is None and t.result in hosted for t in region.targets]
        windows = self.tile.plan.windows
        self.parted = [are_parts(region, v, windows.get(v, {})) for v in region.inputs]
        self.places = places(region, self.tile.cuts)
        self.rows = self.tile.rows
        self.on_mesh = layout is not None

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        return self.finished(*self.accumulate(inputs, globals_, jnp.asarray(self.rows), wanted))

    def accumulate(
        self, inputs: Arrays, globals_: Arrays, rows: Array, wanted: Wanted | None
    ) -> tuple[list[State], list[State]]:
        """Per target its value, or the state of a reduction; and what each tile remembers.

        `wanted`: what is being differentiated, if anything is.
        """
        work, carry = self._forwards(inputs, globals_, wanted, self._replaced(inputs))
        carry, rows = as_varying_as((carry, rows), [*inputs, *globals_])
        return self._scan(work, carry, (rows,))

    def _forwards(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None, replaced: Mapping[int, int]
    ) -> tuple[Forwards, list[State]]:
        """What the forward loop does, and what it begins with."""
        targets = self.region.targets
        # In host memory, zeros of each loop must differ, and several may read the same first input.
        newest = inputs[::-1], globals_[::-1]
        zeros = zeros_after(*(newest if any(self.hosted) else [[*inputs, *globals_]]))
        carry = [
            self._start(t) if t.reduction else (self._empty(k, t.value.aval.dtype, zeros),)
            for k, t in enumerate(targets)
        ]
        for i, k in replaced.items():
            carry[k] = (inputs[i],)
        written = Written(self.hosted, replaced, zeros)
        return Forwards(self.tile, inputs, globals_, wanted, written), carry

    def _scan(self, work: Work, carry: Any, xs: Any) -> tuple[Any, Any]:
        if self.region.skips and len(self.rows) > 1:
            return skipping_some(work, carry, xs, self.rows, self.tile.kinds)
        if self.on_mesh:  # each has other tiles, in one program
            return scan(work.body, carry, xs)
        return over_tiles(work, carry, xs, self.rows, self.tile.kinds)

    def _empty(self, k: int, dtype: Any, zeros: Zeros) -> Array:
        """What the tiles of target `k` are written to."""
        shape = self.tile.layout.shape(self.region.targets[k].result)
        if self.hosted[k]:
            return allocated_on_host(zeros, shape, dtype, k + 1)
        return zeros(shape, dtype)

    def _start(self, target: Target) -> State:
        """The state of a reduction before the first tile: the same number everywhere."""
        shape = self.tile.layout.shape(target.result)
        state = reducer(target).start()
        return tuple(lax.slice(s, (0,) * s.ndim, shape) if s.shape != shape else s for s in state)

    def finished(self, states: Sequence[State], remembered: Any) -> tuple[list[Array], Any]:
        """The results, and what the backward loop must know."""
        targets = self.region.targets
        results = [
            s[0] if t.reduction is None else reducer(t).finish(s)
            for t, s in zip(targets, states, strict=True)
        ]
        kept = [s for t, s in zip(targets, states, strict=True) if t.reduction is not None]
        return results, (kept, remembered)

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        rows = jnp.asarray(self.rows)
        if len(rows) == 1:  # without a loop, the compiler would see that it has all this already
            inputs, globals_ = after((saved.inputs, saved.globals), given.cotangents)
            saved = Saved(inputs, globals_, saved.kept)
        sums, totals = self.pull(saved, given, rows)
        return (
            like(self.region.inputs, given.wanted[0], sums),
            like(self.region.globals, given.wanted[1], totals),
        )

    def pull(self, saved: Saved, given: Given, rows: Array) -> Sums:
        """Sums over all tiles: cotangents of the wanted inputs, and of the wanted globals."""
        work, carry = self._backwards(saved, given, len(rows))
        carry, rows = as_varying_as((carry, rows), [*there(saved.inputs), *saved.globals])
        return self._scan(work, carry, (rows, saved.kept[1]))[0]

    def _backwards(self, saved: Saved, given: Given, tiles: int) -> tuple[Backwards, Sums]:
        """What the backward loop does, and what it begins with."""
        tile = self.tile
        zeros = zeros_after(given.cotangents, [*there(saved.inputs), *saved.globals])
        shared = self._shared(given)
        into = [
            Into(tile.result_slots[shared[i]], adds=False)
            if i in shared
            else Into(tile.input_slots[i], adds=not self.parted[i] or c is not None)
            for i, c in enumerate(given.begun)
        ] or [Into(slots) for slots in tile.input_slots]
        carry = self.sums(saved.globals, given, tiles, zeros)
        for i, k in shared.items():
            carry[0][sum(given.wanted[0][:i])] = cast(Array, given.cotangents[k])
        places = {(i, k): self.places[i, k] for i, k in shared.items()}
        return Backwards(tile, saved, given, into, places, zeros), carry

    def at_once(
        self, inputs: Arrays, globals_: Arrays, given: Given
    ) -> tuple[tuple[list[State], Sums], list[State]]:
        """Both loops in one, of results whose cotangents are known beforehand: what `accumulate`
        returns first, and what `pull` does; and what each tile remembers.
        """
        forwards, states = self._forwards(inputs, globals_, given.wanted, {})
        backwards, sums = self._backwards(Saved(inputs, globals_, None), given, len(self.rows))
        rows = jnp.asarray(self.rows)
        carry, rows = as_varying_as(((states, sums), rows), [*inputs, *globals_])
        return self._scan(Both(forwards, backwards), carry, (rows,))

    def _replaced(self, inputs: Arrays) -> dict[int, int]:
        """Inputs that are not read again, and the target that takes the place of each."""
        if not self.passing or on_early_cpu() or self.region.skips:
            return {}
        free = [
            v in self.passing and not on_host(x)
            for v, x in zip(self.region.inputs, inputs, strict=True)
        ]
        return chosen(self.places, [not hosted for hosted in self.hosted], free)

    def _shared(self, given: Given) -> dict[int, int]:
        """Inputs whose cotangents take the place of a target's, and that target."""
        if not given.begun or on_early_cpu() or self.region.skips:
            return {}
        free = [
            w and c is None and not hosted
            for w, c, hosted in zip(given.wanted[0], given.begun, given.hosted, strict=True)
        ]
        there = [c is not None and not on_host(c) for c in given.cotangents]
        return chosen(self.places, there, free)

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        """One loop over the tiles: the tangents of the targets' tiles, and sums of those of
        reductions.
        """
        tile, (inputs, globals_, (kept, remembered)) = self.tile, saved
        targets, rows = self.region.targets, jnp.asarray(self.rows)
        floats = [k for k, t in enumerate(targets) if is_float(t.result)]
        dtypes = [targets[k].result.aval.dtype for k in floats]
        empty = [
            self._empty(
                k, accumulation_dtype(dtype) if targets[k].reduction else dtype, zeros_after()
            )
            for k, dtype in zip(floats, dtypes, strict=True)
        ]
        carry, rows = as_varying_as((empty, rows), [*there(inputs), *globals_])

        def body(carry: Arrays, xs: Any) -> tuple[list[Array], None]:
            row, remembered = list(xs[0]), xs[1]
            values, moved = tile.tangents(inputs, globals_, tangents, row)
            parts = list(tile.parts(values, kept, remembered, row))
            found = []
            for k, total in zip(floats, carry, strict=True):
                slots, reduction = tile.result_slots[k], targets[k].reduction
                if reduction is None:
                    found.append(write(total, moved[k][0], slots, row))
                    continue
                share = reducer(targets[k]).push(parts[k], moved[k])
                found.append(add(total, share, slots, row))
            return found, None

        found, _ = scan(body, carry, (rows, remembered))
        totals = dict(zip(floats, map(lax.convert_element_type, found, dtypes), strict=True))
        return [totals.get(k) for k in range(len(targets))]

    def sums(self, globals_: Arrays, given: Given, tiles: int, zeros: Zeros) -> Sums:
        """What the cotangents of the wanted inputs and globals are added up in.

        Those of an input in host memory are there too.
        """
        tile, sums = self.tile, []
        for i, (value, slots) in enumerate(zip(self.region.inputs, tile.input_slots, strict=True)):
            if not given.wanted[0][i]:
                continue
            first = given.begun[i] if given.begun else None
            shape = tile.layout.shape(value)
            if given.hosted and given.hosted[i]:
                assert given.begun, "what is added to must be zeros"
                if first is None:
                    first = self._begun_on_host(i, tiles, zeros)
                sums.append(first)
                continue
            dtype = tile.sum_dtype(value, slots, tiles)
            sums.append(zeros(shape, dtype) if first is None else first.astype(dtype))
        wanted = select(globals_, given.wanted[1])
        return sums, [zeros(x.shape, accumulation_dtype(x.dtype)) for x in wanted]

    def _begun_on_host(self, i: int, tiles: int, zeros: Zeros) -> Array:
        """What the cotangents of input `i` are put into. If tiles read parts of it, they write all
        of it; else they add to zeros.
        """
        value = self.region.inputs[i]
        shape, dtype = self.tile.layout.shape(value), value.aval.dtype
        if self.parted[i]:  # `pull` has them written, since nothing has begun
            return allocated_on_host(zeros, shape, dtype, i + 1)
        return zeros_on_host(zeros, shape, dtype, i + 1, tiles)

    def added(self, carry: Sums, pulled: Sums, wanted: Wanted, row: Row) -> Sums:
        """The sums with one more tile, all of them on the device."""
        into = [Into(slots) for slots in select(self.tile.input_slots, wanted[0])]
        return put_in(carry, pulled, into, row)[0]
