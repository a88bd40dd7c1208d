"""One cell of a sweep: a model at a size under a policy, measured in a process of its own.

    python -m experiments.cell '{"model": "unet", "size": 60, "policy": "sqrt"}'

The last line that it prints is a JSON object: times, bytes, and how far the gradients are from
those of plain JAX. A process of its own, because the peak of an allocator never goes down, and
because a crash must cost one cell only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile
import models
import policies

from . import baselines
from .device_memory import Peak, memory_of_device
from .problems import Problem, problem, shape_of
from .step import estimated_bytes


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured. A policy may also be one of the baselines, as `plain`."""

    model: str
    size: int = 0
    """Height and width; 0: the reference's."""
    batch: int = 0
    """Images; 0: the reference's."""
    dtype: str = "float32"
    policy: str = baselines.PLAIN
    tiles: str = ""
    """As `4x4`: the grid of what the policy recomputes; empty: it is recomputed whole."""

    @property
    def name(self) -> str:
        """As `--only` matches it: model, size, policy, tiles, dtype, batch."""
        parts = (self.model, self.size, self.policy, self.tiles, self.dtype, self.batch)
        return ",".join(map(str, parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.model, self.batch or None, self.size or None)

    def grid(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.tiles.split("x"))


def check(cell: Cell) -> None:
    """Raise a `ValueError` that names the field, if the cell cannot be meant. Nothing runs."""
    if cell.model not in models.names():
        raise ValueError(f"there is no model {cell.model!r}; known are {', '.join(models.names())}")
    if cell.policy not in baselines.NAMES:
        policies.resolve(cell.policy)
    if cell.tiles and not all(n.isdigit() and int(n) > 0 for n in cell.tiles.split("x")):
        raise ValueError(f"`tiles` (={cell.tiles!r}) must be numbers, as '4x4'")
    if cell.tiles and cell.policy in baselines.NAMES:
        raise ValueError(
            f"{cell.policy} has no tiles (={cell.tiles!r}); use the policy recompute_all"
        )
    if min(cell.size, cell.batch) < 0:
        raise ValueError(f"`size` (={cell.size}) and `batch` (={cell.batch}) must not be negative")
    wrong = _refusal(cell.model, cell.shape, cell.dtype)
    if wrong:
        raise ValueError(wrong)


@functools.cache
def _refusal(model: str, shape: tuple[int, ...], dtype: str) -> str | None:
    """Why the model does not take such images."""
    try:
        problem(model, shape, jnp.dtype(dtype), abstract=True)
    except (TypeError, ValueError) as error:
        return f"{model} at {shape}, {dtype}: {error}"
    return None


def measure(cell: Cell, *, warmup: int, repeats: int, compare: bool) -> dict[str, Any]:
    """Times and bytes of a step: loss and gradients of all weights."""
    found = problem(cell.model, cell.shape, jnp.dtype(cell.dtype))
    began = time.perf_counter()
    loss, arguments, plan = _scheduled(cell, found)
    traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(*arguments)
    planned = time.perf_counter() - began
    # What a mesh's devices hold is not estimated yet.
    estimated = None if cell.policy in baselines.SHARDED else estimated_bytes(traced)
    began = time.perf_counter()
    compiled = traced.lower().compile()
    compiling = time.perf_counter() - began
    peak = Peak()
    outputs, seconds = None, []
    for _ in range(warmup + repeats):
        began = time.perf_counter()
        outputs = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - began)
    seconds = seconds[warmup:]
    median = statistics.median(seconds)
    flops = 3 * jaxtile.operations(lambda *a: found.loss(*a)[0], *found.arguments).flops
    pixels = cell.shape[0] * cell.shape[1] * cell.shape[2]
    result = {
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "planning_seconds": planned,
        "compile_seconds": compiling,
        "estimated_bytes": estimated,
        "compiled_bytes": jaxtile.Bytes.of(compiled).total,
        "temporary_bytes": jaxtile.Bytes.of(compiled).temporaries,
        "observed_peak": peak.observed(),
        "megapixels_per_second": pixels / median / 1e6,
        "flops_per_second": flops / median,
        "loss": float(outputs[0][0]),
        "device": jax.devices()[0].device_kind,
        "plan": plan,
    }
    if compare and cell.policy != baselines.PLAIN:
        result["gradient_error"] = _error(found, outputs[1])
    return result


def _scheduled(cell: Cell, found: Problem) -> tuple[Any, tuple[Any, ...], Any]:
    """The loss under the cell's policy, its arguments, and the plan of a budget, as JSON."""
    if cell.policy in baselines.NAMES:
        return *baselines.applied(cell.policy, cell.model, found), None
    options = {"tiles": cell.grid()} if cell.tiles else {}
    plan = None
    if not cell.policy.startswith("budget:"):
        policy = policies.resolve(cell.policy)
    else:
        policy = plan = policies.plan(
            found.loss,
            *found.arguments,
            in_axes=found.in_axes,
            budget=cell.policy.removeprefix("budget:"),
            step=lambda tiled: jax.value_and_grad(tiled, has_aux=True),
        )
    tiled = jaxtile.checkpoint(found.loss, in_axes=found.in_axes, policy=policy, **options)
    return tiled, found.arguments, plan and plan.as_json()


def _error(found: Problem, gradients: Any) -> float | None:
    """The largest difference from plain JAX's gradients, relative; None if plain does not fit."""
    gradients = [np.asarray(g, np.float64) for g in jax.tree.leaves(gradients)]
    traced = jax.jit(jax.grad(found.loss, has_aux=True)).trace(*found.arguments)
    limit = memory_of_device().get("bytes_limit")
    lowered = traced.lower()
    if limit is not None and jaxtile.compiled_bytes(lowered).total > 0.8 * limit:
        return None
    try:
        plain, _ = lowered.compile()(*found.arguments)
    except jax.errors.JaxRuntimeError:
        return None
    plain = [np.asarray(g, np.float64) for g in jax.tree.leaves(plain)]
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny))
        for a, b in zip(gradients, plain, strict=True)
    )


def main() -> None:
    options = json.loads(sys.argv[1])
    settings = {"warmup": 1, "repeats": 3, "compare": True, **options.pop("settings", {})}
    cell = Cell(**options)
    check(cell)
    print(json.dumps(measure(cell, **settings)), flush=True)


if __name__ == "__main__":
    main()
