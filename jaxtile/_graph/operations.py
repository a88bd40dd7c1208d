"""The work and the traffic of a function, operation by operation: `jaxtile.operations`.

A traced function has hundreds of equations; people, and other frameworks, speak of operations. Here
an *operation* is what lies between two named values: a value that the function names with
`checkpoint_name` ends one, and everything computed on the way to it since other named values is
part of it. An unnamed value that two operations read ends one of its own, under the name of its
primitive; so do the outputs.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .build import build_untiled
from .static import shown
from .trace import argument_names, inside, only_arrays
from .values import Graph, Node, Value
from .work import fused, whole_flops, whole_macs


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An argument, or the result of an operation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """The equations that lead to one value that is named, returned or read by several others."""

    name: str
    kind: str
    """`convolution`, `contraction`, `max_pool`, `window`, `random`, `reduction`, `elementwise` or
    `movement`: the first of these that one of its equations is; `elementwise` if none is known."""
    inputs: tuple[Tensor, ...]
    """Arguments, constants and results of other operations that it reads, each once."""
    outputs: tuple[Tensor, ...]
    """One, unless an unnamed primitive gives several."""
    flops: int
    """Floating-point operations; elementwise equations count as if fused."""
    macs: int
    """Multiply-adds of its convolutions and contractions."""

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def traffic(self) -> int:
        """Bytes read and written, if every array is moved once."""
        return sum(t.bytes for t in (*self.inputs, *self.outputs))


@dataclasses.dataclass(frozen=True)
class Operations:
    """All operations of a function, in the order in which it was traced. `print` it."""

    arguments: tuple[Tensor, ...]
    operations: tuple[Operation, ...]

    @property
    def flops(self) -> int:
        return sum(o.flops for o in self.operations)

    @property
    def macs(self) -> int:
        return sum(o.macs for o in self.operations)

    @property
    def traffic(self) -> int:
        return sum(o.traffic for o in self.operations)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all results together."""
        return sum(t.bytes for o in self.operations for t in o.outputs)

    def __getitem__(self, name: str) -> Operation:
        for operation in self.operations:
            if operation.name == name:
                return operation
        near = difflib.get_close_matches(name, [o.name for o in self.operations])
        raise KeyError(f"no operation is named {name!r}" + (f"; near are {near}" if near else ""))

    def __str__(self) -> str:
        width = max([9, *(len(o.name) for o in self.operations)])
        lines = [f"{'operation':{width}}  {'kind':12} {'shape':24} {'bytes':>14} {'flops':>16}"]
        for o in self.operations:
            shape = "x".join(map(str, o.output.shape)) or "scalar"
            lines.append(
                f"{o.name:{width}}  {o.kind:12} {shape:24} {o.output.bytes:14,} {o.flops:16,}"
            )
        lines.append(
            f"{len(self.operations)} operations: {self.flops:,} flops, {self.macs:,} multiply-adds,"
            f" {self.traffic:,} bytes moved; results of {self.activation_bytes:,} bytes"
        )
        return "\n".join(lines)


def operations(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Operations:
    """Count the work of `fun(*args)` by named values, without running it.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s. A loop's body counts once per iteration, of
    a `while` once. For a Flax NNX module see `jaxtile.nn.operations`.

    >>> import jax, jaxtile
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def layer(x, w, b):
    ...     y = checkpoint_name(x @ w, "linear")
    ...     return checkpoint_name(jax.nn.relu(y + b), "relu")
    >>> shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 16), (16, 4), (4,))]
    >>> for o in jaxtile.operations(layer, *shapes).operations:
    ...     print(o.name, o.kind, o.output.shape, o.flops, o.traffic)
    linear contraction (8, 4) 1024 896
    relu elementwise (8, 4) 32 272
    """
    args, kwargs = only_arrays(fun, args, kwargs)
    with inside(True):  # what is tiled in it counts as the plain function
        closed = jax.make_jaxpr(lambda args, kwargs: fun(*shown(args), **shown(kwargs)))(
            args, kwargs
        )
    return contract(build_untiled(closed, argument_names(fun, args, kwargs)))[0]


def contract(
    graph: Graph, worth: Callable[[Node], bool] = lambda node: False
) -> tuple[Operations, dict[Node, list[Node]]]:
    """The operations of a graph; and, by the last equation of each, its equations in order.

    `worth`: does this equation end an operation, although it is not named?
    """
    ends = _ends(graph, worth)
    order = {node: i for i, node in enumerate(graph.nodes)}
    members: dict[Node, list[Node]] = {
        end: [] for end in sorted(set(ends.values()), key=order.__getitem__)
    }
    for node in sorted(ends, key=order.__getitem__):
        members[ends[node]].append(node)
    costs = fused(graph.nodes)
    labels = _labels(members)

    def operation(end: Node) -> Operation:
        inside = set(members[end])
        read = dict.fromkeys(
            v.array
            for n in members[end]
            for v in n.inputs
            if v.array.node not in inside and not _literal(v.array)
        )
        return Operation(
            name=labels[end],
            kind=_kind(inside),
            inputs=tuple(_tensor(v, _name(v, labels)) for v in read),
            outputs=tuple(_tensor(v, labels[end]) for v in end.outputs),
            flops=sum(whole_flops(n, costs) for n in inside),
            macs=sum(whole_macs(n) for n in inside),
        )

    arguments = tuple(_tensor(v, v.name or "argument") for v in graph.inputs)
    return Operations(arguments, tuple(operation(end) for end in labels)), members


def _ends(graph: Graph, worth: Callable[[Node], bool]) -> dict[Node, Node]:
    """For each equation that matters, the last equation of the operation that it is part of."""
    readers: dict[Node, set[Node]] = {}
    ends: dict[Node, Node] = {}
    outputs = {v.array.node for v in graph.outputs}
    for node in reversed(graph.nodes):
        reading = readers.get(node, set())
        effect = node.equation.effects and node.outputs
        if node not in outputs and not reading and not effect:
            continue
        named = node.op == "name"
        ends_here = named or node in outputs or len(reading) != 1 or worth(node)
        ends[node] = node if ends_here else next(iter(reading))
        for value in node.inputs:
            if value.array.node is not None:
                readers.setdefault(value.array.node, set()).add(ends[node])
    return ends


def _labels(ends: Iterable[Node]) -> dict[Node, str]:
    """Names of operations; a name that returns is numbered."""
    labels: dict[Node, str] = {}
    seen: dict[str, int] = {}
    for end in ends:
        label = end.outputs[0].name or end.op
        seen[label] = seen.get(label, 0) + 1
        labels[end] = label if seen[label] == 1 else f"{label}:{seen[label]}"
    return labels


_KINDS = ("convolution", "contraction", "max_pool", "window", "random", "reduction")


def _kind(nodes: Iterable[Node]) -> str:
    kinds = {n.traits.kind for n in nodes}
    for kind in _KINDS:
        if kind in kinds:
            return kind
    return "movement" if kinds == {"movement"} else "elementwise"


def _literal(value: Value) -> bool:
    return value.known is not None and math.prod(value.aval.shape) == 1


def _name(value: Value, labels: dict[Node, str]) -> str:
    if value.node is None:
        return value.name or "constant"
    return labels[value.node]


def _tensor(value: Value, name: str) -> Tensor:
    return Tensor(name, tuple(value.aval.shape), str(value.aval.dtype), value.bytes)
