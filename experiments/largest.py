"""The largest image that trains within a budget of memory, per policy.

    python -m experiments.largest --model=vgg16 --budget=16GiB --dtype=bfloat16

Nothing is run: steps are compiled, and the compiled bytes are read. Sizes are searched by bisection
to within 2 %, without autotuning; the size that is printed was compiled as it would run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import flags

import jaxtile
import models
import policies
from policies import format_bytes

from .measuring.problems import problem, shape_of
from .program.command import dtype_flag, start
from .program.progress import Now

_MODEL = flags.DEFINE_enum("model", "vgg16", models.names(), "the model")
_BUDGET = flags.DEFINE_string("budget", "16GiB", "bytes of the compiled step")
_POLICY = flags.DEFINE_multi_string(
    "policy", ["plain", "sqrt", "recompute_all", "budget"], "policies; `budget` is the planner"
)
_DTYPE = dtype_flag("float32")
_BATCH = flags.DEFINE_integer("batch", 1, "images", 1)
_MOST = flags.DEFINE_integer("most", 2**17, "no image is larger than this", 1)

_CLOSE = 1.02


def main(argv: list[str]) -> None:
    del argv
    try:
        budget = policies.parse_bytes(_BUDGET.value)
        jnp.dtype(_DTYPE.value)
        for policy in _POLICY.value:
            if policy not in ("plain", "budget"):
                policies.resolve(policy)
    except (ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    with Now(file=sys.stderr) as now:
        print(table(budget, now))


def table(budget: int, now: Now) -> str:
    """A row for each policy."""
    lines = ["| policy | largest image | megapixels | compiled bytes |", "|---|---|---|---|"]
    for policy in _POLICY.value:
        size = largest(lambda n: fits(policy, n, budget, now), accepted, _MOST.value)
        if size is None:
            lines.append(f"| {policy} | none | | |")
            continue
        total = compiled(policy, size, budget, now)
        while total > budget:  # autotuning chose algorithms that need more
            size = accepted(int(size / _CLOSE))
            total = compiled(policy, size, budget, now)
        pixels = _BATCH.value * size * size / 1e6
        lines.append(f"| {policy} | {size} x {size} | {pixels:.3g} | {total:,} |")
        now.hide()
        print(lines[-1], file=sys.stderr, flush=True)
    device = jax.devices()[0].device_kind
    return (
        "\n".join(lines) + f"\n\n{_MODEL.value}, batch {_BATCH.value}, {_DTYPE.value}, within "
        f"{format_bytes(budget)}; {device}, jax {jax.__version__}"
    )


def largest(
    fits: Callable[[int], bool], accepted: Callable[[int], int | None], most: int
) -> int | None:
    """The largest accepted size that fits, to within 2 %; None if none does.

    Args:
      fits: whether an accepted size does; if one does, so do smaller ones.
      accepted: the largest size up to a number that the model takes.
      most: where the search ends.

    >>> largest(lambda n: n <= 1000, lambda n: n // 8 * 8 or None, 10_000)
    1000
    """
    fitting, size = None, 64
    while True:
        candidate = accepted(min(size, most))
        if candidate is not None and not fits(candidate):
            break
        fitting = fitting if candidate is None else candidate
        if size >= most:
            return fitting
        size *= 2
    if fitting is None:
        return None
    too_large = candidate
    while too_large > fitting * _CLOSE:
        candidate = accepted((fitting + too_large) // 2)
        if candidate is None or candidate <= fitting:
            break
        if fits(candidate):
            fitting = candidate
        else:
            too_large = candidate
    last = accepted(too_large - 1)
    return last if last is not None and last > fitting and fits(last) else fitting


def accepted(n: int) -> int | None:
    """The largest size up to `n` that the model takes, among the 64 before it."""
    for size in range(n, max(0, n - 64), -1):
        try:
            problem(_MODEL.value, _shape(size), jnp.dtype(_DTYPE.value), abstract=True)
            return size
        except ValueError:
            continue
    return None


def fits(policy: str, size: int, budget: int, now: Now) -> bool:
    now(f"{policy}, {size} pixels")
    if policy != "budget":
        return jaxtile.compiled_bytes(_traced(policy, size).lower()).total <= budget
    try:
        return compiled(policy, size, budget, now) <= budget
    except policies.BudgetError:
        return False


def compiled(policy: str, size: int, budget: int, now: Now) -> int:
    """Bytes of the compiled step."""
    if policy != "budget":
        return jaxtile.Bytes.of(_traced(policy, size).lower().compile()).total
    found = problem(_MODEL.value, _shape(size), jnp.dtype(_DTYPE.value), abstract=True)
    say = lambda line: now(f"{policy}, {size} pixels: {line}")  # noqa: E731
    plan = policies.plan(
        found.loss, *found.arguments, in_axes=found.in_axes, budget=budget, progress=say
    )
    return plan.measured_bytes


def _traced(policy: str, size: int) -> jax.stages.Traced:
    found = problem(_MODEL.value, _shape(size), jnp.dtype(_DTYPE.value), abstract=True)
    loss = found.loss
    if policy != "plain":
        loss = jaxtile.checkpoint(loss, in_axes=found.in_axes, policy=policies.resolve(policy))
    return jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(*found.arguments)


def _shape(size: int) -> tuple[int, ...]:
    return shape_of(_MODEL.value, _BATCH.value, size)


if __name__ == "__main__":
    start(main)
