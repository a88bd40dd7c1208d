"""What the estimates of assignments ask of a network again and again, as lists of numbers.

Operations that take no time of their own, and hold nothing, belong to those that read them; of
reductions that read the same, one stands for all. What is left are `parts`, with what they read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..policy import Outline
from ..policy._demands import Demand
from .costs import Costs
from .kernels import durations

Line = tuple[Demand, ...]
"""Per tiled axis, what a tile of a result needs of an operand."""


class Facts:
    """Of one outline, on one device. Lists are by operation."""

    def __init__(self, outline: Outline, costs: Costs):
        self.outline = outline
        parts = outline.parts
        self.n, self.rank = len(parts), outline.rank
        self.tiled = [p.tiled and p.bytes > 0 for p in parts]
        self.reduces = [p.reduces and not t for p, t in zip(parts, self.tiled, strict=True)]
        self.durations = durations(outline, costs)
        whole = [[d.whole for d in self.durations.get(i, ())] or [0.0, 0.0] for i in range(self.n)]
        self.forward, self.backward = map(list, zip(*whole, strict=True))
        self.held = [float(p.held_bytes) for p in parts]
        self.made = [float(p.made_bytes) for p in parts]
        self.bytes = [float(p.bytes) if p.tiled else 0.0 for p in parts]
        self.cotangent = [
            b if p.differentiable else 0.0 for b, p in zip(self.bytes, parts, strict=True)
        ]
        self.by_position = [
            all(d.scale in (0, 1) and not d.halo for line in p.demands for d in line) for p in parts
        ]
        self.ends_with_clamp = [p.ends_with_clamp for p in parts]
        self.elementwise = [p.operation.kind == "elementwise" for p in parts]
        self.loss: int | None = None
        """The sum whose derivative is computed together with it, in tiles."""
        self._leave_out_fused()
        self.asked = [bits([*self.inputs[k], *self.awaits[k]]) for k in range(self.n)]
        self.joints = self._joints()
        self.across = {k: self._across(self.parts[after:]) for k, after in self.joints.items()}
        """Per joint, reductions before the next operation that are awaited there or later."""
        self.following = {k: self._following(k, after) for k, after in self.joints.items()}
        """Per joint, later reductions that can be added up where it is computed, and operations of
        which no result may be whole then.
        """

    def _leave_out_fused(self) -> None:
        """What each operation reads, without operations that are part of their readers; and of
        reductions that read the same, and await the same others, one for all.
        """
        self.reads: list[list[tuple[int, Line]]] = []
        self.awaits: list[frozenset[int]] = []
        kept: set[int] = set()
        hidden: list[list[int]] = [[] for _ in range(self.n)]
        first: dict[Any, int] = {}
        stands_for = list(range(self.n))
        for k, part in enumerate(self.outline.parts):
            read: list[tuple[int, Line]] = []
            for j, line in zip(part.inputs, part.demands, strict=True):
                if j in kept:
                    read.append((j, line))
                else:  # it reads what that one reads
                    read += [(i, line) for i, _ in self.reads[j]]
                    hidden[k] += [j, *hidden[j]]
            self.reads.append(read)
            awaited = (r for j in (k, *hidden[k]) for r in self.outline.parts[j].awaits)
            self.awaits.append(frozenset(stands_for[r] for r in awaited))
            fused = k not in self.durations and not self.held[k] and self.by_position[k]
            if self.reduces[k]:
                alike = tuple(i for i, _ in read), self.awaits[k]
                stands_for[k] = first.setdefault(alike, k)
            elif not self.tiled[k] or (fused and k not in self.outline.outputs):
                continue
            if stands_for[k] == k:
                kept.add(k)
        if self.outline.loss is not None:
            self.loss = stands_for[self.outline.loss]
        self.parts = sorted(kept)
        self.at = {k: n for n, k in enumerate(self.parts)}
        self.whole = {k for k in kept if self.tiled[k] and k not in self.outline.outputs}
        """Results that may be whole arrays; those of the function are in any case."""
        self.inputs = [[i for i, _ in read] for read in self.reads]

    def _joints(self) -> dict[int, int]:
        """Results that are read later, while nothing else that was made before them is; and where,
        in `parts`, the next operations begin.
        """
        last = list(range(self.n))
        for k in self.parts:
            for i in self.inputs[k]:
                last[i] = max(last[i], k)
        found: dict[int, int] = {}
        reach = -1
        for at, k in enumerate(self.parts):
            if self.tiled[k] and self.held[k] > 0 and reach <= k < last[k]:
                later = (n for n in range(at + 1, len(self.parts)) if self.tiled[self.parts[n]])
                if (after := next(later, None)) is not None:
                    found[k] = after
            reach = max(reach, last[k])
        return found

    def _across(self, later: Sequence[int]) -> list[int]:
        return sorted({r for k in later for r in self.awaits[k] if r < later[0]})

    def _following(self, joint: int, after: int) -> list[tuple[int, frozenset[int]]]:
        """Reductions of a result, or of what is computed from it position by position."""
        found, between = [], {joint: frozenset[int]()}
        for k in self.parts[after:]:
            if not self.inputs[k] or not all(i in between for i in self.inputs[k]):
                continue
            way = frozenset[int]().union(*(between[i] for i in self.inputs[k]))
            if self.reduces[k]:
                if all(r < joint for i in (k, *way) for r in self.awaits[i]):
                    found.append((k, way))
            elif self.by_position[k]:
                between[k] = way | {k}
        return found

    def plain(self, operations: Collection[int]) -> float:
        """Seconds of these, forwards and backwards, once."""
        return sum(self.forward[k] + self.backward[k] for k in operations)


def bits(numbers: Iterable[int]) -> int:
    """A set of small numbers, as the bits of one."""
    found = 0
    for n in numbers:
        found |= 1 << n
    return found
