"""Which buffers a traced function needs, and when: a model of what XLA does with it.

No compiler runs. After lowering (`_program`), three more of XLA's decisions are imitated, each of
which can change the memory much:

1. *Fusion* (`_kernels`). A value has a buffer only if something that cannot be fused makes it or
   reads it. A fused reader reads the operands instead, which then live longer: the backward pass of
   a relu holds the convolution's output, not the relu's. A GPU's compiler fuses a value into all
   its readers or into none, into reductions too, and weighs what is read against what is written.
2. *Order* (`_schedule`).
3. *Packing* (`_packing`).

What is live when is then a list of intervals. Memory is the largest sum of them, and the gaps that
packing leaves.

Known inefficiencies: lifetimes are right but for a few kernels, whose order a trace does not tell;
fusion rules are those seen in the CPU compiler of jax 0.10 to 0.12 and in the GPU compiler of jax
0.11 without autotuning, which may choose library calls that need scratch space. Constants inside
the program and scratch space are not counted. What runs inside `shard_map` or a hand-written kernel
is not seen.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from ._instructions import MOVES, RANDOM, REDUCTIONS, Node, Value, narrow
from ._packing import packed_bytes
from ._program import Program
from ._schedule import Kernel, order

_SMALL = 4096  # bytes that are not worth a search
# A reduction is a library call on the CPU, and takes one of these along if nothing else reads it.
_TAKEN_ALONG = frozenset(["add", "add_any", "max", "min", "mul", "square", "sub"])
_PARTS = ("slice", "dynamic_slice", "gather")


@dataclasses.dataclass(eq=False)
class Buffer:
    """Bytes that are held from one step to another, both included."""

    bytes: int
    start: int
    end: int
    kind: str
    """`output`, `host`, `stored`, `recomputed`, `gradients` or `tile`."""
    what: Any
    """For the reader: a `Value`, or an instruction of a compiled program."""


def at_peak(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The temporaries that are live when their sum is largest."""
    temporaries = _beside_outputs(buffers)
    events = [(b.start, 0, b.bytes) for b in temporaries]
    events += [(b.end, 1, -b.bytes) for b in temporaries]
    now, most, when = 0, 0, 0
    for time, _, change in sorted(events):
        now += change
        if now > most:
            most, when = now, time
    return [b for b in temporaries if b.start <= when <= b.end]


def gaps(buffers: Sequence[Buffer]) -> int:
    """Bytes of the block of temporaries that hold nothing when most is live."""
    temporaries = _beside_outputs(buffers)
    least = sum(b.bytes for b in at_peak(temporaries)) // 500
    large = [b for b in temporaries if b.bytes > least]
    return packed_bytes(large) - sum(b.bytes for b in at_peak(large))


def _beside_outputs(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Temporaries that do not fit into the buffer of an output while that is not yet written.

    XLA places large buffers first, and prefers the smallest output that has room.
    """
    outputs = sorted((b for b in buffers if b.kind == "output"), key=lambda b: b.bytes)
    used = {b: [(b.start, b.end)] for b in outputs}
    rest = []
    for b in sorted(buffers, key=lambda b: -b.bytes):
        if b.kind == "output" or not b.bytes:
            continue
        for output in outputs if b.bytes > _SMALL else ():
            fits = output.bytes >= b.bytes
            if fits and all(end < b.start or b.end < start for start, end in used[output]):
                used[output].append((b.start, b.end))
                break
        else:
            rest.append(b)
    return rest


def _kernels(program: Program) -> list[Kernel]:
    """What is left after fusion: operations whose results have buffers, and what they read."""
    outputs = set(program.outputs)
    taken: set[Node] = set()  # by a reduction
    again: set[Node] = set()  # computed anew by each fused reader, although it has a buffer
    on_cpu = program.platform == "cpu"
    heavy = set() if on_cpu else _read_too_often(program)
    repeated: set[Node] = set()  # computed once per window that an element lies in

    def takes(reader: Node, producer: Node) -> bool:
        readers = producer.outputs[0].readers
        if reader in repeated:  # only what costs nothing, or little
            free = producer.constant or producer.op in _PARTS
            alone = len(readers) == 1 and _is_cheap(producer)
            return free or alone or _is_near(producer)
        if not on_cpu and reader.reduces_windows:
            return all(r.reduces_windows or r.takes_producers(program.platform) for r in readers)
        if not on_cpu and reader.op in REDUCTIONS:
            return True
        if reader in taken:
            return producer.op == "broadcast_in_dim"
        return reader.takes_producers(program.platform)

    for node in reversed(program.nodes):
        if not on_cpu and node.reduces_windows and node.windows_overlap:
            repeated.add(node)
        if not node.fusible:
            for value in node.outputs:
                value.has_buffer = True
            continue
        value = node.outputs[0]
        readers = value.readers
        alone = len(readers) == 1 and value not in outputs and readers[0].op in REDUCTIONS
        if alone and node.op in _TAKEN_ALONG and on_cpu:
            taken.add(node)
            continue
        needed = value in outputs or not all(takes(r, node) for r in readers)
        # On the CPU, arithmetic on narrow floats is arithmetic on wide ones, rounded each time.
        rounds = on_cpu and narrow(value.dtype) and node.op not in MOVES
        # A number that several kernels read is computed once.
        number = on_cpu and math.prod(value.shape) == 1 and node.op not in MOVES
        costly = node.expensive or rounds or number
        value.has_buffer = needed or node in heavy or (costly and len(readers) > 1)
        if not value.has_buffer and not repeated.isdisjoint(readers):
            repeated.add(node)
        # Elsewhere, what is not fused into all its readers is fused into none.
        if needed and not costly and node.effectively_unary and on_cpu:
            again.add(node)
    return [
        Kernel(node, _reads(node, program.platform, taken, again))
        for node in program.nodes
        if any(v.has_buffer for v in node.outputs)
    ]


def _is_cheap(node: Node) -> bool:
    """Whether computing it several times reads one array several times, and is little work."""
    return not node.expensive and len(_arrays(node)) <= 1


def _is_near(node: Node, steps: int = 2) -> bool:
    """Whether it is so few cheap steps away from an array in memory, as a relu from a convolution.

    Zeros that something else needs as an array are read too.
    """
    zeros = [v for v in node.inputs if v.node and v.node.constant]
    held = any(not reader.fusible for v in zeros for reader in v.readers)
    before = [v.node for v in _arrays(node) if v.node and v.node.fusible]
    within = not before or (steps > 1 and all(_is_near(n, steps - 1) for n in before))
    return _is_cheap(node) and not held and within


def _arrays(node: Node) -> set[Value]:
    """Operands that are as large as the result, but for those that are one number everywhere."""
    size = math.prod(node.outputs[0].shape)
    large = {v for v in node.inputs if not v.literal and math.prod(v.shape) >= size}
    return {v for v in large if not (v.node and v.node.op in ("broadcast_in_dim", "iota"))}


def _read_too_often(program: Program) -> set[Node]:
    """What a GPU's compiler does not fuse into its readers, because they would read too much.

    Fused, each of n readers reads all operands. Otherwise these are read once, the result is
    written, and read n times. What is made of random numbers is not computed n times either. A
    change to a wider type is part of the readers, so that the narrow result is what is written.
    """
    found: set[Node] = set()
    drawn: set[Value] = set()
    sources: dict[Value, frozenset[Value]] = {}
    for node in program.nodes:
        if not node.fusible:
            continue
        value = node.outputs[0]
        read = frozenset().union(*(sources.get(v, {v}) for v in node.inputs if not v.literal))
        if node.op in _PARTS and sum(v.bytes for v in read) > value.bytes:
            read = frozenset([value])  # no more than it has itself
        operands, n = sum(v.bytes for v in read), len(_readers_beyond_widening(value))
        random = not drawn.isdisjoint(node.inputs)
        if n > 1 and (random or n * operands > operands + (n + 1) * value.bytes):
            found.add(node)
            continue
        sources[value] = read
        if random or node.op == RANDOM:
            drawn.add(value)
    return found


def _readers_beyond_widening(value: Value) -> list[Node]:
    """What reads it, or what reads the same in a wider type, if nothing else reads it."""
    readers = value.readers
    if len(readers) == 1 and readers[0].op == "convert_element_type":
        wide = readers[0].outputs[0]
        return wide.readers if wide.bytes > value.bytes else readers
    return readers


def _reads(
    node: Node, platform: str, taken: Collection[Node], again: Collection[Node]
) -> list[Value]:
    """The buffers that a kernel reads: its operands, or theirs, through what is fused into it."""
    reads: dict[Value, None] = {}
    seen: set[Value] = set()
    pending = [(v, node.takes_producers(platform)) for v in reversed(node.inputs)]
    while pending:
        value, fused = pending.pop()
        if value in seen or value.literal:
            continue
        seen.add(value)
        made = value.node
        if made in taken:
            pending += [(v, False) for v in reversed(made.inputs)]
        elif made and made.fusible and (not value.has_buffer or (fused and made in again)):
            pending += [(v, made.takes_producers(platform)) for v in reversed(made.inputs)]
        else:
            reads[value] = None
    return list(reads)


def _is_reduced(value: Value) -> bool:
    """Whether a reduction reads it, or what is fused into one."""
    pending, seen = [value], set()
    while pending:
        for reader in pending.pop().readers:
            if reader.op in REDUCTIONS:
                return True
            if reader.fusible and reader not in seen and not reader.outputs[0].has_buffer:
                seen.add(reader)
                pending.append(reader.outputs[0])
    return False


def buffers(program: Program, donated: Collection[Value] = ()) -> list[Buffer]:
    """All buffers of a program except its arguments, with the steps at which they are held.

    An output that takes the place of a donated argument is there from the start, and so lies in no
    other buffer.
    """
    free = collections.Counter((v.shape, v.dtype) for v in donated)
    in_place = set()
    for value in dict.fromkeys(v.array for v in program.outputs):
        if free[value.shape, value.dtype] > 0:
            free[value.shape, value.dtype] -= 1
            in_place.add(value)
    return _Lifetimes(in_place).run(program)


class _Lifetimes:
    """One clock for a program and the bodies of its loops, which run while the loop does."""

    def __init__(self, in_place: Collection[Value]) -> None:
        self.now, self.in_place = 0, in_place

    def run(self, program: Program, outside: Collection[Value] = ()) -> list[Buffer]:
        """What is outside lies in a buffer of the caller."""
        kernels = order(program, _kernels(program))
        reads = [list(dict.fromkeys(v.array for v in k.reads)) for k in kernels]
        last = {v: i for i, values in enumerate(reads) for v in values}
        outputs = {v.array for v in program.outputs}
        held: dict[Value, Buffer] = {}
        found: list[Buffer] = []
        for i, kernel in enumerate(kernels):
            node = kernel.node
            self.now += 1
            start = self.now
            for body in node.bodies:
                branch = node.op == "cond"
                found += self.run(body, outside=body.outputs if branch else ())
                found += [Buffer(v.bytes, start, self.now, "tile", v) for v in body.prepared]
            if node.op == "barrier":
                continue
            dying = {
                v: held[v] for v in reads[i] if last[v] == i and v in held and v not in outputs
            }
            for k, value in enumerate(node.outputs):
                if not value.has_buffer:
                    continue
                kind = "tile" if program.inside else node.context.kind
                kind = "host" if value.in_host_memory else kind
                if value in outside or self._lies_in_carry(program, node, value, last, i):
                    held[value] = Buffer(0, start, self.now, kind, value)
                    continue
                # On a GPU, one kernel makes a value and adds it up, and that is not elementwise.
                alone = program.platform == "cpu" or not _is_reduced(value)
                buffer = None
                if (alone or node.starts) and value not in self.in_place:
                    buffer = self._take_over(node, k, dying)
                if buffer is None:
                    begin = 0 if value in self.in_place else start
                    buffer = Buffer(value.bytes, begin, self.now, kind, value)
                    found.append(buffer)
                held[value] = buffer
                if value in outputs and not program.inside:
                    buffer.kind = "output"
            for buffer in dying.values():
                buffer.end = self.now
        for value, buffer in held.items():
            if value in outputs:
                buffer.end = self.now
        return found

    @staticmethod
    def _take_over(node: Node, k: int, dying: dict[Value, Buffer]) -> Buffer | None:
        """The buffer of an operand that is not read again, if the result may lie there.

        A loop updates its carry in place.
        """
        shape, dtype = node.outputs[k].shape, node.outputs[k].dtype
        if node.starts:
            return dying.pop(node.starts[k], None) if k < len(node.starts) else None
        if node.overwrites:
            for value in dying:
                if value.shape == shape and value.dtype == dtype:
                    return dying.pop(value)
        return None

    @staticmethod
    def _lies_in_carry(program: Program, node: Node, value: Value, last, i: int) -> bool:
        """Whether a loop's body can write the new carry over the old one."""
        if value not in program.carried:
            return False
        read = last.get(program.carried[value].array, -1)
        return read < i or (read == i and node.overwrites)
