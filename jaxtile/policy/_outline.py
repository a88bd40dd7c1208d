"""A function as a policy sees it: operations, what may be stored, and how tiles grow.

A traced function has hundreds of equations; a policy should decide about tens of results. So an
`Outline` lists the operations of `jaxtile.operations`, on the graph that is going to be tiled. An
unnamed result of a convolution, contraction, pool or reduction ends an operation too, so that a
function without names can be planned.

For each operation it is known what a tile costs: along each tiled axis, a tile of `n` positions of
the result needs `scale * n + halo` positions of each operand. For a 3x3 convolution with stride 2
this is `2 * n + 1`. The two numbers are found by asking the rules what a small and a larger tile in
the middle of the array need. Where an operation needs something else than a straight line, they are
an approximation; the planner only compares schedules with them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

from .._errors import TilingError
from .._graph.build import build_storing
from .._graph.loss import loss_of
from .._graph.operations import Operation, Operations, contract
from .._graph.sample import Sample, sample_of, trained
from .._graph.trace import Traced, trace
from .._graph.values import Graph, Node, Place, Storage, Value
from .._regions.grid import Grid, GridSpec
from ._demands import Demands, Probe


class Choice(NamedTuple):
    """What a policy does with one result: on which grid it is computed, and what becomes of it."""

    grid: GridSpec
    place: Place = "device"
    """Where it waits for the backward pass: on the `"device"` or on the `"host"`. Or it does not.
    `"passing"`: it is whole in the forward pass only; in the backward pass its cotangent is, and
    the result itself is computed again by window. `"restored"`: it is whole in the forward pass,
    and computed again, once and whole, in the backward pass."""
    forward: tuple[int, ...] | None = None
    """Tiles in the forward pass, if these are others."""


Choices = Mapping[str | EllipsisType, Choice]
"""Per stored result its choice; under the key `...`, the grid of everything else."""


@runtime_checkable
class GraphPolicy(Protocol):
    """A policy that sees the whole graph."""

    def choose(self, outline: Outline) -> Choices: ...


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
    awaits: tuple[int, ...]
    """The reductions whose results it reads, itself or by way of what is computed from them."""
    held_bytes: int
    """Bytes of the arrays, its result among them, that are kept of it for the backward pass if
    nothing is computed again: those that no fusion avoids."""
    made_bytes: int
    """Bytes of those, and of the arrays that are there while it runs only."""
    clamps: bool
    """Is it nothing but a ReLU, or another clamp, of what a convolution or the like computes?"""
    ends_with_clamp: bool
    """Is it work, and then a clamp? A derivative needs the result, and nothing else of it."""
    differentiable: bool
    """Has its result a cotangent?"""
    sample: Sample | None = dataclasses.field(repr=False, compare=False)
    """Its main equation, if it has one."""
    probe: Callable[[], Demands] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def demands(self) -> Demands:
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
    loss: int | None = None
    """The operation with the sum whose derivative is computed together with it, in tiles."""

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
    graph = build_storing(traced)
    operations, members = contract(graph, _worth_storing(graph))
    ends = list(members)
    held, made = _arrays(graph)
    facts = _Facts(
        traced.rank,
        index={v: k for k, end in enumerate(ends) for v in end.outputs},
        held=held,
        made=made,
        awaits=_awaits(graph, members),
        trained=trained(graph),
        probes={},
    )
    parts = tuple(
        _part(operation, end, members[end], facts)
        for operation, end in zip(operations.operations, ends, strict=True)
    )
    outputs = frozenset(facts.index[v.array] for v in graph.outputs if v.array in facts.index)
    loss = loss_of(graph)
    summed = next((k for k, end in enumerate(ends) if loss in members[end]), None)
    found = Outline(operations, parts, outputs, traced.rank, traced, summed)
    return found, {p.name: e.outputs[0] for p, e in zip(parts, ends, strict=True)}, graph


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What is known of a graph, for all of its operations."""

    rank: int
    index: Mapping[Value, int]
    """For each result of an operation, the number of that operation."""
    held: frozenset[Value]
    made: frozenset[Value]
    awaits: Mapping[Node, frozenset[int]]
    trained: Collection[Value]
    probes: dict[Any, Demands]
    """Demands that were found already: networks repeat themselves."""


def _part(operation: Operation, end: Node, nodes: Sequence[Node], facts: _Facts) -> Part:
    inside = set(nodes)
    reads = list(
        dict.fromkeys(
            v.array
            for n in nodes
            for v in n.inputs
            if v.array in facts.index and v.array.node not in inside and v.array.tiled
        )
    )
    reductions = [n for n in nodes if n.reduction is not None]
    ends = dict.fromkeys([v for n in reductions for v in n.inputs] + [end.outputs[0]])
    domain = [v for v in ends if v.tiled]
    results = [v for n in nodes for v in n.outputs if v.tiled]
    lengths = [0] * facts.rank
    for value in domain:
        for n, axis in zip(value.aval.shape, value.axes, strict=True):
            if axis is not None:
                lengths[axis] = n
    probe = Probe(nodes, domain, reads, lengths)
    return Part(
        operation=operation,
        tiled=end.outputs[0].tiled and end.reduction is None,
        reduces=bool(reductions),
        lengths=tuple(lengths),
        inputs=tuple(facts.index[v] for v in reads),
        awaits=tuple(sorted(frozenset().union(*(facts.awaits[n] for n in nodes)))),
        held_bytes=sum(v.bytes for v in results if v in facts.held),
        made_bytes=sum(v.bytes for v in results if v in facts.made),
        clamps={n.op for n in nodes} - {"name"} == {"clamp_by_result"},
        ends_with_clamp=end.outputs[0].clamp in nodes and any(not n.fuses for n in nodes),
        differentiable=end.outputs[0] in facts.trained,
        sample=sample_of(nodes, facts.trained),
        probe=lambda: probe.demands(facts.probes),
    )


def _awaits(graph: Graph, members: Mapping[Node, Sequence[Node]]) -> dict[Node, frozenset[int]]:
    """Per equation, the operations that reduce, and whose results reach it as global values."""
    owner = {node: k for k, nodes in enumerate(members.values()) for node in nodes}
    reaching: dict[Value, frozenset[int]] = {}
    found: dict[Node, frozenset[int]] = {}
    for node in graph.nodes:
        before = frozenset().union(*(reaching.get(v.array, ()) for v in node.inputs))
        found[node] = before - {owner.get(node, -1)}
        for value in node.outputs:
            if node.reduction is not None and node in owner:
                reaching[value] = frozenset({owner[node]})
            elif not value.tiled:
                reaching[value] = before
    return found


def _arrays(graph: Graph) -> tuple[frozenset[Value], frozenset[Value]]:
    """Arrays that wait for the backward pass, and those that no fusion avoids.

    What does not fuse reads them, or makes them; the latter wait if a derivative needs them. A
    plain reduction is not computed as part of its readers, but what it reads is part of it.
    """
    source: dict[Value, Value] = {}
    read, made = [v.array for v in graph.outputs], list[Value]()
    for node in graph.nodes:
        known = node.traits
        for value in node.outputs:
            origin = node.inputs[0].array if known.view else value
            source[value] = source.get(origin, origin)
        if node.tiled and not node.fuses:
            made += node.outputs
            read += [v.array for v in node.inputs if known.kind != "reduction"]
    held = {source.get(v, v) for v in read}
    needed: set[Value] = set()
    for node in reversed(graph.nodes):
        for value in node.outputs:
            if any(_needs_operand(r, held, needed, source) for r in graph.readers[value]):
                needed.add(value)
    waiting = held | {source[v] for v in made if v in needed}
    return frozenset(waiting), frozenset(waiting | {source[v] for v in made})


def _needs_operand(
    node: Node, held: Collection[Value], needed: Collection[Value], source: Mapping[Value, Value]
) -> bool:
    """Does a derivative need what this equation reads, or what is computed from that alone?"""
    known = node.traits
    if not node.tiled or not node.fuses:
        return known.linear != "sum"
    asks_result = known.reads_result and len(node.inputs) == 1
    if not known.forgets and not asks_result:
        return True
    if all(source[v] in held for v in node.outputs):
        return False
    return asks_result or any(v in needed for v in node.outputs)


def _worth_storing(graph: Graph) -> Callable[[Node], bool]:
    """Does an unnamed result end an operation? If it is work, and no name follows it closely."""

    def named_soon(value: Value) -> bool:
        while len(graph.readers[value]) == 1:
            (reader,) = graph.readers[value]
            if reader.op == "name":
                return True
            if not reader.fuses or len(reader.outputs) != 1:
                return False
            if reader.outputs[0].tiled and not value.tiled:
                return False  # a reduction must not be hidden inside an operation that awaits it
            value = reader.outputs[0]
        return False

    def worth(node: Node) -> bool:
        large = node.reduction is not None or (node.tiled and node.works)
        return large and not named_soon(node.outputs[0])

    return worth


def _grid(choice: Choice) -> GridSpec | Grid:
    if choice.forward is None or choice.grid is None or choice.grid == "whole":
        return choice.grid
    return Grid(choice.grid, forward=choice.forward)


def _check(choices: Choices, names: Collection[str]) -> None:
    """Is this what `GraphPolicy.choose` must return?"""
    if not isinstance(choices, Mapping):
        raise TilingError(
            f"the policy's `choose` returned {choices!r}: it must return a dict, from names of "
            "results, and `...` for all others, to `jaxtile.policy.Choice`s"
        )
    for name, choice in choices.items():
        shown = "..." if name is ... else repr(name)
        if name is not ... and name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise TilingError(
                f"the policy chose a grid for {shown}, which is no result of the function"
                + (f"; is {near[0]!r} meant?" if near else "")
                + " (the names are in `jaxtile.policy.outline(...).parts`)"
            )
        if not isinstance(choice, Choice):
            raise TilingError(
                f"the policy chose {choice!r} for {shown}: it must be a `jaxtile.policy.Choice`"
            )
        if choice.place not in get_args(Place):
            raise TilingError(
                f"the policy puts {shown} in place {choice.place!r}: it must be one of "
                f"{', '.join(map(repr, get_args(Place)))}"
            )


def apply(
    choices: Choices, values: Mapping[str, Value]
) -> tuple[Storage, dict[Value | EllipsisType, GridSpec | Grid]]:
    """What a policy stores, and the grids as `jaxtile.checkpoint` takes them."""
    _check(choices, values.keys())
    stored: dict[Value, Place] = {}
    grids: dict[Value | EllipsisType, GridSpec | Grid] = {...: "whole"}
    for name, choice in choices.items():
        if isinstance(name, EllipsisType):
            grids[...] = _grid(choice)
            continue
        value = values[name]
        if value.tiled and value.node is not None and value.node.reduction is None:
            stored[value] = choice.place
            grids[value] = _grid(choice)
    return stored, grids
