"""In which order XLA runs the kernels of a program.

On the CPU breadth first: whatever is ready, in the order in which it became ready. So what the
backward pass can prepare early (weights in another dimension order, say) is prepared early, and is
held. Elsewhere XLA makes three orders and takes the one that needs least: always the kernel that
adds the fewest bytes (its list scheduler), depth first to what is shared most (its DFS scheduler),
and plainly depth first (its post order).

Known inefficiencies: which of two equal kernels comes first is up to names that a trace does not
have; where two orders need nearly the same, the other one may be taken.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from ._instructions import Node, Value
from ._kernels import Kernel
from ._program import Program

_NEARLY = 0.97  # where two orders need as much as that, XLA was seen to take the first


def order(program: Program, kernels: list[Kernel]) -> list[Kernel]:
    """The order in which they run."""
    maker = {v: k for k in kernels for v in k.outputs}
    if program.platform == "cpu":
        return _breadth_first(program, kernels, maker)
    orders = [f(program, kernels, maker) for f in (_least_first, _shared_first, _depth_first)]
    peaks = [_rough_peak(program, ordered) for ordered in orders]
    return orders[0] if peaks[0] * _NEARLY < min(peaks) else orders[peaks.index(min(peaks))]


def _breadth_first(program: Program, kernels, maker) -> list[Kernel]:
    """Of several readers of one value, library calls come first and copies for layout last.

    In this order the compiler makes them.
    """
    users: dict[Any, list[Kernel]] = collections.defaultdict(list)
    waiting = {}
    for kernel in kernels:
        sources = {maker.get(v, v) for v in kernel.reads}
        waiting[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
    for readers in users.values():
        readers.sort(key=lambda k: _rank(k.first))
    queue = collections.deque([*program.arguments])
    queue.extend(s for s in users if isinstance(s, Value) and s not in set(program.arguments))
    queue.extend(k for k in kernels if not waiting[k])
    ordered = []
    while queue:
        done = queue.popleft()
        ordered += [done] if isinstance(done, Kernel) else []
        for kernel in users.get(done, ()):
            waiting[kernel] -= 1
            if not waiting[kernel]:
                queue.append(kernel)
    return ordered


def _depth_first(program: Program, kernels, maker, rank=None) -> list[Kernel]:
    """From the outputs, in turn, each after what it reads; what has the highest rank first.

    What goes to host memory goes at once.
    """
    leaving: dict[Kernel, list[Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        if kernel.outputs[0].in_host_memory and kernel.reads[0] in maker:
            leaving[maker[kernel.reads[0]]].append(kernel)

    def made_by(values: Iterable[Value]) -> list[Kernel]:
        found = list(dict.fromkeys(maker[v] for v in values if v in maker))
        if rank is not None:
            found.sort(key=rank.__getitem__, reverse=True)
        return found[::-1]

    pending = [(k, False) for k in made_by(program.outputs)]
    seen: set[Kernel] = set()
    ordered: dict[Kernel, None] = {}
    while pending:
        kernel, ready = pending.pop()
        if ready:
            ordered.update(dict.fromkeys([kernel, *leaving[kernel]]))
        elif kernel not in seen:
            seen.add(kernel)
            pending.append((kernel, True))
            pending += [(k, False) for k in made_by(kernel.reads)]
    return list(ordered)


def _shared_first(program: Program, kernels, maker) -> list[Kernel]:
    """Depth first, and first to what rests on more shared values, then on more bytes.

    As in XLA, what is reached in two ways counts twice, up to the number of kernels and the bytes
    of all that came before: the last gradients often have the highest rank.
    """
    visited = _depth_first(program, kernels, maker)
    users = collections.Counter(maker[v] for k in visited for v in set(k.reads) if v in maker)
    users.update(maker[v] for v in set(program.outputs) if v in maker)
    rank: dict[Kernel, tuple[int, int]] = {}
    so_far = 0
    for kernel in visited:
        size = sum(v.bytes for v in kernel.outputs if v.has_buffer)
        so_far += size
        below = [rank[k] for k in {maker[v] for v in kernel.reads if v in maker}]
        shared = users[kernel] - 1 + sum(r[0] for r in below)
        rank[kernel] = min(shared, len(visited)), min(size + sum(r[1] for r in below), so_far)
    return _depth_first(program, kernels, maker, rank)


def _least_first(program: Program, kernels, maker) -> list[Kernel]:
    """Of what is ready, always what adds the fewest bytes, less those that it frees."""
    kept = {v.array for v in program.outputs}
    reads = {k: list(dict.fromkeys(v.array for v in k.reads if v.array in maker)) for k in kernels}
    left: dict[Value, list[Kernel]] = collections.defaultdict(list)
    waiting = {}
    users: dict[Kernel, list[Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        sources = {maker[v] for v in kernel.reads if v in maker}
        waiting[kernel] = len(sources)
        for source in sources:
            users[source].append(kernel)
        for value in reads[kernel]:
            left[value].append(kernel)

    def added(kernel: Kernel) -> int:
        made = (v.bytes for v in kernel.outputs if v.has_buffer and not v.in_host_memory)
        freed = (v.bytes for v in reads[kernel] if len(left[v]) == 1 and v not in kept)
        return sum(made) - sum(freed)

    number = {k: i for i, k in enumerate(kernels)}

    def entry(kernel: Kernel) -> tuple[int, bool, int]:
        # What makes several arrays comes later than what needs as much: it also makes a list of
        # them. A library call returns its scratch space, too.
        several = len(kernel.outputs) > 1 or kernel.first.op == "conv_general_dilated"
        return added(kernel), several, number[kernel]

    queue = [entry(k) for k in kernels if not waiting[k]]
    heapq.heapify(queue)
    ordered: dict[Kernel, None] = {}
    while queue:
        kernel = kernels[heapq.heappop(queue)[2]]
        if kernel in ordered:
            continue
        ordered[kernel] = None
        ready = []
        for value in reads[kernel]:
            left[value].remove(kernel)
            ready += left[value] if len(left[value]) == 1 else []
        for user in users[kernel]:
            waiting[user] -= 1
        for other in [*ready, *users[kernel]]:
            if not waiting[other]:
                heapq.heappush(queue, entry(other))
    return list(ordered)


def _rough_peak(program: Program, kernels: Sequence[Kernel]) -> int:
    """Bytes of all buffers that are live at once, loops' bodies apart."""
    last = {v.array: k for k in kernels for v in k.reads}
    kept = {v.array for v in program.outputs}
    now = peak = 0
    for kernel in kernels:
        arrays = dict.fromkeys(v.array for v in kernel.reads)
        dead = [v for v in arrays if last[v] is kernel and v not in kept and v.node is not None]
        places = kernel.overwritten(dead)
        made = (v for v in kernel.outputs if v.has_buffer and v not in places)
        now += sum(v.bytes for v in made if not v.in_host_memory)
        peak = max(peak, now)
        free = (v for v in dead if v not in places.values())
        now -= sum(v.bytes for v in free if not v.in_host_memory)
    return peak


def _rank(node: Node) -> int:
    if node.op in ("conv_general_dilated", "dot_general"):
        return 0
    return 1 if node.op.startswith("reduce_") else 3 if node.for_layout else 2
