"""The nodes of a graph in the making, and which values are to be stored.

Two questions about a value are answered here, by new nodes if need be. Can it be had with *more*
axes, to be combined position by position with a tiled value (`promote`)? Computed window by window,
if its rule allows that (an `iota`, a broadcast, random bits, a cast of those); otherwise it is read
by window out of the whole array, if there is one. And can it be had with *none*, for equations that
mix its positions (`whole`)? If it is stored, or follows cheaply from what is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core.primitives import reshape_p

from .. import _rules as rules
from .._errors import Mixes, TilingError, describe
from .._rules import Axes, Equation, Reduction, tiled, untiled
from .alike import likeness
from .values import Node, Place, Value, constant, is_held

Policy = Callable[..., Any]
"""As `jax.checkpoint` takes it."""


_BOUNDED = ("movement", "elementwise", "random", "reduction", "window", "max_pool")
"""Work whose results are about as large as its operands; contractions with such results, too."""


class Nodes:
    """What has been made so far; inside a tile, nothing can be stored."""

    def __init__(self, policy: Policy | None, in_tile: bool):
        self.policy, self.in_tile = policy, in_tile
        self.list: list[Node] = []
        self.stored: dict[Value, Place] = {}
        self._promoted: dict[tuple[Value, Axes], Value] = {}
        self._wholes: dict[Hashable, Value | None] = {}
        self._kinds: dict[Hashable, Equation] = {}

    def add(
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
        self.list.append(node)
        return node.outputs

    def classify(self, node: Node) -> None:
        """Find the first equation of the graph that a node's is like."""
        if node.tiled and not self.in_tile:
            key = likeness(node.equation, node.inputs)
            node.like = self._kinds.setdefault(key, node.equation)

    def decision(self, equation: Equation) -> Place | None:
        """Where the policy stores this equation's outputs; None: it recomputes them."""
        if self.policy is None:
            return None
        return place(self.policy(equation.primitive, *equation.in_avals, **equation.params))

    def store(self, value: Value, place: Place | None) -> None:
        if value.tiled and 0 not in value.aval.shape and place is not None:
            self.stored[value] = place

    def store_whole(self, values: Iterable[Value]) -> None:
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
                f"an array {describe(value.aval, value.axes)} has its tiled axes in other "
                "dimensions than what reads it"
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
                inputs = list(map(self.promote, node.inputs, in_axes))
                equation = dataclasses.replace(
                    node.equation,
                    in_axes=tuple(v.axes for v in inputs),
                    constant=constants(inputs),
                )
                outputs = self.add(equation, inputs, [axes] * len(node.outputs))
                self._promoted.update(
                    ((v, axes), promoted) for v, promoted in zip(node.outputs, outputs, strict=True)
                )
                return outputs[node.outputs.index(value)]
        if not is_held(value, self.stored):
            raise Mixes(
                f"an array {describe(value.aval, value.axes)} is needed along a further tiled axis",
                "name it with `checkpoint_name` and save that name in `policy`",
            )
        return self.view(value, axes)

    def whole(self, value: Value, bounded: bool = False) -> Value | None:
        """The value as a global one, if it follows from what the policy stores: cheaply, or by
        `bounded` work, whose results are about as large as its operands.

        What is stored is held whole by the user's choice; equations that mix its positions may then
        run once, untiled.
        """
        if not value.tiled:
            return value
        node = value.node
        reduced = node is not None and node.reduction is not None
        if value.array in self.stored or not value.array.tiled or reduced:
            return self.view(value, untiled(value.aval))
        key = value, len(self.stored), bounded
        if key not in self._wholes:
            self._wholes[key] = None if node is None else self._untiled(node, value, bounded)
        return self._wholes[key]

    def _untiled(self, node: Node, value: Value, bounded: bool) -> Value | None:
        """An equation on whole arrays, as `whole` wants it."""
        cheap = node.rule.is_call or node.rule.promote(node.equation, value.axes) is not None
        kind = node.traits.kind
        shrinks = any(value.bytes <= v.bytes for v in node.inputs)
        small = kind in _BOUNDED or (kind == "contraction" and shrinks)
        if not cheap and not (bounded and small):
            return None
        whole = [self.whole(v, bounded) for v in node.inputs]
        inputs = [v for v in whole if v is not None]
        if len(inputs) < len(whole):
            return None
        equation = dataclasses.replace(
            node.equation, in_axes=tuple(untiled(v.aval) for v in inputs)
        )
        outputs = self.add(equation, inputs, [untiled(v.aval) for v in node.outputs])
        return outputs[node.outputs.index(value)]

    def run_whole(self, equation: Equation, inputs: Sequence[Value], reason: str) -> list[Value]:
        """An equation that runs once, on whole arrays, and whose results are read by window."""
        self.store_whole(inputs)
        whole = [self.view(v, untiled(v.aval)) if v.tiled else v for v in inputs]
        untiled_equation = dataclasses.replace(
            equation, in_axes=tuple(v.axes for v in whole), constant=constants(whole)
        )
        outputs = self.add(
            untiled_equation,
            whole,
            [untiled(a) for a in equation.out_avals],
            runs_whole=reason,
        )
        return [
            self.view(v, axes) if tiled(axes) else v
            for v, axes in zip(outputs, equation.out_axes, strict=True)
        ]

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
        if not tiled(axes):
            # The equation runs once, on an array that is small.
            self.store_whole([value])
        return self.add(equation, [value], [axes])[0]

    @staticmethod
    def view(value: Value, axes: Axes) -> Value:
        return Value(value.aval, axes, base=value.array, known=value.known)


def constants(inputs: Sequence[Value]) -> Callable[[int], np.ndarray | None]:
    """What is known of operands while tracing."""
    return lambda i: constant(inputs[i])


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
        case "RecomputeType":
            return None
    raise TilingError(
        f"`policy` returned {decision!r}: it must return a bool, or what the functions of "
        "`jax.checkpoint_policies` return"
    )
