"""Run the regions and the global equations of a schedule, in order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._graph.values import Node, Storage, Value
from .._mesh.devices import Devices
from .._regions.region import Group, Region
from .._regions.regions import Schedule
from .._regions.stages import RunStage, stage_runner
from .._regions.tile import known, lookup
from .grouped import Grouped
from .loop import Loop
from .recompute import Again, Recomputed, Whole, evaluate, on_host, run, to_device, to_host
from .sharded import Sharded


def execute(schedule: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """The outputs of the function for flat arguments."""
    devices, by_window = schedule.devices, _only_by_window(schedule)
    env: dict[Value, Any] = {}
    for value, x in zip(schedule.graph.inputs, map(jax.numpy.asarray, flat), strict=True):
        moved = value.tiled and value not in by_window and on_host(x)
        env[value] = to_device(x) if moved else x
    if devices is not None:
        env = {v: devices.split(x, v.axes) for v, x in env.items()}
    _run_steps(schedule.steps, env, schedule.stored, devices, stage_runner())
    return [_as_array(_whole(env, v, devices)) for v in schedule.graph.outputs]


def _only_by_window(schedule: Schedule) -> set[Value]:
    """The arguments that only loops read: these may stay in host memory."""
    whole = [v.array for v in schedule.graph.outputs]
    for step in schedule.steps:
        if isinstance(step, Group) and step.again is not None:
            whole += step.again.inputs
    for each in schedule.flat:
        if isinstance(each, Node):
            whole += [v.array for v in each.inputs]
            continue
        for region in filter(None, (each, each.again)):
            whole += [v.array for v in region.globals]
            whole += [v.array for v in region.inputs if not region.tiled]
    return set() if schedule.devices else {*schedule.graph.inputs} - {*whole}


def _run_steps(
    steps: Sequence[Node | Region | Group],
    env: dict[Value, Any],
    stored: Storage,
    devices: Devices | None,
    run_stage: RunStage,
    statistics: Mapping[Value, jax.Array] | None = None,
) -> None:
    """Extend `env` by what the steps compute.

    `statistics`: results of reductions that are known from the first time.
    """
    hosted: dict[Value, jax.Array] = {}
    for step in steps:
        if isinstance(step, Node):
            operands = [_whole(env, v, devices) for v in step.inputs]
            env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
            continue
        if isinstance(step, Region) and not step.grid.recomputed and devices is None:
            # What these equations compute is held anyway, so other such regions use it too.
            results = evaluate(step, env)
        else:
            body = _body(step, stored, run_stage)
            inputs = [lookup(env, v.array) for v in body.region.inputs]
            globals_ = [_whole(env, v, devices) for v in body.region.globals]
            copies = [hosted.get(v.array) for v in body.region.inputs]
            results, inputs = run(body, inputs, globals_, copies)
            if devices is None:
                read = zip(body.region.inputs, inputs, strict=True)
                env.update((v, x) for v, x in read if v.base is None and x is not None)
        for value, x in zip(step.results, results, strict=True):
            env[value] = known(x, statistics[value]) if statistics and value in statistics else x
        hosted |= {v: to_host(env[v]) for v in step.results if stored.get(v) == "host"}


def _whole(env: Mapping[Value, Any], value: Value, devices: Devices | None) -> Any:
    """A value that no region reads by window; on a mesh, tiled values are held as blocks."""
    array, x = value.array, lookup(env, value.array)
    return x if devices is None else devices.join(x, array.aval.shape, array.axes)


def _body(step: Region | Group, stored: Storage, run_stage: RunStage) -> Recomputed:
    if step.again is not None:
        first = dataclasses.replace(step, again=None)
        return Again(_body(first, stored, run_stage), _body(step.again, stored, run_stage))
    if isinstance(step, Group):
        run = functools.partial(_run_steps, stored=stored, devices=None, run_stage=run_stage)
        return Grouped(step, run)
    if step.devices is not None:
        return Sharded(step, run_stage)
    return Loop(step, run_stage) if step.tiled else Whole(step)


def _as_array(x: Any) -> jax.Array:
    """A constant of the traced function may be a Python number."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)
