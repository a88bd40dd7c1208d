"""The tile of a function with a derivative rule: what it holds, and graphs evaluated on it.

A function and its rules are several graphs with the same operands. They are planned on the windows
of one tile, with one table of positions. First the function and, if they are known, its rules; from
then on the tile is settled: rules inside rules come later, when the loop is being traced, and must
do with the windows and positions that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import Mixes, TilingError, user_line
from .._geometry import Window, hull
from .._graph.values import Graph, Value
from .._regions.demands import plan
from .._regions.tile import Cut, Table, TilePlan, lookup
from .._regions.tile import evaluate as evaluate_all
from .._rules import Axes, Equation, Windows
from .._rules.registry import hulls

Evaluator = Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]
"""From the positions of a tile and a graph's inputs there to its outputs there."""


def refusal(eqn: Equation, reason: str) -> TilingError:
    return TilingError(
        f"cannot differentiate, in tiles, the derivative rule that calls `{eqn.primitive.name}` at "
        f"{user_line(*eqn.source_infos)}: {reason}. What to do: apply it outside "
        "`jaxtile.checkpoint` if second derivatives are needed"
    )


class CallTile:
    """The windows of one tile of an equation, and evaluators of graphs on them.

    An evaluator is a function of the positions of this tile and of arrays on the windows `held`; it
    returns the graph's outputs on the windows asked for.
    """

    def __init__(self, eqn: Equation, windows: Sequence[Windows]):
        self.eqn, self.table = eqn, Table()
        self.settled = False
        """From then on there are no new positions."""
        self.by_axis = {w.axis: w for ws in windows for w in ws.values()}
        self.grid = {axis: len(w.starts) for axis, w in self.by_axis.items()}
        for window in [w for ws in windows for w in ws.values()]:
            self.table.add(window.axis, window.starts)

    @property
    def positions(self) -> list[Window]:
        return [Window(axis, values, 1) for axis, values in self.table.columns]

    def needs(self, graph: Graph, windows: Sequence[Windows | None]) -> list[Windows]:
        """What a graph needs of each of its inputs."""
        found = self._plan(graph, windows).windows
        return [found.get(v, {}) for v in graph.inputs]

    def _plan(self, graph: Graph, windows: Sequence[Windows | None]) -> TilePlan:
        wanted: dict[Value, list[Windows]] = {}
        for value, window in zip(graph.outputs, windows, strict=True):
            if window is not None or not value.tiled:
                wanted.setdefault(value, []).append(window or {})
        for node in graph.nodes:
            if node.reduction is not None:
                for value in node.inputs:
                    wanted.setdefault(value, []).append(along(value.axes, self.by_axis))
        results = {v: hulls(ws, v.aval.shape) for v, ws in wanted.items()}
        return plan(graph.nodes, results, self.grid, self.table)

    def check_pointwise(self, graph: Graph) -> None:
        """Raise `Mixes` if a value is needed anywhere but at the position that is computed."""
        windows = [along(v.axes, self.by_axis) for v in graph.outputs]
        for found in self._plan(graph, windows).windows.values():
            if any(w != self.by_axis[w.axis] for w in found.values()):
                raise Mixes("it, or its backward rule, reads neighbouring positions")

    def evaluator(
        self, graph: Graph, held: Sequence[Windows], windows: Sequence[Windows | None]
    ) -> Evaluator:
        known = len(self.table.columns)
        tile = self._plan(graph, windows)
        reads = [
            self._cut(have, tile.windows[v]) if v.tiled and v in tile.windows else None
            for v, have in zip(graph.inputs, held, strict=True)
        ]
        crops = [
            self._cut(tile.windows[v], w) if v.tiled and w is not None else None
            for v, w in zip(graph.outputs, windows, strict=True)
        ]
        if not all(map(_within, (tile.windows.get(v, {}) for v in graph.inputs), held)):
            raise self._refusal("it reads positions around those that the tile has")
        if self.settled and len(self.table.columns) > known:
            raise self._refusal("it needs other positions than the tile has")

        def evaluate(
            scalars: Sequence[jax.Array], operands: Sequence[jax.Array]
        ) -> list[jax.Array]:
            env = {
                v: x if cut is None else cut(x, scalars)
                for v, x, cut in zip(graph.inputs, operands, reads, strict=True)
                if not v.tiled or v in tile.windows
            }
            evaluate_all(tile.instructions, env, scalars)
            return [
                jnp.asarray(lookup(env, v) if cut is None else cut(lookup(env, v), scalars))
                for v, cut in zip(graph.outputs, crops, strict=True)
            ]

        return evaluate

    def _refusal(self, reason: str) -> Exception:
        """While the tile is planned, the function may still run whole; later it is too late."""
        return refusal(self.eqn, reason) if self.settled else Mixes(reason)

    def _cut(self, held: Windows, wanted: Windows) -> Cut | None:
        """A dimension of size 1 may carry an axis on one side only; there is nothing to cut."""
        both = held.keys() & wanted.keys()
        return Cut.of(self.table, held, {d: wanted[d] for d in sorted(both)}, 0)


def _within(wanted: Windows, held: Windows) -> bool:
    pairs = [(want, held.get(d, want)) for d, want in wanted.items()]
    return all(((w.starts >= h.starts) & (w.stops <= h.stops)).all() for w, h in pairs)


def along(axes: Axes, by_axis: dict[int, Window]) -> Windows:
    return {d: by_axis[a] for d, a in enumerate(axes) if a is not None}


def following(aval: Any, axes: Axes, by_axis: dict[int, Window]) -> Windows:
    """Windows of an array at the positions of others, along each axis where there are such."""
    return {
        d: hull([by_axis[a]], aval.shape[d])
        if a in by_axis
        else Window(a, np.zeros(1, np.int64), aval.shape[d])
        for d, a in enumerate(axes)
        if a is not None
    }


def all_windows(eqn: Equation, windows: Sequence[Windows | None]) -> list[Windows]:
    """Windows for all outputs; those that nobody wants follow the others."""
    by_axis = {w.axis: w for ws in windows if ws for w in ws.values()}
    return [
        following(aval, axes, by_axis) if window is None else window
        for aval, axes, window in zip(eqn.out_avals, eqn.out_axes, windows, strict=True)
    ]


def hold_all(
    avals: Sequence[Any], axes: Sequence[Axes], tile: CallTile, needs: Sequence[Sequence[Windows]]
) -> list[Windows]:
    """What each operand must hold, if several graphs need these windows of them.

    An operand that none of them reads follows the tile: a rule inside a rule may read it.
    """
    found = [[w for w in windows if w] for windows in zip(*needs, strict=True)]
    return [
        hulls(ws, aval.shape) if ws else following(aval, labels, tile.by_axis)
        for ws, aval, labels in zip(found, avals, axes, strict=True)
    ]


def read_axes(graph: Graph) -> list[Axes]:
    """The inputs' axes, and those along which the graph reads them position by position."""
    axes = [v.axes for v in graph.inputs]
    for node in graph.nodes:
        for value in node.inputs:
            if value.base in graph.inputs and value.tiled:
                axes[graph.inputs.index(value.base)] = value.axes
    return axes
