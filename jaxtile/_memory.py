"""The memory of any JAX function, said three times: predicted, compiled, observed.

The prediction (`predict_memory`) traces and models what XLA does; it takes milliseconds, so a
planner can ask it about many schedules. The compiled figures are XLA's own. The observed peak is
what the allocator saw. They are put side by side because each alone misleads: `jax.checkpoint` may
be undone by the compiler, and then a function holds what it was told to forget. So the report also
counts the convolutions that were traced and those that were compiled, and names the largest values
that are held.

Known inefficiencies: see `_buffers` for the prediction and `_compiled` for the list of what is
held. `memory` compiles the function once more than the call that follows it, unless it was jitted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from . import _compiled
from ._buffers import Buffer, at_peak, buffers, gaps
from ._errors import user_line
from ._instructions import Value
from ._program import OPAQUE, Program

_KINDS = ("stored", "recomputed", "gradients", "tile", "gaps")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on the device, by kind."""

    arguments: int
    outputs: int
    aliases: int
    """Outputs that lie in donated arguments, and so are counted twice above."""
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.aliases

    @classmethod
    def of(cls, executable: Any) -> Bytes:
        """What XLA says of a compiled program."""
        analysis = executable.memory_analysis()
        return cls(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is held when memory is largest."""

    label: str
    """Its `checkpoint_name`; else the primitive, or the instruction, that made it."""
    kind: str
    """`stored`, `recomputed`, `gradients` or `tile`; `temporary` in a compiled program."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    where: str
    """The user's line, or what the compiled program says of the origin; empty if unknown."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a traced function should need. Four kinds of temporaries, and gaps, add up to them."""

    bytes: Bytes
    stored: int
    """Made by the forward pass and held: activations."""
    recomputed: int
    """Made again in the backward pass, outside loops, as `jax.checkpoint` asks."""
    gradients: int
    """Made by the backward pass, outside loops; also operands that it prepares early."""
    tile: int
    """Inside loops: what one iteration holds."""
    gaps: int
    """Between temporaries, as XLA packs them."""
    host: int
    """In host memory, beside all this."""
    convolutions: int
    """Equations; those of a loop's body count once."""
    loops: int
    largest: tuple[Kept, ...]
    unseen: tuple[str, ...] = ()
    """Primitives whose inner memory is not known."""


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

    predicted: Prediction
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
    >>> report.predicted.bytes.arguments == report.compiled.bytes.arguments
    True
    >>> abs(report.predicted.bytes.total / report.compiled.bytes.total - 1) < 0.1
    True
    """
    if not callable(fun):
        raise TypeError(f"`fun` (={fun!r}) must be callable")
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                "`memory` compiles the function, so it cannot be called inside a traced one (`jit`,"
                " `grad`): call it outside, with arrays or `jax.ShapeDtypeStruct`s"
            )
    jitted = fun if hasattr(fun, "trace") and hasattr(fun, "lower") else jax.jit(fun)
    traced = jitted.trace(*args, **kwargs)
    lowered = traced.lower()
    donated = [info.donated for info in jax.tree.leaves(lowered.args_info, is_leaf=_is_info)]
    if len(donated) != len(traced.jaxpr.jaxpr.invars):
        donated = []
    predicted = predict_memory(traced.jaxpr, donated=donated)
    missing = [
        f"the memory inside {name} is not predicted: it is not looked into"
        for name in predicted.unseen
    ]
    executable = lowered.compile()
    compiled, reasons = _read_compiled(executable)
    peak, reason = _observe(executable, args, kwargs, any(donated))
    return Memory(predicted, compiled, peak, (*missing, *reasons, *([reason] if reason else [])))


def _is_info(leaf: Any) -> bool:
    return hasattr(leaf, "donated")


def predict_memory(
    closed_jaxpr: Any,
    *,
    donated: Sequence[bool] = (),
    platform: str | None = None,
    largest: int = 8,
) -> Prediction:
    """The memory of a traced function, without compiling it.

    Args:
      closed_jaxpr: what `jax.make_jaxpr(fun)(*args)` or `jax.jit(fun).trace(*args).jaxpr` gives.
      donated: per argument of the jaxpr, whether its buffer may be taken for an output.
      platform: `cpu`, `gpu` or `tpu`; by default, where JAX runs. The compilers of CPU and GPU are
        modelled closely; elsewhere the figure is an estimate.
      largest: how many of the values held at the peak to list.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    >>> shapes = [jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 1024)]
    >>> found = predict_memory(jax.make_jaxpr(step)(*shapes))
    >>> kinds = found.stored, found.recomputed, found.gradients, found.tile, found.gaps
    >>> found.bytes.temporaries == sum(kinds)
    True
    """
    jaxpr = closed_jaxpr.jaxpr
    if donated and len(donated) != len(jaxpr.invars):
        raise ValueError(
            f"`donated` has {len(donated)} entries for {len(jaxpr.invars)} arguments of the jaxpr"
        )
    program = Program(jaxpr, platform or jax.default_backend())
    used = {v for node in program.nodes for v in node.inputs} | set(program.outputs)
    arguments = [v for v in program.arguments if v in used]
    outputs = [Value(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
    given = [v for v, d in zip(program.arguments, donated, strict=False) if d and v in used]
    found = buffers(program, given)
    on_device = [b for b in found if b.kind != "host"]
    live = at_peak(on_device)
    sums: dict[str, int] = collections.Counter(gaps=gaps(on_device))
    for buffer in live:
        sums[buffer.kind] += buffer.bytes
    operations = list(program.everything())
    return Prediction(
        bytes=Bytes(_sum(arguments), _sum(outputs), _aliases(given, outputs), sum(sums.values())),
        **{kind: sums[kind] for kind in _KINDS},
        host=sum(b.bytes for b in at_peak([b for b in found if b.kind == "host"])),
        convolutions=sum(1 + n.merged for n in operations if n.op == "conv_general_dilated"),
        loops=sum(n.op in ("scan", "while") for n in operations),
        largest=tuple(_kept(b) for b in _largest(live, largest)),
        unseen=tuple(sorted({n.op for n in operations if n.op in OPAQUE})),
    )


def _sum(values: Iterable[Value]) -> int:
    return sum(v.bytes for v in values)


def _aliases(given: Sequence[Value], outputs: Sequence[Value]) -> int:
    """An output takes the buffer of a donated argument of its shape and type."""
    free = collections.Counter((v.shape, v.dtype) for v in given)
    wanted = collections.Counter((v.shape, v.dtype) for v in outputs)
    return sum(Value(*key).bytes * n for key, n in (free & wanted).items())


def _largest(live: Iterable[Buffer], count: int) -> list[Buffer]:
    return sorted((b for b in live if b.bytes), key=lambda b: -b.bytes)[:count]


_UNKNOWN = user_line(None)


def _kept(buffer: Buffer) -> Kept:
    value = buffer.what
    if value.node is None:
        label = "kernel in another dimension order"
        return Kept(label, buffer.kind, value.shape, str(value.dtype), buffer.bytes, "")
    label = value.name or value.node.label
    if value.node.for_layout:
        label += " in another dimension order"
    sources = value.node.context.sources
    where = user_line(*sources) if sources else _UNKNOWN
    where = "" if where == _UNKNOWN else where
    return Kept(label, buffer.kind, value.shape, str(value.dtype), buffer.bytes, where)


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
        program = _compiled.read(executable.as_text())
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
    counts = _compiled.counts(program)
    if counts.chains:
        missing.append(
            f"{counts.chains} library calls of the compiled program run several convolutions or "
            "contractions each: what they hold in between is in no compiled figure"
        )
    largest: tuple[Kept, ...] = ()
    try:
        largest = tuple(_kept_compiled(b) for b in _largest(_compiled.held(program), 8))
    except Exception as error:
        missing.append(f"what the compiled program holds could not be read ({_said(error)})")
    return Compiled(found, host, counts.convolutions, counts.loops, largest), missing


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _kept_compiled(buffer: Buffer) -> Kept:
    instruction, leaf = buffer.what.instruction, buffer.what.leaf
    return Kept(
        instruction.name, buffer.kind, leaf.shape, leaf.dtype, buffer.bytes, instruction.op_name
    )


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
    predicted, compiled = found.predicted, found.compiled
    there = compiled.bytes
    rows = [("", "predicted", "compiled")]
    for name in ("arguments", "outputs", "aliases", "temporaries"):
        ours = getattr(predicted.bytes, name)
        if name != "aliases" or ours or (there and there.aliases):
            sign = -1 if name == "aliases" else 1
            rows.append((name, _mega(sign * ours), _mega(there and sign * getattr(there, name))))
        if name == "temporaries":
            for kind in _KINDS:
                if getattr(predicted, kind):
                    rows.append((f"  {kind}", _mega(getattr(predicted, kind)), ""))
    rows.append(("total", _mega(predicted.bytes.total), _mega(there and there.total)))
    if predicted.host or compiled.host:
        rows.append(("in host memory", _mega(predicted.host), _mega(compiled.host)))
    if found.observed_peak is not None:
        rows.append(("observed peak", "", _mega(found.observed_peak)))
    rows.append(("convolutions", str(predicted.convolutions), _number(compiled.convolutions)))
    rows.append(("loops", str(predicted.loops), _number(compiled.loops)))
    lines = [f"{name:16}{ours:>14}{theirs:>14}" for name, ours, theirs in rows]
    removed = predicted.convolutions - (compiled.convolutions or 0)
    if compiled.convolutions is not None and removed > 0:
        lines.append(
            f"{removed} convolutions were traced but not compiled as such: the compiler merged "
            "equal ones (what was to be computed again is then held instead), or computes them in "
            "another way."
        )
    for title, kept in (("predicted", predicted.largest), ("compiled", compiled.largest)):
        lines += [f"largest values held at the peak, {title}:"] if kept else []
        equal = collections.Counter(map(_described, kept))
        size = {_described(k): k.bytes for k in kept}
        for text, times in equal.items():
            several = f"{times} x " if times > 1 else ""
            lines.append(f"{several + _mega(size[text]):>18}  {text}")
    lines += [f"not there: {sentence}" for sentence in found.missing]
    return "\n".join(lines)


def _mega(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)


def _described(kept: Kept) -> str:
    kind = "" if kept.kind == "temporary" else f" ({kept.kind})"
    shape = ", ".join(map(str, kept.shape))
    return f"{kept.dtype}[{shape}] {kept.label}{kind}" + (f"  {kept.where}" if kept.where else "")
