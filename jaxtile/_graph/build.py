"""From a traced function to a graph whose values know which of their dimensions are tiled.

The builder walks a jaxpr once, forwards. Calls (`jit`, `remat`, ...) are looked through; a `scan`
over tiled values is unrolled, or stays one (see `layers`). Of a `cond`, reductions over tiled axes
are taken out. For every equation that touches a tiled value the builder asks the primitive's rule
for the axes of the outputs. An untiled operand that is combined position by position with a tiled
one is *promoted*: evaluated window by window if its own rule allows (an `iota`, a broadcast, random
bits, a cast of those), otherwise computed whole, once, and read by window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import reshape_p

from .. import _rules as rules
from .._errors import Mixes, TilingError, describe, user_line
from .._rules import Axes, Equation, Reduction, tiled, untiled
from .._rules.manual import type_of
from .alike import likeness
from .branches import in_parts, mixes
from .clamps import ask_results
from .inline import plain_call
from .joint import Groups, Joint, broadcast_to, merge, restated, sizes
from .layers import InTiles, Scan, layers_of
from .lookup import at_own_position
from .trace import Traced
from .values import Graph, Node, Place, Value, constant, is_held

Policy = Callable[..., Any]
"""As `jax.checkpoint` takes it."""

_BOUNDED = ("movement", "elementwise", "random", "reduction", "window", "max_pool")
"""Work whose results are about as large as its operands; contractions with such results, too."""


def build(
    jaxpr: Any,
    consts: Sequence[Any],
    in_axes: Sequence[Axes],
    policy: Policy | None = None,
    look_through: Callable[[Any], Any] = plain_call,
    names: Sequence[str] | None = None,
) -> Graph:
    """The graph of a jaxpr whose arguments carry `in_axes`.

    `look_through`: the jaxpr that an equation calls, if it is to be inlined. `names`: what the
    function calls its arguments.
    """
    return _graph(_Builder(policy, look_through), jaxpr, consts, in_axes, names)


def build_layers(traced: Traced, policy: Policy | None, in_tiles: InTiles) -> Graph:
    """The graph of a function in which scans over rematerialised layers stay scans."""
    builder = _Builder(policy)
    builder.in_tiles = in_tiles
    return _graph(builder, traced.jaxpr, traced.consts, traced.in_axes, traced.names)


def build_storing(
    jaxpr: Any, consts: Sequence[Any], in_axes: Sequence[Axes], names: Sequence[str]
) -> Graph:
    """The graph of a jaxpr in which it is no error that an equation cannot be tiled.

    Its operands are stored, and it runs once, on whole arrays.
    """
    return _graph(_Builder(store_mixed=True), jaxpr, consts, in_axes, names)


def _graph(
    builder: _Builder,
    jaxpr: Any,
    consts: Sequence[Any],
    in_axes: Sequence[Axes],
    names: Sequence[str] | None,
) -> Graph:
    """What the builder makes of a jaxpr; its outputs are stored."""
    known_as: Sequence[str | None] = names or [None] * len(jaxpr.invars)
    arguments = [
        Value(var.aval, axes, name=name)
        for var, axes, name in zip(jaxpr.invars, in_axes, known_as, strict=True)
    ]
    outputs = [builder.merged(v) for v in builder.walk(jaxpr, _known(consts), arguments)]
    for value in outputs:
        builder.stored.setdefault(value.array, "device")
    for node in ask_results(builder.nodes):
        builder.classify(node)
    return Graph(arguments, outputs, builder.nodes, builder.stored)


def build_inside(
    closed: Any,
    in_axes: Sequence[Axes],
    out_axes: Sequence[Axes] | None = None,
    in_rule: bool = True,
) -> Graph:
    """The graph of a jaxpr that is evaluated inside a tile: a function with a derivative rule, that
    rule, or, not `in_rule`, a branch.

    Nothing in it can be stored. Its results carry `out_axes`, if they are given.
    """
    builder = _Builder(in_tile=True, in_rule=in_rule)
    arguments = [Value(v.aval, axes) for v, axes in zip(closed.jaxpr.invars, in_axes, strict=True)]
    outputs = builder.walk(closed.jaxpr, _known(closed.consts), arguments)
    if any(isinstance(v, Joint) for v in outputs):
        raise Mixes("it merges tiled dimensions")
    if out_axes is not None:
        outputs = [builder.promote(v, a) for v, a in zip(outputs, out_axes, strict=True)]
    return Graph(arguments, outputs, builder.nodes)


class _Builder:
    """The walk over a jaxpr: the nodes made so far, and what they need stored.

    `calls` are the places of the calls that are being looked through, the innermost one last. What
    cannot be tiled is an error, unless `store_mixed`: then its operands are stored. `in_tile`: the
    jaxpr is evaluated inside a tile, where nothing can be stored; `in_rule`: there, as a function
    with a derivative rule, or as that rule.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        look_through: Callable[[Any], Any] = plain_call,
        store_mixed: bool = False,
        in_tile: bool = False,
        in_rule: bool = False,
    ):
        self.policy = policy
        self.look_through = look_through
        self.store_mixed = store_mixed
        self.in_tile, self.in_rule = in_tile, in_rule
        self.in_tiles: InTiles | None = None
        self._parted = 0
        self.calls: list[Any] = []
        self.nodes: list[Node] = []
        self.stored: dict[Value, Place] = {}
        self._promoted: dict[tuple[Value, Axes], Value] = {}
        self._wholes: dict[Hashable, Value | None] = {}
        self._kinds: dict[Hashable, Equation] = {}

    def walk(
        self, jaxpr: Any, constants: Sequence[Value], arguments: Sequence[Value]
    ) -> list[Value]:
        """Add the equations that an output depends on; return the outputs."""
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(var: Any) -> Value:
            if isinstance(var, Constant):
                return Value(var.aval, (None,) * np.ndim(var.val), known=var.val)
            return env[var]

        pieces: dict[Any, Sequence[Value]] = {}
        for eqn in _live(jaxpr):
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
            return self._joined(eqn, inputs)
        if not any(v.tiled for v in inputs):
            equation = self._described(eqn, inputs)
            return self._add(equation, inputs, [untiled(a) for a in equation.out_avals])
        if name == "scan":
            return self._layers(eqn, inputs) or self._unroll(eqn, inputs)
        if name == "cond":
            return self._branch(eqn, rule, inputs)
        if rule is not None and rule.apart and len(inputs) > 1:
            return self._apart(eqn, rule, inputs)
        if name == "name" and is_held(inputs[0], self.stored):
            # A name for an array that is held anyway stores nothing new; if the policy saves it, it
            # may be mixed freely.
            self._store(inputs[0].array, self._decision(self._described(eqn, inputs)))
            return inputs
        return self._tiled(eqn, rule, inputs)

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
        consts = _known(getattr(inner, "consts", ()))
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
            constant=_constants(inputs),
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
            promoted = [self.promote(v, axes) for v, axes in zip(inputs, in_axes, strict=True)]
        except Mixes as refusal:
            joint = self._joint(eqn, inputs[0]) if eqn.primitive.name == "reshape" else None
            if joint is not None:
                return [joint]
            return self._equation(eqn, self._unmixed(equation, inputs, refusal))
        equation = dataclasses.replace(
            equation,
            in_axes=tuple(v.axes for v in promoted),
            out_axes=tuple(out_axes),
            constant=_constants(promoted),
        )
        if not self.in_tile and (reason := rule.runs_whole(equation)) is not None:
            return self._run_whole(equation, inputs, reason)
        reduction = rule.reduction(equation)
        outputs = self._add(equation, promoted, out_axes, reduction)
        place = self._decision(equation)
        for value in outputs:
            self._store(value, place)
        if reduction is None and not any(v.tiled for v in outputs):
            # The last tiled dimensions, of size 1, were dropped: the equation runs once, on an
            # array that is small.
            self._store_whole(promoted)
        return [_without_elements(v) if v.tiled and 0 in v.aval.shape else v for v in outputs]

    def _unmixed(self, equation: Equation, inputs: Sequence[Value], refusal: Mixes) -> list[Value]:
        """The operands of an equation that its rule refused to tile, as global values where they
        are stored or follow cheaply from what is.

        The others stay tiled: of attention, the queries. It stays refused if that changes nothing.
        """
        if self.store_mixed:
            self._store_whole([v for v in inputs if v.tiled])
        whole = [self._whole(v, _BOUNDED) for v in inputs]
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
        if self._whole(value) is not None:
            return None
        (split,) = self._restated(eqn, lambda x: lax.reshape(x, sizes(groups)), [value])
        return Joint(eqn.outvars[0].aval, split, groups)

    def _joined(self, eqn: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """An equation that reads joint arrays, stated for what these are; or on whole arrays."""
        found = restated(eqn, inputs)
        if found is None:
            return self._equation(eqn, [self._settled(eqn, inputs, v) for v in inputs])
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
        if node is None or value.tiled or node.equation.primitive.name != "broadcast_in_dim":
            return value
        again = broadcast_to(node.equation, groups)
        return value if again is None else self._call(again, node.inputs)

    def _settled(self, eqn: Any, inputs: Sequence[Value], value: Value) -> Value:
        """A joint array, merged: whole, if it is stored; otherwise its reader is refused."""
        if not isinstance(value, Joint):
            return value
        if self.store_mixed:
            self._store_whole([value.value])
        whole = self._whole(value.value, _BOUNDED)
        if whole is None:
            reason = "it mixes positions that `reshape` merged into one dimension"
            advice = "do it before the `reshape`"
            raise self._refusal(self._described(eqn, inputs), Mixes(reason, advice)) from None
        return self._call(lambda x: lax.reshape(x, value.aval.shape), [whole])

    def merged(self, value: Value) -> Value:
        """An output, as a whole array."""
        if not isinstance(value, Joint):
            return value
        self._store_whole([value.value])
        whole = self._view(value.value, untiled(value.value.aval))
        return self._call(lambda x: lax.reshape(x, value.aval.shape), [whole])

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

    def _run_whole(self, equation: Equation, inputs: Sequence[Value], reason: str) -> list[Value]:
        """An equation that runs once, on whole arrays, and whose results are read by window."""
        self._store_whole(inputs)
        whole = [self._view(v, untiled(v.aval)) if v.tiled else v for v in inputs]
        untiled_equation = dataclasses.replace(
            equation, in_axes=tuple(v.axes for v in whole), constant=_constants(whole)
        )
        outputs = self._add(
            untiled_equation,
            whole,
            [untiled(a) for a in equation.out_avals],
            runs_whole=reason,
        )
        return [
            self._view(v, axes) if tiled(axes) else v
            for v, axes in zip(outputs, equation.out_axes, strict=True)
        ]

    def _add(
        self,
        equation: Equation,
        inputs: Sequence[Value],
        out_axes: Sequence[Axes],
        reduction: Reduction | None = None,
        runs_whole: str | None = None,
    ) -> tuple[Value, ...]:
        if equation.out_axes != tuple(out_axes):
            equation = dataclasses.replace(equation, out_axes=tuple(out_axes))
        node = Node(equation, tuple(inputs), reduction=reduction, runs_whole=runs_whole)
        name = equation.params.get("name") if equation.primitive.name == "name" else None
        node.outputs = tuple(
            Value(aval, tuple(axes), node=node, name=name)
            for aval, axes in zip(equation.out_avals, out_axes, strict=True)
        )
        self.classify(node)
        self.nodes.append(node)
        return node.outputs

    def classify(self, node: Node) -> None:
        """Find the first equation of the graph that a node's is like."""
        if node.tiled and not self.in_tile:
            key = likeness(node.equation, node.inputs)
            node.kind = self._kinds.setdefault(key, node.equation)

    def _decision(self, equation: Equation) -> Place | None:
        """Where the policy stores this equation's outputs; None: it recomputes them."""
        if self.policy is None:
            return None
        return place(self.policy(equation.primitive, *equation.in_avals, **equation.params))

    def _store(self, value: Value, place: Place | None) -> None:
        if value.tiled and 0 not in value.aval.shape and place is not None:
            self.stored[value] = place

    def _store_whole(self, values: Iterable[Value]) -> None:
        """What must exist as whole arrays."""
        for value in values:
            if not is_held(value, self.stored):
                self.stored[value.array] = "device"

    def promote(self, value: Value, axes: Axes) -> Value:
        """The same value, carrying more axes.

        Computed window by window if that is cheap, else read by window.
        """
        axes = tuple(axes)
        value = self._unlabelled(value, axes)
        if value.axes == axes:
            return value
        if any(
            have is not None and have != want for have, want in zip(value.axes, axes, strict=True)
        ):
            raise Mixes(
                f"an array {describe(value.aval, value.axes)} is used as "
                f"{describe(value.aval, axes)}"
            )
        key = (value, axes)
        if key not in self._promoted:
            self._promoted[key] = self._promote(value, axes)
        return self._promoted[key]

    def _promote(self, value: Value, axes: Axes) -> Value:
        node = value.node
        if (
            node is not None
            and node.reduction is None
            and len({v.aval.shape for v in node.outputs}) == 1
            and value not in self.stored
        ):
            rule = rules.find(node.equation.primitive)
            in_axes = rule.promote(node.equation, axes) if rule is not None else None
            if in_axes is not None:
                inputs = [self.promote(v, a) for v, a in zip(node.inputs, in_axes, strict=True)]
                equation = dataclasses.replace(
                    node.equation,
                    in_axes=tuple(v.axes for v in inputs),
                    constant=_constants(inputs),
                )
                outputs = self._add(equation, inputs, [axes] * len(node.outputs))
                self._promoted.update(
                    ((v, axes), promoted) for v, promoted in zip(node.outputs, outputs, strict=True)
                )
                return outputs[node.outputs.index(value)]
        if not is_held(value, self.stored):
            raise Mixes(
                f"an array {describe(value.aval, value.axes)} is needed along a further tiled axis",
                "name it with `checkpoint_name` and save that name in `policy`",
            )
        return self._view(value, axes)

    def _whole(self, value: Value, kinds: Sequence[str] = ()) -> Value | None:
        """The value as a global one, if it follows from what the policy stores: cheaply, or by
        work of these kinds.

        What is stored is held whole by the user's choice; equations that mix its positions may then
        run once, untiled.
        """
        if not value.tiled:
            return value
        node = value.node
        reduced = node is not None and node.reduction is not None
        if value.array in self.stored or not value.array.tiled or reduced:
            return self._view(value, untiled(value.aval))
        key = value, len(self.stored), kinds
        if key not in self._wholes:
            self._wholes[key] = None if node is None else self._untiled(node, value, kinds)
        return self._wholes[key]

    def _untiled(self, node: Node, value: Value, kinds: Sequence[str]) -> Value | None:
        """An equation on whole arrays, as `_whole` wants it."""
        cheap = node.rule.is_call or node.rule.promote(node.equation, value.axes) is not None
        kind = rules.traits(node.equation.primitive).kind
        shrinks = any(value.bytes <= v.bytes for v in node.inputs)
        bounded = kind in kinds or (kinds and kind == "contraction" and shrinks)
        if not cheap and not bounded:
            return None
        whole = [self._whole(v, kinds) for v in node.inputs]
        inputs = [v for v in whole if v is not None]
        if len(inputs) < len(whole):
            return None
        equation = dataclasses.replace(
            node.equation, in_axes=tuple(untiled(v.aval) for v in inputs)
        )
        outputs = self._add(equation, inputs, [untiled(v.aval) for v in node.outputs])
        return outputs[node.outputs.index(value)]

    def _unlabelled(self, value: Value, wanted: Axes) -> Value:
        """Drop unwanted axes from dimensions of size 1: there is only one position to be at."""
        axes = tuple(
            None if n == 1 and have != want else have
            for n, have, want in zip(value.aval.shape, value.axes, wanted, strict=True)
        )
        if axes == value.axes:
            return value
        equation = Equation(
            primitive=reshape_p,
            params={"new_sizes": value.aval.shape, "dimensions": None, "sharding": None},
            in_avals=(value.aval,),
            in_axes=(value.axes,),
            out_avals=(value.aval,),
        )
        if not any(a is not None for a in axes):
            # The equation runs once, on an array that is small.
            self._store_whole([value])
        return self._add(equation, [value], [axes])[0]

    @staticmethod
    def _view(value: Value, axes: Axes) -> Value:
        return Value(value.aval, axes, base=value.array, known=value.known)

    def _layers(self, eqn: Any, inputs: Sequence[Value]) -> list[Value] | None:
        """A `scan` over rematerialised layers, as one that runs on whole arrays."""
        if self.in_tiles is None:
            return None
        found = layers_of(eqn, [v.axes for v in inputs], self.in_tiles)
        if found is None:
            return None
        self._store_whole(inputs)
        whole = [self._view(v, untiled(v.aval)) if v.tiled else v for v in inputs]
        outputs = self._restated(eqn, found, whole)
        node = next(n for n in reversed(self.nodes) if n.equation.primitive.name == "scan")
        node.layers = found
        return [
            self._view(v, axes) if tiled(axes) else v
            for v, axes in zip(outputs, found.out_axes, strict=True)
        ]

    def _unroll(self, eqn: Any, inputs: Sequence[Value]) -> list[Value]:
        """A `scan` over tiled values (equal layers, say), one iteration after the other."""
        params, body, scan = eqn.params, eqn.params["jaxpr"], Scan.of(eqn.params)
        (consts, carry, xs), n_carry = scan.split(inputs), scan.carry
        steps = range(params["length"])
        collected: list[list[Value]] = []
        for i in reversed(steps) if params["reverse"] else steps:
            items = [self._call(lambda x, i=i: x[i], [x]) for x in xs]
            out = self.walk(body.jaxpr, _known(body.consts), [*consts, *carry, *items])
            carry = out[:n_carry]
            collected.append(out[n_carry:])
        if params["reverse"]:
            collected.reverse()
        stacked = [
            self._call(
                lambda *parts, aval=var.aval: (
                    jax.numpy.stack(parts) if parts else jax.numpy.zeros(aval.shape, aval.dtype)
                ),
                parts,
            )
            for var, *parts in zip(eqn.outvars[n_carry:], *collected, strict=True)
        ]
        return [*carry, *stacked]

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
            graphs = [build_inside(b, in_axes, in_rule=self.in_rule) for b in branches]
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
        named = node.equation.primitive.name == "name" and node.tiled
        saved = named and self._decision(node.equation) is not None
        return not self._parted and (saved or mixes(node))

    def _call(self, fun: Callable[..., Any], inputs: Sequence[Value]) -> Value:
        return self._calls(fun, inputs)[0]

    def _calls(self, fun: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        closed = jax.make_jaxpr(fun)(*(type_of(v.aval) for v in inputs))
        return self.walk(closed.jaxpr, _known(closed.consts), inputs)


def place(decision: Any) -> Place | None:
    """Where a value is stored by the decision of a policy; None: it is recomputed."""
    if isinstance(decision, bool):
        return "device" if decision else None
    # JAX does not export the types of its decisions.
    match type(decision).__name__:
        case "SaveableType":
            return "device"
        case "Offloadable":
            return "host"
    return None


def _live(jaxpr: Any) -> list[Any]:
    """The equations that an output depends on, or that have an effect."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Constant)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Constant))
    return live[::-1]


def _without_elements(value: Value) -> Value:
    """An array without elements is a constant: there is nothing to tile, and nothing to store."""
    return Value(
        value.aval, untiled(value.aval), known=np.zeros(value.aval.shape, value.aval.dtype)
    )


def _known(consts: Sequence[Any]) -> list[Value]:
    return [Value(jax.typeof(c), (None,) * np.ndim(c), known=c) for c in consts]


def _constants(inputs: Sequence[Value]) -> Callable[[int], np.ndarray | None]:
    return lambda i: constant(inputs[i])


def refuse(equation: Equation, refusal: Mixes) -> TilingError:
    """A `TilingError` that says which primitive, where, on what shapes, why, and what to do."""
    shapes = ", ".join(
        describe(a, axes) for a, axes in zip(equation.in_avals, equation.in_axes, strict=True)
    )
    advice = refusal.advice or "apply it outside `jaxtile.checkpoint`"
    return TilingError(
        f"cannot tile `{equation.primitive.name}` at {user_line(*equation.source_infos)}: "
        f"{refusal.reason}. Its operands are {shapes} (* marks a tiled dimension). What to do: "
        f'{advice}; or name its operands (`x = jax.ad_checkpoint.checkpoint_name(x, "x")`, after '
        "`import jax.ad_checkpoint`) and save them (`policy=jax.checkpoint_policies."
        'save_only_these_names("x")`): what is stored whole may be mixed freely.'
    )
