"""Which window of every value one tile needs.

The walk goes from the wanted windows back to the inputs. The window of a value is the hull of what
its readers demand, clipped to the array and of one size for all tiles, so windows grow from the
last layer to the first. Two convolutions of width 3 after each other, of which rows 8 to 12 are
wanted: the second demands rows 7 to 13 of the first's result, and that rows 6 to 14 of the input.

A value's window is settled when all its readers have been visited, and instructions are made when
all windows are settled: only then is it known where in a window a reader finds what it asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .._errors import Mixes
from .._geometry import Window, hull
from .._graph.refusal import refuse
from .._graph.values import Node, Value
from .._rules import Need, Step, Windows
from .tile import Cut, Instruction, PlainEquation, ReadView, Table, TiledEquation, TilePlan

Reduce = Callable[[Node, Windows], Step]
"""How a tile computes a reduction over tiled axes, of whose result it wants these windows."""


def plan(
    nodes: Sequence[Node],
    wanted: Mapping[Value, Windows],
    grid: Mapping[int, int],
    table: Table | None = None,
    reduce: Reduce | None = None,
) -> TilePlan:
    """Windows and instructions for the wanted windows.

    `nodes` in topological order; what is not needed is left out. Reductions over tiled axes are
    computed elsewhere, or by the steps that `reduce` gives for them. `table`: of a tile that these
    equations are part of; then untiled inputs and constants, which it has whole, are cut here.
    """
    walk = _Walk(wanted, grid, Table() if table is None else table, reduce)
    for node in reversed(nodes):
        walk.visit(node)
    if table is not None:
        walk.view_inputs()
    return walk.finish()


class _Walk:
    """The walk from the wanted windows back to the inputs."""

    def __init__(
        self,
        wanted: Mapping[Value, Windows],
        grid: Mapping[int, int],
        table: Table,
        reduce: Reduce | None,
    ):
        self.grid, self.table, self.reduce = grid, table, reduce
        self.demands: dict[Value, list[Windows]] = {v: [w] for v, w in wanted.items()}
        self.views: dict[Value, list[Value]] = {}
        """Per array, the values that are the same array with other labels, and are demanded."""
        for value in wanted:
            self._note_view(value)
        self.windows: dict[Value, Windows] = {}
        self.needed: set[Value] = set(wanted)
        """What is wanted, and the global values that are needed for it."""
        self.backwards: list[Callable[[], Instruction]] = []
        """What makes each instruction, the last one first."""

    def visit(self, node: Node) -> None:
        """Demand what an equation reads, if its results are needed: all their readers are known."""
        for base in node.outputs:
            for view in self.views.get(base, ()):
                self._view(view, base)
        if not node.tiled or (node.reduction is not None and self.reduce is None):
            if any(v in self.needed for v in node.outputs):
                self.needed.update(v for v in node.inputs if not v.tiled)
                self.backwards.append(functools.partial(PlainEquation, node))
            return
        reduced = node.reduction is not None and node.outputs[0] in self.needed
        if reduced or any(v in self.demands for v in node.outputs):
            step = self._step(node)
            needs = [self._demand(v, need) for v, need in zip(node.inputs, step.needs, strict=True)]
            self.backwards.append(functools.partial(self._equation, node, step, needs))

    def view_inputs(self) -> None:
        """Views of inputs and constants are read out of whole arrays."""
        for value in list(self.demands):
            if value.base is not None and value.base.node is None:
                self._view(value, value.base)

    def finish(self) -> TilePlan:
        instructions = [make() for make in self.backwards]
        for value in self.demands:
            self._settle(value)
        return TilePlan(self.windows, self.demands, instructions[::-1], self.table)

    def _settle(self, value: Value) -> Windows:
        """The hull of all demands on a value; nobody will ask for more."""
        if value not in self.windows:
            asked = self.demands[value]
            self.windows[value] = {
                d: hull([a[d] for a in asked], value.aval.shape[d])
                for d, axis in enumerate(value.axes)
                if axis is not None
            }
        return self.windows[value]

    def _step(self, node: Node) -> Step:
        """How a tile computes an equation on the windows that are demanded of its results."""
        wanted = [self._settle(v) if v in self.demands else None for v in node.outputs]
        try:
            if node.reduction is not None and self.reduce is not None:
                return self.reduce(node, wanted[0] or {})
            return node.step(wanted)
        except Mixes as refusal:
            raise refuse(node.equation, refusal) from None

    def _demand(self, value: Value, need: Need | None) -> Need | None:
        """Demand what a step needs of an operand; where it names no window, the whole dimension.

        None: the operand is global.
        """
        if not value.tiled:
            self.needed.add(value)
            return None
        need = Need({}) if need is None else need
        whole = {
            d: Window(axis, np.zeros(self.grid.get(axis, 1), np.int64), value.aval.shape[d])
            for d, axis in enumerate(value.axes)
            if axis is not None and d not in need.windows
        }
        need = Need({**need.windows, **whole}, need.fill)
        if value not in self.demands:
            self._note_view(value)
        self.demands.setdefault(value, []).append(need.windows)
        return need

    def _note_view(self, value: Value) -> None:
        if value.base is not None:
            self.views.setdefault(value.base, []).append(value)

    def _equation(self, node: Node, step: Step, needs: Sequence[Need | None]) -> TiledEquation:
        reads = [
            None if need is None else self._cut(v, need)
            for v, need in zip(node.inputs, needs, strict=True)
        ]
        positions = [self.table.add(w.axis, w.starts) for w in step.positions]
        produced = step.produced or [self.windows.get(v, {}) for v in node.outputs]
        crops = [
            Cut.of(self.table, have, self.windows[v], 0) if v in self.windows else None
            for v, have in zip(node.outputs, produced, strict=True)
        ]
        return TiledEquation(node, step, reads, positions, crops)

    def _view(self, view: Value, base: Value) -> None:
        """Demand what a view needs of a value that is computed inside without some of its axes."""
        windows = self._settle(view)
        need = None
        if base.tiled:
            need = Need({d: w for d, w in windows.items() if base.axes[d] is not None})
            self.demands.setdefault(base, []).append(need.windows)
        else:
            self.needed.add(base)
        self.backwards.append(functools.partial(self._read_view, view, base, need))

    def _read_view(self, view: Value, base: Value, need: Need | None) -> ReadView:
        read = None if need is None else self._cut(base, need)
        starts = {
            d: (self.table.add(w.axis, w.starts), w.size)
            for d, w in self.windows[view].items()
            if base.axes[d] is None
        }
        return ReadView(view, base, read, starts)

    def _cut(self, value: Value, need: Need) -> Cut | None:
        return Cut.of(self.table, self._settle(value), need.windows, need.fill)
