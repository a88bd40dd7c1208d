"""Run a region: one loop over its tiles, and one more loop for its derivative.

The forward loop reads windows of the inputs, computes a tile, and writes the targets' tiles in
place. It keeps nothing else, but for what a reduction must remember (`Reduction.remember`). The
backward loop reads the same windows, recomputes the tile, takes this tile's share of the targets'
cotangents, pulls it back through the tile, and adds the result into place. Each element of a target
belongs to one tile, so nothing is counted twice.

`Loop.forward` and `Loop.backward` are called by `recompute`; the scans are in `Loop.accumulate` and
`Loop.pull`.

The sum of the cotangents of a stored array is one array of its size, however many regions read it:
each adds to what the others have begun. Where every tile reads its own part of an input, and writes
the same part of a result (a skip connection), the backward loop puts the input's cotangents where
it has just read the result's: one array for both.

Known inefficiency: the backward loop holds the residuals of a whole tile, not of a part of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._geometry import owned
from .._graph.values import Value
from .._regions.region import Region
from .._regions.stages import Program, RunStage, stage_runner
from .._regions.targets import Target
from .._regions.tile import Cut, Slot, at, lookup
from .._rules import Reduction, Share, Windows
from .._rules.manual import as_varying_as
from .._rules.reductions import accumulation_dtype
from .._rules.registry import masked
from .alike import Work, nearly_constant, zero
from .in_place import are_parts, chosen, places
from .recompute import (
    RECOMPUTED,
    Array,
    Arrays,
    Cotangents,
    Pullback,
    Tangents,
    Wanted,
    after,
    barriers_are_removed,
    environment,
    like,
    on_host,
    partly,
    select,
    to_device,
    zero_cotangent,
    zeros_after,
)

Row = Sequence[Any]
"""The positions of one tile: a row of the table."""
Slots = Sequence[tuple[Slot, int]]
"""Per dimension of an array, where a tile's window begins, and its size."""
State = tuple[Array, ...]
Sums = tuple[list[Array], list[Array]]
"""Of cotangents of the wanted inputs, and of the wanted globals."""
Zeros = Callable[[Sequence[int], Any], Array]
Put = tuple[Callable[..., Array], Slots]
"""Write or add, and where."""
Body = Callable[[Any, Any], tuple[Any, Any]]


class Layout:
    """How the inputs and results of a loop lie in memory: here, as whole arrays."""

    def shape(self, value: Value) -> Sequence[int]:
        return value.aval.shape

    def origin(self, value: Value, dim: int) -> np.ndarray | int:
        """The position of an array's first element, for each tile."""
        return 0

    def counted(self, target: Target, cotangent: Array) -> Array:
        """A cotangent of a target's operand, where it counts: elsewhere zeros."""
        return cotangent

    def scan(self, body: Body, carry: Any, xs: Any) -> tuple[Any, Any]:
        """Without a loop if there is but one tile."""
        if len(jax.tree.leaves(xs)[0]) > 1:
            return lax.scan(body, carry, xs)
        carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda x: x[None], out)


class Loop:
    """The function of a region: inputs and globals to results, tile by tile, and its derivative."""

    def __init__(
        self, region: Region, run_stage: RunStage | None = None, layout: Layout | None = None
    ):
        """`run_stage`: shared by all regions that are traced together."""
        assert region.plan is not None
        self.region, self.plan, self.layout = region, region.plan, layout or Layout()
        table = self.plan.table
        self.input_slots = [self._slots(v, self.plan.windows.get(v, {})) for v in region.inputs]
        self.tiles = {v: region.windows(v) for t in region.targets for v in t.operands}
        # The operand of a reduction may be held on a larger window, for other readers in the tile.
        self.cuts = {v: Cut.of(table, self.plan.windows[v], w, 0) for v, w in self.tiles.items()}
        self.ownership = {v: self._ownership(v, w) for v, w in self.tiles.items()}
        self.result_slots = [
            self._slots(t.result, _result_windows(t, [self.tiles[v] for v in t.operands]))
            for t in region.targets
        ]
        self.parted = [are_parts(region, v, self.plan.windows.get(v, {})) for v in region.inputs]
        self.places = places(region, self.cuts)
        self.rows = table.rows(region.split)
        program = functools.partial(Program, self.plan, run_stage or stage_runner())
        passing = {*select(region.inputs, region.passing)}
        there = {*region.inputs, *region.globals}
        own = {*region.nodes} if region.before else None
        self.before = program(there - passing, passing, {*region.before}, differentiated=False)
        self.tiled_dims = [tuple(self.plan.windows.get(v, {})) for v in region.inputs]
        self.program = program(there, {*self.tiles}, own)

    def _slots(self, value: Value, windows: Windows) -> Slots:
        """Per dimension, the start of each tile's window and its size."""
        add, layout = self.plan.table.add, self.layout
        return [
            (add(windows[d].axis, windows[d].starts - layout.origin(value, d)), windows[d].size)
            if d in windows
            else (0, n)
            for d, n in enumerate(layout.shape(value))
        ]

    def _ownership(self, value: Value, windows: Windows) -> list[tuple[int, Slot]]:
        """Where tiles overlap: dimension, and how many leading positions each tile owns."""
        counts = {d: (w, owned(w, value.aval.shape[d])) for d, w in windows.items()}
        return [
            (d, self.plan.table.add(w.axis, n))
            for d, (w, n) in counts.items()
            if (n != w.size).any()
        ]

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
        targets = self.region.targets
        zeros = zeros_after([*inputs, *globals_])
        carry = [
            self._start(t)
            if t.reduction
            else (zeros(self.layout.shape(t.value), t.value.aval.dtype),)
            for t in targets
        ]
        carry, rows = as_varying_as((carry, rows), [*inputs, *globals_])

        def read(carry: list[State], x: Any) -> Arrays:
            return self.windows(inputs, list(x[0]))

        def compute(windows: Arrays, x: Any) -> list[State]:
            return self.shares(windows, globals_, list(x[0]), wanted)

        def put(carry: list[State], shares: Any, x: Any) -> tuple[list[State], list[State]]:
            row = list(x[0])
            new: list[State] = []
            remembered: list[State] = []
            for k, (target, share) in enumerate(zip(targets, shares, strict=True)):
                if target.reduction is None:
                    new.append((_write(carry[k][0], share[0], self.result_slots[k], row),))
                else:
                    new.append(self.merged(k, carry[k], share, row))
                    remembered.append(reducer(target).remember(share))
            return new, remembered

        return self._scan(Work(read, compute, put, self.blank), carry, (rows,))

    def _scan(self, work: Work, carry: Any, xs: Any) -> tuple[Any, Any]:
        """All tiles; if some may be skipped, those that are alike follow each other."""
        if not self.region.skips or len(self.rows) == 1:
            return self.layout.scan(work.body, carry, xs)
        body, kept, columns = work.skipping(carry, jax.tree.map(lambda x: x[0], xs))
        kept = as_varying_as(kept, jax.tree.leaves(carry))
        order = self.order(columns)
        (carry, *_), out = self.layout.scan(
            body, (carry, *kept), jax.tree.map(lambda x: x[order], xs)
        )
        return carry, jax.tree.map(lambda x: x[np.argsort(order)], out)

    def order(self, columns: Sequence[int]) -> np.ndarray:
        """The tiles, those with equal positions in these columns after each other."""
        return np.lexsort([np.arange(len(self.rows)), *self.rows.T[list(columns)]])

    def blank(self, windows: Sequence[Any]) -> Any:
        """Are windows of the inputs next to constant?"""
        return nearly_constant(windows, self.tiled_dims)

    def _start(self, target: Target) -> State:
        """The state of a reduction before the first tile: the same number everywhere."""
        shape = self.layout.shape(target.result)
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

    def shares(
        self, windows: Arrays, globals_: Arrays, row: Row, wanted: Wanted | None = None
    ) -> list[State]:
        """What one tile gives to each target: its tile, or the state of a reduction of it."""
        if wanted is not None and self.region.changes_value:
            values, _ = self.tile(windows, globals_, wanted, row)
        else:
            values = self._evaluate(windows, globals_, row)
        return [
            tuple(operands)
            if target.reduction is None
            else reducer(target).partial(operands, self._owned(target, row))
            for target, operands in zip(self.region.targets, values, strict=True)
        ]

    def merged(self, k: int, state: State, share: State, row: Row) -> State:
        """The state of target `k`, a reduction, with one more tile."""
        slots = self.result_slots[k]
        held = tuple(window(s, slots, row) for s in state)
        merged = reducer(self.region.targets[k]).merge(held, share)
        return tuple(_write(s, m, slots, row) for s, m in zip(state, merged, strict=True))

    def backward(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        begun: Cotangents,
        wanted: Wanted,
    ) -> tuple[Cotangents, Cotangents]:
        rows = jnp.asarray(self.rows)
        if len(rows) == 1:  # without a loop, the compiler would see that it has all this already
            inputs, globals_ = after((inputs, globals_), [c for c in cotangents if c is not None])
        sums, totals = self.pull(inputs, globals_, kept, cotangents, wanted, rows, begun)
        return like(self.region.inputs, wanted[0], sums), like(
            self.region.globals, wanted[1], totals
        )

    def pull(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        wanted: Wanted,
        rows: Array,
        begun: Cotangents = (),
    ) -> Sums:
        """Sums over all tiles: cotangents of the wanted inputs, and of the wanted globals.

        `begun`: sums that other readers of the inputs have begun.
        """
        kept, remembered = kept
        there = [x for x in inputs if x is not None]
        zeros = zeros_after([c for c in cotangents if c is not None], [*there, *globals_])
        shared = self._shared(cotangents, begun, wanted)
        into = [
            (_write, self.result_slots[shared[i]])
            if i in shared
            else (_write if self.parted[i] and c is None else add, self.input_slots[i])
            for i, c in enumerate(begun)
        ]
        carry = self.sums(globals_, wanted, len(rows), zeros, begun)
        place = {i: sum(wanted[0][:i]) for i in shared}
        for i, k in shared.items():
            carry[0][place[i]] = cast(Array, cotangents[k])
        carry, rows = as_varying_as((carry, rows), [*there, *globals_])

        def read(carry: Sums, x: Any) -> Any:
            row, given = list(x[0]), list(cotangents)
            for i, k in shared.items():
                given[k] = carry[0][place[i]]
            return self.windows(inputs, row), self.result_windows(given, row), x[1]

        def compute(found: Any, x: Any) -> Sums:
            (windows, given, remembered), row = found, list(x[0])
            with jax.named_scope(RECOMPUTED):
                values, pull = self.tile(windows, globals_, wanted, row)
            shares = self.cotangent_shares(values, kept, remembered, given, row)
            for k in shared.values():  # read once, before it is written
                shares[k] = lax.optimization_barrier(shares[k])
            of_windows, of_globals = pull(shares)
            for i, k in shared.items():
                if (cut := self.places[i, k]) is not None:
                    of_windows[place[i]] = cut(of_windows[place[i]], row)
            return of_windows, of_globals

        def put(carry: Sums, pulled: Sums, x: Any) -> tuple[Sums, None]:
            return self.added(carry, pulled, wanted, list(x[0]), into), None

        work = Work(
            read, compute, put, lambda found: self.blank(found[0]), lambda found: zero(found[1])
        )
        sums: Sums = self._scan(work, carry, (rows, remembered))[0]
        return sums

    def _shared(self, cotangents: Cotangents, begun: Cotangents, wanted: Wanted) -> dict[int, int]:
        """Inputs whose cotangents take the place of a target's, and that target."""
        if not begun or barriers_are_removed() or self.region.skips:
            return {}
        free = [w and c is None for w, c in zip(wanted[0], begun, strict=True)]
        return chosen(self.places, [c is not None for c in cotangents], free)

    def tangents(
        self, inputs: Arrays, globals_: Arrays, kept: Any, tangents: Tangents
    ) -> Cotangents:
        """One loop over the tiles: the tangents of the targets' tiles, and sums of those of
        reductions.
        """
        (kept, remembered), targets = kept, self.region.targets
        rows = jnp.asarray(self.rows)
        floats = [jnp.issubdtype(t.result.aval.dtype, jnp.inexact) for t in targets]
        zeros = [
            jnp.zeros(self.layout.shape(t.result), t.result.aval.dtype)
            if t.reduction is None
            else jnp.zeros(self.layout.shape(t.result), accumulation_dtype(t.result.aval.dtype))
            for t, f in zip(targets, floats, strict=True)
            if f
        ]
        there = [x for x in inputs if x is not None]
        carry, rows = as_varying_as((zeros, rows), [*there, *globals_])

        def body(carry: Arrays, xs: Any) -> tuple[list[Array], None]:
            row, remembered = list(xs[0]), xs[1]
            values, moved = self._pushed(inputs, globals_, tangents, row)
            new, notes, states = iter(carry), iter(remembered), iter(kept)
            found = []
            for k, (target, is_float) in enumerate(zip(targets, floats, strict=True)):
                note, state = (next(notes), next(states)) if target.reduction else ((), ())
                if not is_float:
                    continue
                total, slots = next(new), self.result_slots[k]
                if target.reduction is None:
                    found.append(_write(total, moved[k][0], slots, row))
                    continue
                own = self._owned(target, row)
                state = tuple(window(s, slots, row) for s in state)
                share = Share(values[k], own, note, state)
                found.append(add(total, reducer(target).push(share, moved[k]), slots, row))
            return found, None

        found = iter(self.layout.scan(body, carry, (rows, remembered))[0])
        return [
            next(found).astype(t.result.aval.dtype) if f else None
            for t, f in zip(targets, floats, strict=True)
        ]

    def _pushed(
        self, inputs: Arrays, globals_: Arrays, tangents: Tangents, row: Row
    ) -> tuple[list[list[Array]], list[list[Array]]]:
        """The operands of each target in one tile, and their tangents."""
        windows = self._with_passing(self.windows(inputs, row), globals_, row)
        moving = self.windows(tangents[0], row), tangents[1]
        wanted = [[t is not None for t in each] for each in moving]
        evaluate = functools.partial(self._evaluate, row=row)
        function, primals = partly(evaluate, (windows, globals_), wanted)
        return jax.jvp(function, tuple(primals), tuple(map(select, moving, wanted)))

    def tile(
        self, windows: Arrays, globals_: Arrays, wanted: Wanted, row: Row
    ) -> tuple[list[list[Array]], Pullback]:
        """The operands of each target in one tile, and their pullback to what is wanted."""
        windows = self._with_passing(windows, globals_, row)
        evaluate = functools.partial(self._evaluate, row=row)
        function, primals = partly(evaluate, (windows, globals_), wanted)
        return jax.vjp(function, *primals)

    def _with_passing(self, windows: Arrays, globals_: Arrays, row: Row) -> Arrays:
        """The windows, and those of inputs that are passing computed again."""
        if not self.region.before:
            return windows
        env = environment(self.region, windows, globals_)
        self.before.run(env, row)
        return [env[v] for v in self.region.inputs]

    def cotangent_shares(
        self,
        values: Sequence[Sequence[Any]],
        kept: Sequence[State],
        remembered: Sequence[State],
        cotangents: Cotangents,
        row: Row,
    ) -> list[list[Array]]:
        """The cotangents of the operands of each target in one tile: what belongs to the tile.

        `cotangents`: on the tile's window of each target.
        """
        shares = []
        notes, states = iter(remembered), iter(kept)
        for k, (target, operands) in enumerate(zip(self.region.targets, values, strict=True)):
            note, state = (next(notes), next(states)) if target.reduction else ((), ())
            cotangent, slots = cotangents[k], self.result_slots[k]
            if cotangent is None or not jnp.issubdtype(operands[0].dtype, jnp.inexact):
                shares.append([zero_cotangent(x) for x in operands])
                continue
            own = self._owned(target, row)
            share: Sequence[Array] = [cotangent]
            if target.reduction is not None:
                state = tuple(window(s, slots, row) for s in state)
                share = reducer(target).pullback(Share(operands, own, note, state), cotangent)
            mine = [masked(x, mask, 0) for x, mask in zip(share, own, strict=True)]
            shares.append([self.layout.counted(target, x) for x in mine])
        return shares

    def sums(
        self,
        globals_: Arrays,
        wanted: Wanted,
        tiles: int,
        zeros: Zeros,
        begun: Cotangents = (),
    ) -> Sums:
        """What the cotangents of the wanted inputs and globals are added up in."""
        sums = []
        for i, (value, slots) in enumerate(zip(self.region.inputs, self.input_slots, strict=True)):
            if not wanted[0][i]:
                continue
            dtype, first = self.sum_dtype(value, slots, tiles), begun[i] if begun else None
            shape = self.layout.shape(value)
            sums.append(zeros(shape, dtype) if first is None else first.astype(dtype))
        totals = [zeros(x.shape, accumulation_dtype(x.dtype)) for x in select(globals_, wanted[1])]
        return sums, totals

    def added(
        self, carry: Sums, pulled: Sums, wanted: Wanted, row: Row, put: Sequence[Put] = ()
    ) -> Sums:
        """The sums with one more tile; `put`: how each input's cotangents are put into place."""
        (sums, totals), (from_windows, from_globals) = carry, pulled
        put = select(put or [(add, slots) for slots in self.input_slots], wanted[0])
        sums = [
            put_in(s, g, slots, row)
            for (put_in, slots), s, g in zip(put, sums, from_windows, strict=True)
        ]
        totals = [
            lax.add(t, lax.convert_element_type(g, t.dtype))
            for t, g in zip(totals, from_globals, strict=True)
        ]
        return sums, totals

    def sum_dtype(self, value: Value, slots: Slots, tiles: int) -> Any:
        """What many tiles read, not just neighbours, has a sum over tiles as its cotangent."""
        size, dtype = math.prod(self.layout.shape(value)), value.aval.dtype
        times_read = math.prod(size for _, size in slots) * tiles / max(1, size)
        return accumulation_dtype(dtype) if times_read > 8 else dtype

    def windows(self, inputs: Sequence[Array | None], row: Row) -> list[Any]:
        return [
            None if x is None else window(x, slots, row)
            for x, slots in zip(inputs, self.input_slots, strict=True)
        ]

    def result_windows(self, cotangents: Cotangents, row: Row) -> list[Any]:
        return [
            None if c is None or c.dtype == jax.dtypes.float0 else window(c, slots, row)
            for c, slots in zip(cotangents, self.result_slots, strict=True)
        ]

    def _evaluate(self, windows: Arrays, globals_: Arrays, row: Row) -> list[list[Array]]:
        """The operands of each target, in one tile."""
        env = environment(self.region, windows, globals_)
        self.program.run(env, row)
        cut = {
            v: lookup(env, v) if c is None else c(lookup(env, v), row) for v, c in self.cuts.items()
        }
        return [[cut[v] for v in t.operands] for t in self.region.targets]

    def _owned(self, target: Target, row: Row) -> list[Array | None]:
        return [self._mask(v, row) for v in target.operands]

    def _mask(self, value: Value, row: Row) -> Array | None:
        windows = self.tiles[value]
        shape = [windows[d].size if d in windows else n for d, n in enumerate(value.aval.shape)]
        mask = None
        for d, slot in self.ownership[value]:
            inside = lax.broadcasted_iota(np.int32, shape, d) < at(slot, row)
            mask = inside if mask is None else mask & inside
        return mask


def reducer(target: Target) -> Reduction:
    """How a target that is a reduction is accumulated."""
    assert target.reduction is not None
    assert target.reduction.reduction is not None
    return target.reduction.reduction


def _result_windows(target: Target, windows: Sequence[Windows]) -> Windows:
    """The tiles of what a target leaves behind: itself, or what a reduction keeps of it."""
    if target.reduction is None:
        return windows[0]
    by_axis = {w.axis: w for each in windows for w in each.values()}
    return {d: by_axis[a] for d, a in enumerate(target.result.axes) if a is not None}


def _whole(x: Array, slots: Slots) -> bool:
    return all(slot == 0 and size == n for (slot, size), n in zip(slots, x.shape, strict=True))


def _starts(slots: Slots, row: Row) -> list[Array]:
    return [jnp.asarray(at(slot, row), np.int32) for slot, _ in slots]


def window(x: Array, slots: Slots, row: Row) -> Array:
    """The window of this tile, on the device."""
    if not _whole(x, slots):
        sizes = [size for _, size in slots]
        x = lax.dynamic_slice(x, _starts(slots, row), sizes, allow_negative_indices=False)
    return to_device(x) if on_host(x) else x


def _write(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    tile = tile.astype(x.dtype)
    if _whole(x, slots):
        return tile
    return lax.dynamic_update_slice(x, tile, _starts(slots, row), allow_negative_indices=False)


def add(x: Array, tile: Array, slots: Slots, row: Row) -> Array:
    return _write(x, window(x, slots, row) + tile, slots, row)
