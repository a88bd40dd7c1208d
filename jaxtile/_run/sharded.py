"""Regions on many devices.

A region's forward pass is one `shard_map`: devices exchange the halos of its inputs, run their own
tiles, and merge reductions. Its backward pass is another: halos are exchanged again, tiles are
computed again, cotangents in the halo go back to their owners, those of weights are added up. In
between, what is kept is blocks, without halos. JAX never differentiates a collective.

Each device takes its own share of every cotangent, so whatever several devices hold in common, a
weight or a statistic, has a sum over them as its cotangent.

Known inefficiencies: devices wait for a halo before they begin with the tiles that do not need it;
a reversed axis makes every device hold all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._errors import TilingError
from .._graph.values import Value
from .._mesh.collectives import first_only, merged
from .._mesh.halos import Exchange
from .._regions.region import Region
from .._regions.stages import RunStage
from .._regions.targets import Target
from .arrays import Array, Arrays, Cotangents, Tangents, Wanted, added, like, select
from .backwards import Sums
from .loop import Loop
from .ordering import after, zeros_after
from .recompute import Given, Saved
from .tile import Layout, reducer


class Sharded:
    """A region whose inputs and results are arrays of blocks, or whole where nothing is tiled."""

    def __init__(self, region: Region, run_stage: RunStage):
        assert region.devices is not None
        self.region, self.devices = region, region.devices
        self.blocks = _Blocks(region)
        self.loop = Loop(region, run_stage, self.blocks)
        self.names = self.blocks.names(region.split)
        """The mesh axes that the work is distributed over."""
        self.in_specs = [self.devices.spec(v.array.axes) for v in region.inputs]
        self.out_specs = [self.devices.spec(t.result.axes) for t in region.targets]

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        run = self._on_devices(
            functools.partial(self._forward, wanted),
            (P(*self.names), self.in_specs, P()),
            (self.out_specs, P(*self.names)),
        )
        return run(self._rows(), list(inputs), list(globals_))

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        wanted = given.wanted
        cotangents = given.cotangents
        run = self._on_devices(
            functools.partial(self._backward, wanted),
            (
                P(*self.names),
                _where_there(self.in_specs, saved.inputs),
                P(),
                P(*self.names),
                _where_there(self.out_specs, cotangents),
            ),
            (select(self.in_specs, wanted[0]), P()),
        )
        inputs, globals_, kept = saved
        sums, totals = run(self._rows(), list(inputs), list(globals_), kept, cotangents)
        return (
            added(like(self.region.inputs, wanted[0], sums), given.begun),
            like(self.region.globals, wanted[1], totals),
        )

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        raise TilingError(
            "forward mode (`jvp`, `jacfwd`, `linearize`, `hessian`) of a function that is tiled on "
            "a mesh is not defined. What to do: leave out `mesh`, or call it inside "
            "`jax.shard_map`; reverse mode (`grad`, `vjp`) is defined"
        )

    def _on_devices(
        self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        mapped = jax.shard_map(
            fun,
            mesh=self.devices.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        return jax.jit(mapped)

    def _forward(
        self, wanted: Wanted | None, rows: Array, inputs: Arrays, globals_: Arrays
    ) -> tuple[list[Array], Any]:
        inputs = [e.fill(x) for e, x in zip(self.blocks.exchanges, inputs, strict=True)]
        results, kept = self._run(inputs, globals_, self._local(rows), wanted)
        return results, jax.tree.map(self._stacked, kept)

    def _backward(
        self,
        wanted: Wanted,
        rows: Array,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
    ) -> Sums:
        # Otherwise the compiler may find that it has these halos already, and hold them.
        if self.region.grid.recomputed:
            inputs = after(inputs, cotangents)
            inputs = [
                None if x is None else e.fill(x)
                for e, x in zip(self.blocks.exchanges, inputs, strict=True)
            ]
        saved = Saved(inputs, globals_, jax.tree.map(self._local, kept))
        sums, totals = self._pull(saved, Given(cotangents, wanted), self._local(rows))
        sums = [
            self._returned(v, e, s)
            for v, e, s in zip(
                select(self.region.inputs, wanted[0]),
                select(self.blocks.exchanges, wanted[0]),
                sums,
                strict=True,
            )
        ]
        return sums, [_summed(t, self.names) for t in totals]

    def _run(
        self, inputs: Arrays, globals_: Arrays, rows: Array, wanted: Wanted | None
    ) -> tuple[list[Array], Any]:
        """On one device: the results, and what is kept for the derivative."""
        recomputed = self.region.grid.recomputed
        if not recomputed and wanted is not None:  # it keeps what JAX keeps
            row, tile = list(rows[0]), self.loop.tile
            windows = tile.windows(inputs, row)
            values, pull = tile.pullback(windows, globals_, wanted, row)
            return [v[0] for v in values], pull
        states, remembered = self.loop.accumulate(inputs, globals_, rows, wanted)
        states = [
            s if t.reduction is None else merged(reducer(t), s, self._reduced(t))
            for t, s in zip(self.region.targets, states, strict=True)
        ]
        results, kept = self.loop.finished(states, remembered)
        return results, kept if recomputed else ()

    def _reduced(self, target: Target) -> list[str]:
        """The mesh axes that a target is reduced over."""
        return self.blocks.names(a for a in target.axes if a not in target.result.axes)

    def _pull(self, saved: Saved, given: Given, rows: Array) -> Sums:
        """On one device: cotangents of what it read of the wanted inputs, and of wanted globals."""
        if self.region.grid.recomputed:
            return self.loop.pull(saved, given, rows)
        row, loop, tile = list(rows[0]), self.loop, self.loop.tile
        zeros = zeros_after(given.cotangents, [*saved.inputs, *saved.globals])
        sums = loop.sums(saved.globals, given, 1, zeros)
        values = [[self._aval(t.value)] for t in self.region.targets]
        cotangents = tile.result_windows(given.cotangents, row)
        shares = tile.cotangent_shares(values, (), (), cotangents, row)
        return loop.added(sums, saved.kept(shares), given.wanted, row)

    def _aval(self, value: Value) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.blocks.shape(value), value.aval.dtype)

    def _returned(self, value: Value, exchange: Exchange, sum_: Array) -> Array:
        """The cotangent of an input, from what each device found for its block and halo."""
        held = [self.devices.name(a) for a in value.array.axes]
        return exchange.fold(_summed(sum_, [n for n in self.names if n not in held]))

    def _rows(self) -> Array:
        """The table of positions, with one dimension per mesh axis, and then one for the tiles."""
        split, shape = self.region.split, []
        for axis in sorted(split):
            count = self.devices.count(axis)
            shape += [count, split[axis] // count]
        columns = self.loop.rows.shape[1]
        rows = self.loop.rows.reshape(*shape, columns)
        order = [*range(0, len(shape), 2), *range(1, len(shape), 2)]
        counts = [self.devices.mesh.shape[n] for n in self.names]
        rows = rows.transpose(*order, len(shape))
        tiles = self.region.tiles // int(np.prod(counts))
        return jnp.asarray(rows.reshape(*counts, tiles, columns))

    def _stacked(self, x: Array) -> Array:
        return x.reshape((1,) * len(self.names) + x.shape)

    def _local(self, x: Array) -> Array:
        return x.reshape(x.shape[len(self.names) :])


def _where_there(specs: Sequence[P], arrays: Sequence[Array | None]) -> list[P | None]:
    return [s if x is not None else None for s, x in zip(specs, arrays, strict=True)]


def _summed(x: Array, names: Sequence[str]) -> Array:
    return lax.psum(x, tuple(names)) if names else x


class _Blocks(Layout):
    """Inputs are blocks with their halos, results are blocks."""

    def __init__(self, region: Region):
        assert region.devices is not None
        self.region, self.devices = region, region.devices
        self.exchanges = [region.exchange(v) for v in region.inputs]
        self._exchange = dict(zip(region.inputs, self.exchanges, strict=True))

    def shape(self, value: Value) -> Sequence[int]:
        if value in self._exchange:
            shape = list(self._exchange[value].shape)
            for halo in self._exchange[value].halos:
                shape[halo.dim] = halo.size
            return tuple(shape)
        blocks = self.devices.blocks(value.aval.shape, value.axes)
        return tuple(blocks[d].size if d in blocks else n for d, n in enumerate(value.aval.shape))

    def origin(self, value: Value, dim: int) -> np.ndarray | int:
        axis, split = value.axes[dim], self.region.split
        if value in self._exchange:
            for halo in self._exchange[value].halos:
                if halo.dim == dim:
                    return halo.origins(1 if axis is None else split.get(axis, 1))
            return 0
        blocks = self.devices.blocks(value.aval.shape, value.axes)
        if dim not in blocks or axis is None:
            return 0
        count = blocks[dim].devices
        starts = np.array([blocks[dim].start(i) for i in range(count)], np.int64)
        return np.repeat(starts, split[axis] // count)

    def counted(self, target: Target, cotangent: Array) -> Array:
        """What all devices along a mesh axis compute alike counts on the first of them."""
        alike = self.names(a for a in self.region.split if a not in target.axes)
        return first_only(cotangent, alike)

    def names(self, axes: Iterable[int]) -> list[str]:
        """The mesh axes that tiled axes are distributed over."""
        names = [self.devices.names[a] for a in sorted(axes)]
        return [n for n in names if n is not None]
