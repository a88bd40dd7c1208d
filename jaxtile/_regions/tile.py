"""One tile: the windows that it holds, and the instructions that compute them.

`demands` makes both. The values of a tile are arrays on windows; each reader cuts what it asked for
out of a value's window, and supplies its own padding where that lies outside the array.

All positions are integers known while tracing, one per tile. Those that differ between tiles become
*columns* of a table with one row per tile, and the tile loop is a scan over its rows; those that do
not are plain numbers in the program. A loop over tiles of one kind has numbers in its rows too,
where these tiles agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._graph.values import Node, Value
from .._rules import Step, Windows
from .._rules.derivative import apply
from .._rules.plainly import plain


@dataclasses.dataclass(frozen=True)
class Column:
    """A position that differs from tile to tile: which column of the table holds it."""

    index: int


Slot = int | Column
"""A position in a tile: a number, or where in the table it is."""


Scalars = Mapping[int, jax.Array | int] | Sequence[jax.Array | int]
"""The positions of a tile, per column of the table."""


def at(slot: Slot, scalars: Scalars) -> jax.Array | int:
    """The position that a slot stands for; `scalars` are this tile's row of the table."""
    return scalars[slot.index] if isinstance(slot, Column) else slot


@dataclasses.dataclass
class Table:
    """Per column, the tiled axis it depends on and its value for every tile along that axis."""

    columns: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
    _seen: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    def add(self, axis: int, values: np.ndarray) -> Slot:
        if (values == values[0]).all():
            return int(values[0])
        key = (axis, *values.tolist())
        if key not in self._seen:
            self._seen[key] = len(self.columns)
            self.columns.append((axis, values))
        return Column(self._seen[key])

    def rows(self, grid: Mapping[int, int]) -> np.ndarray:
        """One row per tile, in the order of the grid's axes, the last one fastest."""
        axes = sorted(grid)
        index = np.indices([grid[a] for a in axes]).reshape(len(axes), -1)
        tiles = int(np.prod([grid[a] for a in axes]))
        columns = [values[index[axes.index(axis)]] for axis, values in self.columns]
        return np.array(columns, np.int32).reshape(len(columns), tiles).T


class Offset(NamedTuple):
    """Where along one dimension a read begins: at `slot`, between `low` and `high`, for `size`."""

    dim: int
    slot: Slot
    low: int
    high: int
    size: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """Read one window out of an array that holds another; `fill` where that does not reach."""

    offsets: tuple[Offset, ...]
    fill: Any

    @property
    def columns(self) -> list[int]:
        """That say by how much tiles are shifted, if not all by the same."""
        return [o.slot.index for o in self.offsets if isinstance(o.slot, Column)]

    @classmethod
    def of(cls, table: Table, held: Windows, wanted: Windows, fill: Any) -> Cut | None:
        offsets = []
        for d, want in wanted.items():
            have = held[d]
            if want == have:
                continue
            # A window that misses the array altogether reads `fill` only, however far away it is.
            by = np.clip(want.starts - have.starts, -want.size, have.size)
            if (by != 0).any() or want.size != have.size:
                slot = table.add(want.axis, by)
                offsets.append(Offset(d, slot, int(by.min()), int(by.max()), want.size))
        return cls(tuple(offsets), fill) if offsets else None

    def __call__(self, x: jax.Array, scalars: Scalars) -> jax.Array:
        fill = np.asarray(self.fill).astype(x.dtype)
        padding, moving, by = [(0, 0, 0)] * x.ndim, [], []
        for offset in self.offsets:
            start = at(offset.slot, scalars)
            if isinstance(start, int):
                padding[offset.dim] = (-start, start + offset.size - x.shape[offset.dim], 0)
            else:
                moving.append(offset)
                by.append(start)
        if any(p != (0, 0, 0) for p in padding):
            x = lax.pad(x, fill, padding)
        if not moving:
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact) and plain() is None:
            return apply(_Shift(moving, fill.item(), x.shape), x, by)
        return _read(moving, fill, x, by)


def _read(offsets: Sequence[Offset], fill: Any, x: jax.Array, by: Sequence[jax.Array]) -> jax.Array:
    """`y[j] = x[j + by]` along the dimensions of `offsets`, `fill` outside of `x`."""
    padding, starts, sizes = [(0, 0, 0)] * x.ndim, [jnp.int32(0)] * x.ndim, list(x.shape)
    for (d, _, low, high, size), start in zip(offsets, by, strict=True):
        before, after = max(0, -low), max(0, high + size - x.shape[d])
        padding[d], starts[d], sizes[d] = (before, after, 0), start + before, size
    if any(p != (0, 0, 0) for p in padding):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Shift:
    """`_read` of an array of this shape.

    The transpose of a read is a read with the offset reversed. Said so, it fuses like the forward
    read does; left to JAX it would be an update of an array of zeros.
    """

    offsets: Sequence[Offset]
    fill: complex
    shape: Sequence[int]

    def value(self, x: jax.Array, by: Sequence[jax.Array]) -> jax.Array:
        return _read(self.offsets, self.fill, x, by)

    def forward(self, wanted: Any, x: jax.Array, by: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
        return self.value(x, by), by

    def tangents(self, by: Sequence[jax.Array], tangents: Sequence[Any]) -> jax.Array:
        return _read(self.offsets, 0, tangents[0], by)

    def backward(
        self, by: Sequence[jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, list[None]]:
        back = [o._replace(low=-o.high, high=-o.low, size=self.shape[o.dim]) for o in self.offsets]
        return _read(back, 0, cotangent, [-start for start in by]), [None for _ in by]


Computed = list[tuple[Value, jax.Array]]
"""What an instruction adds to the values of a tile."""


@dataclasses.dataclass(frozen=True, eq=False)
class TiledEquation:
    """Compute an equation on windows: cut its operands, compute, crop its results."""

    node: Node
    step: Step
    reads: Sequence[Cut | None]
    positions: Sequence[Slot]
    crops: Sequence[Cut | None]

    @property
    def cuts(self) -> Sequence[Cut | None]:
        return [*self.reads, *self.crops]

    def run(self, env: Mapping[Value, jax.Array], scalars: Scalars) -> Computed:
        operands = [
            _cut(lookup(env, v), read, scalars)
            for v, read in zip(self.node.inputs, self.reads, strict=True)
        ]
        results = self.step.evaluate([at(p, scalars) for p in self.positions], *operands)
        return [
            (value, _cut(result, crop, scalars))
            for value, result, crop in zip(self.node.outputs, results, self.crops, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class PlainEquation:
    """Apply an equation to what the tile has: to global operands, or, if it is a reduction whose
    results are added up over tiles, to this tile's share.
    """

    node: Node
    cuts = ()

    def run(self, env: Mapping[Value, jax.Array], scalars: Scalars) -> Computed:
        operands = [lookup(env, v) for v in self.node.inputs]
        return list(zip(self.node.outputs, self.node.equation.bind(*operands), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class ReadView:
    """Read the window of a view out of the array that it is a view of.

    An example is a constant with one weight per row, in a function with a derivative rule: the tile
    has it whole, and multiplies some rows by some of the weights.
    """

    view: Value
    base: Value
    read: Cut | None
    """Along the axes that the base carries too: it is there on a window of its own."""
    starts: Mapping[int, tuple[Slot, int]]
    """Along the others, where the base is there whole: per dimension, start and size."""

    @property
    def node(self) -> Node | None:
        return self.base.node

    @property
    def cuts(self) -> Sequence[Cut | None]:
        return [self.read]

    def run(self, env: Mapping[Value, jax.Array], scalars: Scalars) -> Computed:
        x = _cut(lookup(env, self.base), self.read, scalars)
        for d, (start, size) in self.starts.items():
            x = lax.dynamic_slice_in_dim(x, at(start, scalars), size, d)
        return [(self.view, x)]


Instruction = TiledEquation | PlainEquation | ReadView


def _cut(x: jax.Array, cut: Cut | None, scalars: Scalars) -> jax.Array:
    return x if cut is None else cut(x, scalars)


@jax.custom_jvp
def with_value(x: jax.Array, value: jax.Array) -> jax.Array:
    """`x`, of which the value is known, so that a compiler need not compute it."""
    return value


with_value.defjvp(lambda primals, tangents: (primals[1], tangents[0]), symbolic_zeros=True)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePlan:
    """The windows of one tile, and the instructions that compute them from the inputs'."""

    windows: dict[Value, Windows]
    demands: dict[Value, list[Windows]]
    """What was asked of each value, before the windows were clipped and made equal."""
    instructions: list[Instruction]
    table: Table


def evaluate(
    instructions: Sequence[Instruction],
    env: dict[Value, jax.Array],
    scalars: Scalars,
    written: Collection[Value] = (),
) -> None:
    """Extend `env` (windows of tiled inputs, whole global inputs) by what instructions compute.

    What is there already is not replaced, only its derivative is that of its equation. `written`:
    what is to be an array, and not a part of what reads it.
    """
    for instruction in instructions:
        for value, x in instruction.run(env, scalars):
            x = lax.optimization_barrier(x) if value in written else x
            env[value] = with_value(x, env[value]) if value in env else x


def lookup(env: Mapping[Value, jax.Array], value: Value) -> jax.Array:
    if value not in env and value.base is not None and not value.tiled:
        return lookup(env, value.base)
    return value.known if value not in env and value.known is not None else env[value]
