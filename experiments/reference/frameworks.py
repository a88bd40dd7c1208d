"""What other frameworks keep of a forward pass for the backward pass, by a rule per operation.

A rule takes one operation of `jaxtile.operations` and gives the names of the tensors that its
gradient reads. What a framework retains is the union over all operations, arguments apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxtile._graph.operations import Operation, Operations

Rule = Callable[[Operation], Collection[str]]


def chainer(op: Operation) -> list[str]:
    """A convolution keeps its input; a ReLU its output; a max pool both; a loss its inputs.

    Dropout keeps a mask of its own, which is not a tensor of the graph; copies keep nothing.
    """
    inputs, output = [t.name for t in op.inputs], [op.output.name]
    return {
        "convolution": inputs,
        "contraction": inputs,
        "elementwise": output,
        "max_pool": inputs + output,
        "reduction": inputs,
    }.get(op.kind, [])


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


def retained(graph: Operations, rule: Rule = chainer) -> dict[str, int]:
    """The results that some gradient reads, in order, with their bytes."""
    results = {o.name: o.output.bytes for o in graph.operations}
    kept = dict.fromkeys(name for o in graph.operations for name in rule(o))
    return {name: results[name.split("@")[0]] for name in kept if name.split("@")[0] in results}


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
