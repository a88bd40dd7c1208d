"""What other frameworks keep of a forward pass for the backward pass, by a rule per operation.

A rule takes one operation of `jaxtile.operations` and gives the names of the tensors that its
gradient reads. What a framework retains is the union over all operations, arguments apart. The
rule of Chainer is also that of the policy `retained`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxtile._graph.operations import Operation, Operations
from policies._catalogue import chainer

Rule = Callable[[Operation], Collection[str]]


def retained(graph: Operations, rule: Rule = chainer) -> dict[str, int]:
    """The results that some gradient reads, in order, with their bytes."""
    results = {o.name: o.output.bytes for o in graph.operations}
    kept = dict.fromkeys(name for o in graph.operations for name in rule(o))
    return {name: results[name.split("@")[0]] for name in kept if name.split("@")[0] in results}
