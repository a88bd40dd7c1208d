"""The walk over a jaxpr, once, forwards.

Calls (`jit`, `remat`, ...) are looked through; a `scan` over tiled values is unrolled, or stays one
(see `layers`). Of a `cond`, reductions over tiled axes are taken out. For every equation that
touches a tiled value the primitive's rule is asked for the axes of the outputs, and operands that
lack axes are promoted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal as Constant

from .. import _rules as rules
from .._errors import Mixes, user_line
from .._rules import Axes, Equation, tiled, untiled
from .._rules.manual import type_of
from .branches import in_parts, mixes
from .inline import is_empty, live, plain_call
from .joint import Groups, Joint, broadcast_to, merge, sizes, tiled_only
from .layers import InTiles, layers_of
from .lookup import at_own_position
from .nodes import Nodes, Policy, constants
from .refusal import refuse
from .restated import restated
from .unrolled import over_merged, unrolled
from .values import Graph, Node, Value, constant, constants_of, is_held, without_elements


class Walk:
    """The walk over a jaxpr, which makes nodes.

    `calls` are the places of the calls that are being looked through, the innermost one last. What
    cannot be tiled is an error, unless `store_mixed`: then its operands are stored. `in_tile`: the
    jaxpr is evaluated inside a tile, where nothing can be stored; `in_rule`: there, as a function
    with a derivative rule, or as that rule. `make_layer` runs the body of a scan over layers in
    tiles; without it such a scan is unrolled.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        look_through: Callable[[Any], Any] = plain_call,
        store_mixed: bool = False,
        in_tile: bool = False,
        in_rule: bool = False,
        make_layer: InTiles | None = None,
    ):
        self.nodes = Nodes(policy, in_tile)
        self.look_through = look_through
        self.store_mixed = store_mixed
        self.in_tile, self.in_rule = in_tile, in_rule
        self.make_layer = make_layer
        self._parted = 0
        self.calls: list[Any] = []

    def inside(self, closed: Any, in_axes: Sequence[Axes]) -> Graph:
        """The graph of a jaxpr that is evaluated inside a tile."""
        inputs = arguments(closed.jaxpr, in_axes, [None] * len(in_axes))
        outputs = self.walk(closed.jaxpr, constants_of(closed.consts), inputs)
        if any(isinstance(v, Joint) for v in outputs):
            raise Mixes("it merges tiled dimensions")
        return Graph(inputs, outputs, self.nodes.list)

    def walk(
        self, jaxpr: Any, constants: Sequence[Value], arguments: Sequence[Value]
    ) -> list[Value]:
        """Add the equations that an output depends on; return the outputs."""
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(var: Any) -> Value:
            if isinstance(var, Constant):
                return Value(var.aval, untiled(var.aval), known=var.val)
            return env[var]

        pieces: dict[Any, Sequence[Value]] = {}
        for eqn in live(jaxpr):
            if is_empty(eqn):
                env.update((v, without_elements(v.aval)) for v in eqn.outvars)
                continue
            inputs = [read(v) for v in eqn.invars]
            if eqn.primitive.name == "concatenate":
                pieces[eqn.outvars[0]] = inputs
            if eqn.primitive.name == "gather":
                outputs = self._gather(eqn, inputs, pieces.get(eqn.invars[1]))
            else:
                outputs = self._equation(eqn, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Add what an equation of a jaxpr stands for, and return its outputs."""
        name, rule = eqn.primitive.name, rules.find(eqn.primitive)
        if name == "pvary":  # a change of type: whoever reads it makes it again
            return inputs
        inner = self.look_through(eqn)
        if inner is not None:
            return self._inline(eqn, inner, inputs)
        if name == "reshape" and eqn.params["dimensions"] is not None:
            order, shape = eqn.params["dimensions"], eqn.params["new_sizes"]
            return self._restated(
                eqn, lambda x: lax.reshape(lax.transpose(x, order), shape), inputs
            )
        if any(isinstance(v, Joint) for v in inputs):
            loops = name == "scan" and not over_merged(eqn, inputs)
            return unrolled(eqn, inputs, self) if loops else self._joined(eqn, inputs)
        if not any(v.tiled for v in inputs):
            equation = self._described(eqn, inputs)
            return self.nodes.add(equation, inputs, [untiled(a) for a in equation.out_avals])
        if name == "scan":
            return self._layers(eqn, inputs) or unrolled(eqn, inputs, self)
        if name == "cond":
            return self._branch(eqn, rule, inputs)
        if rule is not None and rule.apart and len(inputs) > 1:
            return self._apart(eqn, rule, inputs)
        if name == "name" and is_held(inputs[0], self.nodes.stored):
            # A name for an array that is held anyway stores nothing new; if the policy saves it, it
            # may be mixed freely.
            self.nodes.store(inputs[0].array, self.nodes.decision(self._described(eqn, inputs)))
            return inputs
        return self._tiled(eqn, rule, inputs)

    def _layers(self, eqn: Any, inputs: Sequence[Value]) -> list[Value] | None:
        """A `scan` over layers, as one that runs on whole arrays."""
        if self.make_layer is None:
            return None
        found = layers_of(eqn, [v.axes for v in inputs], self.make_layer)
        if found is None:
            return None
        nodes = self.nodes
        nodes.store_whole(inputs)
        whole = [nodes.view(v, untiled(v.aval)) if v.tiled else v for v in inputs]
        outputs = self._restated(eqn, found, whole)
        nodes.list[-1].layers = found  # a `scan`, or a call with a derivative of ours around it
        return [
            nodes.view(v, axes) if tiled(axes) else v
            for v, axes in zip(outputs, found.out_axes, strict=True)
        ]

    def _gather(
        self, eqn: Any, inputs: Sequence[Value], columns: Sequence[Value] | None
    ) -> Sequence[Value]:
        """A look-up by indices that were concatenated from these columns, if they were."""
        found = columns and at_own_position(eqn, inputs[0], columns)
        if not found:
            return self._equation(eqn, inputs)
        function, others = found
        return self._restated(eqn, function, [inputs[0], *others])

    def _inline(self, eqn: Any, inner: Any, inputs: Sequence[Value]) -> list[Value]:
        """The equations of the jaxpr that an equation calls."""
        self.calls.append(eqn.source_info)
        consts = constants_of(getattr(inner, "consts", ()))
        outputs = self.walk(getattr(inner, "jaxpr", inner), consts, inputs)
        self.calls.pop()
        return outputs

    def _described(self, eqn: Any, inputs: Sequence[Value]) -> Equation:
        """The equation as a rule sees it, before its outputs have axes."""
        return Equation(
            primitive=eqn.primitive,
            params=eqn.params,
            in_avals=tuple(v.aval for v in eqn.invars),
            in_axes=tuple(v.axes for v in inputs),
            out_avals=tuple(v.aval for v in eqn.outvars),
            constant=constants(inputs),
            source_infos=(eqn.source_info, *self.calls[::-1]),
            effects=eqn.effects,
            inside=self.in_rule,
        )

    def _tiled(self, eqn: Any, rule: rules.Rule | None, inputs: Sequence[Value]) -> Sequence[Value]:
        """An equation with tiled operands, in tiles; or whole, if it mixes their positions."""
        equation = self._described(eqn, inputs)
        try:
            if rule is None:
                raise Mixes(f"there is no tiling rule for primitive `{eqn.primitive.name}`")
            in_axes, out_axes = rule.axes(equation)
            promoted = [
                self.nodes.promote(v, axes) for v, axes in zip(inputs, in_axes, strict=True)
            ]
        except Mixes as refusal:
            joint = self._joint(eqn, inputs[0]) if eqn.primitive.name == "reshape" else None
            if joint is not None:
                return [joint]
            return self._equation(eqn, self._unmixed(equation, inputs, refusal))
        equation = dataclasses.replace(
            equation,
            in_axes=tuple(v.axes for v in promoted),
            out_axes=tuple(out_axes),
            constant=constants(promoted),
        )
        if not self.in_tile and (reason := rule.runs_whole(equation)) is not None:
            return self.nodes.run_whole(equation, inputs, reason)
        reduction = rule.reduction(equation)
        outputs = self.nodes.add(equation, promoted, out_axes, reduction)
        place = self.nodes.decision(equation)
        for value in outputs:
            self.nodes.store(value, place)
        if reduction is None and not any(v.tiled for v in outputs):
            # The last tiled dimensions, of size 1, were dropped: the equation runs once, on an
            # array that is small.
            self.nodes.store_whole(promoted)
        return [without_elements(v.aval) if 0 in v.aval.shape else v for v in outputs]

    def _unmixed(self, equation: Equation, inputs: Sequence[Value], refusal: Mixes) -> list[Value]:
        """The operands of an equation that its rule refused to tile, as global values where they
        are stored or follow cheaply from what is.

        The others stay tiled: of attention, the queries. It stays refused if that changes nothing.
        """
        if self.store_mixed:
            self.nodes.store_whole([v for v in inputs if v.tiled])
        whole = [self.nodes.whole(v, bounded=True) for v in inputs]
        found = [v if w is None else w for v, w in zip(inputs, whole, strict=True)]
        if not any(v.tiled and not w.tiled for v, w in zip(inputs, found, strict=True)):
            raise self._refusal(equation, refusal) from None
        return found

    def _refusal(self, equation: Equation, refusal: Mixes) -> Exception:
        """Inside a function that runs in a tile, it is that function which cannot."""
        if not self.in_tile:
            return refuse(equation, refusal)
        line = user_line(*equation.source_infos)
        return Mixes(f"inside it, `{equation.primitive.name}` at {line}: {refusal.reason}")

    def _joint(self, eqn: Any, value: Value) -> Joint | None:
        """What a `reshape` merges, if nobody stores it; None: it merges no tiled dimensions."""
        groups = merge(value.aval.shape, eqn.params["new_sizes"])
        if groups is None or all(len(g) < 2 for g in groups):
            return None
        if self.nodes.whole(value) is not None:
            return None
        (split,) = self._restated(eqn, lambda x: lax.reshape(x, sizes(groups)), [value])
        joint = tiled_only(groups, split.axes)
        merged = self.call(lambda x: lax.reshape(x, sizes(joint)), [split])
        return Joint(eqn.outvars[0].aval, merged, joint)

    def _joined(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """An equation that reads joint arrays, stated for what these are; or on whole arrays."""
        found = restated(eqn, inputs)
        if found is None:
            return self._on_merged(eqn, inputs)
        function, groups = found
        arrays = [self._split(v, groups[0]) for v in inputs]
        outputs = self._restated(eqn, function, arrays)
        return [
            Joint(var.aval, value, group)
            if value.tiled and any(len(g) > 1 for g in group)
            else self._restated(eqn, lambda x, n=var.aval.shape: lax.reshape(x, n), [value])[0]
            for var, value, group in zip(eqn.outvars, outputs, groups, strict=True)
        ]

    def _split(self, value: Value, groups: Groups) -> Value:
        """What a joint array is; and a number that is repeated, repeated as often as that."""
        if isinstance(value, Joint):
            return value.value
        node = value.node
        if node is None or value.tiled or node.op != "broadcast_in_dim":
            return value
        again = broadcast_to(node.equation, groups)
        return value if again is None else self.call(again, node.inputs)

    def _on_merged(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """An equation on merged arrays: once, if they are stored, or if its rule lets it run so;
        otherwise it is refused.
        """
        rule, reason = rules.find(eqn.primitive), "it mixes positions that `reshape` merged"
        runs_whole = rule is not None and rule.may_run_whole and not self.in_tile
        if self.store_mixed:
            self.nodes.store_whole([v.value for v in inputs if isinstance(v, Joint)])
        merged = [self._settled(v) for v in inputs]
        if all(v is not None for v in merged):
            return self._equation(eqn, [v for v in merged if v is not None])
        described = self._described(eqn, inputs)
        if not runs_whole:
            refusal = Mixes(f"{reason} into one dimension", "do it before the `reshape`")
            raise self._refusal(described, refusal) from None
        equation = dataclasses.replace(
            described, out_axes=tuple(untiled(a) for a in described.out_avals)
        )
        return self.nodes.run_whole(equation, [self.merged(v) for v in inputs], reason)

    def _settled(self, value: Value) -> Value | None:
        """A joint array, merged: whole, if it is stored; otherwise None."""
        if not isinstance(value, Joint):
            return value
        whole = self.nodes.whole(value.value, bounded=True)
        if whole is None:
            return None
        return self.call(lambda x: lax.reshape(x, value.aval.shape), [whole])

    def merged(self, value: Value) -> Value:
        """An output, as a whole array."""
        if not isinstance(value, Joint):
            return value
        self.nodes.store_whole([value.value])
        whole = self.nodes.view(value.value, untiled(value.value.aval))
        return self.call(lambda x: lax.reshape(x, value.aval.shape), [whole])

    def _restated(
        self, eqn: Any, function: Callable[..., Any], inputs: Sequence[Value]
    ) -> list[Value]:
        """The equations of a function that says the same as one equation."""
        self.calls.append(eqn.source_info)
        outputs = self._calls(function, inputs)
        self.calls.pop()
        return outputs

    def _apart(self, eqn: Any, rule: rules.Rule, inputs: Sequence[Value]) -> list[Value]:
        """One equation for each operand."""
        outputs: list[Value] = []
        for i, (value, read, made) in enumerate(zip(inputs, eqn.invars, eqn.outvars, strict=True)):
            params = rule.alone(eqn.params, i)
            alone = eqn.replace(invars=[read], outvars=[made], params=params)
            outputs += self._equation(alone, [value])
        return outputs

    def _branch(
        self, eqn: Any, rule: rules.Rule | None, inputs: Sequence[Value]
    ) -> Sequence[Value]:
        """A `cond` on a global number: the branch that is taken, if that is known; otherwise a
        `cond` in every tile, without what cannot run there.
        """
        branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
        index = constant(inputs[0]) if platforms is None else None
        if index is not None:
            return self._inline(eqn, branches[int(index)], inputs[1:])
        try:
            in_axes = [v.axes for v in inputs[1:]]
            graphs = [Walk(in_tile=True, in_rule=self.in_rule).inside(b, in_axes) for b in branches]
        except Mixes:  # as the rule will say
            return self._tiled(eqn, rule, inputs)
        # What a part hands on may turn out to be global, and is then parted from the rest.
        restated = in_parts(graphs, self._is_cut, platforms) if self._parted < 2 else None
        if restated is None:
            return self._tiled(eqn, rule, inputs)
        self._parted += 1
        outputs = self._restated(eqn, restated, inputs)
        self._parted -= 1
        return outputs

    def _is_cut(self, node: Node) -> bool:
        """Can it not be in a tile's branch: because it needs all tiles, or is stored?"""
        named = node.op == "name" and node.tiled
        saved = named and self.nodes.decision(node.equation) is not None
        return not self._parted and (saved or mixes(node))

    def call(self, fun: Callable[..., Any], inputs: Sequence[Value]) -> Value:
        return self._calls(fun, inputs)[0]

    def _calls(self, fun: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        closed = jax.make_jaxpr(fun)(*(type_of(v.aval) for v in inputs))
        return self.walk(closed.jaxpr, constants_of(closed.consts), inputs)


def arguments(jaxpr: Any, in_axes: Sequence[Axes], names: Sequence[str | None]) -> list[Value]:
    found = zip(jaxpr.invars, in_axes, names, strict=True)
    return [Value(var.aval, axes, name=name) for var, axes, name in found]
