"""The main equation of an operation, as something that can be run by itself.

How long a convolution takes cannot be told from its arithmetic: a 7 x 7 kernel on 3 channels runs
at a tenth of the rate of one on 64. It can be measured, and what was measured holds for all
equations of its *class*: the same primitive, parameters, types and channels, on any number of
positions. A network has few classes, and networks share them.

Nor can it be told from the memory that it moves how long a GELU takes: its arithmetic can take
longer. A chain (`_rules.chain`) is measured too, and what it takes comes on top of the operation
that it is part of. Of chains, those of the same functions and type are of one class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import conv_general_dilated_p

from .._rules import Axes, Equation, traits
from .._rules.chain import chain_p
from .._rules.planes import wide_bytes
from .values import Graph, Node, Value, is_float

_IRRELEVANT = ("padding", "out_sharding")


@dataclasses.dataclass(frozen=True)
class Sample:
    """An equation, which axes its operands have, and which of them have gradients."""

    equation: Equation
    axes: tuple[Axes, ...]
    differentiated: tuple[bool, ...]
    prepared: int = 0
    """Bytes of those operands that the same operation computes first, but not by a chain: of the
    normalised image that a convolution reads, say. What follows a convolution a compiler makes part
    of it, but not what it reads."""
    chains: tuple[Sample, ...] = ()
    """The chains of the same operation, before or after the equation."""

    @property
    def shape_class(self) -> str:
        """A text that equations share if they differ in nothing but the number of positions."""
        if self.equation.primitive is chain_p:
            links = [link.equation.primitive for link in self.equation.params["links"]]
            names = [p.name for p in links if traits(p).linear is None]
            return f"chain {' '.join(names)} {self.equation.out_avals[0].dtype}"
        operands = zip(self.equation.in_avals, self.axes, self.differentiated, strict=True)
        words = [self.equation.primitive.name]
        for aval, axes, differentiated in operands:
            shape = ["*" if a is not None else n for n, a in zip(aval.shape, axes, strict=True)]
            words.append(f"{aval.dtype}[{','.join(map(str, shape))}]{'+' * differentiated}")
        for name, value in sorted(self.equation.params.items()):
            if name not in _IRRELEVANT and not _is_default(value):
                words.append(f"{name}={tuple(value) if isinstance(value, tuple) else value}")
        return " ".join(words)

    @property
    def gathered(self) -> int:
        """Bytes that a convolution of volumes writes, and reads, before it computes anything."""
        known = self.equation.primitive is conv_general_dilated_p
        return wide_bytes(self.equation.params, *self.equation.in_avals) if known else 0

    def operands(self, smaller: int) -> list[jax.ShapeDtypeStruct]:
        """The operands, with so many times fewer positions along each tiled axis."""
        return [
            jax.ShapeDtypeStruct(
                [n if a is None else -(-n // smaller) for n, a in zip(x.shape, axes, strict=True)],
                x.dtype,
            )
            for x, axes in zip(self.equation.in_avals, self.axes, strict=True)
        ]

    def positions(self, smaller: int = 1) -> int:
        """Of the operand that has the most; of a chain each element is one."""
        if self.equation.primitive is chain_p:
            return math.prod(self.operands(smaller)[0].shape)
        return max(
            math.prod(n for n, a in zip(x.shape, axes, strict=True) if a is not None)
            for x, axes in zip(self.operands(smaller), self.axes, strict=True)
        )


def sample_of(nodes: Sequence[Node], trained: Collection[Value]) -> Sample | None:
    """The one equation among these that takes time; None if there is none, or several.

    `trained`: values that have gradients. What a chain reads a compiler makes part of it.
    """
    chains = [n for n in nodes if n.tiled and n.equation.primitive is chain_p]
    found = [n for n in nodes if n.tiled and n.works] or chains
    if len(found) != 1:
        return None
    (node,) = found
    others = [n for n in chains if n is not node]
    made = {v for n in others for v in n.outputs}
    first = {v.array for v in node.inputs if node.works and v.tiled and v.array not in made}
    return dataclasses.replace(
        _sample(node, trained),
        prepared=sum(v.bytes for v in first if _computes(v, nodes)),
        chains=tuple(_sample(n, trained) for n in others),
    )


def _sample(node: Node, trained: Collection[Value]) -> Sample:
    return Sample(
        node.equation,
        tuple(v.axes for v in node.inputs),
        tuple(v.array in trained for v in node.inputs),
    )


def _computes(value: Value, nodes: Sequence[Node]) -> bool:
    """Do these equations do something to get this value, other than naming or moving it?"""
    node = value.node
    while node is not None and node in nodes and node.traits.view:
        node = node.inputs[0].array.node
    return node in nodes


def trained(graph: Graph) -> set[Value]:
    """The values that have gradients, if the weights are trained; and if none of the arguments is a
    weight, all arguments.
    """
    none = graph.weights.isdisjoint(graph.inputs)
    return graph.dependent(graph.weights | {*(filter(is_float, graph.inputs) if none else ())})


def _is_default(value: Any) -> bool:
    return value is None or value == 1 or (isinstance(value, tuple) and set(value) <= {1})
