"""A function as a planner sees it: operations, what may be stored, and how tiles grow.

Policies that need a view of the whole graph get an `Outline`. Its operations are those of
`jaxtile.operations`, on the graph that is going to be tiled; an unnamed result of a convolution,
contraction, pool or reduction ends an operation too, so that functions without names can be
planned.

For each operation it knows what a tile costs: along each tiled axis, a tile of `n` positions of the
result needs `scale * n + halo` positions of each operand. The numbers are found by asking the rules
for two sizes of tile in the middle of the array.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from .._errors import Mixes, TilingError
from .._geometry import Window
from .._graph.build import build
from .._graph.operations import Operation, Operations, contract
from .._graph.trace import Traced, trace
from .._graph.values import Graph, Node, Storage, Value
from .._regions.grid import GridSpec
from .._regions.tile import plan
from .._rules import traits


class Choice(NamedTuple):
    """What a policy does with one result: stores it, computed on this grid; perhaps on the host."""

    grid: GridSpec
    offload: bool = False


Choices = Mapping[str | EllipsisType, Choice]
"""Per stored result its choice; under the key `...`, the grid of everything else."""


class GraphPolicy(Protocol):
    """A policy that sees the whole graph."""

    def choose(self, outline: Outline) -> Choices: ...


class Demand(NamedTuple):
    """Along one tiled axis, `n` positions of a result need `scale * n + halo` of an operand."""

    scale: float
    halo: float


@dataclasses.dataclass(frozen=True)
class Part:
    """One operation, with what matters for a schedule."""

    operation: Operation
    tiled: bool
    """Is its result tiled? Otherwise it is small, and held anyway."""
    reduces: bool
    """Does it reduce over a tiled axis?"""
    lengths: tuple[int, ...]
    """Positions along each tiled axis, of the result or of what is reduced; 0: it has no such
    axis."""
    inputs: tuple[int, ...]
    """The operations whose tiled results it reads."""
    awaits: int
    """The last reduction before it on whose result it depends; -1: on none."""
    held_bytes: int
    """Bytes of the arrays, its result among them, that plain JAX keeps of it for the backward
    pass: those that no fusion avoids."""
    differentiable: bool
    probe: Callable[[], tuple[tuple[Demand, ...], ...]] = dataclasses.field(
        repr=False, compare=False
    )

    @functools.cached_property
    def demands(self) -> tuple[tuple[Demand, ...], ...]:
        """Per input and tiled axis. Found when first asked for: a plan that exists needs none."""
        return self.probe()

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.operation.outputs)


@dataclasses.dataclass(frozen=True)
class Outline:
    """The operations of a function in topological order, and its outputs."""

    operations: Operations
    parts: tuple[Part, ...]
    outputs: frozenset[int]
    """Operations whose results the function returns."""
    rank: int
    """Number of tiled axes."""
    traced: Traced = dataclasses.field(repr=False, compare=False)
    """The function itself, for policies that compile it."""

    @property
    def fingerprint(self) -> str:
        """The same for functions of the same operations and shapes."""
        facts = [
            (p.name, p.operation.output, p.operation.flops, p.inputs, p.lengths) for p in self.parts
        ]
        return hashlib.sha256(repr((facts, self.rank)).encode()).hexdigest()[:16]


def outline(fun: Callable[..., Any], *args: Any, in_axes: Any, **kwargs: Any) -> Outline:
    """The outline of `fun(*args)`, as a policy would get it from `jaxtile.checkpoint`.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s.
    """
    return outlined(trace(fun, args, kwargs, in_axes))[0]


def outlined(traced: Traced) -> tuple[Outline, dict[str, Value], Graph]:
    """The outline, the value behind each name, and the graph that these are in."""
    rank = traced.rank
    graph = build(traced.jaxpr, traced.consts, traced.in_axes, names=traced.names, store_mixed=True)
    operations, members = contract(graph, _worth_storing(graph))
    probes: dict[Any, Any] = {}
    ends = list(members)
    index = {v: k for k, end in enumerate(ends) for v in end.outputs}
    held = _held(graph)
    awaits = _awaits(graph, members)
    parts = tuple(
        _part(operation, end, members[end], index, held, awaits, rank, probes)
        for operation, end in zip(operations.operations, ends, strict=True)
    )
    found = Outline(
        operations,
        parts,
        frozenset(index[v.array] for v in graph.outputs if v.array in index),
        rank,
        traced,
    )
    names = [o.name for o in operations.operations]
    return found, {n: e.outputs[0] for n, e in zip(names, ends, strict=True)}, graph


def _part(
    operation, end: Node, nodes: Sequence[Node], index, held, awaits, rank: int, probes: dict
) -> Part:
    inside = set(nodes)
    reads = dict.fromkeys(
        v.array
        for n in nodes
        for v in n.inputs
        if v.array in index and v.array.node not in inside and v.array.tiled
    )
    reductions = [n for n in nodes if n.reduction is not None]
    domain = dict.fromkeys([v for n in reductions for v in n.inputs] + [end.outputs[0]])
    domain = [v for v in domain if v.tiled]
    lengths = [0] * rank
    for value in domain:
        for n, axis in zip(value.aval.shape, value.axes, strict=True):
            if axis is not None:
                lengths[axis] = n
    return Part(
        operation=operation,
        tiled=end.outputs[0].tiled and end.reduction is None,
        reduces=bool(reductions),
        lengths=tuple(lengths),
        inputs=tuple(index[v] for v in reads),
        awaits=max((awaits[n] for n in nodes), default=-1),
        held_bytes=sum(v.bytes for n in nodes for v in n.outputs if v in held and v.tiled),
        differentiable=jnp.issubdtype(end.outputs[0].aval.dtype, jnp.inexact),
        probe=lambda: _probed(nodes, domain, list(reads), lengths, probes),
    )


def _probed(nodes, domain, reads, lengths, probes: dict[Any, Any]):
    """The demands; networks repeat themselves, so alike operations are asked about once."""
    key = (
        tuple(lengths),
        tuple((v.aval.shape, v.axes) for v in (*domain, *reads)),
        tuple((n.equation.primitive.name, n.equation.out_avals, n.equation.in_axes) for n in nodes),
        tuple(str(n.equation.params) for n in nodes if _works(n)),
    )
    if key not in probes:
        probes[key] = _demands(nodes, domain, reads, lengths)
    return probes[key]


def _demands(nodes, domain: Sequence[Value], reads: Sequence[Value], lengths: Sequence[int]):
    """Ask for a small and a larger tile, and draw a line through what they need."""
    if not domain or not reads:
        return tuple((Demand(0, 0),) * len(lengths) for _ in reads)
    if all(n.rule.by_position for n in nodes if n.tiled):
        return tuple(
            tuple(Demand(float(axis in v.axes), 0) for axis in range(len(lengths))) for v in reads
        )
    sizes = [[_probe(n) for n in lengths], [2 * _probe(n) if n > 1 else 1 for n in lengths]]
    small, large = (_needed(nodes, domain, reads, lengths, s) for s in sizes)
    found = []
    for few, many, value in zip(small, large, reads, strict=True):
        line = []
        for axis in range(len(lengths)):
            step = sizes[1][axis] - sizes[0][axis]
            if axis not in value.axes:
                line.append(Demand(0, 0))
            elif not lengths[axis]:  # the result has no such axis, or one position along it
                line.append(Demand(0, value.aval.shape[value.axes.index(axis)]))
            elif not step:
                line.append(Demand(0, many.get(axis, 0)))
            else:
                scale = (many.get(axis, 0) - few.get(axis, 0)) / step
                line.append(Demand(scale, few.get(axis, 0) - scale * sizes[0][axis]))
        found.append(tuple(line))
    return tuple(found)


def _probe(length: int) -> int:
    """A power of two, so that strides divide it; as large as fits twice with room for a halo."""
    return next((n for n in (16, 8, 4, 2) if 8 * n <= length), 1)


def _needed(nodes, domain, reads, lengths, sizes) -> list[dict[int, int]]:
    """Per operand read and axis, the positions that one tile in the middle needs."""
    wanted = {
        v: {
            d: Window(a, np.array([lengths[a] // 2 // sizes[a] * sizes[a]]), sizes[a])
            for d, a in enumerate(v.axes)
            if a is not None
        }
        for v in domain
    }
    tiled = [n for n in nodes if n.tiled and n.reduction is None]
    try:
        windows = plan(tiled, wanted, {a: 1 for a in range(len(lengths))}).windows
    except (Mixes, TilingError):
        return [dict(zip(range(len(lengths)), lengths, strict=True)) for _ in reads]
    result = []
    for read in reads:
        needed: dict[int, int] = {}
        for value, window in windows.items():
            if value.array is read:
                for w in window.values():
                    needed[w.axis] = max(needed.get(w.axis, 0), w.size)
        result.append(needed)
    return result


def _awaits(graph: Graph, members: Mapping[Node, Sequence[Node]]) -> dict[Node, int]:
    """Per equation, the last operation before it that reduces, and whose result reaches it."""
    owner = {node: k for k, nodes in enumerate(members.values()) for node in nodes}
    latest: dict[Value, int] = {}
    found: dict[Node, int] = {}
    for node in graph.nodes:
        found[node] = max((latest.get(v.array, -1) for v in node.inputs), default=-1)
        if found[node] == owner.get(node):
            found[node] = -1
        for value in node.outputs:
            if node.reduction is not None:
                latest[value] = owner.get(node, -1)
            elif not value.tiled:
                latest[value] = max((latest.get(v.array, -1) for v in node.inputs), default=-1)
    return found


def _fuses(node: Node) -> bool:
    """Can a compiler compute this as part of what reads it?"""
    return traits(node.equation.primitive).fuses or (node.tiled and node.rule.is_call)


def _held(graph: Graph) -> set[Value]:
    """Arrays that cannot be fused away: made or read by something that does not fuse.

    A plain reduction is not computed as part of its readers, but what it reads is part of it.
    """
    held = {v.array for v in graph.outputs}
    source: dict[Value, Value] = {}
    for node in graph.nodes:
        known = traits(node.equation.primitive)
        for value in node.outputs:
            origin = node.inputs[0].array if known.view else value
            source[value] = source.get(origin, origin)
        if not node.tiled or _fuses(node):
            continue
        held.update(source[v] for v in node.outputs)
        if known.kind != "reduction":
            held.update(source.get(v.array, v.array) for v in node.inputs)
    return {source.get(v, v) for v in held}


def _worth_storing(graph: Graph):
    """Does an unnamed result end an operation? If it is work, and no name follows it closely."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value.array, []).append(node)

    def named_soon(value: Value) -> bool:
        while len(readers.get(value, ())) == 1:
            (reader,) = readers[value]
            if reader.equation.primitive.name == "name":
                return True
            if not _fuses(reader) or len(reader.outputs) != 1:
                return False
            if reader.outputs[0].tiled and not value.tiled:
                return False  # a reduction must not be hidden inside an operation that awaits it
            value = reader.outputs[0]
        return False

    def worth(node: Node) -> bool:
        works = node.reduction is not None or (node.tiled and _works(node))
        return works and not named_soon(node.outputs[0])

    return worth


def _works(node: Node) -> bool:
    kinds = ("convolution", "contraction", "max_pool", "window")
    return traits(node.equation.primitive).kind in kinds


def apply(
    choices: Choices, values: Mapping[str, Value]
) -> tuple[Storage, dict[Value | EllipsisType, GridSpec]]:
    """What a policy stores, and the grids as `jaxtile.checkpoint` takes them."""
    stored: dict[Value, Literal["device", "host"]] = {}
    grids: dict[Value | EllipsisType, GridSpec] = {}
    for name, choice in choices.items():
        if isinstance(name, EllipsisType):
            grids[...] = choice.grid
            continue
        value = values[name]
        if value.tiled and value.node is not None and value.node.reduction is None:
            stored[value] = "host" if choice.offload else "device"
            grids[value] = choice.grid
    return stored, grids
