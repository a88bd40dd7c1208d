"""Functions with derivative rules of their own: `custom_jvp` and `custom_vjp`.

The function and its rule are traced at full size, made into graphs, and evaluated on the tile like
any other equations; the tile's version is again a `custom_jvp` or `custom_vjp`. So ReLU keeps its
gradient at 0, and a surrogate gradient stays one.

A `custom_vjp` is harder. Its backward rule is any Python function, and in a tile it sees only this
tile's share of the cotangent. That is enough if the rule works position by position and is linear
in the cotangent; both are *proved* from what it was traced to (`_unproved`). Rules without a proof
(they clip the gradient, add noise or a regulariser's, normalise it, round it) are right all the
same: such a function runs once, on whole arrays, as in plain JAX, and its operands are stored.

A rule may call functions with rules again, often its own (`exp`'s does). Those rules matter to
second derivatives only, so they are traced when JAX asks for them; what they need must then be in
the windows that the tile has, or it is refused.

Known inefficiency: a graph that holds no derivative, an evaluation say, stores what runs whole too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import Mixes, TilingError, user_line
from .._geometry import Window, hull
from .._graph.alike import graph_likeness
from .._graph.branches import mixes
from .._graph.build import build_inside
from .._graph.inline import any_call
from .._graph.trace import inside, is_gone
from .._graph.values import Graph, Value
from .._rules import Axes, Equation, Need, Rule, Step, Windows, find, register, tiled
from .._rules.manual import type_of
from .._rules.plainly import plainly
from .call_tile import (
    CallTile,
    Evaluator,
    all_windows,
    along,
    hold_all,
    read_axes,
    refusal,
)
from .guard import guarded
from .linear import is_linear

T = TypeVar("T")
Arrays = Sequence[jax.Array]


class ClosureError(TilingError):
    """A rule closes over a traced array: it can be run neither in tiles nor whole."""


class _Call(Rule):
    is_call = True

    def likeness(self, eqn: Equation) -> Hashable:
        return tuple(map(id, eqn.params.values()))

    def axes(self, eqn: Equation) -> tuple[list[Axes], list[Axes]]:
        in_axes = read_axes(_body(eqn, eqn.in_axes))
        return in_axes, [v.axes for v in _body(eqn, in_axes).outputs]


@register("custom_jvp_call")
class CustomJvp(_Call):
    def runs_whole(self, eqn: Equation) -> str | None:
        if _partly_tiled(eqn):
            return _PARTLY
        try:
            graphs = [_body(eqn, eqn.in_axes), _tangents(eqn)]
        except ClosureError:
            raise
        except (Mixes, TilingError) as error:
            return f"its derivative rule cannot be tiled: {error}"
        if any(_mixes(graph) for graph in graphs):
            return "the function, or its derivative rule, reduces over a tiled axis"
        return _calls_unproved(graphs[1])

    def likeness(self, eqn: Equation) -> Hashable:
        """A rule inside a rule matters as well, and is not traced yet."""
        graphs = [_body(eqn, eqn.in_axes), _tangents(eqn)]
        rules = [find(n.equation.primitive) for g in graphs for n in g.nodes]
        if eqn.inside or any(r is not None and r.is_call for r in rules):
            return super().likeness(eqn)
        return tuple(map(graph_likeness, graphs))

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        produced = all_windows(eqn, windows)
        diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)
        rule_windows = [produced[i] for i in diff_out]
        tile = CallTile(eqn, produced)
        body = _body(eqn, eqn.in_axes)
        needs = [tile.needs(body, produced)]
        if not eqn.inside:
            needs.append(tile.needs(_tangents(eqn), rule_windows))
        held = _held(eqn, tile, needs)
        run_body = tile.evaluator(body, held, produced)
        tangents = functools.cache(lambda: _tangent_evaluator(eqn, tile, held, rule_windows))
        if not eqn.inside:
            tangents()
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
                with plainly("transposed"):
                    found = tangents()(scalars, [*operands, *(given[i] for i in diff_in)])
                out = call(scalars, *operands)
                no_tangent = [np.zeros(x.shape, jax.dtypes.float0) for x in out]
                return out, tuple(_replace(no_tangent, diff_out, found))

            return call(list(scalars), *operands)

        return Step([Need(h) for h in held], evaluate, positions=tile.positions, produced=produced)


@register("custom_vjp_call", "call_hi_primitive")
class CustomVjp(_Call):
    changes_value = True

    def runs_whole(self, eqn: Equation) -> str | None:
        return _PARTLY if _partly_tiled(eqn) else _unproved(eqn)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        by_axis = _window_per_axis(eqn, windows)
        produced = [along(axes, by_axis) for axes in eqn.out_axes]
        held = [along(axes, by_axis) for axes in eqn.in_axes]
        tile = CallTile(eqn, [*held, *produced])
        run_body = tile.evaluator(_body(eqn, eqn.in_axes), held, produced)
        rules = functools.cache(lambda: _rule_evaluators(eqn, tile, held, produced))
        if not eqn.inside:
            rules()
        tile.settled = True
        finish = guarded if eqn.inside else tuple
        diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)

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
                return [None for _ in scalars], *_replace([None] * len(operands), diff_in, found)

            call.defvjp(forward, backward)
            return call(list(scalars), *operands)

        return Step([Need(h) for h in held], evaluate, positions=tile.positions, produced=produced)


def _body(eqn: Equation, in_axes: Sequence[Axes]) -> Graph:
    """The function itself."""
    return eqn.once((_body, tuple(in_axes)), lambda: build_inside(any_call(eqn), in_axes))


_PARTLY = "some of its results carry no tiled axis"


def _partly_tiled(eqn: Equation) -> bool:
    return len({tiled(axes) for axes in eqn.out_axes}) > 1


def _mixes(graph: Graph) -> bool:
    return any(map(mixes, graph.nodes))


def _differentiable(eqn: Equation, primals: Arrays) -> Callable[..., list[jax.Array]]:
    """The equation as a function of its float operands that returns its float results."""
    diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)

    def function(*diff: jax.Array) -> list[jax.Array]:
        out = eqn.bind(*_replace(primals, diff_in, diff))
        return [out[i] for i in diff_out]

    return function


def _pick(eqn: Equation, primals: Sequence[T]) -> list[T]:
    """Those of the operands that are floats."""
    return [primals[i] for i in _inexact(eqn.in_avals)]


def _tangents(eqn: Equation) -> Graph:
    """The tangents of a `custom_jvp`'s float results, from operands and their tangents."""
    return eqn.once(_tangents, lambda: _traced_tangents(eqn))


def _traced_tangents(eqn: Equation) -> Graph:
    def jvp(primals: Arrays, tangents: Arrays) -> list[jax.Array]:
        return jax.jvp(_differentiable(eqn, primals), _pick(eqn, primals), tangents)[1]

    diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)
    shapes = _shapes(eqn.in_avals)
    closed = _traced(eqn, jvp, shapes, _pick(eqn, shapes))
    in_axes = [*eqn.in_axes, *(eqn.in_axes[i] for i in diff_in)]
    return build_inside(closed, in_axes, [eqn.out_axes[i] for i in diff_out])


def _differentiated(eqn: Equation) -> Graph:
    """All results of a `custom_vjp`, as they are when it is differentiated: what `fwd` returns."""

    def forward(primals: Arrays) -> list[jax.Array]:
        def function(*diff: jax.Array) -> list[jax.Array]:
            return eqn.bind(*_replace(primals, _inexact(eqn.in_avals), diff))

        return jax.vjp(function, *_pick(eqn, primals))[0]

    closed = _traced(eqn, forward, _shapes(eqn.in_avals))
    return build_inside(closed, eqn.in_axes, eqn.out_axes)


def _pullback(eqn: Equation) -> Callable[[Arrays, Arrays], tuple[jax.Array, ...]]:
    """From operands and the cotangents of float results to those of float operands."""

    def pullback(primals: Arrays, cotangents: Arrays) -> tuple[jax.Array, ...]:
        pull = jax.vjp(_differentiable(eqn, primals), *_pick(eqn, primals))[1]
        return pull(list(cotangents))

    return pullback


def _cotangents(eqn: Equation) -> Graph:
    """The graph of a `custom_vjp`'s pullback."""
    diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)
    shapes = _shapes(eqn.in_avals), _shapes([eqn.out_avals[i] for i in diff_out])
    closed = _traced(eqn, _pullback(eqn), *shapes)
    in_axes = [*eqn.in_axes, *(eqn.out_axes[i] for i in diff_out)]
    return build_inside(closed, in_axes, [eqn.in_axes[i] for i in diff_in])


def _unproved(eqn: Equation) -> str | None:
    """Why a `custom_vjp` may not run on tiles; None: it is proved that it may.

    It works position by position, forwards and backwards, and its pullback is linear in the
    cotangent. The pullback may add up positions to make the cotangent of an untiled operand.
    """
    try:
        body, forward, backward = (
            _body(eqn, eqn.in_axes),
            _differentiated(eqn),
            _cotangents(eqn),
        )
        if _mixes(body) or _mixes(forward):
            return "it reduces over a tiled axis"
        if not _sums_last(backward):
            return "its backward rule uses a reduction over a tiled axis"
        by_axis = {a: Window(a, np.arange(n, dtype=np.int64), 1) for a, n in _lengths(eqn).items()}
        tile = CallTile(eqn, [along(a, by_axis) for a in (*eqn.in_axes, *eqn.out_axes)])
        for graph in (body, forward, backward):
            tile.check_pointwise(graph)
    except ClosureError:
        raise
    except (Mixes, TilingError) as error:
        return str(error)
    cotangents = _shapes([eqn.out_avals[i] for i in _inexact(eqn.out_avals)])
    if not is_linear(_pullback(eqn), _shapes(eqn.in_avals), cotangents):
        return "its backward rule is not linear in the cotangent, or rounds it"
    return None if eqn.inside else _calls_unproved(forward) or _calls_unproved(backward)


def _calls_unproved(rule: Graph) -> str | None:
    """Why a rule may not run on tiles because of a function that it calls.

    It matters to second derivatives, which this cannot know of. Rules that those call in turn are
    left to `_rule_evaluators`, or a rule that calls itself would never be proved.
    """
    for node in rule.nodes:
        found = find(node.equation.primitive)
        if found is not None and found.changes_value and (reason := _unproved(node.equation)):
            return f"its rule calls a function with a rule that may not run on tiles: {reason}"
    return None


def _sums_last(graph: Graph) -> bool:
    """Are sums the only reductions over tiled axes, and is what they lead to never tiled again?"""
    summed: set[Value] = set()
    for node in graph.nodes:
        after = any(v.array in summed for v in node.inputs)
        if node.reduction is not None and (not node.reduction.adds or after):
            return False
        if node.reduction is None and node.tiled and after:
            return False
        if node.reduction is None and not node.tiled and any(v.tiled for v in node.inputs):
            return False
        if node.reduction is not None or after:
            summed.update(node.outputs)
    return True


def _tangent_evaluator(
    eqn: Equation, tile: CallTile, held: Sequence[Windows], windows: Sequence[Windows]
) -> Evaluator:
    """The tangents of a `custom_jvp` on the windows that the tile holds."""
    graph, diff_in = _tangents(eqn), _inexact(eqn.in_avals)
    if _mixes(graph):
        raise refusal(eqn, "its derivative rule reduces over a tiled axis")
    return tile.evaluator(graph, [*held, *(held[i] for i in diff_in)], windows)


def _rule_evaluators(
    eqn: Equation, tile: CallTile, held: Sequence[Windows], windows: Sequence[Windows]
) -> tuple[Evaluator, Evaluator]:
    """A `custom_vjp`'s forward and backward rule on the windows that the tile holds."""
    if eqn.inside and (reason := _unproved(eqn)) is not None:
        raise refusal(eqn, reason)
    diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)
    return (
        tile.evaluator(_differentiated(eqn), held, windows),
        tile.evaluator(
            _cotangents(eqn),
            [*held, *(windows[i] for i in diff_out)],
            [held[i] for i in diff_in],
        ),
    )


def _lengths(eqn: Equation) -> dict[int, int]:
    """Positions along each tiled axis, of a function that works position by position."""
    lengths: dict[int, set[int]] = {}
    for aval, axes in zip(
        (*eqn.in_avals, *eqn.out_avals), (*eqn.in_axes, *eqn.out_axes), strict=True
    ):
        for n, a in zip(aval.shape, axes, strict=True):
            if a is not None:
                lengths.setdefault(a, set()).add(n)
    if any(len(found) > 1 for found in lengths.values()):
        raise Mixes("its results have other sizes than its operands")
    return {a: found.pop() for a, found in lengths.items()}


def _window_per_axis(eqn: Equation, windows: Sequence[Windows | None]) -> dict[int, Window]:
    """One window per axis for all operands and outputs of a function of single positions."""
    lengths = _lengths(eqn)
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
    n, diff_in = len(eqn.in_avals), _inexact(eqn.in_avals)
    tangents = [_replace([{}] * n, diff_in, of_graph[n:]) for of_graph in needs if of_graph[n:]]
    operands = [of_graph[:n] for of_graph in needs]
    return hold_all(eqn.in_avals, eqn.in_axes, tile, [*operands, *tangents])


def _traced(eqn: Equation, rule: Callable[..., Any], *shapes: Any) -> Any:
    with inside(True):
        closed = jax.make_jaxpr(rule)(*shapes)
    if any(isinstance(c, jax.core.Tracer) and is_gone(c) for c in closed.consts):
        raise ClosureError(
            f"the derivative rule of the `{eqn.primitive.name}` function at "
            f"{user_line(*eqn.source_infos)} closes over an array that was made inside the tiled "
            "function, which is gone when the rule is traced (as under `jax.checkpoint`). What to "
            "do: make that array outside, or pass it to the function as an operand"
        )
    return closed


def _inexact(avals: Sequence[Any]) -> list[int]:
    """Which of these arrays have derivatives."""
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [type_of(a) for a in avals]


def _replace(items: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
    replaced = list(items)
    for i, value in zip(indices, values, strict=True):
        replaced[i] = value
    return replaced
