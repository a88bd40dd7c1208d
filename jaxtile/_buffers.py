"""Which buffers a traced function needs, and when: a model of what XLA does with it.

No compiler runs. After lowering (`_program`), three more of XLA's decisions are imitated, each of
which can change the memory much:

1. *Fusion* (`_fusion`): which values have buffers.
2. *Order* (`_schedule`): when they are made, and read for the last time.
3. *Packing* (`_packing`): where they lie.

What is live when is then a list of intervals. Memory is the largest sum of them, and the gaps that
packing leaves.

Known inefficiencies: lifetimes are right but for a few kernels, whose order a trace does not tell.
Constants inside the program and the scratch space of library calls, which autotuning chooses, are
not counted. What runs inside `shard_map` or a hand-written kernel is not seen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ._fusion import kernels
from ._instructions import Node, Value
from ._packing import packed_bytes
from ._program import Program
from ._schedule import order

_SMALL = 4096  # bytes that are not worth a search


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


def buffers(program: Program, donated: Sequence[Value] = ()) -> list[Buffer]:
    """All buffers of a program except its arguments, with the steps at which they are held.

    An output that takes the place of a donated argument is there from the start, and so lies in no
    other buffer. JAX gives the first of equal outputs the first of equal arguments. If a kernel
    reads it in another order than it writes the output, the output is copied there at the end.
    """
    free: dict[Any, list[Value]] = collections.defaultdict(list)
    for value in reversed(donated):
        free[value.shape, value.dtype].append(value)
    in_place = {}
    for value in dict.fromkeys(v.array for v in program.outputs):
        if same := free[value.shape, value.dtype]:
            in_place[value] = same.pop()
    return _Lifetimes(in_place).run(program)


class _Lifetimes:
    """One clock for a program and the bodies of its loops, which run while the loop does."""

    def __init__(self, in_place: Mapping[Value, Value]) -> None:
        """Results, each with the argument whose place it takes."""
        self.now, self.in_place = 0, in_place

    def run(self, program: Program, outside: Collection[Value] = ()) -> list[Buffer]:
        """What is outside lies in a buffer of the caller."""
        ordered = order(program, kernels(program))
        reads = [list(dict.fromkeys(v.array for v in k.reads)) for k in ordered]
        last = {v: i for i, values in enumerate(reads) for v in values}
        outputs = {v.array for v in program.outputs}
        held: dict[Value, Buffer] = {}
        found: list[Buffer] = []
        copied: list[Buffer] = []  # to where an argument is, at the end
        for i, kernel in enumerate(ordered):
            self.now += 1
            start = self.now
            for body in kernel.first.bodies:
                branch = kernel.first.op == "cond"
                found += self.run(body, outside=body.outputs if branch else ())
                found += [Buffer(v.bytes, start, self.now, "tile", v) for v in body.prepared]
            if kernel.first.op == "barrier":
                continue
            dying = {
                v: held[v] for v in reads[i] if last[v] == i and v in held and v not in outputs
            }
            places = kernel.overwritten(dying)
            for node, value in [(n, v) for n in kernel.parts for v in n.outputs if v.has_buffer]:
                kind = "tile" if program.inside else node.context.kind
                kind = "host" if value.in_host_memory else kind
                if value in outside or self._lies_in_carry(program, node, value, last, i):
                    held[value] = Buffer(0, start, self.now, kind, value)
                    continue
                if value in places and value not in self.in_place:
                    buffer = dying.pop(places[value])
                else:
                    begin = 0 if value in self.in_place else start
                    buffer = Buffer(value.bytes, begin, self.now, kind, value)
                    found.append(buffer)
                if value.in_library_order and self.in_place.get(value) in kernel.parts[node]:
                    copied.append(Buffer(value.bytes, start, self.now, kind, value))
                held[value] = buffer
                if value in outputs and not program.inside:
                    buffer.kind = "output"
            for buffer in dying.values():
                buffer.end = self.now
        for buffer in [*copied, *(held[v] for v in outputs if v in held)]:
            buffer.end = self.now
        return found + copied

    @staticmethod
    def _lies_in_carry(program: Program, node: Node, value: Value, last, i: int) -> bool:
        """Whether a loop's body can write the new carry over the old one."""
        if value not in program.carried:
            return False
        read = last.get(program.carried[value].array, -1)
        return read < i or (read == i and node.overwrites)
