"""One tile: which window of every value it needs, and how it computes them.

Planning walks the equations from the wanted windows back to the inputs. The window of a value is
the hull of what its readers demand, clipped to the array and of one size for all tiles, so regions
shrink from layer to layer. Evaluation walks forwards; each reader cuts what it asked for out of the
value's window, and supplies its own padding where that lies outside the array.

All positions are integers known while tracing, one per tile. Those that differ between tiles become
*columns* of a table with one row per tile, and the tile loop is a scan over its rows; those that do
not are plain numbers in the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import Mixes
from .._geometry import Window, hull
from .._graph.build import refuse
from .._graph.values import Node, Value
from .._rules import Need, Step, Windows
from .._rules.transposing import transposing


@dataclasses.dataclass(frozen=True)
class Column:
    """A position that differs from tile to tile: which column of the table holds it."""

    index: int


@dataclasses.dataclass
class Table:
    """Per column, the tiled axis it depends on and its value for every tile along that axis."""

    columns: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)
    _seen: dict[tuple, int] = dataclasses.field(default_factory=dict)

    def add(self, axis: int, values: np.ndarray) -> int | Column:
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
    slot: int | Column
    low: int
    high: int
    size: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """Read one window out of an array that holds another; `fill` where that does not reach."""

    offsets: tuple[Offset, ...]
    fill: Any

    @classmethod
    def of(cls, table: Table, held: Windows, wanted: Windows, fill: Any) -> Cut | None:
        offsets = []
        for d, want in wanted.items():
            have = held[d]
            # A window that misses the array altogether reads `fill` only, however far away it is.
            by = np.clip(want.starts - have.starts, -want.size, have.size)
            if (by != 0).any() or want.size != have.size:
                slot = table.add(want.axis, by)
                offsets.append(Offset(d, slot, int(by.min()), int(by.max()), want.size))
        return cls(tuple(offsets), fill) if offsets else None

    def __call__(self, x: jax.Array, scalars: Sequence[jax.Array]) -> jax.Array:
        fill = np.asarray(0 if self.fill is None else self.fill).astype(x.dtype)
        padding = [(0, 0, 0)] * x.ndim
        for d, slot, _, _, size in self.offsets:
            if isinstance(slot, int):
                padding[d] = (-slot, slot + size - x.shape[d], 0)
        if any(p != (0, 0, 0) for p in padding):
            x = lax.pad(x, fill, padding)
        moving = tuple(o for o in self.offsets if isinstance(o.slot, Column))
        if not moving:
            return x
        by = [scalars[o.slot.index] for o in moving]
        if jnp.issubdtype(x.dtype, jnp.inexact) and not transposing():
            return _shift(moving, fill.item(), x, by)
        return _read(moving, fill, x, by)


def _read(offsets: Sequence[Offset], fill, x: jax.Array, by: Sequence[jax.Array]) -> jax.Array:
    """`y[j] = x[j + by]` along the dimensions of `offsets`, `fill` outside of `x`."""
    padding, starts, sizes = [(0, 0, 0)] * x.ndim, [jnp.int32(0)] * x.ndim, list(x.shape)
    for (d, _, low, high, size), start in zip(offsets, by, strict=True):
        before, after = max(0, -low), max(0, high + size - x.shape[d])
        padding[d], starts[d], sizes[d] = (before, after, 0), start + before, size
    if any(p != (0, 0, 0) for p in padding):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    return lax.dynamic_slice(x, starts, sizes)


# The transpose of a read is a read with the offset reversed. Said so, it fuses like the forward
# read does; left to JAX it would be an update of an array of zeros.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _shift(offsets, fill: complex, x: jax.Array, by: Sequence[jax.Array]) -> jax.Array:
    return _read(offsets, fill, x, by)


def _shift_forward(offsets, fill, x, by):
    return _read(offsets, fill, x, by), ([x.shape[o.dim] for o in offsets], by)


def _shift_backward(offsets, fill, residuals, cotangent):
    sizes, by = residuals
    back = [
        o._replace(low=-o.high, high=-o.low, size=n) for o, n in zip(offsets, sizes, strict=True)
    ]
    return _read(back, 0, cotangent, [-start for start in by]), [None for _ in by]


_shift.defvjp(_shift_forward, _shift_backward)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One equation of a tile.

    How its operands are cut, how it is computed, how its outputs are cropped.
    """

    node: Node
    step: Step
    reads: list[Cut | None]
    positions: list[int | Column]
    crops: list[Cut | None]


@dataclasses.dataclass(eq=False)
class TilePlan:
    """The windows of one tile, and the instructions that compute them from the inputs'."""

    windows: dict[Value, Windows]
    demands: dict[Value, list[Windows]]
    """What was asked of each value, before the windows were clipped and made equal."""
    instructions: list[Instruction | Node]
    table: Table

    def evaluate(
        self, env: dict[Value, jax.Array], scalars: Sequence[jax.Array]
    ) -> dict[Value, jax.Array]:
        """Extend `env` (windows of tiled inputs, whole global inputs) by all values of the tile."""

        def resolve(slot):
            return scalars[slot.index] if isinstance(slot, Column) else slot

        for item in self.instructions:
            if isinstance(item, Node):
                operands = [lookup(env, v) for v in item.inputs]
                env.update(zip(item.outputs, item.equation.bind(*operands), strict=True))
                continue
            operands = [
                x if cut is None else cut(x, scalars)
                for x, cut in zip(
                    (lookup(env, v) for v in item.node.inputs), item.reads, strict=True
                )
            ]
            outputs = item.step.evaluate([resolve(p) for p in item.positions], *operands)
            for value, out, crop in zip(item.node.outputs, outputs, item.crops, strict=True):
                if value in self.windows or not value.tiled:
                    env[value] = out if crop is None else crop(out, scalars)
        return env


def lookup(env: Mapping[Value, jax.Array], value: Value) -> jax.Array:
    if value not in env and value.base is not None and not value.tiled:
        return lookup(env, value.base)
    return value.known if value not in env and value.known is not None else env[value]


def plan(
    nodes: Sequence[Node],
    wanted: Mapping[Value, Windows],
    grid: Mapping[int, int],
    table: Table | None = None,
    reduce: Callable[[Node, Windows], Step] | None = None,
    whole_inside: bool = False,
) -> TilePlan:
    """Windows and instructions for the wanted windows.

    `nodes` in topological order; what is not needed is left out. Reductions over tiled axes are
    computed elsewhere, or by the steps that `reduce` gives for them. `whole_inside`: untiled inputs
    and constants that are read by window are there whole, and not by window.
    """
    demands: dict[Value, list[Windows]] = {value: [windows] for value, windows in wanted.items()}
    windows: dict[Value, Windows] = {}
    table = Table() if table is None else table
    backwards: list[Instruction | Node] = []
    needed_globals: set[Value] = set()

    def settle(value: Value) -> Windows:
        """The hull of all demands on a value; nobody will ask for more."""
        if value not in windows:
            asked = demands[value]
            windows[value] = {
                d: hull([a[d] for a in asked], value.aval.shape[d])
                for d, axis in enumerate(value.axes)
                if axis is not None
            }
        return windows[value]

    def view(value: Value) -> None:
        """A window of a value that is computed inside, but without some of the axes."""
        base, window = value.base, settle(value)
        kept = {d: w for d, w in window.items() if base.axes[d] is not None}
        further = {d: w for d, w in window.items() if base.axes[d] is None}

        def evaluate(scalars, x):
            for d, start in zip(further, scalars, strict=True):
                x = lax.dynamic_slice_in_dim(x, start, further[d].size, d)
            return [x]

        need = Need(kept) if base.tiled else None
        if base.tiled:
            demands.setdefault(base, []).append(kept)
        else:
            needed_globals.add(base)
        node = Node(base.node.equation if base.node else None, (base,), (value,))
        step = Step([need], evaluate, positions=list(further.values()))
        backwards.append(Instruction(node, step, [need], [], []))

    for node in reversed(nodes):
        for value in [v for v in demands if v.base in node.outputs]:
            view(value)
        if not node.tiled or (node.reduction is not None and reduce is None):
            if any(v in needed_globals or v in wanted for v in node.outputs):
                backwards.append(node)
                for v in node.inputs:
                    if not v.tiled:
                        needed_globals.add(v)
            continue
        reduced = node.reduction is not None and node.outputs[0] in needed_globals
        if not reduced and not any(v in demands for v in node.outputs):
            continue
        out = [settle(v) if v in demands else None for v in node.outputs]
        try:
            if node.reduction is not None:
                step = reduce(node, out[0] or {})
            else:
                step = node.rule.step(node.equation, out)
        except Mixes as refusal:
            raise refuse(node.equation, refusal) from None
        reads: list[Need | None] = []
        for value, need in zip(node.inputs, step.needs, strict=True):
            if not value.tiled:
                needed_globals.add(value)
                reads.append(None)
                continue
            need = need if need is not None else Need({})
            whole = {
                d: Window(axis, np.zeros(grid.get(axis, 1), np.int64), value.aval.shape[d])
                for d, axis in enumerate(value.axes)
                if axis is not None and d not in need.windows
            }
            need = Need({**need.windows, **whole}, need.fill)
            demands.setdefault(value, []).append(need.windows)
            reads.append(need)
        backwards.append(Instruction(node, step, reads, [], []))
    if whole_inside:
        for value in [v for v in demands if v.base is not None and v.base.node is None]:
            view(value)

    for item in backwards:
        if isinstance(item, Node):
            continue
        step = item.step
        item.reads = [
            None if need is None else Cut.of(table, settle(v), need.windows, need.fill)
            for v, need in zip(item.node.inputs, item.reads, strict=True)
        ]
        item.positions = [table.add(w.axis, w.starts) for w in step.positions]
        produced = step.produced or [windows.get(v, {}) for v in item.node.outputs]
        item.crops = [
            Cut.of(table, have, windows[v], 0) if v in windows else None
            for v, have in zip(item.node.outputs, produced, strict=True)
        ]
    for value in demands:
        settle(value)
    return TilePlan(windows, demands, backwards[::-1], table)
