"""The memory of any JAX function: estimated, compiled and observed, side by side.

The estimate is made from the traced function. The compiled figures are those that XLA gives. The
observed peak is what the device's allocator handed out while the function ran once. Each of them
alone can mislead. If the compiler undoes a `jax.checkpoint`, for instance, a function holds what it
should have computed again, and only the compiled figures show it. So the report also counts the
convolutions that were traced and those that were compiled, and names the largest values that the
compiled program holds.

Limits: see `hlo` for those of the list of what is held. `memory` compiles the function; a later
call compiles it again, unless it was jitted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._errors import check_callable
from . import hlo
from .compiled import Bytes
from .estimate import Estimate, donated, estimate_memory


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is held when memory is largest."""

    label: str
    """The instruction that made it."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    where: str
    """What the compiled program says of its origin; empty if unknown."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled program needs, and what it does."""

    bytes: Bytes | None
    host: int
    """Temporaries and outputs in host memory."""
    convolutions: int | None
    """Instructions, library calls included; those of a loop's body count once."""
    loops: int | None
    largest: tuple[Kept, ...]


@dataclasses.dataclass(frozen=True)
class Memory:
    """What `memory` found out. `print` it."""

    estimated: Estimate
    compiled: Compiled
    observed_peak: int | None
    """Bytes that the device's allocator had handed out at most, other arrays included."""
    missing: tuple[str, ...]
    """Numbers that are not there, and why."""

    def __str__(self) -> str:
        return _report(self)


def memory(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Memory:
    """How much memory `fun(*args, **kwargs)` needs, where it goes, and what is held.

    Args:
      fun: any JAX function, usually a whole training step. A jitted one is taken as it is, with its
        donated and static arguments.
      args: arrays, or `jax.ShapeDtypeStruct`s. Nothing runs, unless all are arrays and the device
        reports its memory: then `fun` runs once, and donated arguments are copied first.
      kwargs: likewise.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) @ w)
    >>> shapes = [jax.ShapeDtypeStruct((n, 256), "float32") for n in (256, 4096)]
    >>> report = memory(jax.grad(loss), *shapes)
    >>> report.estimated.bytes.arguments == report.compiled.bytes.arguments
    True
    """
    check_callable(fun)
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                "`memory` compiles the function, so it cannot be called inside a traced one (`jit`,"
                " `grad`): call it outside, with arrays or `jax.ShapeDtypeStruct`s"
            )
    jitted = fun if hasattr(fun, "trace") and hasattr(fun, "lower") else jax.jit(fun)
    traced = jitted.trace(*args, **kwargs)
    executable = traced.lower().compile()
    compiled, reasons = _read_compiled(executable)
    peak, reason = _observe(executable, args, kwargs, any(donated(traced)))
    reasons += [reason] if reason else []
    return Memory(estimate_memory(traced), compiled, peak, tuple(reasons))


def _read_compiled(executable: Any) -> tuple[Compiled, list[str]]:
    """Never raises: what cannot be read is None, with the reason."""
    missing, found, host = [], None, 0
    try:
        found, analysis = Bytes.of(executable), executable.memory_analysis()
        names = ("host_temp_size_in_bytes", "host_output_size_in_bytes")
        host = sum(getattr(analysis, name, 0) for name in names)
    except Exception as error:
        missing.append(f"compiled bytes: this backend does not give them ({_said(error)})")
    try:
        program = hlo.read(executable.as_text())
    except Exception as error:
        program = None
        missing.append(f"the compiled program could not be read ({_said(error)})")
    else:
        if program is None:
            missing.append("the compiled program has no entry that could be read")
    if program is None:
        return Compiled(found, host, None, None, ()), missing
    if program.unread:
        missing.append(f"{program.unread} instructions of the compiled program could not be read")
    counts = hlo.counts(program)
    if counts.chains:
        missing.append(
            f"{counts.chains} library calls of the compiled program run several convolutions or "
            "contractions each: what they hold in between is in no compiled figure"
        )
    largest: tuple[Kept, ...] = ()
    try:
        held = sorted(hlo.held(program), key=lambda b: -b.leaf.bytes)
        largest = tuple(_kept(b) for b in held[:8] if b.leaf.bytes)
    except Exception as error:
        missing.append(f"what the compiled program holds could not be read ({_said(error)})")
    return Compiled(found, host, counts.convolutions, counts.loops, largest), missing


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _kept(buffer: hlo.Buffer) -> Kept:
    instruction, leaf = buffer.instruction, buffer.leaf
    return Kept(instruction.name, leaf.shape, leaf.dtype, leaf.bytes, instruction.op_name)


def _observe(executable: Any, args: Any, kwargs: Any, donates: bool) -> tuple[int | None, str]:
    """The allocator's peak after one run, or why there is none."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        return None, f"observed peak: not provided by this backend ({device.platform})"
    leaves = jax.tree.leaves((args, kwargs))
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        return None, "observed peak: the arguments are not all arrays, so nothing was run"
    if donates:
        args, kwargs = jax.tree.map(lambda x: x.copy(), (args, kwargs))
    before = stats["peak_bytes_in_use"]
    try:
        jax.block_until_ready(executable(*args, **kwargs))
    except Exception as error:
        return None, f"observed peak: the function could not be run ({_said(error)})"
    after = device.memory_stats()["peak_bytes_in_use"]
    if after <= before:
        return None, (
            "observed peak: this process had reached a higher one before, and the allocator's peak "
            "never goes down; ask in a new process"
        )
    return after, ""


def _report(found: Memory) -> str:
    estimated, compiled = found.estimated, found.compiled
    there = compiled.bytes
    rows = [("", "estimated", "compiled")]
    for name in ("arguments", "outputs", "aliases", "temporaries"):
        ours = getattr(estimated.bytes, name)
        if name != "aliases" or ours or (there and there.aliases):
            sign = -1 if name == "aliases" else 1
            theirs = sign * getattr(there, name) if there else None
            rows.append((name, _mega(sign * ours), _mega(theirs)))
    rows.append(("total", _mega(estimated.bytes.total), _mega(there.total if there else None)))
    if compiled.host:
        rows.append(("in host memory", "", _mega(compiled.host)))
    if found.observed_peak is not None:
        rows.append(("observed peak", "", _mega(found.observed_peak)))
    rows.append(("convolutions", str(estimated.convolutions), _number(compiled.convolutions)))
    rows.append(("loops", str(estimated.loops), _number(compiled.loops)))
    lines = [f"{name:16}{ours:>14}{theirs:>14}" for name, ours, theirs in rows]
    removed = estimated.convolutions - (compiled.convolutions or 0)
    if compiled.convolutions is not None and removed > 0:
        lines.append(
            f"{removed} convolutions were traced but not compiled as such: the compiler merged "
            "equal ones (what was to be computed again is then held instead), or computes them in "
            "another way."
        )
    if compiled.largest:
        lines.append("largest values held at the peak of the compiled program:")
    size = {_described(kept): kept.bytes for kept in compiled.largest}
    for text, times in collections.Counter(map(_described, compiled.largest)).items():
        several = f"{times} x " if times > 1 else ""
        lines.append(f"{several + _mega(size[text]):>18}  {text}")
    lines.append(
        "estimated: from the trace, in its order; the compiler fuses and reorders, and its figures "
        "hold. `jaxtile.plan` estimates by a model of the schedule instead, so it says another "
        "number; what it calls compiled is the same as here, for the same step."
    )
    lines += [f"not there: {sentence}" for sentence in found.missing]
    return "\n".join(lines)


def _mega(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)


def _described(kept: Kept) -> str:
    shape = ", ".join(map(str, kept.shape))
    return f"{kept.dtype}[{shape}] {kept.label}" + (f"  {kept.where}" if kept.where else "")
