"""Bytes of a traced function without compiling it: a guess that takes milliseconds.

Arrays are counted while they are live, in the order of the trace. Elementwise work and data
movement are taken to be part of whatever reads them, as a compiler fuses them: their results become
arrays only where something that cannot be fused with them (a convolution, say) reads them. A loop
needs what one iteration needs.

The estimate is for comparing functions and for a first number on a screen; its accuracy is not
promised. XLA orders and packs differently, and libraries have scratch space: `compiled_bytes` asks
the compiler.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax

from .._graph.build import build_untiled
from .._graph.inline import bodies
from .._graph.values import Graph, Node, Value
from .compiled import Bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a traced function may need."""

    bytes: Bytes
    convolutions: int
    """Equations; those of a loop's body count once."""
    loops: int


def estimate_memory(traced: Any) -> Estimate:
    """A guess at the memory of a traced function, `jax.jit(fun).trace(*args)`.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> step = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    >>> shapes = [jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 1024)]
    >>> jaxtile.estimate_memory(jax.jit(step).trace(*shapes)).bytes.outputs
    16384
    """
    if not hasattr(traced, "jaxpr"):
        raise TypeError(f"{traced!r} is not traced: give `jax.jit(fun).trace(*args)`")
    graph = build_untiled(traced.jaxpr)
    used = {v.array for node in graph.nodes for v in node.inputs}
    used |= {v.array for v in graph.outputs}
    arguments = [v for v in graph.inputs if v in used]
    given = [v for v, d in zip(graph.inputs, donated(traced), strict=True) if d and v in used]
    steps = _Steps(graph)
    found = Bytes(
        sum(v.bytes for v in arguments),
        sum(v.bytes for v in graph.outputs),
        _aliases(given, graph.outputs),
        steps.peak(elsewhere={v.array for v in graph.outputs}),
    )
    loops = steps.counts["scan"] + steps.counts["while"]
    return Estimate(found, steps.counts["conv_general_dilated"], loops)


def donated(traced: Any) -> list[bool]:
    """Per argument of a traced function, whether an output may take its place."""
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda leaf: hasattr(leaf, "donated"))
    found = [info.donated for info in infos]
    count = len(traced.jaxpr.jaxpr.invars)
    return found if len(found) == count else [False] * count


def _aliases(given: Iterable[Value], outputs: Iterable[Value]) -> int:
    """An output takes the buffer of a donated argument of its shape and type."""
    free, wanted = (
        collections.Counter((v.aval.shape, str(v.aval.dtype), v.bytes) for v in values)
        for values in (given, outputs)
    )
    return sum(key[2] * n for key, n in (free & wanted).items())


class _Steps:
    """A graph as steps that read and write arrays.

    An array is live from the step that writes it to the last one that reads it, both included.
    Arguments are written by no step, and not counted.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.sources: dict[Value, frozenset[Value]] = {}
        """For a result that is computed where it is read, the arrays that it is computed from."""
        self.steps: list[tuple[list[Any], list[Any]]] = []
        self.sizes: dict[Any, int] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        """Equations by primitive, those of loops' bodies once."""
        self._run()

    def peak(self, elsewhere: Collection[Value] = ()) -> int:
        """The largest number of bytes live at once, of arrays that do not lie elsewhere."""
        last = {v: i for i, (reads, writes) in enumerate(self.steps) for v in (*reads, *writes)}
        ends = collections.defaultdict(list)
        for value, i in last.items():
            ends[i].append(value)
        now = most = 0
        for i, (_, writes) in enumerate(self.steps):
            now += sum(self.sizes[v] for v in writes if v not in elsewhere)
            most = max(most, now)
            now -= sum(self.sizes.get(v, 0) for v in ends[i] if v not in elsewhere)
        return most

    def _run(self) -> None:
        for node in self.graph.nodes:
            known = node.traits
            self.counts[node.op] += 1
            if known.view and len(node.inputs) == len(node.outputs):
                for value, same in zip(node.outputs, node.inputs, strict=True):
                    self.sources[value] = self._read(same)
            elif known.fuses:
                read = frozenset().union(*map(self._read, node.inputs))
                self.sources.update(dict.fromkeys(node.outputs, read))
            else:
                inputs = [a for v in node.inputs for a in self._array(v)]
                self._step(inputs, node.outputs, self._inside(node))
        for value in self.graph.outputs:
            self._array(value)

    def _inside(self, node: Node) -> int:
        """What one iteration of a loop, or the largest branch, holds; its arguments lie outside."""
        inside = [_Steps(build_untiled(body)) for body in bodies(node.equation)]
        for body in inside:
            self.counts += body.counts
        return max((body.peak() for body in inside), default=0)

    def _read(self, value: Value) -> frozenset[Value]:
        value = value.array
        return self.sources.get(value, frozenset([value]))

    def _array(self, value: Value) -> frozenset[Value]:
        """The arrays that a reader without fusion reads: fused work becomes an array first."""
        value = value.array
        read = self._read(value)
        same = len(read) == 1 and next(iter(read)).bytes == value.bytes
        if read and not same:
            self._step(read, [value], 0)
            self.sources[value] = frozenset([value])
        return self._read(value)

    def _step(self, reads: Iterable[Any], writes: Sequence[Value], extra: int) -> None:
        self.sizes.update({v: v.bytes for v in writes})
        scratch = [object()] if extra else []
        self.sizes.update(dict.fromkeys(scratch, extra))
        self.steps.append((list(reads), [*writes, *scratch]))


def given_and_made(traced: Any) -> tuple[int, int]:
    """Bytes of a traced function's arguments and results, on the device and in host memory. A
    donated argument and the result that takes its place count once.
    """
    jaxpr, found = traced.jaxpr, []
    for host in (False, True):
        given, made = (
            [_size(a) * (host == (a.memory_space is jax.memory.Space.Host)) for a in avals]
            for avals in (jaxpr.in_avals, jaxpr.out_avals)
        )
        reused = sum(n for n, d in zip(given, donated(traced), strict=True) if d)
        found.append(sum(given) + sum(made) - min(reused, sum(made)))
    return found[0], found[1]


def _size(aval: Any) -> int:
    return aval.size * getattr(aval.dtype, "itemsize", 8)
