"""The budget planner: kept, good, monotone, saved and drawn."""

import dataclasses
import functools
import importlib.util
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import jaxtile.nn
import policies
from experiments.measuring.problems import problem, shape_of
from jaxtile._plan.absent import as_moved
from jaxtile._plan.assignment import Assignments
from jaxtile._plan.costs import BUILT_IN, Timing, built_in_for_another
from jaxtile._plan.facts import Facts
from jaxtile._plan.kernels import durations, grids
from jaxtile._plan.measuring import unknown, with_measured
from jaxtile._plan.model import Model
from jaxtile._plan.planner import default_step
from jaxtile._plan.search import Search, Terms
from jaxtile._plan.solver import fastest, smallest
from jaxtile._platform import tracing_for
from jaxtile._run.ordering import host_of
from jaxtile.policy import Choice

from .random_networks import CHANNELS, Network
from .support import assert_close, assert_same, conv, normal, parametrize_few
from .test_solver import optimum

AXES = (None, (1, 2))
IMAGE = normal(0, 1, 64, 48, 4)
WEIGHTS = [normal(i, 3, 3, 4, 4) / 6 for i in range(1, 6)]


def network(weights, x):
    skip = x
    for i, w in enumerate(weights):
        x = checkpoint_name(jnp.tanh(conv(x, w)), f"layer{i}")
        x = x + skip if i == 3 else x
    return jnp.mean(x**2)


def short(weights, x):
    return network(weights[:3], x)


def features(weights, x):
    """Without names, with batch norms."""
    for w in weights[:3]:
        x = conv(x, w)
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3))
    return x


def normed(weights, x):
    return jnp.mean(features(weights, x) ** 2)


def compiled_bytes(fun, args=(WEIGHTS, IMAGE)) -> int:
    found = jaxtile.memory(default_step(args, AXES)(fun), *jax.eval_shape(lambda: args))
    return found.compiled.bytes.total


def plan(fun=network, budget="1MiB", **kwargs) -> policies.Plan:
    return policies.plan(
        fun, WEIGHTS, IMAGE, in_axes=AXES, budget=budget, progress=lambda line: None, **kwargs
    )


@functools.cache
def told(fun, budget, **kwargs) -> tuple[policies.Plan, list[str], list[str]]:
    """A plan; what was said before and after each compilation, searches aside."""
    lines: list[str] = []
    found = policies.plan(
        fun, WEIGHTS, IMAGE, in_axes=AXES, budget=budget, progress=lines.append, **kwargs
    )
    searches = [i for i, line in enumerate(lines) if "looking for a schedule" in line]
    assert searches[0] == 0
    assert len(searches) <= len(lines) / 2
    lines = [line for i, line in enumerate(lines) if i not in searches]
    return found, lines[::2], lines[1::2]


def planned(fun=network, budget="1MiB") -> policies.Plan:
    return told(fun, budget)[0]


plain_bytes = functools.cache(compiled_bytes)


@parametrize_few("fun", [network, normed])
@parametrize_few("share", [0.4, 0.6, 1.0])
def test_the_budget_is_kept_and_the_result_exact(fun, share):
    budget = int(share * plain_bytes(fun))
    found = planned(fun, budget)
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, policy=found)
    assert found.measured_bytes == compiled_bytes(tiled) <= budget
    assert_same(fun, WEIGHTS, IMAGE, in_axes=AXES, tiles="whole", policy=found)


def test_a_large_budget_gives_plain_jax():
    found = plan(budget="1GiB")
    assert [s.grid for s in found.stages] == [None]
    assert found.seconds == found.plain_seconds


@pytest.mark.slow
def test_too_small_a_budget_names_the_smallest_that_works():
    with pytest.raises(policies.BudgetError, match="smallest budget found to work") as raised:
        plan(short, "10kB")
    least = raised.value.smallest
    assert f"{least:,}" in str(raised.value)
    assert plan(short, least).measured_bytes <= least
    with pytest.raises(policies.BudgetError):
        plan(short, least - 1000)


def test_nothing_is_searched_for_within_less_than_the_arguments():
    """Only what every search tries last is compiled, to name a budget that works."""
    lines = []
    with pytest.raises(policies.BudgetError) as raised:
        policies.plan(short, WEIGHTS, IMAGE, in_axes=AXES, budget="1kB", progress=lines.append)
    assert not any("looking for" in line for line in lines)
    assert plan(short, raised.value.smallest).measured_bytes <= raised.value.smallest


def test_progress_is_told():
    found, before, after = told(network, int(0.6 * plain_bytes(network)))
    assert all("estimated" in line and "compiling" in line for line in before)
    assert all("compiled in" in line for line in after)
    assert ["as it will run" in line for line in before] == [False] * (len(before) - 1) + [True]
    assert policies.format_bytes(found.measured_bytes) in after[-1]
    assert " fits " in after[-1]


@pytest.mark.slow
@parametrize_few("fun", [network, normed])
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_few_schedules_are_compiled_and_each_after_one_that_fits_is_faster(fun, share):
    found, before, after = told(fun, int(share * compiled_bytes(fun)))
    assert 2 <= len(before) <= 7
    times = [float(re.search(r"([0-9.]+)x plain", line)[1]) for line in before]
    first = next(i for i, line in enumerate(after) if " fits " in line)
    assert all(time <= times[first] for time in times[first + 1 : -1])
    fitting = [t for t, line in zip(times, after, strict=True) if " fits " in line]
    assert f"{min(fitting):.2f}x plain" in str(found)


@pytest.mark.slow
def test_the_promise_is_about_the_program_that_runs(monkeypatch):
    """Autotuning may choose an algorithm that needs more: then the search goes on."""
    honest = jaxtile.compiled_bytes

    def too_little(lowered, platform):
        found = honest(lowered, platform)
        return dataclasses.replace(found, temporaries=int(0.6 * found.temporaries))

    budget = int(0.6 * compiled_bytes(network))
    expected = plan(network, budget)
    monkeypatch.setattr("jaxtile._plan.search.compiled_bytes", too_little)
    found, _, after = told.__wrapped__(network, budget)
    assert any("is too much for" in line for line in after)
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=found)
    assert found.measured_bytes == compiled_bytes(tiled) <= budget
    assert found.seconds <= 1.3 * expected.seconds


@pytest.mark.slow
def test_without_time_the_first_schedule_that_fits_is_taken():
    _, before, after = told(normed, "1GiB", time_limit=0.0)
    assert len(before) == 2
    _, before, after = told(normed, int(0.7 * compiled_bytes(normed)), time_limit=0.0)
    assert [" fits " in line for line in after] == [False] * (len(after) - 2) + [True] * 2


def test_a_function_that_is_part_of_its_readers_has_a_plan():
    found = policies.plan(
        lambda x: x.astype(jnp.bfloat16), IMAGE, in_axes=((1, 2),), budget="1MiB", progress=print
    )
    assert "1.00x plain" in str(found)


@pytest.mark.slow
def test_by_name():
    """`budget:` compiles when it is applied, and keeps its promise too."""
    budget = int(0.5 * plain_bytes(network))
    policy = policies.resolve(f"budget:{budget}")
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=policy)
    assert compiled_bytes(tiled) <= budget


@pytest.mark.slow
def test_by_name_inside_other_transformations():
    """The function closes over a traced array, and is itself differentiated under `jit`."""
    budget = int(0.6 * plain_bytes(network))

    @jax.jit
    def gradient(weights, x):
        scaled = jax.tree.map(lambda w: 0.5 * w, weights)
        tiled = jaxtile.checkpoint(
            lambda x: network(scaled, x),
            in_axes=((1, 2),),
            policy=policies.resolve(f"budget:{budget}"),
        )
        return jax.grad(lambda x: tiled(x))(x)

    plain = jax.jit(jax.grad(lambda x: network([0.5 * w for w in WEIGHTS], x)))(IMAGE)
    assert_close(gradient(WEIGHTS, IMAGE), plain)


@pytest.mark.slow
def test_the_step_that_counts_is_the_users():
    """A step that donates its weights, and has a momentum."""

    def step_of(tiled):
        def step(weights, momentum, x):
            grads = jax.grad(tiled)(weights, x)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
            return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum

        return jax.jit(step, donate_argnums=(0, 1))

    args = (WEIGHTS, WEIGHTS, IMAGE)
    found = plan(budget="400kB", step=step_of, step_args=args)
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=found)
    sizes = step_of(tiled).lower(*args).compile().memory_analysis()
    total = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    assert sizes.alias_size_in_bytes > 0
    assert found.measured_bytes == total - sizes.alias_size_in_bytes <= 400_000


def test_modules():
    model = jaxtile.nn.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0))
    image = IMAGE.astype(jnp.float32)

    def loss(model, image):
        return jnp.mean(jnp.tanh(model(jnp.tanh(model(image)))) ** 2)

    found = policies.plan(
        loss, model, image, in_axes=AXES, budget="150kB", progress=lambda line: None
    )
    assert any(isinstance(s.grid, tuple) for s in found.stages)
    tiled = jaxtile.nn.checkpoint(loss, in_axes=AXES, policy=found)
    got, plain = (nnx.jit(nnx.value_and_grad(fun))(model, image) for fun in (tiled, loss))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-6), got, plain))


def fan(weights, x):
    """Twenty branches from one array."""
    return sum(jnp.sum(jnp.tanh(conv(x, weights[0] * i))) for i in range(20))


def clipped(weights, x):
    """A backward rule that must see whole cotangents: some grids are refused."""
    for i, w in enumerate(weights[:3]):
        x = checkpoint_name(jnp.tanh(conv(clip_gradient(x), w)), f"layer{i}")
    return jnp.sum(x)


@jax.custom_vjp
def clip_gradient(x):
    return x


clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def test_a_grid_that_is_refused_is_not_used_again():
    def traced(policy):
        grids = [stage.grid for stage in policy.stages] if policy else []
        finest = max((grid for grid in grids if isinstance(grid, tuple)), default=(1, 1))
        if finest > (1, 1) and (not refused or finest in refused):
            refused.append(finest)
            raise jaxtile.TilingError("so many tiles")
        fun = jaxtile.checkpoint(short, in_axes=AXES, policy=policy) if policy else short
        return jax.jit(default_step((WEIGHTS, IMAGE), AXES)(fun)).trace(WEIGHTS, IMAGE)

    refused: list = []
    outline = jaxtile.policy.outline(short, WEIGHTS, IMAGE, in_axes=AXES)
    budget = int(0.4 * plain_bytes(short))
    terms = Terms(budget, BUILT_IN["cpu"], progress=lambda line: None)
    assert Search(outline, traced, terms).run().measured_bytes <= budget
    assert len(refused) == 1


@pytest.mark.slow
@parametrize_few("fun", [lambda w, x: network(w, x[:, :9, :7])[None], fan, clipped])
def test_the_smallest_budget_works_and_so_does_every_larger_one(fun):
    weights, x = WEIGHTS, normal(0, 1, 11, 9, 4)
    quiet = {"in_axes": AXES, "progress": lambda line: None}
    with pytest.raises(policies.BudgetError) as raised:
        policies.plan(fun, weights, x, budget=100, **quiet)
    least = raised.value.smallest
    for share in (1.0, 1.3):
        found = policies.plan(fun, weights, x, budget=share * least, **quiet)
        assert found.measured_bytes <= share * least


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.sum(w[0]),
        lambda w, x: jnp.sum(x),
        lambda w, x: jnp.sum(jnp.tanh(x.mean((1, 2)) @ w[0][0, 0])),
        lambda w, x: jnp.sum(jnp.tanh(conv(x[:, :1, :1], w[0]))),
        lambda w, x: jnp.argmax(conv(x, w[0]), -1),
        lambda w, x: (3.0, jnp.sum(conv(x, w[0]))),
        lambda w, x: conv(x, w[0]),
        lambda w, x: jnp.sum(jnp.fft.fft(conv(x, w[0]), axis=1).real),
    ],
)
def test_odd_functions(fun):
    found = plan(fun, "1GB")
    assert found.measured_bytes <= 10**9
    assert_same(fun, WEIGHTS, IMAGE, in_axes=AXES, tiles="whole", policy=found)


def test_arguments_that_are_numbers():
    found = policies.plan(
        lambda w, x, n: network(w, x * n),
        WEIGHTS,
        IMAGE,
        3,
        in_axes=(*AXES, None),
        budget="1GB",
        progress=lambda line: None,
    )
    assert found.stages


def test_nothing_to_plan():
    with pytest.raises(ValueError, match="nothing to plan"):
        plan(lambda w, x: x)


def test_a_budget_for_a_function_without_operations():
    tiled = jaxtile.checkpoint(lambda w, x: x, in_axes=AXES, budget="1MiB")
    assert (tiled(WEIGHTS, IMAGE) == IMAGE).all()


def test_saved_and_loaded(tmp_path):
    found = planned()
    found.save(tmp_path / "plan.json")
    assert policies.Plan.load(tmp_path / "plan.json") == found
    (tmp_path / "broken.json").write_text('{"jaxtile": "plan", "version": 1}')
    with pytest.raises(ValueError, match=r"broken.json is not a plan: it has no 'stages'"):
        policies.Plan.load(tmp_path / "broken.json")
    (tmp_path / "broken.json").write_text("null")
    with pytest.raises(ValueError, match="no JSON object"):
        policies.Plan.load(tmp_path / "broken.json")
    wrong = [
        ("budget", "much", "must be a number"),
        ("rest", {"grid": [0, "x"]}, "must be tiles along axes"),
        ("version", 2, "was written by another version"),
    ]
    for name, value, words in wrong:
        broken = {**found.as_json(), name: value}
        with pytest.raises(ValueError, match=words):
            policies.Plan.from_json(broken)


def test_a_plan_with_names_that_the_function_lacks_is_refused():
    found = planned().as_json()
    found["stages"][0]["stored"] = ["nosuch"]
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=policies.Plan.from_json(found))
    with pytest.raises(ValueError, match="it stores 'nosuch', which the function does not have"):
        tiled(WEIGHTS, IMAGE)


def test_a_plan_for_another_size_is_refused():
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=planned())
    with pytest.raises(ValueError, match="made for another function, or for other shapes"):
        tiled(WEIGHTS, normal(0, 1, 32, 48, 4))
    tiled = jaxtile.checkpoint(network, in_axes=(None, (0, 1)), policy=planned())
    with pytest.raises(ValueError, match="made for another function, or for other shapes"):
        tiled(WEIGHTS, IMAGE)


def test_drawn(tmp_path):
    planned().draw(tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.startswith("<?xml")
    assert len(picture) > 5000


def test_explained():
    found = planned(network, int(0.4 * plain_bytes(network)))
    text = found.explain()
    assert f"{found.seconds / found.plain_seconds:.2f}x plain" in text
    assert "tiles" in text
    assert all(name in text for s in found.stages for name in s.stored[:4])
    assert str(found) == text


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


SMALL = {"unet": 220, "vgg16": 64, "alexnet": None, "resnet50": 64, "local_cnn": None}
SHARES = (0.5, 0.25)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "resnet50", "local_cnn")]


def check_promise(fun, args, in_axes, share: float) -> None:
    """Within a share of plain's temporaries; or else within the budget that the error names."""
    step = default_step(args, in_axes)

    def compiled(fun):
        return jaxtile.Bytes.of(jax.jit(step(fun)).lower(*args).compile())

    plain = compiled(fun)
    budget = int(plain.fixed + share * plain.temporaries)
    quiet = {"in_axes": in_axes, "progress": lambda line: None}
    try:
        found = policies.plan(fun, *args, budget=budget, **quiet)
    except policies.BudgetError as error:
        budget = error.smallest
        found = policies.plan(fun, *args, budget=budget, **quiet)
    tiled = jaxtile.checkpoint(fun, in_axes=in_axes, policy=found)
    assert found.measured_bytes == compiled(tiled).total <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16", "alexnet", *SLOW])
def test_budgets_are_kept_on_the_reference_models(name):
    batch = 8 if name in ("alexnet", "local_cnn") else 1
    found = problem(name, shape_of(name, batch, SMALL[name]), jnp.float32, abstract=True)
    check_promise(found.loss, found.arguments, found.in_axes, 0.65)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), list(itertools.product(range(22), SHARES)))
def test_budgets_are_kept_on_networks_that_nobody_tuned_for(seed, share):
    fun = drawn(seed)
    check_promise(fun, jax.eval_shape(lambda: fun.args), AXES, share)


def drawn(seed: int) -> Network:
    """A random network of six layers, on an image that is large enough to matter."""
    chance = random.Random(seed)
    layers = [("conv", 3, 3, 1, "SAME", 1, 0.5)] + [
        chance.choice(
            [
                ("conv", 3, 3, chance.choice([1, 1, 2]), "SAME", chance.choice([1, 2]), 0.1),
                ("depthwise",),
                ("max_pool", 2, 2, "VALID"),
                ("average_pool",),
                ("act", chance.choice(["relu", "gelu", "unit"])),
                ("batch_norm",),
                ("instance_norm",),
                ("squeeze_excite",),
                ("skip", chance.randrange(9)),
                ("concatenate", chance.randrange(9)),
                ("resize", "bilinear", 64, 48),
            ]
        )
        for _ in range(5)
    ]
    return Network(tuple(layers), (1, 128, 96, CHANNELS), None, None, seed)


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


def test_costs(tmp_path, monkeypatch):
    table = dataclasses.replace(BUILT_IN["cpu"], bandwidth=1.0)
    monkeypatch.setenv("JAXTILE_COSTS", str(tmp_path / "costs.json"))
    assert policies.costs() == BUILT_IN["cpu"]  # until something is measured
    table.save(tmp_path / "costs.json")
    assert policies.costs() == table
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a table of costs"):
        policies.costs()


def test_costs_from_a_file(tmp_path):
    BUILT_IN["gpu"].save(tmp_path / "costs.json")
    found = plan(costs=tmp_path / "costs.json")
    assert found.device == "NVIDIA H200 (built in)"
    with pytest.raises(FileNotFoundError, match="none"):
        plan(costs=str(tmp_path / "none.json"))
    with pytest.raises(TypeError, match=r"`costs` \(=3\) must be a `policies.Costs` or the path"):
        plan(costs=3)
    with pytest.raises(TypeError, match=r"`device` \(=3\) must be a GPU's name"):
        plan(device=3)


def test_a_table_of_another_device_is_not_used_silently():
    assert built_in_for_another() is None  # a CPU has its own
    assert built_in_for_another("NVIDIA H200") is None
    assert "NVIDIA A100" in built_in_for_another("NVIDIA A100")
    assert "those of NVIDIA H200" in built_in_for_another("NVIDIA A100")


def has_cuda_plugin() -> bool:
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) for name in names)


def test_a_device_that_nobody_knows():
    with pytest.raises(policies.NoDeviceError, match="must be one of NVIDIA H200"):
        plan(device="NVIDIA X1")


@pytest.mark.skipif(has_cuda_plugin(), reason="the CUDA plugin is installed")
def test_without_the_plugin_no_plan_for_an_absent_device():
    with pytest.raises(policies.NoDeviceError, match="needs JAX's CUDA plugin"):
        plan(device="NVIDIA H200")


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA plugin")
def test_a_plan_for_a_gpu_that_is_not_there():
    found = plan(budget="400kB", device="NVIDIA H200")
    assert found.measured_bytes <= 400_000
    assert found.device.startswith("NVIDIA H200")


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA plugin")
def test_an_image_in_the_host_memory_of_a_gpu_that_is_not_there():
    """It counts neither as an argument on the device nor as a result that waits."""
    host = host_of(jax.devices()[0])
    image = jax.ShapeDtypeStruct((1, 1024, 768, 4), "float64", sharding=host)
    found = jaxtile.plan(network, WEIGHTS, image, in_axes=AXES, budget="16MB", device="NVIDIA H200")
    assert found.measured_bytes <= 16_000_000 < 8 * image.size
    assert found.host_bytes == 0


def test_bytes_of_a_step_that_moves_its_arguments_to_host_memory():
    """The compiled program has them in both places; or on the device only, where it reads them
    whole, and needs them there.
    """
    moves = jaxtile.Bytes(arguments=10, outputs=1, aliases=0, temporaries=5, host=8)
    assert as_moved(moves, 6) == jaxtile.Bytes(4, 1, 0, 5, host=2)
    reads_whole = jaxtile.Bytes(10, 1, 0, 5)
    assert as_moved(reads_whole, 6) == reads_whole


def test_what_is_compiled_for_a_gpu_has_no_workaround_for_a_cpu():
    """It waits by a barrier, wherever it is traced."""

    def gradient():
        tiled = jaxtile.checkpoint(lambda *a: short(*a), in_axes=AXES, tiles=(2, 2))
        return str(jax.make_jaxpr(jax.grad(tiled))(WEIGHTS, IMAGE))

    here = gradient()
    with tracing_for("gpu"):
        assert "optimization_barrier" in gradient()
    assert gradient() == here


@pytest.mark.slow
def test_measured(tmp_path, monkeypatch):
    """The kinds of operations are timed once, and kept; and steps of schedules that fit are run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXTILE_COSTS", raising=False)

    def loss(kernel, image):
        for _ in range(3):
            image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
        return jnp.mean(image**2)

    args = jnp.ones((4, 4, 3, 3)), jnp.ones((1, 4, 48, 48))
    axes, lines = (None, (2, 3)), []
    options = {"in_axes": axes, "budget": "300kB", "measure": True, "progress": lines.append}
    found = jaxtile.plan(loss, *args, **options)
    assert found.measured_bytes <= 300_000
    assert found.measured_seconds > 0
    assert jaxtile.policy.outline(loss, *args, in_axes=axes).fingerprint == found.fingerprint
    # Two classes: of the first convolution only the kernel has a gradient.
    table = policies.costs()
    assert len(table.classes) == 2
    for few, many in table.classes.values():
        assert few.positions == 12 * 12
        assert many.positions == 48 * 48
    assert any("timing 2 kinds" in line for line in lines)
    lines.clear()
    again = jaxtile.plan(loss, *args, **options)
    assert not any("timing" in line for line in lines)
    assert again.device == found.device
    assert policies.Plan.from_json(found.as_json()) == found


def two_convolutions(kernel, image):
    """One with that kernel, and one to one channel, position by position."""

    def loss(kernel, last, image):
        image = jax.lax.conv(jax.lax.conv(image, kernel, (1, 1), "SAME"), last, (1, 1), "SAME")
        return jnp.mean(image**2)

    shapes = [kernel, (1, kernel[0], 1, 1), image]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jaxtile.policy.outline(loss, *args, in_axes=(None, None, (2, 3)))


def test_what_takes_no_time_is_not_timed():
    view = two_convolutions((64, 64, 5, 5), (1, 64, 512, 512))
    assert len(unknown(view, BUILT_IN["cpu"])) == 2
    (one,) = unknown(view, BUILT_IN["cpu"], least=0.01)
    assert "[64,64,5,5]" in one


def test_before_few_steps_little_is_timed(tmp_path, monkeypatch):
    """What takes the most time comes first, and nothing if all steps are soon done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXTILE_COSTS", raising=False)

    view = two_convolutions((8, 8, 3, 3), (1, 8, 32, 32))
    lines: list[str] = []
    none = with_measured(view, BUILT_IN["cpu"], lines.append, steps=1)
    assert none == BUILT_IN["cpu"]
    assert "2 kinds of operations" in lines[0]
    assert "not timed" in lines[0]
    seconds = sum(d.whole for both in durations(view, none).values() for d in both)
    few = with_measured(view, none, lines.append, steps=1 / seconds)  # a second: 50 ms for this
    (one,) = few.classes
    assert "[8,8,3,3]" in one
    assert len(with_measured(view, few, lines.append).classes) == 2


def test_few_steps_are_not_worth_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTILE_COSTS", str(tmp_path / "costs.json"))
    BUILT_IN["cpu"].save(tmp_path / "costs.json")
    lines: list[str] = []

    def loss(x):
        return (x**2).sum()

    options = {"in_axes": 0, "budget": "1MiB", "measure": True, "progress": lines.append}
    found = jaxtile.plan(loss, jnp.ones((8, 8)), steps=1, **options)
    assert found.measured_seconds is None
    assert any("not compared with others" in line for line in lines)
    assert jaxtile.plan(loss, jnp.ones((8, 8)), **options).measured_seconds is not None


def test_nothing_is_measured_on_a_device_that_is_not_here():
    with pytest.raises(ValueError, match="not here"):
        jaxtile.plan(jnp.sum, jnp.ones((4, 4)), in_axes=0, budget=1, device="GPU", measure=True)


def test_measured_times_are_used():
    """Between what was measured there are straight lines, and beyond it time is in proportion."""
    outline = jaxtile.policy.outline(
        lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME").sum(),
        jnp.ones((4, 4, 3, 3)),
        jnp.ones((1, 4, 64, 64)),
        in_axes=(None, (2, 3)),
    )
    (part,) = (p for p in outline.parts if p.sample is not None)
    times = (Timing(256, 2e-3, 3e-3), Timing(1024, 5e-3, 9e-3))
    table = dataclasses.replace(BUILT_IN["cpu"], classes={part.sample.shape_class: times})
    forward, gradient = table.durations(part.operation, part.sample)
    assert forward.whole == pytest.approx(4 * 5e-3)
    assert gradient.whole == pytest.approx(4 * 9e-3)
    assert forward.of(1 / 4) == pytest.approx(5e-3)
    assert forward.of(640 / 4096) == pytest.approx(3.5e-3)
    assert forward.of(0) == table.start
    # With 16384 elements it takes ten times as long; a share of them from 16384 bytes on.
    long = dataclasses.replace(table, long=(2**14, 10.0)).durations(part.operation, part.sample)[0]
    assert long.whole == pytest.approx(10 * forward.whole)
    few = 2**14 / (4096 * 4 * part.sample.equation.out_avals[0].dtype.itemsize)
    assert long.of(few * 0.999) == pytest.approx(forward.of(few * 0.999))
    assert long.of(few) == pytest.approx(10 * forward.of(few))
    longer = dataclasses.replace(table, long=(2**14 + 1, 10.0))
    assert longer.durations(part.operation, part.sample)[0].whole == pytest.approx(forward.whole)
