"""One operation of a program before XLA's fusion, its arrays, and where it comes from."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._program import Program

MOVES = frozenset(
    """
    broadcast_in_dim iota slice pad transpose rev gather dynamic_slice concatenate split
    """.split()
)
# XLA does not compute these twice to save a buffer.
_EXPENSIVE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1
    lgamma log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh
    """.split()
)
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
RANDOM = "random words"


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Value:
    """One array. A literal, or one made by a barrier (`source`), takes no buffer of its own."""

    shape: tuple[int, ...]
    dtype: Any
    node: Node | None = None
    literal: bool = False
    source: Value | None = None
    view_of: Value | None = None
    """The array itself, if this is only how one equation sees its shape."""
    name: str | None = None
    readers: list[Node] = dataclasses.field(default_factory=list)
    has_buffer: bool = False
    in_host_memory: bool = False
    in_library_order: bool = False
    """Its dimensions lie in memory as a GPU's library has them, in another order than the shape."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 4)

    @property
    def base(self) -> Value:
        return self if self.view_of is None else self.view_of

    def seen_as(self, shape: tuple[int, ...]) -> Value:
        """With the shape that an equation sees: a reshape is the same array."""
        if self.base.shape == tuple(shape):
            return self.base
        return dataclasses.replace(self.base, shape=tuple(shape), view_of=self.base)

    @property
    def array(self) -> Value:
        value = self.base
        while value.source is not None:
            value = value.source
        return value


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Node:
    """One operation, as XLA sees it."""

    op: str
    inputs: list[Value]
    context: Context
    params: dict[str, Any]
    outputs: list[Value] = dataclasses.field(default_factory=list)
    fusible: bool = False
    in_place: bool = False
    for_layout: bool = False
    """Copies an operand into the dimension order that a library wants."""
    adds: bool = False
    """Can add another array to its result, as a GPU's library does with convolutions."""
    bodies: list[Program] = dataclasses.field(default_factory=list)
    starts: list[Value] = dataclasses.field(default_factory=list)
    """What a loop's carry starts as, per output."""
    merged: int = 0
    """Equal operations that this one stands for, too."""

    @property
    def label(self) -> str:
        """The primitive, and what it became."""
        name = self.context.primitive
        return self.op if self.op == name or not name else f"{name} ({self.op})"

    def output(self, shape: Iterable[int], dtype: Any) -> Value:
        self.outputs.append(Value(tuple(shape), dtype, self))
        return self.outputs[-1]

    @property
    def expensive(self) -> bool:
        if self.op not in _EXPENSIVE or self.outputs[0].dtype.kind not in "fcV":
            return False
        # A division by a constant becomes a multiplication.
        return not (self.op == "div" and self.inputs[1].literal)

    @property
    def constant(self) -> bool:
        """One number everywhere."""
        return self.op == "broadcast_in_dim" and all(v.literal for v in self.inputs)

    def takes_producers(self, platform: str) -> bool:
        """Whether what makes its operands can be fused into it."""
        if self.op == "concatenate" and platform == "cpu":
            # Copied block by block, unless the blocks are rows.
            minor = len(self.outputs[0].shape) - 1
            return self.fusible and len(self.inputs) <= 8 and self.params["dimension"] != minor
        return self.fusible and self.op != "reduce_precision"

    @property
    def overwrites(self) -> bool:
        """Whether the result may lie where an operand of equal shape was."""
        return self.in_place or (self.fusible and self.op not in ("transpose", "rev"))

    @property
    def reduces_windows(self) -> bool:
        return self.op.startswith("reduce_window")

    @property
    def windows_overlap(self) -> bool:
        sizes = self.params["window_dimensions"]
        return any(n > s for n, s in zip(sizes, self.params["window_strides"], strict=True))

    @property
    def effectively_unary(self) -> bool:
        """At most one operand is as large as the result: computing it twice reads no more."""
        rank = len(self.outputs[0].shape)
        large = [
            v
            for v in self.inputs
            if not (v.literal or (v.node and v.node.op in ("broadcast_in_dim", "iota")))
            and len(v.shape) >= rank
        ]
        return len(large) <= 1


@dataclasses.dataclass(frozen=True)
class Context:
    """Where an equation comes from: its kind of work, and its source, innermost call first."""

    kind: str = "stored"
    sources: tuple[Any, ...] = ()
    primitive: str = ""

    def enter(self, eqn: Any) -> Context:
        kind = _kind(eqn.source_info.name_stack) or self.kind
        return Context(kind, (eqn.source_info, *self.sources), eqn.primitive.name)


@functools.lru_cache(maxsize=4096)
def _kind(name_stack: Any) -> str | None:
    """What JAX notes of the transformation that made an equation."""
    text = str(name_stack)
    if "rematted_computation" in text:
        return "recomputed"
    return "gradients" if "transpose(" in text else None


def narrow(dtype: Any) -> bool:
    return str(dtype) in ("bfloat16", "float16")


def is_in_order(value: Value, order: Sequence[int]) -> bool:
    large = [d for d in order if value.shape[d] != 1]
    return large == sorted(large)
