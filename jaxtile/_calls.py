"""Functions with derivative rules of their own: `custom_jvp` and `custom_vjp`.

Both the function and its derivative rule are traced at full size, made into graphs, and evaluated
on the tile like any other equations; the tile's version is again a `custom_jvp` or `custom_vjp`. So
ReLU keeps its gradient at 0, and a surrogate gradient stays one.

A `custom_vjp` sees only the cotangent that reaches it from this tile. That is enough if it works
position by position and is linear in the cotangent. If it is not linear (it clips the gradient,
say) its output is stored, so that it sees the whole cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ._derivative import derivative_rule
from ._errors import Mixes
from ._geometry import Window, hull
from ._graph import ALL_CALLS, build
from ._rules import Axes, Equation, Need, Rule, Step, Windows, register
from ._tile import Cut, Table, TilePlan, lookup, plan
from ._values import Graph, Value


def _inexact(avals) -> list[int]:
    return [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _shapes(avals):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def _body(eqn: Equation, in_axes: Sequence[Axes]) -> Graph:
    closed = eqn.params["call_jaxpr"]
    return build(closed.jaxpr, closed.consts, in_axes)


def _in_axes(eqn: Equation) -> list[Axes]:
    """The operands' axes, and those along which the function reads them position by position."""
    axes = list(eqn.in_axes)
    graph = _body(eqn, axes)
    for node in graph.nodes:
        for value in node.inputs:
            if value.base in graph.inputs and value.tiled:
                axes[graph.inputs.index(value.base)] = value.axes
    return axes


def _derivative(eqn: Equation, fun, extra_avals, extra_axes) -> Graph:
    closed = jax.make_jaxpr(fun)(_shapes(eqn.in_avals), _shapes(extra_avals))
    # A rule often calls its own function (ReLU's does). Inside a rule such calls are inlined: it is
    # not differentiated again.
    return build(closed.jaxpr, closed.consts, [*eqn.in_axes, *extra_axes], look_through=ALL_CALLS)


class _Call(Rule):
    def axes(self, eqn: Equation):
        in_axes = _in_axes(eqn)
        graph = _body(eqn, in_axes)
        if any(node.reduction is not None for node in graph.nodes):
            raise Mixes(
                f"a function with a derivative rule of its own (`{eqn.primitive.name}`) reduces "
                "over a tiled axis"
            )
        if any(not n.tiled and any(v.tiled for v in n.inputs) for n in graph.nodes):
            raise Mixes(f"inside a `{eqn.primitive.name}`, a tiled dimension of size 1 is dropped")
        return in_axes, [v.axes for v in graph.outputs]


def _grid(windows: Sequence[Windows | None]) -> dict[int, int]:
    return {w.axis: len(w.starts) for ws in windows if ws for w in ws.values()}


def _wanted(outputs: Sequence[Value], windows: Sequence[Windows | None]) -> dict[Value, Windows]:
    """What is wanted of a graph's outputs; one value may be several outputs."""
    wanted: dict[Value, list[Windows]] = {}
    for value, window in zip(outputs, windows, strict=True):
        if window is not None or not value.tiled:
            wanted.setdefault(value, []).append(window or {})
    return {
        v: {d: hull([w[d] for w in ws], v.aval.shape[d]) for d in ws[0]} for v, ws in wanted.items()
    }


def _evaluator(
    graph: Graph,
    tile: TilePlan,
    table: Table,
    held: Sequence[Windows],
    windows: Sequence[Windows | None],
):
    """A function of arrays on the windows `held` that returns the graph's outputs on `windows`."""
    reads = [
        _cut(table, have, tile.windows[v]) if v.tiled and v in tile.windows else None
        for v, have in zip(graph.inputs, held, strict=True)
    ]
    crops = [
        _cut(table, tile.windows[v], w) if v.tiled and w is not None else None
        for v, w in zip(graph.outputs, windows, strict=True)
    ]

    def evaluate(scalars, operands):
        env = {
            v: x if cut is None else cut(x, scalars)
            for v, x, cut in zip(graph.inputs, operands, reads, strict=True)
            if not v.tiled or v in tile.windows
        }
        tile.evaluate(env, scalars)
        return [
            lookup(env, v) if cut is None else cut(lookup(env, v), scalars)
            for v, cut in zip(graph.outputs, crops, strict=True)
        ]

    return evaluate


def _cut(table: Table, held: Windows, wanted: Windows) -> Cut | None:
    """A dimension of size 1 may carry an axis on one side only; there is nothing to cut there."""
    both = held.keys() & wanted.keys()
    return Cut.of(table, held, {d: wanted[d] for d in sorted(both)}, 0)


@register("custom_jvp_call")
class CustomJvp(_Call):
    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        windows = _all_windows(eqn, windows)
        diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)

        def jvp(primals, tangents):
            def partial(*diff):
                return eqn.bind(*_replace(primals, diff_in, diff))

            _, dots = jax.jvp(partial, [primals[i] for i in diff_in], tangents)
            return [dots[i] for i in diff_out]

        body = _body(eqn, eqn.in_axes)
        rule = _derivative(
            eqn, jvp, [eqn.in_avals[i] for i in diff_in], [eqn.in_axes[i] for i in diff_in]
        )
        _forbid_reductions(rule)
        table, grid = Table(), _grid(windows)
        rule_windows = [windows[i] for i in diff_out]
        plans = [
            plan(body.nodes, _wanted(body.outputs, windows), grid, table),
            plan(rule.nodes, _wanted(rule.outputs, rule_windows), grid, table),
        ]
        held = [_held(value, i, diff_in, body, rule, plans) for i, value in enumerate(body.inputs)]
        run_body = _evaluator(body, plans[0], table, held, windows)
        run_rule = _evaluator(
            rule, plans[1], table, [*held, *(held[i] for i in diff_in)], rule_windows
        )

        def evaluate(scalars, *operands):
            @jax.custom_jvp
            def call(*operands):
                return tuple(run_body(scalars, operands))

            @call.defjvp
            def call_jvp(primals, tangents):
                with derivative_rule():
                    dots = run_rule(scalars, [*primals, *(tangents[i] for i in diff_in)])
                out = call(*primals)
                no_tangent = [np.zeros(x.shape, jax.dtypes.float0) for x in out]
                return out, tuple(_replace(no_tangent, diff_out, dots))

            return call(*operands)

        return Step(
            [Need(h) for h in held], evaluate, positions=_positions(table), produced=windows
        )


@register("custom_vjp_call")
class CustomVjp(_Call):
    def axes(self, eqn: Equation):
        in_axes, out_axes = super().axes(eqn)
        _backward(dataclasses.replace(eqn, in_axes=tuple(in_axes), out_axes=tuple(out_axes)))
        return in_axes, out_axes

    def whole_cotangent(self, eqn: Equation) -> bool:
        return not _linear(eqn)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)
        body, back = _body(eqn, eqn.in_axes), _backward(eqn)
        by_axis = _window_per_axis(eqn, windows)
        windows = [
            {d: by_axis[a] for d, a in enumerate(axes) if a is not None} for axes in eqn.out_axes
        ]
        held = [
            {d: by_axis[a] for d, a in enumerate(axes) if a is not None} for axes in eqn.in_axes
        ]
        table, grid = Table(), _grid(windows)
        body_plan = plan(body.nodes, _wanted(body.outputs, windows), grid, table)
        wanted = _wanted(back.outputs, [held[i] for i in diff_in])
        for node in back.nodes:
            if node.reduction is not None:
                value = node.inputs[0]
                wanted[value] = {d: by_axis[a] for d, a in enumerate(value.axes) if a is not None}
        back_plan = plan(back.nodes, wanted, grid, table)
        for tile in (body_plan, back_plan):
            for value, found in tile.windows.items():
                if not all(w.same(by_axis[w.axis]) for w in found.values()):
                    raise _not_pointwise(value.aval)
        run_body = _evaluator(body, body_plan, table, held, windows)
        run_back = _evaluator(
            back,
            back_plan,
            table,
            [*held, *(windows[i] for i in diff_out)],
            [held[i] for i in diff_in],
        )

        def evaluate(scalars, *operands):
            @jax.custom_vjp
            def call(scalars, *operands):
                return tuple(run_body(scalars, operands))

            def forward(scalars, *operands):
                return call(scalars, *operands), (scalars, operands)

            def backward(residuals, cotangents):
                scalars, operands = residuals
                found = run_back(scalars, [*operands, *(cotangents[i] for i in diff_out)])
                return [None for _ in scalars], *_replace([None] * len(operands), diff_in, found)

            call.defvjp(forward, backward)
            return call(list(scalars), *operands)

        return Step(
            [Need(h) for h in held], evaluate, positions=_positions(table), produced=windows
        )


def _window_per_axis(eqn: Equation, windows: Sequence[Windows | None]) -> dict[int, Window]:
    """One window per axis for all operands and outputs of a function of single positions."""
    lengths: dict[int, set[int]] = {}
    for aval, axes in zip(
        (*eqn.in_avals, *eqn.out_avals), (*eqn.in_axes, *eqn.out_axes), strict=True
    ):
        for n, a in zip(aval.shape, axes, strict=True):
            if a is not None:
                lengths.setdefault(a, set()).add(n)
    if any(len(found) > 1 for found in lengths.values()):
        raise _not_pointwise(eqn.in_avals[0])
    wanted: dict[int, list[Window]] = {}
    for window in (w for ws in windows if ws for w in ws.values()):
        wanted.setdefault(window.axis, []).append(window)
    whole = {
        a: Window(a, np.zeros(1, np.int64), min(n)) for a, n in lengths.items() if a not in wanted
    }
    return whole | {a: hull(found, min(lengths[a])) for a, found in wanted.items()}


def _replace(items, indices, values) -> list:
    items = list(items)
    for i, value in zip(indices, values, strict=True):
        items[i] = value
    return items


def _positions(table: Table) -> list[Window]:
    return [Window(axis, values, 1) for axis, values in table.columns]


def _all_windows(eqn: Equation, windows: Sequence[Windows | None]) -> list[Windows]:
    """Windows for all outputs.

    Those that nobody wants follow the others along each axis where they can.
    """
    by_axis = {w.axis: w for ws in windows if ws for w in ws.values()}
    out = []
    for aval, axes, window in zip(eqn.out_avals, eqn.out_axes, windows, strict=True):
        if window is None:
            window = {
                d: hull([by_axis[a]], aval.shape[d])
                if a in by_axis
                else Window(a, np.zeros(1, np.int64), aval.shape[d])
                for d, a in enumerate(axes)
                if a is not None
            }
        out.append(window)
    return out


def _held(
    value: Value, i: int, diff_in: list[int], body: Graph, rule: Graph, plans: list[TilePlan]
) -> Windows:
    """What an operand must hold for the function, its derivative rule and the tangent."""
    readers = [(plans[0], body.inputs[i]), (plans[1], rule.inputs[i])]
    if i in diff_in:
        readers.append((plans[1], rule.inputs[len(body.inputs) + diff_in.index(i)]))
    found = [p.windows[v] for p, v in readers if v in p.windows]
    return (
        {d: hull([f[d] for f in found], value.aval.shape[d]) for d in found[0]}
        if value.tiled and found
        else {}
    )


def _forbid_reductions(graph: Graph) -> None:
    if any(node.reduction is not None for node in graph.nodes):
        raise Mixes("a derivative rule reduces over a tiled axis")


def _pullback(eqn: Equation):
    diff_in, diff_out = _inexact(eqn.in_avals), _inexact(eqn.out_avals)

    def pullback(primals, cotangents):
        def partial(*diff):
            out = eqn.bind(*_replace(primals, diff_in, diff))
            return [out[i] for i in diff_out]

        return jax.vjp(partial, *(primals[i] for i in diff_in))[1](list(cotangents))

    return pullback


def _backward(eqn: Equation) -> Graph:
    """The graph of a `custom_vjp`'s pullback.

    It may sum over tiled axes only to make cotangents of untiled operands.
    """
    diff_out = _inexact(eqn.out_avals)
    graph = _derivative(
        eqn,
        _pullback(eqn),
        [eqn.out_avals[i] for i in diff_out],
        [eqn.out_axes[i] for i in diff_out],
    )
    summed: set[Value] = set()
    for node in graph.nodes:
        after = any(v.array in summed for v in node.inputs)
        if node.reduction is not None and (
            node.equation.primitive.name != "reduce_sum" or after or not _linear(eqn)
        ):
            raise Mixes("the backward rule of a `custom_vjp` reduces over a tiled axis")
        if node.reduction is None and node.tiled and after:
            raise Mixes(
                "the backward rule of a `custom_vjp` uses a sum over a tiled axis in every position"
            )
        if node.reduction is not None or after:
            summed.update(node.outputs)
    return graph


def _linear(eqn: Equation) -> bool:
    """Is the pullback linear in the cotangent, as a derivative is?"""
    outs = [eqn.out_avals[i] for i in _inexact(eqn.out_avals)]
    ins = [eqn.in_avals[i] for i in _inexact(eqn.in_avals)]

    def transposed(primals, result):
        pullback = functools.partial(_pullback(eqn), primals)
        return jax.linear_transpose(lambda *c: pullback(c), *_shapes(outs))(tuple(result))

    try:
        jax.make_jaxpr(transposed)(_shapes(eqn.in_avals), _shapes(ins))
    except Exception:  # JAX has no single error for it: what cannot be transposed is not linear
        return False
    return True


def _not_pointwise(aval) -> Mixes:
    return Mixes(
        f"a `custom_vjp` function reads neighbouring positions (an array of shape {aval.shape})",
        "write it as a `custom_jvp`, or apply the spatial part outside of it",
    )
