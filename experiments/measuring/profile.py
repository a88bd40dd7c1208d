"""Where the time of a step goes: kernels by time and by region, from JAX's profiler.

    with traced(folder) as steps:
        for _ in range(3):
            with steps():
                jax.block_until_ready(compiled(*arguments))
    print(report(folder, compiled, predicted(outline, policy)))

The profiler writes a file of events, each with the instruction of the program that it runs. The
program's text has, for each instruction, the path by which JAX came to it: under `transpose` it is
the backward pass, and below `rematted_computation` it is computed again. What only copies is
`moved`, wherever it is. What is under no derivative is the `update`: the optimiser, and checks.

Limits: a fusion counts as what its last operation is. On a GPU a library's kernel in a graph of
kernels is known by nothing; it counts as the matrix product that the program runs next. On a CPU an
operation on several threads is seen on the one that began it, so some of what looks like waiting is
work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

import policies
from jaxtile._memory import hlo
from jaxtile._plan.assignment import Assignments
from jaxtile._plan.kernels import durations
from jaxtile._run.recompute import RECOMPUTED
from jaxtile.policy import Outline

_STEP = "jaxtile_step"
REGIONS = (
    *("forward", "recomputed", "backward", "moved", "update", "other programs"),
    *("waiting", "starting"),
)
_INSIDE = ("while", "conditional", "call", "async-start", "async-done")  # they run what is in them
_MOVES = frozenset(
    """
    copy copy-start copy-done slice dynamic-slice dynamic-update-slice pad concatenate transpose
    reshape bitcast broadcast reverse gather iota constant parameter tuple get-tuple-element convert
    """.split()
)
_NO_WORK = frozenset("parameter constant bitcast tuple get-tuple-element".split())
_ROWS = 12  # kernels in the table


@contextlib.contextmanager
def traced(folder: pathlib.Path) -> Iterator[Callable[[], Any]]:
    """A context that is traced into a folder; gives what to wrap each step in."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the events
    with jax.profiler.trace(folder, profiler_options=options):
        yield lambda: jax.profiler.TraceAnnotation(_STEP)


@dataclasses.dataclass(frozen=True)
class Event:
    kernel: str
    region: str
    computes: str
    start: float
    end: float


def report(folder: pathlib.Path, compiled: Any, predicted: dict[str, float]) -> str:
    """The newest trace of a folder, beside what was predicted for each region, in seconds."""
    steps, events = read(folder, compiled.as_text())
    if not steps or not events:
        return f"the profile in {folder} has no steps, or no kernels of them"
    return "\n".join([*_by_region(steps, events, predicted), "", *_by_kernel(len(steps), events)])


def read(folder: pathlib.Path, text: str) -> tuple[list[tuple[float, float]], list[Event]]:
    """When the steps of the newest trace began and ended, and what ran in them; in seconds."""
    file = max(folder.glob("**/*.trace.json.gz"), key=lambda p: p.stat().st_mtime)
    with gzip.open(file, "rt") as opened:
        found = json.load(opened)["traceEvents"]
    lines = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in found
        if e.get("ph") == "M" and e["name"] in ("process_name", "thread_name")
    }
    module = hlo.read(text)
    name = text.split(maxsplit=2)[1].rstrip(",")
    computations = {} if module is None else module.computations
    known = {it.name: it for c in computations.values() for it in c}
    products = None if module is None else Products(module)
    # What runs beside the others has a kernel, and no instruction, to be known by.
    kernels = {_kernel(name): it for it in known.values() for name in (it.name, *it.called[:1])}
    steps, events = [], []
    for e in sorted((e for e in found if e.get("ph") == "X"), key=lambda e: e["ts"]):
        start, end = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
        on_device = "/device:" in lines.get((e["pid"], None), "")
        stream = lines.get((e["pid"], e["tid"]), "").startswith("Stream")
        op = e.get("args", {}).get("hlo_op", "")
        if e["name"] == _STEP:
            steps.append((start, end))
        elif (on_device and stream) or (op and not on_device):
            its_module = e.get("args", {}).get("hlo_module")
            own = its_module in (None, name)
            it = known.get(op, kernels.get(e["name"])) if own else None
            if products and (it or (its_module == name and not _moves(e["name"]))):
                it = products.after(it)
            if it is not None and it.opcode in _INSIDE:
                continue
            events.append(_event(e["name"], own, it, computations, start, end))
    inside = [e for e in events if any(a <= e.start < b for a, b in steps)]
    return sorted(steps), inside


def _kernel(name: str) -> str:
    """The name that XLA gives to the kernel of an instruction, or of what is wrapped for it.

    >>> _kernel("wrapped_dynamic-slice_computation.1")
    'wrapped_dynamic_slice_1'
    """
    return name.replace("_computation", "").replace(".", "_").replace("-", "_")


class Products:
    """Matrix products of a program, in the order in which they run."""

    def __init__(self, module: hlo.HloModule) -> None:
        self._next: dict[str, hlo.HloInstruction | None] = {}
        for instructions in module.computations.values():
            found = next(filter(_is_product, instructions), None)  # in the next iteration, or step
            for it in reversed(instructions):
                self._next[it.name] = found
                found = it if _is_product(it) else found
        self._last = module.computations[module.entry][-1]

    def after(self, it: hlo.HloInstruction | None) -> hlo.HloInstruction | None:
        """This instruction, which runs now; None: the product that comes after the last one."""
        it = it or self._next[self._last.name]
        self._last = it or self._last
        return it


def _is_product(it: hlo.HloInstruction) -> bool:
    return it.opcode == "custom-call" and "cublas" in it.attributes


def _moves(kernel: str) -> bool:
    return "memcpy" in kernel.lower() or "memset" in kernel.lower()


def _event(
    kernel: str, own: bool, it: hlo.HloInstruction | None, computations: Any, *when: float
) -> Event:
    if it is None:
        return Event(kernel, "moved" if _moves(kernel) else "other programs", "", *when)
    opcodes = {it.opcode}
    if it.opcode in ("fusion", "fusion-start"):
        inside = [i for c in it.called for i in computations.get(c, ())]
        # Numbers are where to copy from or to.
        opcodes = {i.opcode for i in inside if any(math.prod(x.shape) > 1 for x in i.leaves)}
    moved = opcodes <= _MOVES and not opcodes <= _NO_WORK
    shapes = " ".join(f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "") for leaf in it.leaves[:1])
    computes = f"{it.op_name.rpartition('/')[2] or it.opcode} {shapes}"
    return Event(kernel, "moved" if moved else region(it.op_name), computes, *when)


def region(path: str) -> str:
    """Of an operation, by how JAX came to it.

    >>> region("jit(step)/jvp()/conv_general_dilated")
    'forward'
    >>> region("jit(step)/transpose(jvp())/while/body/rematted_computation/jvp()/tanh")
    'recomputed'
    >>> region("jit(step)/transpose(jvp())/while/body/transpose(jvp())/mul")
    'backward'
    >>> region("jit(step)/transpose(jvp(rematted_computation))/transpose(jvp())/mul")
    'backward'
    >>> region("jit(step)/add")
    'update'
    """
    _, again, after = path.rpartition(RECOMPUTED)
    if again and "transpose(" not in after:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "update"


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them goes on.

    >>> busy([(0, 2), (1, 3), (5, 6)])
    4
    """
    total, until = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def _by_region(
    steps: Sequence[tuple[float, float]], events: Sequence[Event], predicted: dict[str, float]
) -> list[str]:
    number, wall = len(steps), sum(end - start for start, end in steps)
    clipped = [(e.start, min(e.end, b)) for e in events for a, b in steps if a <= e.start < b]
    seconds = {name: sum(e.end - e.start for e in events if e.region == name) for name in REGIONS}
    seconds["starting"] = wall - sum(_lasting(clipped, *step) for step in steps)
    seconds["waiting"] = wall - seconds["starting"] - busy(clipped)
    lines = [f"{wall / number:.4g} s a step, of {number} that were traced"]
    rows = [("region", "ms a step", "share", "predicted, ms")]
    for name, taken in seconds.items():
        expected = f"{predicted[name] * 1e3:.4g}" if name in predicted else "-"
        if taken or name in predicted:
            rows.append((name, f"{taken / number * 1e3:.4g}", f"{taken / wall:.1%}", expected))
    return [*lines, *_aligned(rows)]


def _lasting(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds from the beginning of the first of those in a step to the end of the last."""
    inside = [(a, b) for a, b in spans if start <= a < end]
    return max(b for _, b in inside) - inside[0][0] if inside else 0.0


def _by_kernel(number: int, events: Sequence[Event]) -> list[str]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for e in events:
        groups.setdefault((e.kernel, e.region, e.computes), []).append(e.end - e.start)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [("kernel", "region", "calls a step", "ms a step", "computes")]
    for (kernel, name, computes), times in ordered[:_ROWS]:
        calls, taken = f"{len(times) / number:.4g}", f"{sum(times) / number * 1e3:.4g}"
        rows.append((kernel[:60], name, calls, taken, computes))
    rest = sum(sum(times) for _, times in ordered[_ROWS:])
    more = len(ordered) - _ROWS
    if more > 0:
        rows.append((f"{more} more", "", "", f"{rest / number * 1e3:.4g}", ""))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def predicted(outline: Outline, policy: Any) -> dict[str, float]:
    """Seconds by region, as the planner has them; `recomputed` is all that a schedule takes beyond
    plain JAX, and so also what tiles are slower by. No policy: plain JAX.
    """
    costs = policies.costs()
    # As in tiles: an array that is too long for fast kernels is long only if it is whole.
    found = durations(outline, dataclasses.replace(costs, long=policies.Costs.long)).values()
    forward, backward = (sum(d[i].whole for d in found) for i in (0, 1))
    seconds = forward + backward
    if isinstance(policy, policies.Plan):
        seconds = policy.seconds
    elif policy is not None:
        assignments = Assignments(outline, costs)
        seconds = assignments.estimate(assignments.of(policy.choose(outline))).seconds
    again = max(0.0, seconds - forward - backward)
    return {"forward": forward, "recomputed": again, "backward": backward}
