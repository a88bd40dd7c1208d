"""`cond` and `switch` on a number that all tiles share, and `platform_dependent`.

A tile holds of each operand what any branch needs, and runs the branch that is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from .._graph.branches import choose, mixes
from .._graph.build import build_inside
from .._graph.values import Graph
from .._rules import Axes, Equation, Need, Rule, Step, Windows, register, tiled
from .._rules.registry import merge
from .call_tile import CallTile, all_windows, hold_all, read_axes


@register("cond", kind="window")
class Cond(Rule):
    may_run_whole = True

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        per_branch = zip(*map(read_axes, _graphs(eqn, eqn.in_axes[1:])), strict=True)
        in_axes = [merge(eqn.primitive, axes) for axes in per_branch]
        outputs = zip(*(g.outputs for g in _graphs(eqn, in_axes)), strict=True)
        return [(), *in_axes], [merge(eqn.primitive, [v.axes for v in vs]) for vs in outputs]

    def runs_whole(self, eqn: Equation) -> str | None:
        if eqn.effects:
            return "a branch has effects"
        if len({tiled(axes) for axes in eqn.out_axes}) > 1:
            return "some of its results carry no tiled axis"
        for node in (n for g in _graphs(eqn, eqn.in_axes[1:], eqn.out_axes) for n in g.nodes):
            if mixes(node):
                return f"a branch calls `{node.op}` on a tiled axis"
            if node.tiled and (reason := node.rule.runs_whole(node.equation)) is not None:
                return f"a branch calls `{node.op}`: {reason}"
        return None

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        produced = all_windows(eqn, windows)
        graphs = _graphs(eqn, eqn.in_axes[1:], eqn.out_axes)
        tile = CallTile(eqn, produced)
        needs = [tile.needs(graph, produced) for graph in graphs]
        held = hold_all(eqn.in_avals[1:], eqn.in_axes[1:], tile, needs)
        branches = [tile.evaluator(graph, held, produced) for graph in graphs]
        tile.settled = True
        platforms = eqn.params.get("branches_platforms")

        def evaluate(
            scalars: Sequence[jax.Array], index: jax.Array, *operands: jax.Array
        ) -> list[jax.Array]:
            ready = [functools.partial(run, scalars, operands) for run in branches]
            return choose(platforms, [index, *operands], ready)

        needed = [None, *map(Need, held)]
        return Step(needed, evaluate, positions=tile.positions, produced=produced)


def _graphs(
    eqn: Equation, in_axes: Sequence[Axes], out_axes: Sequence[Axes] | None = None
) -> list[Graph]:
    """The branches; their results carry `out_axes`, if they are given."""
    out_axes = None if out_axes is None else tuple(out_axes)
    return eqn.once(
        (tuple(in_axes), out_axes),
        lambda: [build_inside(b, in_axes, out_axes, eqn.inside) for b in eqn.params["branches"]],
    )
