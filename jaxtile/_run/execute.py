"""Run the regions and the global equations of a schedule, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .._graph.values import Value
from .._regions.regions import Region, Schedule
from .._regions.tile import lookup
from .loop import Loop
from .recompute import Recomputed, Whole, evaluate, run, to_host
from .sharded import Sharded


def execute(schedule: Schedule, flat: Sequence[Any]) -> list[jax.Array]:
    """The outputs of the function for flat arguments."""
    devices = schedule.devices
    arrays = map(jax.numpy.asarray, flat)
    env: dict[Value, Any] = dict(zip(schedule.graph.inputs, arrays, strict=True))
    if devices is not None:
        env = {v: devices.split(x, v.axes) for v, x in env.items()}
    hosted: dict[Value, jax.Array] = {}

    def whole(value: Value) -> Any:
        """A value that no region reads by window; on a mesh, tiled values are held as blocks."""
        array, x = value.array, lookup(env, value.array)
        return x if devices is None else devices.join(x, array.aval.shape, array.axes)

    for step in schedule.steps:
        if not isinstance(step, Region):
            operands = [whole(v) for v in step.inputs]
            env.update(zip(step.outputs, step.equation.bind(*operands), strict=True))
            continue
        if not step.grid.recomputed and devices is None:
            # What these equations compute is held anyway, so other such regions use it too.
            results = evaluate(step, env)
        else:
            body = _body(step)
            inputs = [lookup(env, v.array) for v in step.inputs]
            globals_ = [whole(v) for v in step.globals]
            results = run(body, inputs, globals_, [hosted.get(v.array) for v in step.inputs])
        env.update(zip((t.result for t in step.targets), results, strict=True))
        hosted |= {
            t.result: to_host(env[t.result])
            for t in step.targets
            if t.reduction is None and schedule.stored.get(t.result) == "host"
        }
    return [_as_array(whole(v)) for v in schedule.graph.outputs]


def _body(region: Region) -> Recomputed:
    if region.devices is not None:
        return Sharded(region)
    return Loop(region) if region.tiled else Whole(region)


def _as_array(x: Any) -> jax.Array:
    """A constant of the traced function may be a Python number."""
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)
