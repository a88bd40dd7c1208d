"""What a compiled program holds, read from its scheduled HLO text.

XLA's `memory_analysis` gives the number of bytes, but not which arrays they are. The program's text
lists the instructions in the order in which they run. A walk over them finds which buffers are live
at the moment when most bytes are, and which instructions made them. So one can see whether a value
was kept for the backward pass or computed again. Bodies of loops are walked where the loop runs.

Limits: XLA packs buffers into one block, and writes results over operands that nobody reads again.
Here every result is a buffer of its own: the list says which values are large and live, not how
many bytes they take together. Scratch space inside library calls is not in the text.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\(|\)|/\*.*?\*/|(\w+)\[([^\]]*)\](?:\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([^,\s]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an instruction's result."""

    dtype: str
    shape: tuple[int, ...]

    @functools.cached_property
    def bytes(self) -> int:
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[1]) if digits else 32)
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    name: str
    opcode: str
    leaves: tuple[Leaf, ...]
    spans: tuple[tuple[int, int], ...]
    """For a tuple, which leaves belong to which element."""
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    attributes: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class HloModule:
    computations: Mapping[str, Sequence[HloInstruction]]
    entry: str
    unread: int
    """Lines that look like instructions and could not be read."""


def read(text: str) -> HloModule | None:
    """The computations of an HLO module's text; None if there is no entry."""
    computations: dict[str, list[HloInstruction]] = {}
    entry, current, unread = None, None, 0
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif (found := _INSTRUCTION.match(line)) is not None:
            instruction = _instruction(found[2], found[3], bool(found[1]))
            unread += instruction is None
            current += [instruction] if instruction else []
    return HloModule(computations, entry, unread) if entry and computations[entry] else None


def _instruction(name: str, rest: str, is_root: bool) -> HloInstruction | None:
    opcode = _OPCODE.search(" " + rest)
    if opcode is None:
        return None
    shape, begin = rest[: opcode.start()], opcode.end() - 1
    end = _closing(rest, begin)
    attributes = rest[end + 1 :]
    leaves, spans = _leaves(shape)
    branches = _BRANCHES.search(attributes)
    called = _CALLED.findall(attributes)
    called += _NAME.findall(branches[1]) if branches else []
    op_name = re.search(r'op_name="([^"]*)"', attributes)
    return HloInstruction(
        name,
        opcode[1],
        leaves,
        spans,
        tuple(_NAME.findall(rest[begin:end])),
        tuple(c.lstrip("%") for c in called),
        op_name[1] if op_name else "",
        attributes,
        is_root,
    )


def _closing(text: str, begin: int) -> int:
    depth = 1
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _leaves(shape: str) -> tuple[tuple[Leaf, ...], tuple[tuple[int, int], ...]]:
    """The arrays in a shape, in order, and where the elements of the outermost tuple lie."""
    leaves: list[Leaf] = []
    spans: list[tuple[int, int]] = []
    depth = start = 0
    for token in _SHAPE.finditer(shape):
        if token[0] == "(":
            depth += 1
            start = len(leaves) if depth == 2 else start
        elif token[0] == ")":
            depth -= 1
            if depth == 1:
                spans.append((start, len(leaves)))
        elif token[1] is not None:
            dims = tuple(int(d.lstrip("<=")) for d in token[2].split(",") if d.strip())
            leaves.append(Leaf(token[1], dims))
            if depth == 1:
                spans.append((len(leaves) - 1, len(leaves)))
    return tuple(leaves), tuple(spans)


_VIEWS = frozenset(
    """
    bitcast tuple get-tuple-element while optimization-barrier opt-barrier copy-done async-done
    async-update add-dependency domain
    """.split()
)
_FREE = frozenset(["parameter", "constant", "partition-id", "replica-id", "after-all"])
Place = tuple[str, int]
"""A buffer: the instruction that first wrote it, and the number of its leaf."""
Places = collections.defaultdict[str, list[Place]]
"""Per instruction, the buffers of its leaves; none for names that are not in the computation."""


@dataclasses.dataclass(eq=False)
class Buffer:
    """A leaf of an instruction, and the first and the last moment at which it is held."""

    instruction: HloInstruction
    leaf: Leaf
    start: int
    end: int
    is_output: bool


def held(program: HloModule) -> list[Buffer]:
    """The temporaries that are live when their sum is largest, by a walk over the schedule."""
    found = _Walk(program).run(program.entry, is_entry=True)
    return _at_peak([b for b in found if not b.is_output])


def _at_peak(buffers: Iterable[Buffer]) -> list[Buffer]:
    events = [(b.start, 0, b.leaf.bytes) for b in buffers]
    events += [(b.end, 1, -b.leaf.bytes) for b in buffers]
    now, most, when = 0, 0, 0
    for time, _, change in sorted(events):
        now += change
        if now > most:
            most, when = now, time
    return [b for b in buffers if b.start <= when <= b.end]


class _Walk:
    """One clock for the entry and the computations that it runs."""

    def __init__(self, program: HloModule):
        self.computations, self.now = program.computations, 0

    def run(self, computation: str, *, is_entry: bool = False) -> list[Buffer]:
        """Buffers of a computation; arguments, and results other than the entry's, are the
        caller's.
        """
        instructions = self.computations.get(computation, ())
        places = self._places(instructions)
        last = {p: i for i, it in enumerate(instructions) for o in it.operands for p in places[o]}
        returned = {p for it in instructions if it.is_root for p in places[it.name]}
        live: dict[Place, Buffer] = {}
        found = []
        for i, it in enumerate(instructions):
            self.now += 1
            start = self.now
            for called in it.called if it.opcode in ("while", "call", "conditional") else ():
                found += self.run(called)
            for k, leaf in enumerate(it.leaves):
                place = (it.name, k)
                if it.opcode not in _FREE and places[it.name][k] == place:
                    live[place] = Buffer(it, leaf, start, self.now, place in returned)
                    found += [live[place]] if is_entry or place not in returned else []
            for place in (p for o in it.operands for p in places[o] if last[p] == i):
                if place in live:
                    live[place].end = self.now
        for place in returned & live.keys():
            live[place].end = self.now
        return found

    def _places(self, instructions: Sequence[HloInstruction]) -> Places:
        """Where each leaf of each instruction lies."""
        places: Places = collections.defaultdict(list)
        by_name = {it.name: it for it in instructions}
        for it in instructions:
            own = [(it.name, k) for k in range(len(it.leaves))]
            before = [p for o in it.operands for p in places[o]]
            if it.opcode == "get-tuple-element" and it.operands[0] in by_name:
                index = re.search(r"index=(\d+)", it.attributes)
                spans = by_name[it.operands[0]].spans
                begin, end = spans[int(index[1])] if index and spans else (0, len(own))
                own = before[begin:end]
            elif it.opcode in _VIEWS and len(before) >= len(own):
                own = before[: len(own)]
            places[it.name] = own
        return places


@dataclasses.dataclass(frozen=True)
class Counts:
    convolutions: int
    loops: int
    chains: int
    """Library calls that run several operations, and hold what is between them themselves."""


def counts(program: HloModule) -> Counts:
    """Convolutions, those inside library calls too, and loops; a loop's body counts once."""
    found = [it for computation in program.computations.values() for it in computation]
    return Counts(
        sum(it.opcode == "convolution" or _calls_convolution(it) for it in found),
        sum(it.opcode == "while" for it in found),
        sum("kind=kCustom" in it.attributes and _is_chain(it, program) for it in found),
    )


def _is_chain(it: HloInstruction, program: HloModule) -> bool:
    inside = program.computations.get(it.called[0], ()) if it.called else ()
    return sum(i.opcode in ("convolution", "dot", "reduce-window") for i in inside) > 1


def _calls_convolution(it: HloInstruction) -> bool:
    target = re.search(r'custom_call_target="([^"]*)"', it.attributes)
    return it.opcode == "custom-call" and target is not None and "conv" in target[1].lower()
