"""Functions with derivative rules of their own: `custom_jvp` and `custom_vjp`.

The function and its rule are traced at full size, made into graphs, and evaluated on the tile like
any other equations; the tile's version is again a `custom_jvp` or `custom_vjp`. So ReLU keeps its
gradient at 0, and a surrogate gradient stays one.

A `custom_vjp` is harder. Its backward rule is any Python function, and in a tile it sees only this
tile's share of the cotangent. That is enough if the rule works position by position and is linear
in the cotangent; both are *proved* from what it was traced to (`unproved`). Rules without a proof
(they clip the gradient, add noise or a regulariser's, normalise it, round it) are right all the
same: such a function runs once, on whole arrays, as in plain JAX, and its operands are stored.

A rule may call functions with rules again, often its own (`exp`'s does). Those rules matter to
second derivatives only, so they are traced when JAX asks for them; what they need must then be in
the windows that the tile has, or it is refused.

Known inefficiency: a graph that holds no derivative, an evaluation say, stores what runs whole too.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import Mixes, TilingError
from .._geometry import Window, hull
from .._graph.alike import graph_likeness
from .._graph.values import Graph
from .._rules import Axes, Equation, Need, Rule, Step, Windows, find, register, tiled
from .._rules.guard import guarded
from .._rules.plainly import plainly
from .call_tile import CallTile, Evaluator, all_windows, along, hold_all, read_axes, refusal
from .graphs import (
    Arrays,
    ClosureError,
    body_of,
    cotangents_of,
    differentiated,
    gives_itself,
    inexact,
    replace,
    tangents_of,
    values_of,
)
from .proof import any_mixes, calls_unproved, lengths_of, unproved

_PARTLY = "some of its results carry no tiled axis"


def _partly_tiled(eqn: Equation) -> bool:
    return len({tiled(axes) for axes in eqn.out_axes}) > 1


class _Call(Rule):
    is_call, may_run_whole = True, True

    def likeness(self, eqn: Equation) -> Hashable:
        return tuple(map(id, eqn.params.values()))

    def axes(self, eqn: Equation) -> tuple[list[Axes], list[Axes]]:
        in_axes = read_axes(body_of(eqn, eqn.in_axes))
        return in_axes, [v.axes for v in body_of(eqn, in_axes).outputs]


@register("custom_jvp_call")
class CustomJvp(_Call):
    def runs_whole(self, eqn: Equation) -> str | None:
        if _partly_tiled(eqn):
            return _PARTLY
        try:
            graphs = self._graphs(eqn)
        except ClosureError:
            raise
        except (Mixes, TilingError) as error:
            return f"its derivative rule cannot be tiled: {error}"
        if any(any_mixes(graph) for graph in graphs):
            return "the function, or its derivative rule, reduces over a tiled axis"
        return next(filter(None, map(calls_unproved, graphs[1:])), None)

    def changes_value(self, eqn: Equation) -> bool:
        try:
            return not gives_itself(eqn)
        except TilingError:  # its rule closes over an array
            return True

    def _graphs(self, eqn: Equation) -> list[Graph]:
        """The function, its tangents, and its value if its rule gives another."""
        own = [] if gives_itself(eqn) else [values_of(eqn)]
        return [body_of(eqn, eqn.in_axes), tangents_of(eqn), *own]

    def likeness(self, eqn: Equation) -> Hashable:
        """A rule inside a rule matters as well, and is not traced yet."""
        graphs = self._graphs(eqn)
        rules = [find(n.equation.primitive) for g in graphs for n in g.nodes]
        if eqn.inside or any(r is not None and r.is_call for r in rules):
            return super().likeness(eqn)
        return tuple(map(graph_likeness, graphs))

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        produced = all_windows(eqn, windows)
        diff_in, diff_out = inexact(eqn.in_avals), inexact(eqn.out_avals)
        rule_windows = [produced[i] for i in diff_out]
        tile = CallTile(eqn, produced)
        body = body_of(eqn, eqn.in_axes)
        needs = [tile.needs(body, produced)]
        if not eqn.inside:
            needs.append(tile.needs(tangents_of(eqn), rule_windows))
            needs += [] if gives_itself(eqn) else [tile.needs(values_of(eqn), produced)]
        held = _held(eqn, tile, needs)
        run_body = tile.evaluator(body, held, produced)
        rule = functools.cache(lambda: _jvp_evaluators(eqn, tile, held, produced))
        if not eqn.inside:
            rule()
        tile.settled = True
        finish = guarded if eqn.inside else tuple

        def evaluate(scalars: Arrays, *operands: jax.Array) -> tuple[jax.Array, ...]:
            @jax.custom_jvp
            def call(scalars: Arrays, *operands: jax.Array) -> tuple[jax.Array, ...]:
                return finish(tuple(run_body(scalars, operands)))

            @call.defjvp
            def call_jvp(
                primals: tuple[Any, ...], dots: tuple[Any, ...]
            ) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
                (scalars, *operands), (_, *given) = primals, dots
                values, tangents = rule()
                with plainly("transposed"):
                    found = tangents(scalars, [*operands, *(given[i] for i in diff_in)])
                out = values(scalars, operands) if values else call(scalars, *operands)
                no_tangent = [np.zeros(x.shape, jax.dtypes.float0) for x in out]
                return tuple(out), tuple(replace(no_tangent, diff_out, found))

            return call(list(scalars), *operands)

        return Step([Need(h) for h in held], evaluate, positions=tile.positions, produced=produced)


@register("custom_vjp_call", "call_hi_primitive")
class CustomVjp(_Call):
    pulls_back = True

    def changes_value(self, eqn: Equation) -> bool:
        return True

    def runs_whole(self, eqn: Equation) -> str | None:
        return _PARTLY if _partly_tiled(eqn) else unproved(eqn)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        by_axis = _window_per_axis(eqn, windows)
        produced = [along(axes, by_axis) for axes in eqn.out_axes]
        held = [along(axes, by_axis) for axes in eqn.in_axes]
        tile = CallTile(eqn, [*held, *produced])
        run_body = tile.evaluator(body_of(eqn, eqn.in_axes), held, produced)
        rules = functools.cache(lambda: _rule_evaluators(eqn, tile, held, produced))
        if not eqn.inside:
            rules()
        tile.settled = True
        finish = guarded if eqn.inside else tuple
        diff_in, diff_out = inexact(eqn.in_avals), inexact(eqn.out_avals)

        def evaluate(scalars: Arrays, *operands: jax.Array) -> tuple[jax.Array, ...]:
            @jax.custom_vjp
            def call(scalars: Arrays, *operands: jax.Array) -> tuple[jax.Array, ...]:
                return finish(tuple(run_body(scalars, operands)))

            def forward(
                scalars: Arrays, *operands: jax.Array
            ) -> tuple[tuple[jax.Array, ...], tuple[Arrays, Arrays]]:
                run_forward, _ = rules()
                return tuple(run_forward(scalars, operands)), (scalars, operands)

            def backward(residuals: tuple[Arrays, Arrays], cotangents: Arrays) -> tuple[Any, ...]:
                scalars, operands = residuals
                _, run_backward = rules()
                found = run_backward(scalars, [*operands, *(cotangents[i] for i in diff_out)])
                return [None for _ in scalars], *replace([None] * len(operands), diff_in, found)

            call.defvjp(forward, backward)
            return call(list(scalars), *operands)

        return Step([Need(h) for h in held], evaluate, positions=tile.positions, produced=produced)


def _jvp_evaluators(
    eqn: Equation, tile: CallTile, held: Sequence[Windows], windows: Sequence[Windows]
) -> tuple[Evaluator | None, Evaluator]:
    """A `custom_jvp`'s values by its rule, None if they are the function's, and its tangents, on
    the windows that the tile holds.
    """
    tangents, values = tangents_of(eqn), None if gives_itself(eqn) else values_of(eqn)
    if any_mixes(tangents) or (values is not None and any_mixes(values)):
        raise refusal(eqn, "its derivative rule reduces over a tiled axis")
    diff_in, diff_out = inexact(eqn.in_avals), inexact(eqn.out_avals)
    return (
        None if values is None else tile.evaluator(values, held, windows),
        tile.evaluator(
            tangents, [*held, *(held[i] for i in diff_in)], [windows[i] for i in diff_out]
        ),
    )


def _rule_evaluators(
    eqn: Equation, tile: CallTile, held: Sequence[Windows], windows: Sequence[Windows]
) -> tuple[Evaluator, Evaluator]:
    """A `custom_vjp`'s forward and backward rule on the windows that the tile holds."""
    if eqn.inside and (reason := unproved(eqn)) is not None:
        raise refusal(eqn, reason)
    diff_in, diff_out = inexact(eqn.in_avals), inexact(eqn.out_avals)
    return (
        tile.evaluator(differentiated(eqn), held, windows),
        tile.evaluator(
            cotangents_of(eqn),
            [*held, *(windows[i] for i in diff_out)],
            [held[i] for i in diff_in],
        ),
    )


def _window_per_axis(eqn: Equation, windows: Sequence[Windows | None]) -> dict[int, Window]:
    """One window per axis for all operands and outputs of a function of single positions."""
    lengths = lengths_of(eqn)
    wanted: dict[int, list[Window]] = {}
    for window in windows:
        for w in (window or {}).values():
            wanted.setdefault(w.axis, []).append(w)
    return {
        a: hull(wanted[a], n) if a in wanted else Window(a, np.zeros(1, np.int64), n)
        for a, n in lengths.items()
    }


def _held(eqn: Equation, tile: CallTile, needs: Sequence[Sequence[Windows]]) -> list[Windows]:
    """What each operand must hold for all graphs; its tangent is held on the same windows."""
    n, diff_in = len(eqn.in_avals), inexact(eqn.in_avals)
    tangents = [replace([{}] * n, diff_in, of_graph[n:]) for of_graph in needs if of_graph[n:]]
    operands = [of_graph[:n] for of_graph in needs]
    return hold_all(eqn.in_avals, eqn.in_axes, tile, [*operands, *tangents])
