"""Operations that run as one, and which of these a GPU's compiler joins.

After fusion, kernels that read the same array become one with several results, which runs when the
last of them can; so does a kernel with one that reads its result. Arrays that only the joint kernel
reads are then no longer written.

Known inefficiencies: XLA joins a kernel with one that reads its result if that is estimated to be
faster. Here it is not if the result, which something else reads too, takes more than sums and
products, and the reader adds up. XLA does join some of these.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Iterable, Sequence

from ._instructions import REDUCTIONS, Node, Value


@dataclasses.dataclass(eq=False, slots=True)
class Kernel:
    """Operations that run as one, and the buffers that each reads."""

    parts: dict[Node, list[Value]]
    first: Node = dataclasses.field(init=False)
    reads: list[Value] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.first = next(iter(self.parts))
        self.reads = list(dict.fromkeys(v for reads in self.parts.values() for v in reads))

    @property
    def outputs(self) -> list[Value]:
        return [v for node in self.parts for v in node.outputs]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """What a fusion or a sum goes over; None for other kernels."""
        node = next((n for n in self.parts if n.op not in REDUCTIONS), self.first)
        if node.op in REDUCTIONS:
            return node.inputs[0].shape
        return node.outputs[0].shape if node.fusible else None

    @property
    def adds_up(self) -> bool:
        return any(node.op in REDUCTIONS for node in self.parts)

    def overwritten(self, dying: Iterable[Value]) -> dict[Value, Value]:
        """Results that may lie where an operand was that is not read again, with that operand.

        No other result may be made of it. A loop updates its carry in place. A kernel that also
        adds up does not go through its arrays in order.
        """
        places: dict[Value, Value] = {}
        free = dict.fromkeys(dying)
        for node, reads in self.parts.items():
            others = {v.array for n, r in self.parts.items() if n is not node for v in r}
            own = [v for v in dict.fromkeys(v.array for v in reads) if v not in others]
            for k, result in enumerate(node.outputs):
                if node.starts:
                    operands = node.starts[k : k + 1]
                elif node.overwrites and result.has_buffer and not self.adds_up:
                    alike = (result.shape, result.dtype)
                    operands = [v for v in own if (v.shape, v.dtype) == alike]
                else:
                    break
                for operand in [v for v in operands if v in free][:1]:
                    places[result] = operand
                    del free[operand]
        return places


def joined(kernels: Sequence[Kernel], outputs: Collection[Value]) -> list[Kernel]:
    """These, some of them joined, as a GPU's compiler does.

    For each array, from the last one made to the arguments: all that read it; then what makes it,
    and one that reads it.
    """
    joins = _Joins(kernels)
    for value in sorted(joins.readers, key=lambda v: joins.maker.get(v, -1), reverse=True):
        if math.prod(value.shape) > 1:
            joins.join_readers(value)
            joins.join_maker(value, is_output=value in outputs)
    return list(joins.kernels.values())


class _Joins:
    """Kernels by number, and which others each needs: a set of numbers, as bits.

    Two can be joined if they go over equal shapes, and none needs the other by way of a third,
    which could run neither before nor after them.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = dict(enumerate(kernels))
        self.maker = {v: i for i, k in self.kernels.items() for v in k.outputs}
        self.readers: dict[Value, dict[int, None]] = collections.defaultdict(dict)
        self.bits = {i: 1 << i for i in self.kernels}
        self.needs: dict[int, int] = {}
        for i, kernel in self.kernels.items():
            sources = {self.maker[v] for v in kernel.reads if v in self.maker}
            needed = (self.needs[j] | self.bits[j] for j in sources)
            self.needs[i] = functools.reduce(operator.or_, needed, 0)
            for value in kernel.reads:
                self.readers[value][i] = None

    def join_readers(self, value: Value) -> None:
        waiting = sorted(self.readers[value])
        while waiting:
            i = waiting.pop(0)
            for j in list(waiting):
                connected = self.needs[i] & self.bits[j] or self.needs[j] & self.bits[i]
                if not connected and self._alike(i, j):
                    self._join(i, j, self.kernels[i].parts | self.kernels[j].parts)
                    waiting.remove(j)

    def join_maker(self, value: Value, is_output: bool) -> None:
        """With a reader, preferably one that is joint already; with the only one if it is so.

        A single reader that is not had its chance in fusion.
        """
        i = self.maker.get(value)
        if i is None or len(self.kernels[i].parts) > 1 or not self.kernels[i].first.fusible:
            return
        dropped = len(self.readers[value]) == 1 and not is_output
        costly = not dropped and _is_costly(value)
        able = [
            j
            for j in sorted(self.readers[value])
            if self._alike(i, j)
            and self._follows(i, j, value)
            and not (costly and self.kernels[j].adds_up)
        ]
        joint = [j for j in able if len(self.kernels[j].parts) > 1]
        for j in (joint or ([] if dropped else able))[:1]:
            own = self.kernels[i].reads
            parts = {
                node: list(dict.fromkeys(w for v in reads for w in (own if v is value else [v])))
                for node, reads in self.kernels[j].parts.items()
            }
            value.has_buffer = not dropped
            self._join(i, j, parts if dropped else self.kernels[i].parts | parts)

    def _follows(self, i: int, j: int, value: Value) -> bool:
        """Whether the latter needs the former for this value only."""
        others = (v for v in self.kernels[j].reads if v in self.maker and v is not value)
        return not any(self.needs[self.maker[v]] & self.bits[i] for v in others)

    def _alike(self, i: int, j: int) -> bool:
        one, other = self.kernels[i], self.kernels[j]
        axes = {n.params.get("axes") for k in (one, other) for n in k.parts if n.op in REDUCTIONS}
        return one.shape is not None and one.shape == other.shape and len(axes) < 2

    def _join(self, i: int, j: int, parts: dict[Node, list[Value]]) -> None:
        for k in (i, j):
            for value in self.kernels[k].reads:
                del self.readers[value][k]
        del self.kernels[j]
        self.kernels[i] = joint = Kernel(parts)
        for value in joint.reads:
            self.readers[value][i] = None
        self.maker.update(dict.fromkeys(joint.outputs, i))
        self.bits[i] |= self.bits.pop(j)
        self.needs[i] = (self.needs[i] | self.needs.pop(j)) & ~self.bits[i]
        for k in self.kernels:
            if self.needs[k] & self.bits[i]:
                self.needs[k] |= self.needs[i] | self.bits[i]


def _is_costly(value: Value) -> bool:
    """Whether the kernel that makes it computes more than sums and products."""
    pending, seen = [value.node], set()
    while pending:
        node = pending.pop()
        if node.expensive:
            return True
        for v in node.inputs:
            if v.node and v.node.fusible and not v.has_buffer and v not in seen:
                seen.add(v)
                pending.append(v.node)
    return False
