"""Run a region: one loop over its tiles, and one more loop for its derivative.

The forward loop reads windows of the inputs, computes a tile, and writes the targets' tiles in
place. It keeps nothing else, but for what a reduction must remember (`Reduction.remember`). The
backward loop reads the same windows, recomputes the tile, takes this tile's share of the targets'
cotangents, pulls it back through the tile, and adds the result into place. Each element of a target
belongs to one tile, so nothing is counted twice.

`Loop.forward` and `Loop.backward` are called by `recompute`; the scans are in `Loop.accumulate` and
`Loop.pull`. What is done for one tile is in `tile`.

The sum of the cotangents of a stored array is one array of its size, however many regions read it:
each adds to what the others have begun. Where every tile reads its own part of an input, and writes
the same part of a result (a skip connection), the backward loop puts the input's cotangents where
it has just read the result's: one array for both. So does the forward loop with such an input that
is passing.

Known inefficiency: the backward loop holds the residuals of a whole tile, not of a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._graph.values import Value
from .._platform import on_early_cpu
from .._regions.region import Region
from .._regions.stages import RunStage
from .._regions.targets import Target
from .._rules.manual import as_varying_as
from .._rules.reductions import accumulation_dtype
from .alike import Work, order, zero
from .arrays import Array, Arrays, Cotangents, Tangents, Wanted, like, select, there
from .in_place import are_parts, chosen, places
from .kinds import Kind
from .ordering import after, on_host, zeros_after
from .recompute import RECOMPUTED, Given, Saved
from .slots import Row, Slots, Zeros, add, allocated_on_host, write, zeros_on_host
from .tile import Layout, State, Tile, reducer

Sums = tuple[list[Array], list[Array]]
"""Of cotangents of the wanted inputs, and of the wanted globals."""
Put = tuple[Callable[..., Array], Slots]
"""Write or add, and where."""


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
        # Each device has other tiles, in one program.
        self.kinds = self.tile.kinds if layout is None else [Kind.of(self.rows)]

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
        tile, targets = self.tile, self.region.targets
        # In host memory, zeros of each loop must differ, and several may read the same first input.
        newest = inputs[::-1], globals_[::-1]
        zeros = zeros_after(*(newest if any(self.hosted) else [[*inputs, *globals_]]))
        carry = [
            self._start(t) if t.reduction else (self._empty(k, t.value.aval.dtype, zeros),)
            for k, t in enumerate(targets)
        ]
        replaced = self._replaced(inputs)
        for i, k in replaced.items():
            carry[k] = (inputs[i],)
        carry, rows = as_varying_as((carry, rows), [*inputs, *globals_])

        def read(carry: list[State], x: Any) -> Arrays:
            given = list(inputs)
            for i, k in replaced.items():
                (given[i],) = carry[k]
            windows = tile.windows(given, list(x[0]))
            for i in replaced:  # read once, before it is written
                windows[i] = lax.optimization_barrier(windows[i])
            return windows

        def compute(windows: Arrays, x: Any) -> list[State]:
            return tile.shares(windows, globals_, list(x[0]), wanted)

        def put(carry: list[State], shares: Any, x: Any) -> tuple[list[State], list[State]]:
            row = list(x[0])
            new: list[State] = []
            remembered: list[State] = []
            for k, (target, share) in enumerate(zip(targets, shares, strict=True)):
                if target.reduction is None:
                    new.append((write(carry[k][0], share[0], tile.result_slots[k], row),))
                else:
                    new.append(tile.merged(k, carry[k], share, row))
                    remembered.append(reducer(target).remember(share))
            return new, remembered

        return self._scan(Work(read, compute, put, tile.blank), carry, (rows,))

    def _scan(self, work: Work, carry: Any, xs: Any) -> tuple[Any, Any]:
        """All tiles, of one kind after the other; if some may be skipped, those that are alike
        follow each other.
        """
        if not self.region.skips or len(self.rows) == 1:
            return self._each_kind(work, carry, xs)
        body, kept, columns = work.skipping(carry, jax.tree.map(lambda x: x[0], xs))
        kept = as_varying_as(kept, jax.tree.leaves(carry))
        turns = order(self.rows, columns)
        (carry, *_), out = _scan(body, (carry, *kept), jax.tree.map(lambda x: x[turns], xs))
        return carry, jax.tree.map(lambda x: x[np.argsort(turns)], out)

    def _each_kind(self, work: Work, carry: Any, xs: Any) -> tuple[Any, Any]:
        """A loop for each kind of tiles."""
        if len(self.kinds) == 1:
            return _scan(work.body, carry, xs)
        outs = []
        for kind in self.kinds:

            def body(carry: Any, x: Any, kind: Kind = kind) -> tuple[Any, Any]:
                return work.body(carry, (kind.row(x[0]), *x[1:]))

            own = kind.tiles
            carry, out = _scan(body, carry, jax.tree.map(lambda x, own=own: x[own], xs))
            outs.append(out)
        back = np.argsort(np.concatenate([kind.tiles for kind in self.kinds]))
        return carry, jax.tree.map(lambda *out: jnp.concatenate(out)[back], *outs)

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
        tile, (inputs, globals_, (kept, remembered)) = self.tile, saved
        read_from = [*there(inputs), *globals_]
        zeros = zeros_after(given.cotangents, read_from)
        shared = self._shared(given)
        into = [
            (write, tile.result_slots[shared[i]])
            if i in shared
            else (write if self.parted[i] and c is None else add, tile.input_slots[i])
            for i, c in enumerate(given.begun)
        ]
        carry = self.sums(globals_, given, len(rows), zeros)
        place = {i: sum(given.wanted[0][:i]) for i in shared}
        for i, k in shared.items():
            carry[0][place[i]] = cast(Array, given.cotangents[k])
        carry, rows = as_varying_as((carry, rows), read_from)

        def read(carry: Sums, x: Any) -> Any:
            row, cotangents = list(x[0]), list(given.cotangents)
            for i, k in shared.items():
                cotangents[k] = carry[0][place[i]]
            return tile.windows(inputs, row), tile.result_windows(cotangents, row), x[1]

        def compute(found: Any, x: Any) -> Sums:
            (windows, cotangents, remembered), row = found, list(x[0])
            with jax.named_scope(RECOMPUTED):
                values, pull = tile.pullback(windows, globals_, given.wanted, row)
            shares = tile.cotangent_shares(values, kept, remembered, cotangents, row)
            for k in shared.values():  # read once, before it is written
                shares[k] = lax.optimization_barrier(shares[k])
            of_windows, of_globals = pull(shares)
            for i, k in shared.items():
                if (cut := self.places[i, k]) is not None:
                    of_windows[place[i]] = cut(of_windows[place[i]], row)
            return of_windows, of_globals

        def put(carry: Sums, pulled: Sums, x: Any) -> tuple[Sums, None]:
            return self.added(carry, pulled, given.wanted, list(x[0]), into), None

        work = Work(
            read, compute, put, lambda found: tile.blank(found[0]), lambda found: zero(found[1])
        )
        return self._scan(work, carry, (rows, remembered))[0]

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
        floats = [
            k for k, t in enumerate(targets) if jnp.issubdtype(t.result.aval.dtype, jnp.inexact)
        ]
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

        found, _ = _scan(body, carry, (rows, remembered))
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

    def added(
        self, carry: Sums, pulled: Sums, wanted: Wanted, row: Row, put: Sequence[Put] = ()
    ) -> Sums:
        """The sums with one more tile; `put`: how each input's cotangents are put into place."""
        (sums, totals), (from_windows, from_globals) = carry, pulled
        put = select(put or [(add, slots) for slots in self.tile.input_slots], wanted[0])
        sums = [
            put_in(s, g, slots, row)
            for (put_in, slots), s, g in zip(put, sums, from_windows, strict=True)
        ]
        totals = [
            lax.add(t, lax.convert_element_type(g, t.dtype))
            for t, g in zip(totals, from_globals, strict=True)
        ]
        return sums, totals


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """Without a loop if there is but one tile."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)
