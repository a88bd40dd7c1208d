"""One tile of a region: what it reads, computes, owns, and gives to each target.

The same for all loops over tiles: those on one device, on many (`sharded`), and on the host
(`_stream`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._geometry import owned
from .._graph.values import Value
from .._regions.region import Region
from .._regions.stages import Program, RunStage
from .._regions.targets import Target
from .._regions.tile import Cut, Slot, at, lookup
from .._rules import Reduction, Share, Windows
from .._rules.accumulation import masked
from .._rules.reductions import accumulation_dtype
from .alike import nearly_constant
from .arrays import (
    Array,
    Arrays,
    Cotangents,
    Pullback,
    Tangents,
    Wanted,
    pulled,
    pushed,
    select,
    zero_cotangent,
)
from .kinds import Kind, kinds
from .slots import Row, Slots, window, windows_of, write
from .whole import environment

State = tuple[Array, ...]
"""Of a target: its tile, or the state of a reduction."""


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


class Tile:
    """What the tiles of a region have in common; `row`, the positions of one of them, differs."""

    def __init__(self, region: Region, run_stage: RunStage, layout: Layout | None = None):
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
        self._dims = [tuple(self.plan.windows.get(v, {})) for v in region.inputs]
        program = functools.partial(Program, self.plan, run_stage)
        passing = {*select(region.inputs, region.passing)}
        there = {*region.inputs, *region.globals}
        own = {*region.nodes} if region.before else None
        self._before = program(there - passing, passing, {*region.before}, differentiated=False)
        self._program = program(there, {*self.tiles}, own)

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

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The positions of all tiles."""
        return self.plan.table.rows(self.region.split)

    @functools.cached_property
    def kinds(self) -> list[Kind]:
        """Tiles that are shifted alike."""
        cuts = [c for i in self.plan.instructions for c in i.cuts]
        shifts = {k for c in (*cuts, *self.cuts.values()) if c is not None for k in c.columns}
        return kinds(self.rows, sorted(shifts))

    def windows(self, inputs: Sequence[Array | None], row: Row) -> list[Any]:
        return windows_of(inputs, self.input_slots, row)

    def result_windows(self, cotangents: Cotangents, row: Row) -> list[Any]:
        return windows_of(cotangents, self.result_slots, row)

    def blank(self, windows: Sequence[Any]) -> Any:
        """Are windows of the inputs next to constant?"""
        return nearly_constant(windows, self._dims)

    def shares(
        self, windows: Arrays, globals_: Arrays, row: Row, wanted: Wanted | None = None
    ) -> list[State]:
        """What the tile gives to each target: its tile, or the state of a reduction of it."""
        if wanted is not None and self.region.changes_value:
            values, _ = self.pullback(windows, globals_, wanted, row)
        else:
            values = self._evaluate(windows, globals_, row)
        return self.shares_of(values, row)

    def shares_of(self, values: Sequence[Sequence[Array]], row: Row) -> list[State]:
        """What a tile gives to each target, from the operands of the targets."""
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
        return tuple(write(s, m, slots, row) for s, m in zip(state, merged, strict=True))

    def pullback(
        self, windows: Arrays, globals_: Arrays, wanted: Wanted, row: Row
    ) -> tuple[list[list[Array]], Pullback]:
        """The operands of each target, and their pullback to what is wanted."""
        evaluate = functools.partial(self._evaluate, row=row)
        return pulled(evaluate, (windows, globals_), wanted)

    def tangents(
        self, inputs: Arrays, globals_: Arrays, tangents: Tangents, row: Row
    ) -> tuple[list[list[Array]], list[list[Array]]]:
        """The operands of each target, and their tangents; `inputs` and `tangents` are whole."""
        windows = self.with_passing(self.windows(inputs, row), globals_, row)
        moving = self.windows(tangents[0], row), tangents[1]
        return pushed(functools.partial(self._evaluate, row=row), (windows, globals_), moving)

    def with_passing(self, windows: Arrays, globals_: Arrays, row: Row) -> Arrays:
        """The windows, and those of inputs that are passing computed again."""
        if not self.region.before:
            return windows
        env = environment(self.region, windows, globals_)
        self._before.run(env, row)
        return [env[v] for v in self.region.inputs]

    def _evaluate(self, windows: Arrays, globals_: Arrays, row: Row) -> list[list[Array]]:
        """The operands of each target."""
        env = environment(self.region, windows, globals_)
        self._program.run(env, row)
        cut = {
            v: lookup(env, v) if c is None else c(lookup(env, v), row) for v, c in self.cuts.items()
        }
        return [[cut[v] for v in t.operands] for t in self.region.targets]

    def cotangent_shares(
        self,
        values: Sequence[Sequence[Any]],
        kept: Sequence[State],
        remembered: Sequence[State],
        cotangents: Cotangents,
        row: Row,
    ) -> list[list[Array]]:
        """The cotangents of the operands of each target: what belongs to the tile.

        `cotangents`: on the tile's window of each target.
        """
        shares = []
        parts = self.parts(values, kept, remembered, row)
        for target, cotangent, part in zip(self.region.targets, cotangents, parts, strict=True):
            if cotangent is None or not jnp.issubdtype(part.operands[0].dtype, jnp.inexact):
                shares.append([zero_cotangent(x) for x in part.operands])
                continue
            share: Sequence[Array] = [cotangent]
            if target.reduction is not None:
                share = reducer(target).pullback(part, cotangent)
            mine = [masked(x, mask, 0) for x, mask in zip(share, part.owned, strict=True)]
            shares.append([self.layout.counted(target, x) for x in mine])
        return shares

    def parts(
        self,
        values: Sequence[Sequence[Any]],
        kept: Iterable[State],
        remembered: Iterable[State],
        row: Row,
    ) -> Iterator[Share]:
        """Per target the tile's operands; of a reduction also its state, and what it remembers."""
        states, notes = iter(kept), iter(remembered)
        for target, operands, slots in zip(
            self.region.targets, values, self.result_slots, strict=True
        ):
            note, state = (next(notes), next(states)) if target.reduction else ((), ())
            held = tuple(window(s, slots, row) for s in state)
            yield Share(operands, self._owned(target, row), note, held)

    def sum_dtype(self, value: Value, slots: Slots, tiles: int) -> Any:
        """What many tiles read, not just neighbours, has a sum over tiles as its cotangent."""
        size, dtype = math.prod(self.layout.shape(value)), value.aval.dtype
        times_read = math.prod(size for _, size in slots) * tiles / max(1, size)
        return accumulation_dtype(dtype) if times_read > 8 else dtype

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
