"""How many bytes are live when a list of operations is replayed, as other frameworks run it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from experiments.reference.frameworks import Rule, chainer
from jaxtile._graph.operations import Operation, Operations


class Peak(NamedTuple):
    bytes: int
    at: str | None
    """The first step that reaches the peak; None if it is what was there before the first."""


def replay(
    steps: Sequence[tuple[str, Collection[str], Collection[str]]],
    sizes: Mapping[str, int],
    *,
    resident: Collection[str] = (),
    keep: Collection[str] = (),
) -> Peak:
    """The largest number of bytes live at once.

    While a step runs, what it reads and what it writes are both live. A tensor is allocated by the
    first step that writes it (a later writer adds to the same buffer) and freed after the last step
    that reads or writes it, unless it is kept. What is read but never written takes nothing, unless
    it is resident.

    Args:
      steps: (name, reads, writes), in order of execution.
      sizes: bytes of each tensor.
      resident: tensors that are there from the start to the end.
      keep: tensors that, once written, stay to the end.

    >>> steps = [("conv", ["x"], ["y"]), ("relu", ["y"], ["z"]), ("pool", ["z"], ["p"])]
    >>> replay(steps, {"x": 4, "y": 4, "z": 4, "p": 1}, resident=["x"])
    Peak(bytes=12, at='relu')
    """
    unknown = {t for _, _, writes in steps for t in writes}.union(resident) - sizes.keys()
    if unknown:
        raise ValueError(f"`sizes` has no bytes for {', '.join(sorted(unknown)[:5])}")
    last = {t: i for i, (_, reads, writes) in enumerate(steps) for t in (*reads, *writes)}
    live = set(resident)
    stay = live | set(keep)
    now = sum(sizes[t] for t in live)
    peak = Peak(now, None)
    for i, (name, reads, writes) in enumerate(steps):
        new = set(writes) - live
        live |= new
        now += sum(sizes[t] for t in new)
        if now > peak.bytes:
            peak = Peak(now, name)
        dead = {t for t in (*reads, *writes) if last[t] == i and t in live and t not in stay}
        live -= dead
        now -= sum(sizes[t] for t in dead)
    return peak


def tensorflow(op: Operation) -> list[str]:
    """As TensorFlow's layout pass runs it on a GPU: images are NCHW, but local response norm and
    the gradients of weights work on NHWC copies (`@NHWC`), which are tensors of their own.

    A ReLU keeps its output; a max pool its input and output; a norm both, as NHWC; a convolution
    its input, as NHWC; adding a bias nothing; the l2 loss its input.
    """
    inputs, output = [t.name for t in op.inputs], [op.output.name]
    unary = len(inputs) == 1
    return {
        "convolution": [f"{name}@NHWC" for name in inputs],
        "elementwise": output if unary else [],
        "window": [f"{name}@NHWC" for name in inputs + output],
        "max_pool": inputs + output,
        "reduction": inputs,
    }.get(op.kind, [])


def untied(op: Operation) -> list[str]:
    """The framework of the locally connected CNN: layers keep their inputs, a nonlinearity its
    input and its output, softmax the probabilities.
    """
    inputs, output = [t.name for t in op.inputs], [op.output.name]
    return {
        "convolution": inputs,
        "contraction": inputs,
        "elementwise": inputs + output if len(inputs) == 1 else inputs,
        "reduction": output if op.output.shape else [],
    }.get(op.kind, [])


def training_steps(
    graph: Operations, rule: Rule = chainer, *, constant: Collection[str] = ()
) -> list[tuple[str, list[str], list[str]]]:
    """Forward and backward as steps for `replay`; `grad:x` is the gradient of `x`.

    The gradient of an operation reads the gradient of its result and what `rule` keeps, and writes
    gradients of its inputs, `constant` ones apart. Gradients run from the deepest operation up, as
    in Chainer: an operation's depth is one more than that of the deepest one it reads from.
    """
    depth: dict[str, int] = {}
    steps = []
    for op in graph.operations:
        reads = [t.name for t in op.inputs]
        depth[op.name] = 1 + max((depth.get(name, -1) for name in reads), default=-1)
        steps.append((op.name, reads, [op.name]))
    latest_first = sorted(reversed(graph.operations), key=lambda op: -depth[op.name])
    for op in latest_first:
        reads = [f"grad:{op.name}", *rule(op)]
        writes = [f"grad:{t.name}" for t in op.inputs if t.name not in constant]
        steps.append((f"grad:{op.name}", reads, writes))
    return steps
