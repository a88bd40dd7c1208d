"""Policies on the reference graph, beside what a framework keeps and what a paper's model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxtile
import policies
from policies import format_bytes
from policies._lower_sets import (
    Chain,
    ancestor_sets,
    cheapest_within,
    lower_sets,
    smallest_budget,
    square_root,
)

from ..measuring.problems import Problem, problem, shape_of
from .frameworks import retained
from .lower_sets import depth_first_sets, forward_graph, smallest_budget_as_listed


def reference(
    budgets: tuple[str, ...] = ("4GB", "2GB", "1GB", "0.5GB"),
    *,
    now: Callable[[str], None],
    batch: int | None = None,
    size: int | None = None,
) -> str:
    """The table: policies on the U-Net, with the bytes of three memory models."""
    shape = shape_of("unet", batch, size)
    found = problem("unet", shape, jnp.float32, abstract=True)
    graph = forward_graph(jaxtile.operations(found.loss, *found.arguments))
    outline = jaxtile.policy.outline(found.loss, *found.arguments, in_axes=found.in_axes)
    kept = sum(retained(outline.operations).values())
    plain = jaxtile.explain(
        found.loss,
        *found.arguments,
        in_axes=found.in_axes,
        policy=policies.resolve("store_all"),
    )
    lower = cheapest_within(graph, lower_sets(graph), 6_000_000_000)
    rows = [
        _row(found, plain, text, other, now)
        for text, other in (
            ("store_all", "-"),
            ("retained", f"{kept:,} kept (Chainer's rule)"),
            ("sqrt", _paper(square_root(graph))),
            ("lower_sets:6GB", _paper(lower)),
        )
    ]
    rows += [_budget_row(found, plain, b, now) for b in budgets]
    now("looking for the smallest budgets of the paper's model")
    exact, approximate = (
        smallest_budget(graph, family(graph)).peak for family in (lower_sets, ancestor_sets)
    )
    listed = smallest_budget_as_listed(graph, depth_first_sets(graph))
    return "\n".join(
        [
            "| policy | estimated bytes | compiled bytes | ratio | forward flops | other model |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"U-Net, batch {shape[0]}, {shape[1]} x {shape[2]}, float32; compiled for "
            f"{jax.devices()[0].device_kind}, jax {jax.__version__}. Estimated and compiled: "
            "arguments, results and temporaries of one step (loss and all gradients). Other model: "
            "what the framework keeps of the forward pass, or the peak in the memory model of the "
            "lower-set paper, which counts activations and their gradients only, and frees nothing "
            "within a stage.",
            f"Smallest budget in the paper's model: {listed:,} bytes over all lower sets if steps "
            "follow the order of a depth-first list, as in the reference (its 5,717 MB); "
            f"{exact:,} bytes if they need not; {approximate:,} bytes over ancestor sets (5,785 "
            "MB).",
        ]
    )


def _paper(chain: Chain) -> str:
    return f"{chain.peak:,} (lower-set paper)"


def _row(found: Problem, plain: jaxtile.Explanation, text: str, other: str, now: Any) -> str:
    now(f"{text}: compiling")
    policy = policies.resolve(text)
    tiled = jaxtile.checkpoint(found.loss, in_axes=found.in_axes, policy=policy)
    report = jaxtile.memory(jax.value_and_grad(tiled, has_aux=True), *found.arguments)
    estimated, compiled = report.estimated.bytes.total, report.compiled.bytes.total
    now(f"{text}: {format_bytes(compiled)}")
    forward = _forward(found, plain, policy)
    return f"| {text} | {_columns(estimated, compiled)} | {forward:.2f}x | {other} |"


def _budget_row(found: Problem, plain: jaxtile.Explanation, budget: str, now: Any) -> str:
    try:
        plan = policies.plan(
            found.loss, *found.arguments, in_axes=found.in_axes, budget=budget, progress=now
        )
    except policies.BudgetError as error:
        return f"| budget:{budget} | does not fit | smallest: {error.smallest:,} | | | |"
    columns = _columns(plan.estimated_bytes, plan.measured_bytes)
    return f"| budget:{budget} | {columns} | {_forward(found, plain, plan):.2f}x | - |"


def _columns(estimated: int, compiled: int) -> str:
    return f"{estimated:,} | {compiled:,} | {estimated / compiled:.3f}"


def _forward(found: Problem, plain: jaxtile.Explanation, policy: Any) -> float:
    """Operations of the forward pass, once more for what is recomputed, relative to plain JAX."""
    explained = jaxtile.explain(found.loss, *found.arguments, in_axes=found.in_axes, policy=policy)
    return (explained.forward_flops + explained.recomputed_flops) / plain.forward_flops
