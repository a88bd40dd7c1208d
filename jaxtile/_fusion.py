"""Which operations of a program XLA makes one kernel of, and so which values have buffers.

A value has a buffer only if something that cannot be fused makes it or reads it. A fused reader
reads the operands instead, which then live longer: the backward pass of a relu holds the
convolution's output, not the relu's. A GPU's compiler fuses a value into all its readers or into
none, into reductions too, and weighs what is read against what is written; then it joins kernels
(`_kernels`).

Known inefficiencies: the rules are those seen in the CPU compiler of jax 0.10 to 0.12 and in the
GPU compiler of jax 0.11, which estimates times instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ._instructions import MOVES, RANDOM, REDUCTIONS, Node, Value, narrow
from ._kernels import Kernel, joined
from ._program import Program

# A reduction is a library call on the CPU, and takes one of these along if nothing else reads it.
_TAKEN_ALONG = frozenset(["add", "add_any", "max", "min", "mul", "square", "sub"])
# Of what XLA computes once on the CPU, a GPU's compiler computes these several times.
_CHEAP_ON_GPU = ("erf", "exp", "log", "sqrt")
_PARTS = ("slice", "dynamic_slice", "gather")


def kernels(program: Program) -> list[Kernel]:
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
        slow = node.expensive and (on_cpu or node.op not in _CHEAP_ON_GPU)
        costly = slow or rounds or number
        value.has_buffer = needed or node in heavy or (costly and len(readers) > 1)
        if not value.has_buffer and not repeated.isdisjoint(readers):
            repeated.add(node)
        # Elsewhere, what is not fused into all its readers is fused into none.
        if needed and not costly and node.effectively_unary and on_cpu:
            again.add(node)
    found = [
        Kernel({node: _reads(node, program.platform, taken, again)})
        for node in program.nodes
        if any(v.has_buffer for v in node.outputs)
    ]
    return found if on_cpu else joined(found, outputs)


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
    Two readers of what is in the library's order, one of which writes it in the usual one, compute
    it each.
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
        few = 2 if value.in_library_order else 1
        if n > few and (random or n * operands > operands + (n + 1) * value.bytes):
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
