"""Which buffers a traced function needs, and when: a model of what XLA does with it.

No compiler runs. After lowering (`_program`), two more of XLA's decisions are imitated, each of
which alone can double the memory:

1. *Fusion* (`_kernels`). A value has a buffer only if something that cannot be fused makes it or
   reads it. A fused reader reads the operands instead, which then live longer: the backward pass of
   a relu holds the convolution's output, not the relu's.
2. *Order* (`_order`). On the CPU XLA runs operations breadth first: whatever is ready, in the order
   in which it became ready. So what the backward pass can prepare early (weights in another
   dimension order, say) is prepared early, and is held. Elsewhere XLA looks for an order that needs
   little.

What is live when is then a list of intervals, and memory is the largest sum of them.

Known inefficiencies: buffers are added up, while XLA packs them into one block with gaps; fusion
rules are those seen in the CPU compiler of jax 0.10 to 0.12; other backends have other kernels and
layouts, so there the figure is an estimate. Constants inside the program and scratch space of
library calls are not counted. What runs inside `shard_map` or a hand-written kernel is not seen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from ._program import MOVES, Node, Program, Value, narrow

_SMALL = 4096  # bytes that are not worth a search
# A reduction is a library call on the CPU, and takes one of these along if nothing else reads it.
_TAKEN_ALONG = frozenset(["add", "add_any", "max", "min", "mul", "square", "sub"])
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


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


@dataclasses.dataclass(eq=False, slots=True)
class _Kernel:
    node: Node
    reads: list[Value]


def _kernels(program: Program) -> list[_Kernel]:
    """What is left after fusion: operations whose results have buffers, and what they read."""
    outputs = set(program.outputs)
    taken: set[Node] = set()  # by a reduction
    again: set[Node] = set()  # computed anew by each fused reader, although it has a buffer

    def takes(reader: Node, producer: Node) -> bool:
        if reader in taken:
            return producer.op == "broadcast_in_dim"
        return reader.takes_producers

    for node in reversed(program.nodes):
        if not node.fusible:
            for value in node.outputs:
                value.has_buffer = True
            continue
        value = node.outputs[0]
        readers = value.readers
        alone = len(readers) == 1 and value not in outputs and readers[0].op in _REDUCTIONS
        if alone and node.op in _TAKEN_ALONG and program.platform == "cpu":
            taken.add(node)
            continue
        needed = value in outputs or not all(takes(r, node) for r in readers)
        # On the CPU, arithmetic on narrow floats is arithmetic on wide ones, rounded each time.
        rounds = program.platform == "cpu" and narrow(value.dtype) and node.op not in MOVES
        costly = node.expensive or rounds
        value.has_buffer = needed or (costly and len(readers) > 1)
        if needed and not costly and node.effectively_unary:
            again.add(node)
    return [
        _Kernel(node, _reads(node, taken, again))
        for node in program.nodes
        if any(v.has_buffer for v in node.outputs)
    ]


def _reads(node: Node, taken: Collection[Node], again: Collection[Node]) -> list[Value]:
    """The buffers that a kernel reads: its operands, or theirs, through what is fused into it."""
    reads: dict[Value, None] = {}
    seen: set[Value] = set()
    pending = [(v, node.takes_producers) for v in reversed(node.inputs)]
    while pending:
        value, fused = pending.pop()
        if value in seen or value.literal:
            continue
        seen.add(value)
        made = value.node
        if made in taken:
            pending += [(v, False) for v in reversed(made.inputs)]
        elif made and made.fusible and (not value.has_buffer or (fused and made in again)):
            pending += [(v, made.takes_producers) for v in reversed(made.inputs)]
        else:
            reads[value] = None
    return list(reads)


def _order(program: Program, kernels: list[_Kernel]) -> list[_Kernel]:
    """On the CPU breadth first: a queue of what is ready.

    Of several readers of one value, library calls come first and copies for layout last, because
    the compiler makes them in this order.
    """
    maker: dict[Value, Any] = {v: k for k in kernels for v in k.node.outputs}
    if program.platform != "cpu":
        # Elsewhere XLA tries several orders and takes the one that needs least.
        orders = (kernels, _when_needed(program, kernels, maker))
        return min(orders, key=lambda order: _rough_peak(program, order))
    users: dict[Any, list[_Kernel]] = collections.defaultdict(list)
    waiting = {}
    for kernel in kernels:
        sources = {maker.get(v, v) for v in kernel.reads}
        waiting[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
    for readers in users.values():
        readers.sort(key=lambda k: _rank(k.node))
    queue = collections.deque([*program.arguments])
    queue.extend(s for s in users if isinstance(s, Value) and s not in set(program.arguments))
    queue.extend(k for k in kernels if not waiting[k])
    ordered = []
    while queue:
        done = queue.popleft()
        ordered += [done] if isinstance(done, _Kernel) else []
        for kernel in users.get(done, ()):
            waiting[kernel] -= 1
            if not waiting[kernel]:
                queue.append(kernel)
    return ordered


def _when_needed(program: Program, kernels, maker) -> list[_Kernel]:
    """Depth first, from each output in turn, in the order in which they were traced.

    A pass that computes values again then does so piece by piece. What goes to host memory goes at
    once.
    """
    outputs = set(program.outputs)
    leaving: dict[_Kernel, list[_Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        if kernel.node.outputs[0].in_host_memory and kernel.reads[0] in maker:
            leaving[maker[kernel.reads[0]]].append(kernel)
    pending = [(k, False) for k in reversed(kernels) if not outputs.isdisjoint(k.node.outputs)]
    seen: set[_Kernel] = set()
    ordered: dict[_Kernel, None] = {}
    while pending:
        kernel, ready = pending.pop()
        if ready:
            ordered.update(dict.fromkeys([kernel, *leaving[kernel]]))
        elif kernel not in seen:
            seen.add(kernel)
            pending.append((kernel, True))
            pending += [(maker[v], False) for v in reversed(kernel.reads) if v in maker]
    return list(ordered)


def _rough_peak(program: Program, kernels: Sequence[_Kernel]) -> int:
    """Bytes of all buffers that are live at once, loops' bodies apart."""
    last = {v.array: k for k in kernels for v in k.reads}
    kept = {v.array for v in program.outputs}
    now = peak = 0
    for kernel in kernels:
        made = [v for v in kernel.node.outputs if v.has_buffer and not v.in_host_memory]
        now += sum(v.bytes for v in made)
        peak = max(peak, now)
        dead = {v.array for v in kernel.reads if last[v.array] is kernel} - kept
        now -= sum(v.bytes for v in dead if v.node is not None and not v.in_host_memory)
    return peak


def _rank(node: Node) -> int:
    if node.op in ("conv_general_dilated", "dot_general"):
        return 0
    return 1 if node.op.startswith("reduce_") else 3 if node.for_layout else 2


def buffers(program: Program, donated: Collection[Value] = ()) -> list[Buffer]:
    """All buffers of a program except its arguments, with the steps at which they are held.

    An output that takes the place of a donated argument is there from the start.
    """
    found = _Lifetimes().run(program, inside=False)
    free = collections.Counter((v.shape, v.dtype) for v in donated)
    for buffer in found:
        key = (buffer.what.shape, buffer.what.dtype)
        if buffer.kind == "output" and free[key] > 0:
            free[key] -= 1
            buffer.start = 0
    return found


class _Lifetimes:
    """One clock for a program and the bodies of its loops, which run while the loop does."""

    def __init__(self) -> None:
        self.now = 0

    def run(self, program: Program, inside: bool, outside: Collection[Value] = ()) -> list[Buffer]:
        """What is outside lies in a buffer of the caller."""
        kernels = _order(program, _kernels(program))
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
                found += self.run(body, inside=True, outside=body.outputs if branch else ())
                found += [Buffer(v.bytes, start, self.now, "tile", v) for v in body.prepared]
            if node.op == "barrier":
                continue
            dying = {
                v: held[v] for v in reads[i] if last[v] == i and v in held and v not in outputs
            }
            for k, value in enumerate(node.outputs):
                if not value.has_buffer:
                    continue
                kind = "tile" if inside else node.context.kind
                kind = "host" if value.in_host_memory else kind
                if value in outside or self._lies_in_carry(program, node, value, last, i):
                    held[value] = Buffer(0, start, self.now, kind, value)
                    continue
                buffer = self._take_over(node, k, dying)
                if buffer is None:
                    buffer = Buffer(value.bytes, start, self.now, kind, value)
                    found.append(buffer)
                held[value] = buffer
                if value in outputs and not inside:
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
