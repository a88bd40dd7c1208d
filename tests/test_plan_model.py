"""The planner's model: what it says of schedules, against itself and against the compiler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import policies
from experiments.measuring.problems import problem, shape_of
from jaxtile._plan.assignment import Assignments
from jaxtile._plan.costs import BUILT_IN
from jaxtile._plan.facts import Facts
from jaxtile._plan.kernels import grids
from jaxtile._plan.model import Model
from jaxtile._plan.planner import default_step
from jaxtile._plan.solver import fastest, smallest
from jaxtile.policy import Choice

from .support import conv, parametrize_few
from .test_plan import AXES, IMAGE, WEIGHTS, features, network, normed
from .test_solver import optimum

CASES = {
    "alexnet": None,
    "unet": None,
    "vgg16": 1024,
    "resnet50": 512,
    "local_cnn": None,
}


@functools.cache
def reference(name: str):
    return problem(name, shape_of(name, size=CASES[name]), jnp.float32, abstract=True)


def model_of(outline, device: str) -> Model:
    return Model(Facts(outline, BUILT_IN[device]), BUILT_IN[device])


@functools.cache
def reference_model(name: str) -> Model:
    found = reference(name)
    outline = jaxtile.policy.outline(found.loss, *found.arguments, in_axes=found.in_axes)
    return model_of(outline, "gpu")


def stretches(model):
    return model.stretches(grids(model.outline))


def estimated(outline, choices, costs=BUILT_IN["cpu"]):
    assignments = Assignments(outline, costs)
    return assignments.estimate(assignments.of(choices))


def test_a_schedule_of_one_stage_costs_about_the_same_in_both_ways():
    model = reference_model("vgg16")
    tables = stretches(model)
    for mode, grid in enumerate(tables.modes):
        found = tables.seconds[mode, 0, -1]
        if np.isfinite(found):
            other = estimated(model.outline, {...: Choice(grid)}, BUILT_IN["gpu"]).seconds
            assert other == pytest.approx(found, rel=0.05)


@parametrize_few("name", CASES)
def test_more_memory_never_costs_time(name):
    """By the solver's own cost model."""
    tables = stretches(reference_model(name))
    peaks = np.geomspace(smallest(tables).peak / 2, tables.peak[0, 0, -1], 12)
    found = [fastest(tables, peak) for peak in [*peaks, smallest(tables).peak]]
    assert found[-1] is not None
    solutions = [s for s in found[:-1] if s is not None]
    assert len(solutions) > 1
    times = [s.seconds for s in solutions]
    assert times == sorted(times, reverse=True)
    assert times[0] <= found[-1].seconds


@pytest.mark.slow
def test_an_axis_of_one_position():
    """A batch of one whose axis is tiled: no grid has tiles along it."""
    outline = jaxtile.policy.outline(network, WEIGHTS, IMAGE, in_axes=(None, (0, 1, 2)))
    assert grids(outline)
    assert all(grid[0] == 1 and min(grid) > 0 for grid in grids(outline))
    plan = policies.plan(
        network, WEIGHTS, IMAGE, in_axes=(None, (0, 1, 2)), budget="400kB", progress=print
    )
    assert plan.measured_bytes <= 400_000


def test_an_operation_on_the_whole_map_needs_all_of_it():
    """As the first dense layer of AlexNet, a convolution with one result per image."""

    def fun(weights, x):
        *layers, last = weights
        for w in layers:
            x = jax.nn.relu(conv(x, w))
        return conv(checkpoint_name(x, "map"), last, padding="VALID")[:, 0, 0]

    weights = [*WEIGHTS, jax.ShapeDtypeStruct((16, 16, WEIGHTS[-1].shape[-1], 8), "float64")]
    images = jax.ShapeDtypeStruct((8, 16, 16, WEIGHTS[0].shape[2]), "float64")
    outline = jaxtile.policy.outline(fun, weights, images, in_axes=(None, (0, 1, 2)))
    plain, tiled = (
        estimated(outline, policies.resolve(text).choose(outline))
        for text in ("store_all", "tiled:4x1x1")
    )
    assert tiled.seconds > plain.seconds
    assert plain.peak / 8 < tiled.peak < plain.peak
    whole = stretches(model_of(outline, "cpu"))
    grid = next(k for k, g in enumerate(whole.modes) if g == (4, 1, 1))
    assert whole.seconds[grid, 0, -1] == pytest.approx(tiled.seconds, rel=0.05)


def test_norms_need_not_all_be_stored():
    """Between storing what each norm reads and recomputing all for each, there is something."""
    outline = jaxtile.policy.outline(normed, WEIGHTS, IMAGE, in_axes=AXES)
    tables = stretches(model_of(outline, "cpu"))
    assert any(part.awaits for part in outline.parts)
    last = len(tables.cuts) - 1
    assert np.isfinite(tables.seconds[2:, 0, last]).any()
    assert tables.seconds[2:, 0, last].min() > 2 * tables.seconds[0, 0, last]


def test_against_an_integer_programme_on_a_graph():
    def small(weights, x):
        return network(weights[:3], x)

    outline = jaxtile.policy.outline(small, WEIGHTS, IMAGE, in_axes=AXES)
    tables = stretches(model_of(outline, "gpu"))
    lowest, highest = smallest(tables).peak, tables.peak[0, 0, -1]
    for i in range(8):
        budget = lowest + (highest - lowest) * i / 7
        assert fastest(tables, budget).seconds == pytest.approx(optimum(tables, budget))


def test_stages_are_in_order():
    model = reference_model("unet")
    tables = stretches(model)
    solution = fastest(tables, 0.3 * tables.peak[0, 0, -1])
    stops = [s.stop for s in solution.stages]
    assert stops == sorted(stops)
    assert [s.start for s in solution.stages] == [0, *stops[:-1]]


def test_what_is_part_of_another_kernel_takes_no_time():
    """A norm in bfloat16: the change of type, the second sum, and what is made of both."""

    def fun(w, x):
        x = checkpoint_name(conv(x, w), "conv")
        wide = x.astype(jnp.float32)
        mean, square = wide.mean((0, 1, 2)), (wide * wide).mean((0, 1, 2))
        scale = jax.lax.rsqrt(square - mean**2 + 1e-3)
        return checkpoint_name(((wide - mean) * scale).astype(x.dtype), "norm").sum()

    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((3, 3, 4, 4), (1, 256, 256, 4)))
    model = model_of(jaxtile.policy.outline(fun, w, x, in_axes=AXES), "gpu")
    kernels = {model.outline.parts[k].name for k in model.durations}
    kinds = {p.name: p.operation.kind for p in model.outline.parts}
    assert sorted(kinds[name] for name in kernels) == [*("convolution", "reduction", "reduction")]
    others = [k for k in range(model.n) if k not in model.durations]
    assert (model.forward[others] == 0).all()
    # The norm is part of the sum, which reads what the change of type reads: half as many bytes.
    table = BUILT_IN["gpu"]
    least = 2 * x.size / table.bandwidth
    total = max(k for k, p in enumerate(model.outline.parts) if p.reduces)
    assert model.forward[total] == pytest.approx(max(least, table.start), rel=0.01)


@pytest.mark.slow
def test_the_loops_of_a_stretch_share_the_cotangents_of_what_they_read():
    """Three norms in tiles: beside what the model knows, the program has a copy of the image. (If
    the loss were one sum, its loop would begin what is shared, and XLA would pack it otherwise.)
    """

    def fun(weights, x):
        found = features(weights[1:], checkpoint_name(conv(x, weights[0]), "first"))
        return jnp.sum(found.mean((0, 1, 2)) ** 2)

    class Policy:
        def choose(self, outline):
            return {"first": jaxtile.policy.Choice(None), ...: jaxtile.policy.Choice((8, 8))}

    x = jax.ShapeDtypeStruct((1, 256, 256, 4), IMAGE.dtype)
    outline = jaxtile.policy.outline(fun, WEIGHTS, x, in_axes=AXES)
    tables = stretches(model_of(outline, "cpu"))
    after = tables.cuts.index(1 + [p.name for p in outline.parts].index("first"))
    peak = tables.added[0, 0, after] + tables.peak[tables.modes.index((8, 8)), after, -1]
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, policy=Policy())
    step = jax.jit(default_step((WEIGHTS, x), AXES)(tiled))
    compiled = jaxtile.Bytes.of(step.lower(WEIGHTS, x).compile())
    image = x.size * x.dtype.itemsize
    assert peak + image == pytest.approx(compiled.temporaries, rel=0.05)
