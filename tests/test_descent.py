"""Schedules that decide about each result by itself: their estimates, and the search for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

import jaxtile
from experiments.measuring.problems import problem, shape_of
from jaxtile._plan.assignment import Assignments
from jaxtile._plan.candidates import as_assignment
from jaxtile._plan.candidates import assigned as as_candidate
from jaxtile._plan.costs import BUILT_IN, Duration, host_memory
from jaxtile._plan.descent import Descent
from jaxtile._plan.kernels import grids, strips
from jaxtile._plan.model import Model
from jaxtile._plan.planner import default_step
from jaxtile._plan.search import Search, Terms
from jaxtile._plan.solver import ChosenStretch, fastest, measured
from jaxtile._plan.states import HOSTED, INSIDE, KEPT, PASSING, RESTORED, Mode
from jaxtile._plan.traffic import Traffic

from .support import assert_close, conv, parametrize_few
from .test_again import Results, arguments, network, normed, tiled

AXES = (None, (1, 2))
MODES = {"whole": "whole", "once": (1, 1), "tiles": (4, 4)}


def assignments(layers, size=256, costs=BUILT_IN["gpu"]):
    params, _ = arguments(layers)
    x = jax.ShapeDtypeStruct((1, size, size, 2), jnp.float64)
    return Assignments(jaxtile.policy.outline(network, params, x, in_axes=AXES), costs)


def results(costs):
    return [
        k for k in costs.facts.parts if costs.facts.outline.parts[k].operation.kind == "convolution"
    ]


def assigned(costs, states, mode):
    found = [INSIDE] * costs.facts.n
    for k, state in zip(results(costs), states, strict=True):
        found[k] = state
    return costs.assignment(found, [mode] * costs.facts.n)


def test_time_is_that_of_the_operations_that_run():
    """As `test_again.test_work` counts them."""
    costs, m = assignments(layers=4), 4
    kept, restored, passing = (
        costs.estimate(assigned(costs, [state] * m, Mode((1, 1))))
        for state in (KEPT, RESTORED, PASSING)
    )

    def convolutions(estimate):
        return [k for r in estimate.regions for k in r.before if k in results(costs)]

    # The region of the k-th result computes k - 1 before it, and the loss all.
    assert len(convolutions(passing)) == m * (m - 1) / 2 + m
    assert not convolutions(kept)
    assert not convolutions(restored)
    # All that leads to the results is run once more.
    own = [k for r in restored.regions[:-1] for k in r.own if not costs.facts.reduces[k]]
    assert restored.seconds == pytest.approx(
        kept.seconds + sum(costs.facts.forward[k] for k in own)
    )
    assert restored.seconds < passing.seconds


@parametrize_few("states", ["kpkp", "k", "p"])
def test_bytes_are_near_those_of_the_program(states):
    costs, letters = assignments(layers=4, size=512), {"k": KEPT, "p": PASSING}
    chosen = [letters[c] for c in states.ljust(4, states[-1])]
    estimated = costs.estimate(assigned(costs, chosen, Mode((4, 4), tiled_forward=True))).peak
    params, _ = arguments(layers=4)
    x = jax.ShapeDtypeStruct((1, 512, 512, 2), jnp.float64)
    step = default_step((params, x), AXES)(tiled(Results((4, 4), states)))
    compiled = jaxtile.compiled_bytes(jax.jit(step).lower(params, x)).temporaries
    assert 0.6 < estimated / compiled < 1.3


def test_bytes_while_what_passes_is_computed_again():
    """A sum of two convolutions is a third array beside them: a library has made these."""

    def fun(kernels, x):
        a = checkpoint_name(conv(x, kernels[0]), "a")
        b = checkpoint_name(conv(x, kernels[1]), "b")
        total = checkpoint_name(jnp.tanh(a + b), "total")
        return jnp.sum(checkpoint_name(conv(total, kernels[2]), "last") ** 2)

    kernels = [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float64)] * 3
    x = jax.ShapeDtypeStruct((1, 64, 64, 8), jnp.float64)
    costs = Assignments(jaxtile.policy.outline(fun, kernels, x, in_axes=AXES), BUILT_IN["gpu"])
    index = {part.name: k for k, part in enumerate(costs.facts.outline.parts)}
    a, b, total, last = (index[name] for name in ("a", "b", "total", "last"))
    states = [INSIDE] * costs.facts.n
    states[total], states[last] = PASSING, KEPT
    found = costs.estimate(costs.assignment(states, [Mode("whole")] * costs.facts.n))
    (region,) = (r for r in found.regions if r.end == last)
    assert region.before == (a, b, total)
    assert region.cost.backward >= 3 * costs.facts.bytes[total]


def test_bytes_of_cotangents_apart_from_sums():
    """In one piece a region makes cotangents of its inputs, and adds them to what others began."""

    def fun(kernels, x):
        first = conv(x, kernels[0])
        second = conv(jnp.tanh(first), kernels[1])
        return jnp.sum(conv(second + jnp.sin(first), kernels[2]) ** 2)

    kernels = [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float64)] * 3
    x = jax.ShapeDtypeStruct((1, 64, 64, 8), jnp.float64)
    costs = Assignments(jaxtile.policy.outline(fun, kernels, x, in_axes=AXES), BUILT_IN["gpu"])
    first, second, _ = results(costs)
    states = [KEPT if k in (first, second) else INSIDE for k in range(costs.facts.n)]
    found = costs.estimate(costs.assignment(states, [Mode("whole")] * costs.facts.n))
    size = costs.facts.bytes[first]
    needs = {r.end: need for r, need in zip(found.regions, found.needs, strict=True)}
    # What is kept before it, two sums of cotangents, and what it adds to one of them.
    assert needs[second] >= 4 * size


@pytest.mark.parametrize("mode", [Mode("whole"), Mode((4, 4), tiled_forward=True)])
def test_bytes_of_what_statistics_follow(mode):
    """Their cotangents come back to where it was computed. In one piece they are added to its own,
    beside which it is; each tile reads its window of what was kept, and so all of that is there.
    """

    def fun(kernels, x, *, norm):
        y = checkpoint_name(conv(jnp.tanh(conv(x, kernels[0])), kernels[1]), "y")
        scale = jax.lax.rsqrt(jnp.var(y, (0, 1, 2)) + 1) if norm else 1.0
        return jnp.sum(jnp.sin(conv(y * scale, kernels[2])))

    kernels = [jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float64)] * 3
    x = jax.ShapeDtypeStruct((1, 64, 64, 8), jnp.float64)

    def backward(norm, state):
        given = functools.partial(fun, norm=norm)
        costs = Assignments(
            jaxtile.policy.outline(given, kernels, x, in_axes=AXES), BUILT_IN["gpu"]
        )
        names = [part.name for part in costs.facts.outline.parts]
        states = [state if name == "y" else INSIDE for name in names]
        after = costs.facts.n - names.index("y") - 1
        modes = [mode] * (costs.facts.n - after) + [Mode((4, 4), tiled_forward=True)] * after
        found = costs.estimate(costs.assignment(states, modes))
        (region,) = (r for r in found.regions if r.end == names.index("y"))
        return region.cost.backward / costs.facts.bytes[region.end]

    if mode.grid == "whole":
        assert backward(True, KEPT) == backward(True, PASSING) >= 2
    else:
        assert backward(True, KEPT) == pytest.approx(backward(True, PASSING) + 1)
        assert backward(False, KEPT) == backward(False, PASSING)


def test_near_the_best_of_all_assignments():
    """An exhaustive search over the states of four results, in one mode each, is the oracle."""
    costs = assignments(layers=4)
    descent = Descent(costs, [(2, 2), (4, 4)])
    every = [
        costs.estimate(assigned(costs, states, Mode(grid)))
        for states in itertools.product((INSIDE, PASSING, RESTORED, KEPT), repeat=4)
        for grid in (None, "whole", (1, 1), (2, 2), (4, 4))
    ]
    plain = max(e.peak for e in every)
    for share in (0.9, 0.7, 0.5, 0.4):
        best = min(e.seconds for e in every if e.peak <= share * plain)
        found = descent.fastest(share * plain)
        assert found.peak <= share * plain
        assert found.seconds <= 1.05 * best


@pytest.mark.slow
def test_never_slower_than_all_in_tiles_of_one_grid():
    """What nothing spans is in host memory then. Walks from what is fast alone end before it."""
    costs, tried = assignments(layers=10, size=2048), [(2, 2), (4, 4), (8, 8)]
    descent = Descent(costs, tried, host=math.inf)
    states = [HOSTED if k in costs.facts.joints else INSIDE for k in range(costs.facts.n)]
    for grid in tried:
        modes = [Mode(grid, tiled_forward=True)] * costs.facts.n
        simple = costs.estimate(costs.assignment(states, modes))
        found = descent.fastest(simple.peak)
        assert found.peak <= simple.peak
        assert found.seconds <= simple.seconds


def test_less_memory_never_costs_less_time():
    descent = Descent(assignments(layers=6), [(2, 2), (4, 4)])
    most = descent.fastest(float("inf")).peak
    found = [descent.fastest(share * most) for share in (1.0, 0.8, 0.6, 0.45)]
    assert all(a.seconds <= 1.001 * b.seconds for a, b in itertools.pairwise(found))
    assert descent.smallest().peak < found[-1].peak


@pytest.mark.slow
def test_what_the_solver_finds_is_made_to_fit():
    """By the estimate here its schedule of a U-Net needs a little more than it may, if its loss has
    no loop of its own.
    """
    unet = problem("unet", shape_of("unet"), jnp.float32, abstract=True)
    outline = jaxtile.policy.outline(unet.loss, *unet.arguments, in_axes=unet.in_axes)
    outline = dataclasses.replace(outline, loss=None)
    costs = Assignments(outline, BUILT_IN["gpu"])
    model = Model(costs.facts, BUILT_IN["gpu"])
    tables, descent = model.stretches(grids(outline)), Descent(costs, grids(outline))
    everything = measured(tables, (ChosenStretch(0, 0, len(tables.cuts) - 1),))
    begun = as_assignment(costs, model, tables, fastest(tables, everything.peak / 4))
    assert costs.estimate(begun).peak > everything.peak / 4
    found = descent.fastest(everything.peak / 4, [begun])
    assert found.peak <= everything.peak / 4
    assert found.seconds < 1.1 * costs.estimate(begun).seconds


def bottlenecks(params, x, *, fast=True):
    """Blocks of which only the second of three convolutions reads around a position."""
    for kernels in params:
        y = x
        for kernel in kernels:
            y = jax.nn.softplus(normed(conv(y, kernel), 1.0, fast))
        x = x + y
    return jnp.mean(x**3)


def blocks():
    kernels = [jax.ShapeDtypeStruct((k, k, 2, 2), jnp.float64) for k in (1, 3, 1)]
    return [kernels, kernels], jax.ShapeDtypeStruct((1, 64, 64, 2), jnp.float64)


@parametrize_few("fast", [True, False])  # the variance from the mean, in a second pass
@pytest.mark.parametrize("places", ["kkkkkk", "ikiiki", "iipiip", "pipipi", "ihiihi", "iiiiii"])
def test_estimates_are_of_the_loops_that_run(places, fast):
    """Statistics ride along where what they are of is made, or have a loop of their own."""
    params, x = blocks()
    fun = functools.partial(bottlenecks, fast=fast)
    outline = jaxtile.policy.outline(fun, params, x, in_axes=AXES)
    costs = Assignments(outline, BUILT_IN["gpu"])
    states = {"k": KEPT, "p": PASSING, "i": INSIDE, "h": HOSTED}
    given = assigned(costs, [states[s] for s in places], Mode((4, 4), tiled_forward=True))
    stages = as_candidate(costs, given)
    chosen = {name: c for s in stages.stages for name, c in s.choices.items()}
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, policy=Chosen(chosen | {...: stages.rest}))
    loops = re.findall(r"\bscan\[", str(jax.make_jaxpr(tiled)(params, x)))
    assert len(costs.estimate(given).regions) == len(loops)


@dataclasses.dataclass(frozen=True)
class Chosen:
    choices: dict

    def choose(self, outline):
        return self.choices


def outlined(network):
    if network is bottlenecks:
        return jaxtile.policy.outline(bottlenecks, *blocks(), in_axes=AXES)
    size = 252 if network == "unet" else 256
    given = problem(network, shape_of(network, size=size), jnp.bfloat16, abstract=True)
    return jaxtile.policy.outline(given.loss, *given.arguments, in_axes=given.in_axes)


@parametrize_few("network", [bottlenecks, "resnet50", "unet", "vgg16"], always=1)
def test_segments_can_be_estimated_one_by_one(network):
    """At random: between whole results that nothing else spans, nothing depends on the rest."""
    outline = outlined(network)
    by_segment, at_once = (Assignments(outline, BUILT_IN["gpu"]) for _ in range(2))
    at_once.facts.joints, facts = {}, by_segment.facts
    at_once.modes = by_segment.modes
    tried = [*grids(outline)[:2], *strips(outline)[:1]]
    descent = Descent(by_segment, tried, host=math.inf)
    rng, split = random.Random(0), 0
    for _ in range(100):
        states = rng.choices((INSIDE, PASSING, RESTORED, KEPT, HOSTED), (4, 4, 1, 2, 2), k=facts.n)
        modes = [Mode("whole")] * facts.n
        for block in descent.blocks:
            mode = by_segment.modes[rng.choice(descent.modes)]
            for k in block:
                modes[k] = mode
        random_one = by_segment.assignment(states, modes)
        given = descent._normal(random_one.states, random_one.modes)
        found, expected = by_segment.estimate(given), at_once.estimate(given)
        assert found.seconds == pytest.approx(expected.seconds)
        assert found.needs == pytest.approx(expected.needs)
        assert found.hosted == pytest.approx(expected.hosted)
        numbers = given.modes.tolist()
        split += len(list(by_segment._split(None, facts.parts, given.states, numbers))) > 1
    assert split > 50


@parametrize_few("network", [bottlenecks, "resnet50"], always=1)
def test_what_is_estimated_is_what_runs(network):
    """A schedule says of stored results how they are computed; all else follows from that."""
    outline = outlined(network)
    costs = Assignments(outline, BUILT_IN["gpu"])
    descent = Descent(costs, grids(outline))
    descent.smallest()
    every = [found.assignment for found in descent.seen()]
    assert len(every) > 100
    for found in every[:: len(every) // 50]:
        stages = as_candidate(costs, found)
        chosen = {name: c for s in stages.stages for name, c in s.choices.items()}
        again = costs.of(chosen | {...: stages.rest})
        assert costs.estimate(again).seconds == costs.estimate(found).seconds
        assert costs.estimate(again).peak == costs.estimate(found).peak


@pytest.mark.slow
def test_planned_with_norms():
    """The plan fits, says what is not kept, survives a file, and gives the same gradients."""
    params, _ = arguments(layers=6)
    x = jax.random.normal(jax.random.key(0), (1, 128, 128, 2), jnp.float64)
    step = jax.jit(default_step((params, x), AXES)(network))
    plain = jaxtile.compiled_bytes(step.lower(params, x))
    budget = int(plain.total - 0.6 * plain.temporaries)
    quietly = {"progress": lambda line: None, "costs": BUILT_IN["gpu"]}
    plan = jaxtile.plan(network, params, x, in_axes=AXES, budget=budget, **quietly)
    assert plan.measured_bytes <= budget
    again = jaxtile.Plan.from_json(plan.as_json())
    assert again.choices == plan.choices
    got = jax.jit(jax.value_and_grad(tiled(again)))(params, x)
    assert_close(got, jax.jit(jax.value_and_grad(network))(params, x))


def test_host_memory_is_used_where_the_device_has_none():
    """Bytes on the device are given up for time, if loops make and read a result."""
    costs = assignments(layers=4, size=512)
    kept, hosted = (
        costs.estimate(assigned(costs, [state] * 4, Mode((4, 4), tiled_forward=True)))
        for state in (KEPT, HOSTED)
    )
    assert hosted.seconds > kept.seconds
    assert hosted.peak < 0.5 * kept.peak

    on_device, both = (Descent(costs, [(2, 2), (8, 8)], host=x) for x in (0, math.inf))
    allowed = on_device.smallest().peak
    assert both.smallest().peak < 0.9 * allowed
    found = both.fastest(0.9 * allowed)
    states = found.assignment.states
    modes = [costs.modes[n] for n in found.assignment.modes]
    there = [k for k in costs.facts.whole if states[k] == HOSTED]
    assert there
    assert all(modes[k].loops for k in there)
    assert {n for s in as_candidate(costs, found.assignment).stages for n in s.offloaded} == {
        costs.facts.outline.parts[k].name for k in there
    }


@parametrize_few("places", ["hphh", "pphh", "hhhh", "hpph"], always=2)
@parametrize_few("kernel", [3, 1])
def test_bytes_that_are_moved_to_host_memory_and_back(places, kernel):
    """As many as the program moves, but for halos, and windows of the image."""
    params, _ = arguments(layers=4, size=(1, 2048, 2048, 2), kernel=kernel)
    x = jax.ShapeDtypeStruct((1, 2048, 2048, 2), jnp.float64)
    outline = jaxtile.policy.outline(network, params, x, in_axes=AXES)
    # Whether the last region is differentiated at once depends on where its input lies.
    costs = Assignments(dataclasses.replace(outline, loss=None), BUILT_IN["gpu"])
    states = {"h": HOSTED, "p": PASSING, "r": RESTORED}
    given, kept = (
        costs.estimate(
            assigned(costs, [states.get(s, KEPT) for s in each], Mode((4, 4), tiled_forward=True))
        )
        for each in (places, places.replace("h", "k"))
    )
    estimated = (given.seconds - kept.seconds) * costs.costs.host_bandwidth
    step = jax.value_and_grad(tiled(Results((4, 4), places, forward=(4, 4))))
    assert estimated == pytest.approx(moved(jax.make_jaxpr(step)(params, x).jaxpr), rel=0.03)


def moved(jaxpr):
    """Bytes of what is copied to another memory, and is not made of one number."""
    even = {v for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" for v in e.outvars}
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put" and even.isdisjoint(eqn.invars):
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
        total += eqn.params.get("length", 1) * sum(map(moved, jaxprs_in_params(eqn.params)))
    return total


@pytest.mark.skipif(not pathlib.Path("/proc/meminfo").exists(), reason="Linux says it there")
def test_how_much_host_memory_there_is(monkeypatch):
    """What XLA gives, and not all of what the machine has."""
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    assert host_memory(here=False) == 64 * 2**30
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1000000")
    assert host_memory(here=False) == 1_000_000 * 2**30
    (total,) = re.findall(r"MemTotal:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())
    assert host_memory(here=True) == pytest.approx(0.75 * 1024 * int(total), rel=0.01)


def test_bytes_in_host_memory():
    """Values wait there until the first region that reads them is differentiated, and cotangents
    are there from the last one on: the third region reads the first two values.
    """
    costs = assignments(layers=4, size=512)
    value = costs.facts.bytes[results(costs)[0]]
    for count, most in enumerate((0, 1 + 1, 2 + 2, 2 + 3, 4 + 2)):
        states = [HOSTED] * count + [INSIDE] * (4 - count)
        found = costs.estimate(assigned(costs, states, Mode((4, 4), tiled_forward=True)))
        assert found.hosted == most * value


@pytest.mark.slow
def test_no_more_in_host_memory_than_there_is():
    """The less of it there is, the slower; if it is too little for all cuts, a walk finds where to
    cut less often.
    """
    costs, tried = assignments(layers=10, size=2048), [(2, 2), (4, 4), (8, 8)]
    value, allowed = costs.facts.bytes[results(costs)[0]], Descent(costs, tried).smallest().peak
    found = [Descent(costs, tried, host=n * value).fastest(allowed) for n in (0, 2, 5, math.inf)]
    for there, f in zip((0, 2, 5, math.inf), found, strict=True):
        assert f.peak <= allowed
        assert f.hosted == costs.estimate(f.assignment).hosted <= there * value
    assert all(b.seconds < 0.95 * a.seconds for a, b in itertools.pairwise(found))
    assert Descent(costs, tried, host=5 * value).fastest(0.9 * allowed) is not None


def test_transfers_run_beside_strips():
    """At 10 bytes a second. Both ways at once, but for the ends, and for sums that come back."""
    blocks, strips = (Mode(grid, tiled_forward=True) for grid in ((10, 10), (100, 1)))
    moved = Traffic(fetched=40.0, sent=100.0)
    assert moved.waited(blocks, 8.0, link=10.0) == 14.0
    ends = 0.03 * 14.0
    assert moved.waited(strips, 8.0, link=10.0) == pytest.approx(ends + 0.97 * 2.0)
    assert moved.waited(strips, 80.0, link=10.0) == pytest.approx(ends)
    back = Traffic(fetched=40.0, sent=100.0, added=100.0)
    assert back.waited(strips, 80.0, link=10.0) == pytest.approx(0.03 * 24.0 + 0.97 * 10.0)


@parametrize_few("room", [2**24, 2**30])
def test_strips_where_there_is_little_room(room):
    """A result takes 16 MiB."""
    params, _ = arguments(layers=4)
    x = jax.ShapeDtypeStruct((1, 1024, 1024, 2), jnp.float64)
    outline = jaxtile.policy.outline(network, params, x, in_axes=AXES)
    plain = jax.jit(default_step((params, x), AXES)(network)).trace(params, x)
    search = Search(outline, lambda _: plain, Terms(2**30, BUILT_IN["gpu"], host=2**40))
    *_, found = search.candidates({"solver": room, "descent": room})
    assert found.peak <= room
    little = room == 2**24
    assert any(s.offloaded for s in found.stages) == little
    tiled = [s.grid for s in found.stages if isinstance(s.grid, tuple)]
    assert not little or all(grid[1] == 1 for grid in tiled)


def test_a_share_of_an_operation():
    """One by one as all together: between points, at them, and beyond them."""
    duration = Duration(9.0, (0.125, 0.25, 1.0), (1.0, 3.0, 4.0))
    shares = [0.0, 0.125, 0.2, 0.25, 0.7, 1.0, 1.5]
    assert [duration.at(x) for x in shares] == pytest.approx(list(duration.of(np.array(shares))))


@pytest.mark.parametrize(
    "shape, axes, found",
    [
        ((1, 1024, 6, 2), (1, 2), [(8, 1), (12, 1), (16, 1)]),
        ((1, 10, 6, 2), (1, 2), [(8, 1)]),
        ((2, 1024, 6, 2), (1, 2), []),
        ((1, 2, 1024, 6), (2, 3), []),
    ],
)
def test_strips_are_one_piece_of_memory(shape, axes, found):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    window = [3 if d in axes else 1 for d in range(4)]

    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1,) * 4, "SAME").sum()

    assert strips(jaxtile.policy.outline(pooled, x, in_axes=(axes,))) == found
