"""How long operations, and whole schedules, take on this device: run and timed.

Each class of operations (`_graph.sample`) is run alone, forwards and backwards, on arrays as large
as the network's, and on some as large as a tile of them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.sample import Sample
from .._run.arrays import pulled
from ..policy import Outline
from .costs import Costs, Timing, measured_path
from .kernels import durations

_LARGEST = 2**28  # elements of an array: beyond 2**31 libraries are slow, and memory is not ours
_TILES = 4  # along each axis, of the smaller arrays
_SHARE = 1e-3  # of a step: if it takes ten times as long as estimated, that is still little
COMPARING = 0.05  # of the time of all steps: what finding the fastest schedule may take
_LEAST = 0.02  # seconds that are measured
_RUNS = 3  # of a step, after the first one
_LONG = 1.0  # seconds: what is loaded in a first run is nothing beside it


def unknown(outline: Outline, costs: Costs, least: float = 0.0) -> dict[str, Sample]:
    """The largest sample of each class that a table has no times of, and that is estimated to take
    at least this share of the time of all; what takes the most comes first.
    """
    found: dict[str, Sample] = {}
    seconds: dict[str, float] = collections.defaultdict(float)
    estimated = durations(outline, costs)
    for k, part in enumerate(outline.parts):
        for sample in (part.sample, *part.sample.chains) if part.sample else ():
            name = sample.shape_class
            if name not in costs.classes:
                found[name] = max(found.get(name, sample), sample, key=Sample.positions)
                seconds[name] += sum(d.whole for d in estimated.get(k, ()))
    order = sorted(found, key=lambda name: -seconds[name])
    least *= _seconds(outline, costs)
    return {name: found[name] for name in order if seconds[name] >= least}


def _seconds(outline: Outline, costs: Costs) -> float:
    """Of all operations, forwards and backwards, once."""
    return sum(d.whole for both in durations(outline, costs).values() for d in both)


def timings(samples: Mapping[str, Sample]) -> Iterator[tuple[str, tuple[Timing, ...]]]:
    """Per class, its times: of few positions, and of many."""
    for name, sample in samples.items():
        factor = 1
        while _possible(sample, 2 * factor) and _largest(sample, factor) > _LARGEST:
            factor *= 2
        factors = [n for n in (_TILES * factor, factor) if _possible(sample, n)]
        by_size = {sample.positions(n): n for n in factors}
        yield name, tuple(_timing(sample, n) for _, n in sorted(by_size.items()))


def _possible(sample: Sample, smaller: int) -> bool:
    """Has the equation a result, on so many times fewer positions?"""
    try:
        return all(x.size for x in _results(sample, smaller))
    except (TypeError, ValueError):  # not if one operand's length follows from another's
        return False


def _largest(sample: Sample, smaller: int) -> int:
    return max(x.size for x in [*sample.operands(smaller), *_results(sample, smaller)])


def with_measured(
    outline: Outline, costs: Costs, say: Callable[[str], None], steps: float = math.inf
) -> Costs:
    """The table, and times of what it did not know; written where the planner looks. Before few
    steps, not of all.
    """
    samples, began = unknown(outline, costs, _SHARE), time.perf_counter()
    if not samples:
        return costs
    most = COMPARING * steps * _seconds(outline, costs)
    if most < _LEAST:
        say(
            f"plan: {len(samples)} kinds of operations that the table of costs does not have are "
            f"not timed, since all steps take about {steps * _seconds(outline, costs):.1f} s"
        )
        return costs
    say(f"plan: timing {len(samples)} kinds of operations that the table of costs does not have")
    found = dict(costs.classes)
    for name, times in timings(samples):
        found[name] = times
        if time.perf_counter() - began > most:
            break
    kind, path = jax.devices()[0].device_kind, measured_path()
    device = costs.device if kind in costs.device else f"{costs.device}, operations of {kind}"
    measured = dataclasses.replace(costs, device=device, classes=found)
    measured.save(path)
    say(f"plan: timed in {time.perf_counter() - began:.1f} s, kept in {path}")
    return measured


def step_seconds(lowered: Any, compiled: Any) -> float:
    """Of a compiled step, on arguments of zeros; the fastest of some runs, or a long one."""
    times: list[float] = []
    for _ in range(1 + _RUNS):  # arguments may be donated
        args, kwargs = jax.tree.map(_zeros, lowered.args_info, compiled.input_shardings)
        jax.block_until_ready((args, kwargs))
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args, **kwargs))
        times.append(time.perf_counter() - begin)
        if times[-1] > _LONG:
            return min(times)
    return min(times[1:])


def _zeros(x: Any, place: Any) -> jax.Array:
    """Where the step wants it; None: nowhere, it is not used."""
    if place is not None and place.memory_kind == "pinned_host":
        return jax.device_put(np.zeros(x.shape, x.dtype), place)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def _results(sample: Sample, smaller: int) -> list[jax.ShapeDtypeStruct]:
    return jax.eval_shape(sample.equation.bind, *sample.operands(smaller))


def _timing(sample: Sample, smaller: int) -> Timing:
    wanted = sample.differentiated

    def gradients(cotangents: Any, *operands: jax.Array) -> Any:
        _, pull = pulled(lambda xs: sample.equation.bind(*xs), (operands,), (wanted,))
        return pull(cotangents)

    operands = [_filled(x) for x in sample.operands(smaller)]
    cotangents = [_filled(x) for x in _results(sample, smaller)]
    forward = seconds(sample.equation.bind, *operands)
    backward = seconds(gradients, cotangents, *operands) if any(wanted) else 0.0
    return Timing(sample.positions(smaller), forward, backward)


def _filled(x: jax.ShapeDtypeStruct) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones(x.shape, x.dtype)
    return jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def seconds(fun: Callable[..., Any], *args: Any) -> float:
    """Of one call among many, which the device runs one after the other."""
    compiled = jax.jit(fun)  # it starts faster than what `compile` returns
    jax.block_until_ready(compiled(*args))
    times, begin = 1, time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(times):
            results = compiled(*args)  # the last ones are freed
        jax.block_until_ready(results)
        taken = time.perf_counter() - start
        if taken >= _LEAST or time.perf_counter() - begin > 20 * _LEAST:
            return taken / times
        times = max(2 * times, int(times * _LEAST / max(taken, 1e-6)))
