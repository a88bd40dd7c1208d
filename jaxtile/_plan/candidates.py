"""Schedules from wherever they come, in one form: with names of operations, bytes and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..policy import Choice
from .assignment import Assignments
from .model import Model, Stretches
from .solver import Solution
from .stage import Candidate, PlannedStage
from .states import HOSTED, INSIDE, KEPT, PASSING, RESTORED, Assignment, Mode


def solved(model: Model, tables: Stretches, solution: Solution) -> Candidate:
    """A solution of the tables, with the names of operations instead of indices."""
    parts = model.outline.parts
    stages = []
    for mode, a, b in solution.stages:
        grid, i, j = tables.modes[mode], tables.cuts[a], tables.cuts[b]
        alive = [k for k in model.live(j).nonzero()[0] if i <= k < j]
        stages.append(
            PlannedStage(
                first=parts[i].name,
                last=parts[j - 1].name,
                operations=j - i,
                grid=grid,
                stored=tuple(parts[k].name for k in alive),
                stored_bytes=int(model.bytes[alive].sum()),
                held_bytes=int(tables.added[mode, a, b]),
                offloaded=(),
                working_bytes=int(tables.peak[mode, a, b]),
                seconds=float(tables.seconds[mode, a, b]),
            )
        )
    rest = Choice(stages[-1].grid)
    return Candidate(_merged(stages), rest, "solver", solution.seconds, solution.peak)


def as_assignment(
    costs: Assignments, model: Model, tables: Stretches, solution: Solution
) -> Assignment:
    """What is live at a cut is kept, everything else is inside its stretch."""
    states, modes = [INSIDE] * model.n, list[Mode]()
    for mode, a, b in solution.stages:
        grid, i, j = tables.modes[mode], tables.cuts[a], tables.cuts[b]
        modes += [Mode(grid, tiled_forward=isinstance(grid, tuple))] * (j - i)
        for k in model.live(j).nonzero()[0]:
            states[k] = KEPT
    return costs.assignment(states, modes)


def assigned(costs: Assignments, found: Assignment) -> Candidate:
    """An assignment, with the names of operations: neighbours with one grid are a stage."""
    facts, states = costs.facts, found.states.tolist()
    modes = [costs.modes[n] for n in found.modes.tolist()]
    parts, estimate = facts.outline.parts, costs.estimate(found)
    needs = {r.end: need for r, need in zip(estimate.regions, estimate.needs, strict=True)}
    stages: list[PlannedStage] = []
    for (grid, tiled_forward), members in itertools.groupby(range(facts.n), modes.__getitem__):
        own = list(members)
        kept, hosted, passing, restored = (
            [k for k in own if states[k] == state and k in facts.whole]
            for state in (KEPT, HOSTED, PASSING, RESTORED)
        )
        regions = [r for r in estimate.regions if r.end in own]
        before = sum(stage.held_bytes for stage in stages)
        once = {k for r in regions if grid is None for k in r.own}
        stages.append(
            PlannedStage(
                first=parts[own[0]].name,
                last=parts[own[-1]].name,
                operations=len(own),
                grid=grid,
                stored=tuple(parts[k].name for k in sorted([*kept, *hosted])),
                stored_bytes=int(sum(facts.bytes[k] for k in [*kept, *hosted])),
                held_bytes=int(
                    sum(facts.held[k] for k in once) or sum(facts.bytes[k] for k in kept)
                ),
                offloaded=tuple(parts[k].name for k in hosted),
                working_bytes=int(max((needs[r.end] - before for r in regions), default=0)),
                seconds=sum(r.cost.seconds + r.extra for r in regions) + facts.plain(once),
                passing=tuple(parts[k].name for k in passing),
                restored=tuple(parts[k].name for k in restored),
                forward=None if tiled_forward or not isinstance(grid, tuple) else (1,) * facts.rank,
            )
        )
    rest = Choice(stages[-1].grid, forward=stages[-1].forward)
    return Candidate(tuple(stages), rest, "descent", estimate.seconds, estimate.peak)


def _merged(stages: Sequence[PlannedStage]) -> tuple[PlannedStage, ...]:
    """Neighbouring stages that are both kept as plain JAX keeps them are joined into one."""
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
