"""One cell of a sweep: a model at a size under a policy, measured in a process of its own.

    python -m experiments.cell '{"model": "unet", "size": 60, "policy": "sqrt"}'

The last line that it prints is a JSON object: times, bytes, and how far the gradients are from
those of plain JAX. A process of its own, because the peak of an allocator never goes down, and
because a crash must cost one cell only.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile
import policies

from .devices.memory import Peak, memory_of_device
from .measuring import baselines, profile
from .measuring.cells import Cell, check
from .measuring.planning import PREFIX, plan_of
from .measuring.problems import Problem, problem

_PROFILED = 3  # steps


def measure(
    cell: Cell, *, warmup: int, repeats: int, compare: bool, profile_into: str = "", plan: str = ""
) -> dict[str, Any]:
    """Times and bytes of a step: loss and gradients of all weights.

    `profile_into`: a folder to trace some steps into; `plan`: the file of a plan that was made for
    the cell's budget.
    """
    found = problem(cell.model, cell.shape, jnp.dtype(cell.dtype))
    began = time.perf_counter()
    loss, arguments, policy = _scheduled(cell, found, plan)
    traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(*arguments)
    planned = time.perf_counter() - began
    # What a mesh's devices hold is not estimated yet.
    on_one = cell.policy not in baselines.SHARDED
    estimated = jaxtile.estimate_memory(traced).bytes.total if on_one else None
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
        "spread": (max(seconds) - min(seconds)) / median if len(seconds) > 1 else None,
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
        "plan": policy.as_json() if isinstance(policy, policies.Plan) else None,
    }
    if profile_into:
        expected = _predicted(cell, found, policy)
        result["profile"] = _profiled(pathlib.Path(profile_into), compiled, arguments, expected)
    if compare and cell.policy != baselines.PLAIN:
        result["gradient_error"] = _error(found, outputs[1])
    return result


def _scheduled(cell: Cell, found: Problem, plan: str) -> tuple[Any, tuple[Any, ...], Any]:
    """The loss under the cell's policy, its arguments, and that policy; None: it is a baseline."""
    if cell.policy in baselines.NAMES:
        return *baselines.applied(cell.policy, cell.model, found), None
    options = {"tiles": cell.grid()} if cell.tiles else {}
    policy: Any
    if not cell.policy.startswith(PREFIX):
        policy = policies.resolve(cell.policy)
    else:
        policy = policies.Plan.load(plan) if plan else plan_of(cell, found)
    tiled = jaxtile.checkpoint(found.loss, in_axes=found.in_axes, policy=policy, **options)
    return tiled, found.arguments, policy


def _predicted(cell: Cell, found: Problem, policy: Any) -> dict[str, float]:
    """By region; what `jax.checkpoint` computes again is not predicted."""
    outline = jaxtile.policy.outline(found.loss, *found.arguments, in_axes=found.in_axes)
    expected = profile.predicted(outline, policy)
    if policy is None and cell.policy != baselines.PLAIN:
        del expected["recomputed"]
    return expected


def _profiled(
    folder: pathlib.Path, compiled: Any, arguments: tuple[Any, ...], expected: dict[str, float]
) -> str:
    """Where the time of a few steps went."""
    with profile.traced(folder) as step:
        for _ in range(_PROFILED):
            with step():
                jax.block_until_ready(compiled(*arguments))
    return profile.report(folder, compiled, expected)


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
