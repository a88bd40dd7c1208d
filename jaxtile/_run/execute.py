"""Run the regions and the global equations of a schedule, in order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import jax

from .._graph.values import Node, Storage, Value
from .._mesh.devices import Devices
from .._regions.region import Group, Region
from .._regions.regions import Schedule
from .._regions.stages import RunStage, stage_runner
from .._regions.tile import lookup, with_value
from .again import Again
from .at_once import AtOnce
from .loop import Loop
from .ordering import on_host, to_device, to_host
from .recompute import Recomputed, run
from .sharded import Sharded
from .whole import Statistics, Whole, evaluate


def execute(schedule: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """The outputs of the function for flat arguments."""
    devices, by_window = schedule.devices, _only_by_window(schedule)
    hosted = {v for v in by_window if schedule.stored.get(v) == "host"}
    env: dict[Value, Any] = {}
    for value, x in zip(schedule.graph.inputs, map(jax.numpy.asarray, flat), strict=True):
        moved = value.tiled and value not in by_window and on_host(x)
        env[value] = to_device(x) if moved else x
    if devices is not None:
        env = {v: devices.split(x, v.axes) for v, x in env.items()}
    runner = _Runner(schedule.stored, devices, hosted)
    runner.run(schedule.steps, env, {})
    # A constant of the traced function may be a Python number.
    return [jax.numpy.asarray(runner.whole(env, v)) for v in schedule.graph.outputs]


def _only_by_window(schedule: Schedule) -> set[Value]:
    """The arguments, and results of loops, that only loops read: these may lie in host memory."""
    if schedule.devices:
        return set()
    groups = [step for step in schedule.steps if isinstance(step, Group)]
    made = {v for step in schedule.steps if _loops(step) for v in step.results}
    made -= {v.array for group in groups for v in group.inputs}
    whole = [v.array for v in schedule.graph.outputs]
    whole += [v for group in groups if group.again is not None for v in group.again.inputs]
    whole += [v.array for step in schedule.flat for v in _read_whole(step)]
    return ({*schedule.graph.inputs} | made) - {*whole}


def _read_whole(step: Node | Region) -> list[Value]:
    """What a step reads otherwise than by window, in either pass."""
    if isinstance(step, Node):
        return list(step.inputs)
    both = [step, *([step.again] if step.again is not None else [])]
    return [v for r in both for v in (*r.globals, *(() if r.tiled else r.inputs))]


def _loops(step: Node | Region | Group) -> TypeGuard[Region]:
    """Is it a loop over tiles, forwards and backwards?"""
    if not isinstance(step, Region):
        return False
    return all(r.has_loop for r in (step, step.again or step))


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs the steps of a schedule."""

    stored: Storage
    devices: Devices | None
    hosted: Collection[Value]
    """Results that lie in host memory, and nowhere else."""
    run_stage: RunStage = dataclasses.field(default_factory=stage_runner)
    run_again: bool = False
    """Is it the forward pass of what the backward pass runs again?"""

    def run(
        self, steps: Sequence[Node | Region | Group], env: dict[Value, Any], statistics: Statistics
    ) -> None:
        """Extend `env` by what the steps compute."""
        copies: dict[Value, jax.Array] = {}
        for step in steps:
            if isinstance(step, Node):
                operands = [self.whole(env, v) for v in step.inputs]
                env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
                continue
            if isinstance(step, Region) and not step.grid.recomputed and self.devices is None:
                # What these equations compute is held anyway, so other such regions use it too.
                results = evaluate(step, env, {})
            else:
                results = self._run_body(self._body(step), env, copies)
            for value, x in zip(step.results, results, strict=True):
                env[value] = with_value(x, statistics[value]) if value in statistics else x
            copies |= {v: to_host(env[v]) for v in step.results if self._has_copy(v)}

    def _has_copy(self, value: Value) -> bool:
        """Is a result offloaded that is needed on the device as well?"""
        return self.stored.get(value) == "host" and value not in self.hosted

    def _run_body(
        self, body: Recomputed, env: dict[Value, Any], copies: Mapping[Value, jax.Array]
    ) -> list[jax.Array]:
        region = body.region
        inputs = [lookup(env, v.array) for v in region.inputs]
        globals_ = [self.whole(env, v) for v in region.globals]
        in_host_memory = [copies.get(v.array) for v in region.inputs]
        results, inputs = run(body, inputs, globals_, in_host_memory, run_again=self.run_again)
        if self.devices is None:
            read = zip(region.inputs, inputs, strict=True)
            env.update((v, x) for v, x in read if v.base is None and x is not None)
        return results

    def whole(self, env: Mapping[Value, Any], value: Value) -> Any:
        """A value that no region reads by window; on a mesh, tiled values are held as blocks."""
        array, x = value.array, lookup(env, value.array)
        devices = self.devices
        return x if devices is None else devices.join(x, array.aval.shape, array.axes)

    def _body(self, step: Region | Group) -> Recomputed:
        if step.again is not None:
            first = dataclasses.replace(step, again=None)
            return Again(self._body(first), self._body(step.again))
        if isinstance(step, Group):
            runners = self, dataclasses.replace(self, run_again=True)
            return Whole(step, *(functools.partial(runner._group, step) for runner in runners))
        if step.devices is not None:
            return Sharded(step, self.run_stage)
        if step.tiled:
            passing = {v for v, place in self.stored.items() if place == "passing"}
            loop = Loop(step, self.run_stage, hosted=self.hosted, passing=passing)
            return loop if step.loss is None else AtOnce(loop)
        return Whole(step, functools.partial(evaluate, step))

    def _group(
        self, group: Group, env: dict[Value, Any], statistics: Statistics
    ) -> list[jax.Array]:
        self.run(group.steps, env, statistics)
        return [env[v] for v in group.results]
