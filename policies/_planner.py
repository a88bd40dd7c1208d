"""The budget planner: `policies.plan`.

Solve, compile, read the true bytes, and solve again for less (or more) until the compiled program
fits. A budget is a promise about the compiled step: `temporaries + arguments + outputs - aliases`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile
from jaxtile import Choice, Outline
from jaxtile._trace import flat_axes

from ._bytes import format_bytes, parse_bytes
from ._catalogue import resolve
from ._costs import Costs, costs, has_host_memory
from ._model import EstimatedStage, Model, Stretches
from ._plan import Plan, PlannedStage
from ._solver import Solution, Stage, fastest, measured, smallest

_COMPILES = 6
_SURELY_TOO_MUCH = 1.15  # predictions are not that wrong: not worth compiling
_FULL = 0.95  # of the budget: not worth compiling again for what is left of it
_WORTH = 0.01  # of the time: a gain that is worth compiling again
_WORTH_A_TRY = 0.03  # of the time: likewise, of what is predicted not to fit


class BudgetError(ValueError):
    """No schedule fits the budget. `smallest` is the smallest number of bytes that was reached."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


def plan(
    fun: Callable[..., Any],
    *args: Any,
    in_axes: Any,
    budget: int | str,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    step_args: Sequence[Any] | None = None,
    offload: bool | None = None,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest schedule of `fun` whose compiled training step fits a budget of bytes.

    Args:
      fun: as for `jaxtile.checkpoint`; functions of NNX modules too.
      args: arrays or `jax.ShapeDtypeStruct`s. Bind keyword arguments with `functools.partial`.
      in_axes: as for `jaxtile.checkpoint`.
      budget: bytes, as `"2GiB"`: of arguments, outputs and temporaries of the compiled step.
      step: from the tiled function to the step that is compiled; by default the value and the
        gradients with respect to all float arguments that are not tiled. If the step has an
        optimiser in it, say so here: `step=lambda tiled: train_step_of(tiled)`.
      step_args: the arguments of the step, if they are not `args`.
      offload: may results wait in host memory? By default not.
      costs: rates of the device; by default those measured by `experiments.calibrate`, or built in.
      progress: called with a line of text before and after each compilation; by default they are
        printed to the standard error.

    Raises:
      BudgetError: nothing fits; it says the smallest budget that works.

    >>> import jax, jax.numpy as jnp, jaxtile, policies
    >>> def loss(kernel, image):
    ...     for _ in range(3):
    ...         image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    ...     return jnp.mean(image**2)
    >>> kernel, image = jnp.ones((8, 8, 3, 3)), jnp.ones((1, 8, 64, 64))
    >>> axes = (None, (2, 3))
    >>> quietly = {"progress": lambda line: None}
    >>> plan = policies.plan(loss, kernel, image, in_axes=axes, budget="600kB", **quietly)
    >>> plan.measured_bytes <= 600_000
    True
    >>> tiled = jaxtile.checkpoint(loss, in_axes=axes, policy=plan)
    >>> bool(jnp.allclose(tiled(kernel, image), loss(kernel, image)))
    True
    """
    if _has_modules(args):
        from jaxtile.nn import Pure

        if step is not None:
            raise ValueError(
                "`step` cannot be given together with NNX modules: split them with `nnx.split` and "
                "plan the function of their states"
            )
        fun = Pure(fun, args, {})
        args = fun.args
    outline = jaxtile.outline(fun, *args, in_axes=in_axes)
    make = step or default_step(args, in_axes, _has_gradients(outline))

    def traced(policy: Any) -> Any:
        tiled = jaxtile.checkpoint(fun, in_axes=in_axes, policy=policy)
        run = make(tiled)
        run = run if hasattr(run, "trace") else jax.jit(run)
        return run.trace(*(args if step_args is None else step_args))

    if not outline.parts:
        raise ValueError("there is nothing to plan: the function has no operations")
    return _Search(outline, traced, parse_bytes(budget), offload, costs, progress).run()


def plan_outline(outline: Outline, budget: int) -> Plan:
    """The plan for a function that is known by its outline only, with the default step."""
    known = outline.traced
    in_axes = tuple(_as_in_axes(labels, known.rank) for labels in known.in_axes)
    # What the function closes over may be traced; it becomes arguments.
    held = [*known.jaxpr.invars, *known.jaxpr.constvars]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in held]
    in_axes += (None,) * len(known.jaxpr.constvars)

    def fun(*leaves: Any) -> Any:
        n = len(known.jaxpr.invars)
        return jax.core.eval_jaxpr(known.jaxpr, leaves[n:], *leaves[:n])

    def traced(policy: Any) -> Any:
        tiled = jaxtile.checkpoint(fun, in_axes=in_axes, policy=policy)
        step = default_step(shapes, in_axes, _has_gradients(outline))(tiled)
        return jax.jit(step).trace(*shapes)

    return _Search(outline, traced, budget, None, None, None).run()


def default_step(
    args: Sequence[Any], in_axes: Any, has_gradients: bool = True
) -> Callable[..., Any]:
    """From a function to its value and its gradients, if it has any.

    If the first result is a number, it is the loss; otherwise the loss is the sum of all results.
    """
    tiled_axes, _ = flat_axes(in_axes, tuple(args), {}, jax.tree.leaves(tuple(args)))
    leaves, tree = jax.tree.flatten(tuple(args))
    floats = [i for i, x in enumerate(leaves) if _is_float(x)]
    wanted = [i for i in floats if not any(a is not None for a in tiled_axes[i])] or floats

    def step_of(tiled: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            given = jax.tree.leaves(args)

            def loss(some: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
                full = list(given)
                for i, x in zip(wanted, some, strict=True):
                    full[i] = x
                out = tiled(*jax.tree.unflatten(tree, full))
                results = [x for x in jax.tree.leaves(out) if _is_float(x)]
                if results and results[0].ndim == 0:
                    return results[0].real, out
                return sum(jnp.sum(x.real.astype(jnp.float32)) for x in results), out

            if not wanted or not has_gradients:
                return tiled(*args)
            return jax.value_and_grad(loss, has_aux=True)([given[i] for i in wanted])

        return step

    return step_of


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A schedule, by the model."""

    stages: tuple[PlannedStage, ...]
    rest: Choice
    source: str
    seconds: float
    peak: float


class _Search:
    """Solve for a budget of the model, compile, compare, correct, until the program fits."""

    def __init__(self, outline, traced, budget, offload, rates, progress):
        self.outline, self.traced, self.budget = outline, traced, budget
        self.say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
        began = time.perf_counter()
        self.costs = rates or costs()
        self.model = Model(outline, self.costs, offload=bool(offload) and has_host_memory())
        self.tables = self.model.stretches()
        self.others = [_named(self.model, text) for text in portfolio(self.model)]
        everything = Stage(0, 0, len(self.tables.cuts) - 1)
        self.plain = measured(self.tables, (everything,))
        self.solving = time.perf_counter() - began
        self.fixed = _arguments_and_results(traced(resolve("store_all")))
        self._smallest: _Candidate | None = None

    def run(self) -> Plan:
        fits: Plan | None = None
        lowest: Plan | None = None
        # Budgets of the model that are known to fit, and not to fit.
        below, above = 0.0, float("inf")
        allowed, tried, compiled = float(self.budget - self.fixed), set(), 0
        while compiled < _COMPILES:
            candidate = self.fastest(allowed) or self.smallest()
            gain = 1 if fits is None else 1 - candidate.seconds / fits.seconds
            if candidate in tried or gain < _WORTH:
                break
            tried.add(candidate)
            last = candidate == self.smallest()
            try:
                found, traced = self._predicted(candidate)
            except jaxtile.TilingError as error:
                self._leave_out(candidate, error)
                continue
            total = found.predicted_bytes
            # Compiling takes minutes on a GPU: not for what may well not fit, once something fits,
            # or if what should fit is nearly as fast.
            doubtful = fits is None and total <= self.budget * _SURELY_TOO_MUCH
            if total <= self.budget or last or (doubtful and self._gains(candidate, total)):
                found, compiled = self._compiled(found, traced), compiled + 1
                total = found.measured_bytes
                lowest = found if lowest is None else min(found, lowest, key=_measured_bytes)
            if total <= self.budget:
                fits, below = found, max(below, candidate.peak)
                if total > _FULL * self.budget:
                    break
            elif last:
                break
            else:
                above = min(above, candidate.peak)
            right = self._corrected(candidate, total)
            allowed = right if below < right < above else (below + min(above, 2 * right)) / 2
        while fits is None and self.smallest() not in tried:
            tried.add(self.smallest())
            try:
                least = self._compiled(*self._predicted(self.smallest()))
            except jaxtile.TilingError as error:
                self._leave_out(self.smallest(), error)
                continue
            fits = least if least.measured_bytes <= self.budget else None
            lowest = least if lowest is None else min(least, lowest, key=_measured_bytes)
        if fits is None:
            raise self._too_small(lowest)
        return fits

    def _corrected(self, candidate: _Candidate, total: int) -> float:
        """The budget of the model at which the step should fit, after one that takes so much."""
        return candidate.peak * (self.budget - self.fixed) / max(1, total - self.fixed) * 0.99

    def _gains(self, candidate: _Candidate, total: int) -> bool:
        """Whether it is worth a try, compared with what would come next if it does not fit."""
        following = self.fastest(self._corrected(candidate, total)) or self.smallest()
        return candidate.seconds < (1 - _WORTH_A_TRY) * following.seconds

    def _leave_out(self, candidate: _Candidate, error: jaxtile.TilingError) -> None:
        """A grid that the function refuses is not tried again: the finest of a candidate's."""
        grids = [s.grid for s in (*candidate.stages, candidate.rest) if isinstance(s.grid, tuple)]
        if not grids:
            raise error
        finest = max(grids, key=math.prod)
        for mode, (grid, _) in enumerate(self.tables.modes):
            if grid == finest:
                self.tables.seconds[mode] = np.inf
        self.others = [
            c for c in self.others if finest not in (*(s.grid for s in c.stages), c.rest.grid)
        ]
        self._smallest = None

    def _too_small(self, lowest: Plan) -> BudgetError:
        least = lowest.measured_bytes
        return BudgetError(
            f"no schedule fits a budget of {format_bytes(self.budget)} ({self.budget:,} bytes): "
            f"arguments and results alone take {format_bytes(self.fixed)}; the smallest budget "
            f"found to work is {format_bytes(least)} ({least:,} bytes)",
            least,
        )

    def fastest(self, allowed: float) -> _Candidate | None:
        """The fastest schedule whose peak by the model is at most so many bytes."""
        began = time.perf_counter()
        solution = fastest(self.tables, allowed) if allowed > 0 else None
        found = [c for c in self.others if c.peak <= allowed]
        if solution is not None:
            found.insert(0, _solved(self.model, self.tables, solution))
        self.solving += time.perf_counter() - began
        return min(found, key=lambda c: c.seconds, default=None)

    def smallest(self) -> _Candidate:
        if self._smallest is None:
            solved = _solved(self.model, self.tables, smallest(self.tables))
            self._smallest = min([solved, *self.others], key=lambda c: c.peak)
        return self._smallest

    def _predicted(self, candidate: _Candidate) -> tuple[Plan, Any]:
        """A candidate as a plan, with the bytes that its step should need; and the traced step."""
        found = Plan(
            stages=candidate.stages,
            rest=candidate.rest,
            source=candidate.source,
            fingerprint=self.outline.fingerprint,
            device=self.costs.device,
            budget=self.budget,
            predicted_bytes=0,
            measured_bytes=None,
            seconds=candidate.seconds,
            plain_seconds=self.plain.seconds,
            plain_bytes=int(self.fixed + self.plain.peak),
        )
        traced = self.traced(found)
        predicted = jaxtile.predict_memory(traced.jaxpr, donated=_donated(traced)).bytes.total
        return dataclasses.replace(found, predicted_bytes=predicted), traced

    def _compiled(self, found: Plan, traced: Any) -> Plan:
        self.say(
            f"plan: {len(found.stages)} stages, {found.seconds / found.plain_seconds:.2f}x plain's "
            f"time, {format_bytes(found.predicted_bytes)} predicted; solved in "
            f"{self.solving:.2f} s; compiling"
        )
        began = time.perf_counter()
        total = jaxtile.Bytes.of(traced.lower().compile()).total
        verdict = "fits" if total <= self.budget else "is too much for"
        self.say(
            f"plan: compiled in {time.perf_counter() - began:.0f} s, {format_bytes(total)}: "
            f"{verdict} {format_bytes(self.budget)}"
        )
        return dataclasses.replace(found, measured_bytes=total)


def _measured_bytes(plan: Plan) -> int:
    return plan.measured_bytes


def portfolio(model: Model) -> list[str]:
    """Policies of the catalogue that the planner compares with: it is never worse than these."""
    simple = ["retained", "store_convs", "every:2", "every:4", "every:8", "sqrt", "recompute_all"]
    return simple + ["tiled:" + "x".join(map(str, grid)) for grid in model.grids]


def _solved(model: Model, tables: Stretches, solution: Solution) -> _Candidate:
    """A solution of the tables in terms of names."""
    parts = model.outline.parts
    stages = []
    for at, (mode, a, b) in enumerate(solution.stages):
        grid, i, j = tables.modes[mode][0], tables.cuts[a], tables.cuts[b]
        alive = [k for k in model.live(j).nonzero()[0] if i <= k < j]
        following = solution.stages[at + 1] if at + 1 < len(solution.stages) else None
        waits = following is not None and tables.modes[following.mode][1]
        stages.append(
            PlannedStage(
                first=parts[i].name,
                last=parts[j - 1].name,
                operations=j - i,
                grid=grid,
                stored=tuple(parts[k].name for k in alive),
                stored_bytes=int(model.bytes[alive].sum()),
                held_bytes=int(tables.added[mode, a, b]),
                offloaded=(parts[alive[-1]].name,) if waits else (),
                working_bytes=int(tables.peak[mode, a, b]),
                seconds=float(tables.seconds[mode, a, b]),
            )
        )
    rest = Choice(stages[-1].grid)
    return _Candidate(_merged(stages), rest, "solver", solution.seconds, solution.peak)


def _merged(stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """Neighbours that are both kept are one."""
    merged: list[PlannedStage] = []
    for stage in stages:
        if merged and merged[-1].grid is None and stage.grid is None:
            before = merged.pop()
            stage = stage._replace(
                first=before.first,
                operations=before.operations + stage.operations,
                held_bytes=before.held_bytes + stage.held_bytes,
                working_bytes=before.held_bytes + stage.working_bytes,
                seconds=before.seconds + stage.seconds,
            )
        merged.append(stage)
    return tuple(merged)


def _named(model: Model, text: str) -> _Candidate:
    """A policy of the catalogue, costed with the same model."""
    choices = resolve(text).choose(model.outline)
    estimate = model.estimate(choices)
    parts = model.outline.parts

    def planned(stage: EstimatedStage) -> PlannedStage:
        name = parts[stage.end].name
        stored = (name,) if name in choices else ()
        kept = model.held[stage.start : stage.end + 1].sum()
        size = int(model.bytes[stage.end]) if stored else 0
        return PlannedStage(
            first=parts[stage.start].name,
            last=name,
            operations=stage.end + 1 - stage.start,
            grid=stage.choice.grid,
            stored=stored,
            stored_bytes=size,
            held_bytes=int(kept) if stage.choice.grid is None else size,
            offloaded=stored if stage.choice.offload else (),
            working_bytes=int(stage.working),
            seconds=stage.seconds,
        )

    stages = tuple(map(planned, estimate.stages))
    return _Candidate(stages, choices[...], text, estimate.seconds, estimate.peak)


def _arguments_and_results(traced: Any) -> int:
    """Bytes of a step's arguments and results; donated arguments become results."""
    jaxpr = traced.jaxpr
    given, made = ([_size(a) for a in avals] for avals in (jaxpr.in_avals, jaxpr.out_avals))
    reused = sum(n for n, d in zip(given, _donated(traced), strict=True) if d)
    return sum(given) + sum(made) - min(reused, sum(made))


def _donated(traced: Any) -> list[bool]:
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    return [info.donated for info in infos]


def _size(aval: Any) -> int:
    return aval.size * getattr(aval.dtype, "itemsize", 8)


def _as_in_axes(labels: Sequence[int | None], rank: int) -> Any:
    if not any(a is not None for a in labels):
        return None
    return tuple(labels.index(a) if a in labels else None for a in range(rank))


def _has_gradients(outline: Outline) -> bool:
    return any(_is_float(v.aval) for v in outline.traced.jaxpr.outvars)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", None) or jnp.result_type(x), jnp.inexact)


def _has_modules(args: Any) -> bool:
    """Are there NNX modules or variables, as `jaxtile.nn.checkpoint` takes?

    Those in a state, which is a value, do not count.
    """
    from flax import nnx

    def known(x: Any) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable | nnx.State)

    found = jax.tree.leaves(args, is_leaf=known)
    return any(isinstance(x, nnx.Pytree | nnx.Variable) for x in found)
