"""Operations that XLA makes one of, before it fuses them: arithmetic done by a library call.

On every platform, what is scattered into zeros and added. On a GPU, what a convolution adds, what a
max pool finds beside the maximum, and the dimension order of what is made of kernels' gradients.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence

from ._instructions import MOVES, Node, Value, is_in_order


def rewritten(nodes: list[Node], outputs: Sequence[Value], platform: str) -> list[Node]:
    """The operations of a program that are left, in order."""
    nodes = _add_into_scatters(nodes, outputs)
    if platform != "cpu":
        nodes = _copy_shared_zeros(nodes)
        nodes = _add_in_convolutions(nodes, outputs)
        nodes = _choose_with_pools(nodes, outputs)
        _keep_library_order(nodes)
    return nodes


def _add_into_scatters(nodes: list[Node], outputs: Sequence[Value]) -> list[Node]:
    """A sum with what is scattered into zeros is scattered into the other summand instead."""
    reads = collections.Counter([*(v for n in nodes for v in n.inputs), *outputs])
    gone = set()
    for i, node in enumerate(nodes):
        if node.op not in ("add", "add_any"):
            continue
        for value, other in (node.inputs, node.inputs[::-1]):
            scatter = value.node
            if scatter and scatter.op == "scatter into zeros" and reads[value] == 1:
                gone |= {scatter.inputs[0].node} if reads[scatter.inputs[0]] == 1 else set()
                moved = dataclasses.replace(scatter, op="scatter", outputs=node.outputs)
                moved.inputs = [other, *scatter.inputs[1:]]
                node.outputs[0].node = moved
                nodes[i] = moved
                gone.add(scatter)
                break
    return [n for n in nodes if n not in gone]


def _add_in_convolutions(nodes: list[Node], outputs: Sequence[Value]) -> list[Node]:
    """A convolution, on a GPU, adds its bias and one more array itself."""
    reads = collections.Counter([*(v for n in nodes for v in n.inputs), *outputs])
    gone = set()

    def makers(value: Value) -> list[Node]:
        """What makes it, and what makes that before a bias is added."""
        if value.node is None or reads[value] > 1:
            return []
        if value.node.op != "add" or not any(_is_spread(v, value) for v in value.node.inputs):
            return [value.node]
        return [value.node, *(v.node for v in value.node.inputs if reads[v] == 1)]

    for i, node in enumerate(nodes):
        if node.op not in ("add", "add_any"):
            continue
        for value, other in (node.inputs, node.inputs[::-1]):
            found = [n for n in makers(value) if n and n.adds]
            if found and not _is_spread(other, node.outputs[0]):
                gone.update(makers(value))
                inputs = [*found[0].inputs, other]
                new = dataclasses.replace(found[0], inputs=inputs, outputs=node.outputs)
                new.adds = False
                node.outputs[0].node = nodes[i] = new
                break
    return [n for n in nodes if n not in gone]


def _is_spread(value: Value, result: Value) -> bool:
    """Whether it has fewer numbers than what is made of it, as a bias has."""
    made = value.node is not None and value.node.op == "broadcast_in_dim"
    return value.literal or made or math.prod(value.shape) < math.prod(result.shape)


def _copy_shared_zeros(nodes: list[Node]) -> list[Node]:
    """A scatter writes over its zeros: over a copy of them, if something else reads them."""
    readers = collections.Counter(v for n in nodes for v in n.inputs)
    found = []
    for node in nodes:
        if node.op == "scatter into zeros" and readers[zeros := node.inputs[0]] > 1:
            copy = Node("copy", [zeros], node.context, {})
            node.inputs[0] = copy.output(zeros.shape, zeros.dtype)
            found.append(copy)
        found.append(node)
    return found


def _choose_with_pools(nodes: list[Node], outputs: Sequence[Value]) -> list[Node]:
    """A pool, and which position of each window it chose, are found in one kernel.

    The choice is made of the windows' positions, each a slice of the pool's operand. The pool's
    gradient reads it, so this is also when: in the forward pass, after which the operand need
    not be held.
    """
    pools = [n for n in nodes if n.op in ("reduce_window_max", "reduce_window_min")]
    readers: dict[Value, list[Node]] = collections.defaultdict(list)
    for node in nodes if pools else ():
        for value in dict.fromkeys(node.inputs):
            readers[value].append(node)
    kept, gone = set(outputs), set()
    for pool in pools:
        found = _from_windows(nodes, pool, readers, gone)

        def leaves(node: Node) -> bool:
            value = node.outputs[0]
            return value in kept or not all(r in found for r in readers[value])

        # What is made of one choice is part of its readers.
        while single := [n for n in found if leaves(n) and _operands_in(n, found) < 2]:
            for node in single:
                del found[node]
        chosen = [n for n in found if leaves(n)]
        if chosen:
            pool.fusible = False
            for node in chosen:
                pool.outputs += node.outputs
                node.outputs[0].node = pool
            gone.update(found)
    return [n for n in nodes if n not in gone]


def _from_windows(nodes, pool: Node, readers, gone: Collection[Node]) -> dict[Node, None]:
    """Operations whose operands are positions of the pool's windows, or made of such only."""
    operand, shape = pool.inputs[0], pool.outputs[0].shape
    sources = [operand, *(n.outputs[0] for n in readers[operand] if n.op == "pad")]
    slices = [n for source in sources for n in readers[source] if n.op == "slice"]
    found = dict.fromkeys(n for n in slices if n.outputs[0].shape == shape and n not in gone)
    for node in nodes if found else ():
        inputs = [v for v in node.inputs if not v.literal and not (v.node and v.node.constant)]
        made_of = node.fusible and inputs and all(v.node in found for v in inputs)
        if made_of and node.outputs[0].shape == shape:
            found[node] = None
    return found


def _operands_in(node: Node, nodes: Collection[Node]) -> int:
    return sum(v.node in nodes for v in dict.fromkeys(node.inputs))


def _keep_library_order(nodes: list[Node]) -> None:
    """What is made of a kernel's gradient has its order, not the one that the kernel came in.

    So an optimiser reads the copy of the kernel that the forward pass made.
    """
    copies: dict[Value, Value] = {}
    for node in nodes:
        result = node.outputs[0]
        if node.for_layout:
            copies.setdefault(node.inputs[0], result)
        elif node.op == "conv_general_dilated":
            result.in_library_order = not is_in_order(result, _library_order(node))
        elif node.fusible and node.op not in MOVES:
            like = (v for v in node.inputs if v.shape == result.shape)
            if any(v.in_library_order for v in like):
                result.in_library_order = True
                node.inputs = [copies.get(v, v) for v in node.inputs]


def _library_order(convolution: Node) -> tuple[int, ...]:
    """Batch first and features last, but for gradients of kernels: outputs first, inputs last.

    With one cotangent per image, such a gradient is a convolution like others.
    """
    numbers, cotangent = convolution.params["dimension_numbers"], convolution.inputs[1]
    batch, features, *spatial = numbers.out_spec
    of_kernel = numbers.lhs_spec[0] != 0
    if of_kernel and any(cotangent.shape[d] != 1 for d in numbers.rhs_spec[2:]):
        return features, *spatial, batch
    return batch, *spatial, features
