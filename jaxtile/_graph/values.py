"""The graph's parts: arrays that know which of their dimensions are tiled, and equations.

Three kinds of values are kept apart. *Tiled*: some dimension carries a tiled axis. *Global*: none
does. *Held*: there is a whole array of it, because it is an argument, a constant, stored, global,
or a reduction's result. What is stored is a map beside the values: `Graph.stored` is what those who
made the graph asked for, and a schedule has its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import _rules as rules
from .._errors import Mixes, TilingError, describe
from .._geometry import Window
from .._rules import Axes, Equation, Reduction, Step, Traits, Windows, tiled, untiled
from .inline import bodies, plain_call
from .layers import Layers


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """One array of the traced function.

    A view has a `base`: the same array, with its dimensions labelled otherwise. A constant is
    `known`.
    """

    aval: Any
    axes: Axes
    node: Node | None = None
    base: Value | None = None
    known: Any = None
    name: str | None = None
    """Given by the user with `checkpoint_name`; for an argument, what the function calls it."""

    def __repr__(self) -> str:
        source = "argument" if self.node is None else self.node.op
        return f"Value({self.name or source}: {describe(self.aval, self.axes)})"

    @functools.cached_property
    def tiled(self) -> bool:
        return tiled(self.axes)

    @property
    def array(self) -> Value:
        """The value whose whole array this one is, or is a view of."""
        return self if self.base is None else self.base

    @property
    def concrete(self) -> bool:
        """Is this a constant, and not a traced value that the function closes over?"""
        return self.known is not None and not isinstance(self.known, jax.core.Tracer)

    @property
    def clamp(self) -> Node | None:
        """The ReLU, or other clamp, whose result it is, if no derivative needs that one's
        operand.
        """
        node = self.node
        while node is not None and node.op == "name":
            node = node.inputs[0].array.node
        return node if node is not None and node.forgets_operand else None

    @property
    def bytes(self) -> int:
        itemsize = getattr(self.aval.dtype, "itemsize", 8)
        return int(np.prod(self.aval.shape, dtype=np.int64)) * itemsize


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    """One equation of the graph."""

    equation: Equation
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    reduction: Reduction | None = None
    runs_whole: str | None = None
    """Why it runs on whole arrays, although its operands are tiled."""
    layers: Layers | None = None
    """What a `scan` over whole arrays does, if its body runs in tiles."""
    like: Equation = dataclasses.field(init=False)
    """The first equation of the graph that this one is like."""
    stage: int = dataclasses.field(init=False)
    """How many convolutions and other expensive equations are before it, at most."""
    sums: bool = dataclasses.field(init=False)
    """Does it add or move results of convolutions and the like, with no factor or function between?
    Then no derivative of these needs what it computes."""

    def __post_init__(self) -> None:
        self.like = self.equation
        known = self.traits
        before = [v.array.node for v in self.inputs if v.tiled]
        adds = known.linear == "sum" or known.kind == "movement"
        self.sums = not known.fuses or (adds and all(n is None or n.sums for n in before))
        self.stage = max((n.stage + n.expensive for n in before if n is not None), default=0)

    def __repr__(self) -> str:
        return f"Node({self.op}: {list(self.inputs)} -> {list(self.outputs)})"

    @property
    def op(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def traits(self) -> Traits:
        return rules.traits(self.equation.primitive)

    @property
    def tiled(self) -> bool:
        return self.reduction is not None or any(v.tiled for v in self.outputs)

    @property
    def forgets_operand(self) -> bool:
        """Does a derivative need its result, and nothing of what that is computed from? So it is
        with a ReLU after a convolution (`clamps`).
        """
        return self.op == "clamp_by_result"

    @property
    def flat(self) -> bool:
        """Is its derivative zero, as that of `stop_gradient`?"""
        return self.traits.flat

    @property
    def fuses(self) -> bool:
        """Can a compiler compute this as part of what reads it?"""
        return self.traits.fuses or (self.tiled and self.rule.is_call)

    @property
    def works(self) -> bool:
        """Is it worth storing what it computes?"""
        return self.traits.works

    @property
    def expensive(self) -> bool:
        return self.works or self.traits.kind == "reduction"

    @property
    def rule(self) -> rules.Rule:
        found = rules.find(self.equation.primitive)
        assert found is not None
        return found

    @property
    def is_call(self) -> bool:
        """Does it call a function with a derivative rule of the user?"""
        if self.layers is not None:
            return self.layers.body.calls
        return any(rule.is_call for rule, _ in _rules_of(self.equation))

    @functools.cached_property
    def changes_value(self) -> bool:
        """May its value differ when it is differentiated?"""
        return any(rule.changes_value(eqn) for rule, eqn in _rules_of(self.equation))

    @functools.cached_property
    def by_position(self) -> bool:
        """Does every position of its results come from the same position of what it reads? So it is
        with a convolution of one pixel.
        """
        if self.rule.by_position:
            return True
        if self.layers is not None:
            return False
        try:
            needs = self.step([_positions(v) for v in self.outputs]).needs
        except (Mixes, TilingError):
            return False
        pairs = [(v, need) for v, need in zip(self.inputs, needs, strict=True) if v.tiled]
        return all(need is not None and need.windows == _positions(v) for v, need in pairs)

    def step(self, windows: Sequence[Windows | None]) -> Step:
        """How to produce these windows of the outputs; the same object for alike equations."""
        key = tuple(None if w is None else tuple(w.items()) for w in windows)
        return self.like.once(key, lambda: self.rule.step(self.like, windows))


def _positions(value: Value) -> Windows:
    """The first position, one in the middle and the last, as tiles along each tiled axis."""
    return {
        d: Window(axis, np.array([0, n // 2, n - 1]), 1)
        for d, (axis, n) in enumerate(zip(value.axes, value.aval.shape, strict=True))
        if axis is not None
    }


def _rules_of(eqn: Any) -> Iterator[tuple[rules.Rule, Equation]]:
    """The rule of an equation, and those of what its branches and loops call."""
    rule, called = rules.find(eqn.primitive), plain_call(eqn)
    if rule is not None:
        yield rule, eqn if isinstance(eqn, Equation) else _untiled(eqn)
    for body in bodies(eqn) if called is None else [called]:
        for inner in getattr(body, "jaxpr", body).eqns:
            yield from _rules_of(inner)


def _untiled(eqn: Any) -> Equation:
    """An equation of a jaxpr."""
    avals = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
    in_axes, out_axes = (tuple(map(untiled, some)) for some in avals)
    return Equation(eqn.primitive, eqn.params, avals[0], in_axes, avals[1], out_axes)


Place = Literal["device", "host", "passing", "restored"]
"""Where a whole array waits for the backward pass: in the memory of the device or of the host. The
others do not wait: they are there until their readers have run, and are computed again, a passing
one by window in each region that reads it, a restored one whole and once."""

Storage = Mapping[Value, Place]
"""The values that are there as whole arrays, and where they wait."""


def is_held(value: Value, stored: Storage) -> bool:
    value = value.array
    computed = value.tiled and value.node is not None and value.node.reduction is None
    return not computed or value in stored


@dataclasses.dataclass(frozen=True)
class Graph:
    inputs: list[Value]
    outputs: list[Value]
    nodes: list[Node]
    stored: Storage = dataclasses.field(default_factory=dict)
    """Outputs, what the policy stores, and operands of what cannot run in tiles."""
    is_layer: bool = False
    """Is it the body of a `scan`, whose outputs are not those of the user's function?"""

    def dependent(self, values: Iterable[Value]) -> set[Value]:
        """These values, and all that have derivatives with respect to one of them."""
        found = {*values}
        for node in self.nodes:
            if not node.flat and any(v.array in found for v in node.inputs):
                found |= set(filter(is_float, node.outputs))
        return found

    @functools.cached_property
    def weights(self) -> set[Value]:
        """Float values without tiled dimensions that are given to the function, or that it closes
        over while it is traced.
        """
        given = {*self.inputs, *(v.array for n in self.nodes for v in n.inputs)}
        return {
            v for v in given if v.node is None and not v.tiled and is_float(v) and not v.concrete
        }

    @functools.cached_property
    def readers(self) -> dict[Value, list[Node]]:
        """The equations that read each array, in order."""
        found: dict[Value, list[Node]] = {v: [] for n in self.nodes for v in n.outputs}
        for node in self.nodes:
            for value in node.inputs:
                found.setdefault(value.array, []).append(node)
        return found


def is_float(value: Value) -> bool:
    """May it have a derivative?"""
    return bool(jnp.issubdtype(value.aval.dtype, jnp.inexact))


def moving(nodes: Sequence[Node], results: Iterable[Value]) -> set[Value]:
    """The arrays with respect to which these results have derivatives, by these equations."""
    found = {v.array for v in results if is_float(v)}
    for node in reversed(nodes):
        if not node.flat and any(v in found for v in node.outputs):
            found |= {v.array for v in node.inputs if is_float(v)}
    return found


def constants_of(consts: Sequence[Any]) -> list[Value]:
    """The constants of a jaxpr."""
    return [Value(aval := jax.typeof(c), untiled(aval), known=c) for c in consts]


def without_elements(aval: Any) -> Value:
    """An array without elements is a constant: there is nothing to tile, and nothing to store."""
    return Value(aval, untiled(aval), known=np.zeros(aval.shape, aval.dtype))


def constant(value: Value) -> np.ndarray | None:
    """The value as a NumPy array, if it depends on no argument of the function; computed when first
    asked for.

    It is compiled as one program, as it would be in the untiled function: XLA rounds differently
    when it sees more at once, and the indices of a nearest-neighbour resize are the integer part of
    such a number.
    """
    value = value.array
    if value.known is None and is_constant(value):
        value.known = jax.jit(lambda: _constant_array(value, {})).lower().compile()()
    if not value.concrete:
        return None
    return (
        np.asarray(value.known)
        if np.issubdtype(jax.typeof(value.known).dtype, np.generic)
        else None
    )


def is_constant(value: Value) -> bool:
    if value.known is not None:
        return value.concrete
    node = value.node
    return node is not None and not node.tiled and all(is_constant(v.array) for v in node.inputs)


def _constant_array(value: Value, env: dict[Value, Any]) -> Any:
    if value.known is not None:
        return value.known
    if value not in env:
        node = value.node
        assert node is not None
        operands = [_constant_array(v.array, env) for v in node.inputs]
        env.update(zip(node.outputs, node.equation.bind(*operands), strict=True))
    return env[value]
