"""Many devices: exact on any mesh, and what is refused."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile
import policies

from .meshes import AXES, WEIGHTS, devices, on, sharded
from .random_networks import EXAMPLES, networks
from .support import (
    assert_close,
    assert_same,
    conv,
    max_pool,
    normal,
    parametrize_few,
    plain_results,
    results,
)
from .test_models import NAMES, labels, make, saves_convolutions
from .test_random_networks import _SETTINGS

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

MESHES = [(1, 2), (2, 1), (2, 2), (4, 2), (8, 1)]


def network(weights, x):
    """Batch statistics, dropout by coordinate, a pool, a stride, and several outputs."""
    y = checkpoint_name(conv(x, weights[0]), "first")
    mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
    y = (y - mean) * lax.rsqrt(square - mean**2 + 1e-3)
    y = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, y.shape), y, 0)
    y = checkpoint_name(conv(max_pool(y, 3, 2, "SAME"), weights[1], 2), "second")
    return y, y.max((1, 2)), jnp.cos(y).mean(2)


def check(fun, arguments, shape, **schedule) -> None:
    """As `assert_same`, with the plain function compiled once."""
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, **schedule, **on(*shape))
    assert_close(results(tiled, arguments), plain(fun, arguments[-1].shape))


@functools.cache
def plain(fun, size):
    return plain_results(fun, inputs(fun, size))


def inputs(fun, size):
    return WEIGHTS[:2] if fun is network else WEIGHTS[0], normal(9, *size)


STORED = NAMES("first", "second")
GRIDS = {
    "tiles": ((2, 3), STORED),
    "one tile": ((1, 1), STORED),
    "whole": ("whole", None),
    "kept": ({...: None}, None),
    "mixed": ({"first": (2, 1), "second": "whole", ...: None}, STORED),
    "mixed otherwise": ({"first": None, "second": (1, 2), ...: "whole"}, STORED),
}
EVEN, UNEVEN = (2, 16, 16, 2), (2, 19, 11, 2)


@parametrize_few("name", ["tiles", "whole", "mixed"])
def test_grids(name):
    tiles, policy = GRIDS[name]
    check(network, inputs(network, UNEVEN), (3, 2), tiles=tiles, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("size", [EVEN, UNEVEN])
@pytest.mark.parametrize("shape", [*MESHES, (3, 2), (1, 8)])
@pytest.mark.parametrize("name", GRIDS)
def test_all_grids(name, shape, size):
    tiles, policy = GRIDS[name]
    check(network, inputs(network, size), shape, tiles=tiles, policy=policy)


def wide(w, x):
    """Halos far wider than a block: several hops."""
    return conv(jnp.sin(conv(x, w, rhs_dilation=(4, 3))), w, rhs_dilation=(3, 3))


def singular(w, x):
    """x / |x|: a position that does not exist must not be computed, not even for a moment."""
    return (x / jnp.abs(x)).sum() + jnp.log(jnp.abs(conv(x, w))).sum()


def resized(w, x):
    x = jax.image.resize(conv(x, w), (x.shape[0], 17, 5, 2), "bilinear")
    return jnp.flip(lax.conv_transpose(x, w, (2, 3), "SAME"), 1)[:, ::3]


def transposed_axes(w, x):
    """Maps along one axis only, and both axes in both orders."""
    rows, cols = x.mean(2), x.max(1)
    return conv(x * rows[:, :, None] - cols[:, None], w).transpose(2, 0, 1, 3), jnp.cos(rows)


CASES = {
    "many hops, untiled": (wide, (1, 13, 7, 2), (2, 4), "whole"),
    "three rows on eight devices": (wide, (2, 3, 5, 2), (8, 1), (2, 2)),
    "many hops": (wide, (1, 11, 9, 2), (8, 1), (1, 2)),
    "no spurious positions": (singular, (1, 11, 6, 2), (4, 2), (2, 1)),
    "no spurious positions, kept": (singular, (1, 3, 5, 2), (8, 1), {...: None}),
    "resized and reversed": (resized, (1, 9, 11, 2), (3, 2), (2, 1)),
    "one axis only, untiled": (transposed_axes, (2, 10, 7, 2), (4, 2), "whole"),
}


@parametrize_few("name", CASES, always=2)
def test_hard_cases(name):
    fun, size, shape, tiles = CASES[name]
    check(fun, inputs(fun, size), shape, tiles=tiles)


@functools.cache
def model(name: str):
    """A small one: its loss with the new statistics, its arguments, and the plain results."""
    options, size, classes, target, policy = {
        "unet": (
            dict(channels=2, depth=1, padding="SAME", norm="batch", dropout=0.2),
            (2, 14, 18, 1),
            (1, 3),
            (2, 14, 18),
            NAMES("d1a", "u0b"),
        ),
        "resnet50": (dict(blocks=(1,), width=2), (2, 37, 30, 3), (5,), (2,), saves_convolutions),
        "alexnet": (dict(width=2), (1, 79, 67, 3), (), None, NAMES("pool2")),
        "vgg16": (dict(width=1), (1, 64, 70, 3), (), None, NAMES("pool2", "pool4")),
        "local_cnn": (
            dict(channels=3, kernels=(3, 4), num_classes=5),
            (4, 13, 11, 2),
            ((13, 11), 2),
            (4,),
            NAMES("L0.filterNL"),
        ),
    }[name]
    made = make(name, *classes, **options)
    made.train()
    graphdef, state = nnx.split(made)

    def loss(state, *args):
        merged = nnx.merge(graphdef, state)
        return merged.loss(*args), nnx.state(merged, nnx.BatchStat)

    args = [state, normal(1, *size)]
    axes = [None, (1, 2)]
    if target is not None:
        args.append(labels(*target, classes=5 if len(target) == 1 else 3))
        axes.append(None if len(target) == 1 else (1, 2))
    return loss, args, tuple(axes), policy, plain_results(loss, args)


def check_model(name: str, shape, tiles) -> None:
    loss, args, axes, policy, want = model(name)
    tiled = jaxtile.checkpoint(loss, in_axes=axes, tiles=tiles, policy=policy, **on(*shape))
    assert_close(results(tiled, args), want)


@pytest.mark.slow
@parametrize_few(
    "name, shape, tiles",
    [
        ("local_cnn", (2, 1), (2, 2)),
        ("unet", (2, 2), "whole"),
        ("resnet50", (8, 1), "whole"),
        ("alexnet", (1, 2), (1, 1)),
        ("vgg16", (4, 2), (1, 2)),
    ],
)
def test_models(name, shape, tiles):
    check_model(name, shape, tiles)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(1, 1), (2, 2), "whole", {...: None}])
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", ["unet", "resnet50", "alexnet", "vgg16", "local_cnn"])
def test_all_models(name, shape, tiles):
    check_model(name, shape, tiles)


shapes = st.sampled_from([*MESHES, (1, 8), (3, 2), (2, 4), (5, 1)])
mesh_axes = st.sampled_from([("rows", "cols"), ("cols", "rows"), ("rows", None), (None, "cols")])


def check_random(network, shape, axes) -> None:
    hypothesis.note(f"{network!r} on {shape}, {axes}")
    schedule = {"tiles": network.tiles, "policy": network.policy, "mesh_axes": axes}
    assert_same(network, *network.args, in_axes=AXES, mesh=devices(*shape), **schedule)
    jax.clear_caches()


@pytest.mark.slow
@hypothesis.settings(max_examples=3, **_SETTINGS)
@hypothesis.given(networks(), shapes, mesh_axes)
def test_random_networks(network, shape, axes):
    check_random(network, shape, axes)


@pytest.mark.slow
@hypothesis.settings(max_examples=EXAMPLES, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks(), shapes, mesh_axes)
def test_many_random_networks(network, shape, axes):
    check_random(network, shape, axes)


def loss_of(weights, x):
    return sum(jnp.sum(jnp.sin(out)) for out in network(weights, x))


@pytest.mark.slow
@parametrize_few("kind", ["explicit", "automatic"])
def test_arguments_on_the_mesh(kind):
    """Distributed arguments, of meshes with and without shardings in types, in and out of `jit`."""
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = devices(2, 2, axis_types=types)
    weights, image = inputs(network, EVEN)
    x, w = sharded(mesh, image), jax.device_put(weights, NamedSharding(mesh, P()))
    tiled = jaxtile.checkpoint(
        network, in_axes=AXES, tiles=(1, 2), policy=STORED, mesh=mesh, mesh_axes=("rows", "cols")
    )
    want = plain(network, EVEN)
    assert_close(results(tiled, (w, x)), want)
    out = jax.jit(tiled)(w, x)
    assert_close(out, want[1])
    assert out[0].sharding.spec[1:3] == ("rows", "cols")
    with jax.set_mesh(mesh):
        assert_close(jax.jit(tiled)(w, x), want[1])


def test_without_jit():
    def fun(w, x):
        return jnp.sin(conv(x, w)).sum()

    image = jax.device_put(normal(9, 1, 5, 6, 2), jax.devices()[0])
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, tiles=(2, 2), **on(2, 1))
    got, want = (jax.value_and_grad(f)(WEIGHTS[0], image) for f in (tiled, fun))
    assert_close(got, want)


@pytest.mark.slow
def test_data_parallel_training():
    """The batch is one more tiled axis; the optimiser does not notice."""
    mesh = devices(2, 2, 2, names=("data", "rows", "cols"))
    schedule = {"mesh": mesh, "mesh_axes": ("data", "rows", "cols")}
    tiled = jaxtile.checkpoint(loss_of, in_axes=(None, (0, 1, 2)), policy=STORED, **schedule)
    optimiser = optax.adam(1e-2)

    def train(loss):
        @jax.jit
        def step(weights, state, x):
            gradients = jax.grad(loss)(weights, x)
            updates, state = optimiser.update(gradients, state)
            return optax.apply_updates(weights, updates), state

        weights, state = WEIGHTS[:2], optimiser.init(WEIGHTS[:2])
        for seed in range(3):
            weights, state = step(weights, state, normal(seed, 3, 9, 12, 2))
        return weights

    assert_close(train(tiled), train(loss_of), 1e-11)


@pytest.mark.slow
def test_some_axes_of_a_mesh():
    """One tiled axis stays on each device, and one mesh axis is not used."""
    mesh = devices(2, 2, 2, names=("other", "rows", "cols"))
    schedule = {"tiles": (3, 2), "mesh": mesh, "mesh_axes": (None, "rows")}
    tiled = jaxtile.checkpoint(network, in_axes=AXES, policy=STORED, **schedule)
    assert_close(results(tiled, inputs(network, UNEVEN)), plain(network, UNEVEN))


@pytest.mark.slow
def test_vmap_and_second_derivatives():
    def fun(w, x):
        return jnp.sum(jnp.sin(conv(jnp.tanh(conv(x, w)), w)))

    tiled = jaxtile.checkpoint(fun, in_axes=AXES, tiles=(2, 1), **on(2, 2))
    images = normal(9, 3, 1, 7, 8, 2)
    got, want = (
        jax.jit(jax.vmap(jax.grad(f), (None, 0)))(WEIGHTS[0], images) for f in (tiled, fun)
    )
    assert_close(got, want)

    def twice(f):
        slope = jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(f)(w, images[0]))))
        return jax.jit(slope)(WEIGHTS[0])

    assert_close(twice(tiled), twice(fun))


@pytest.mark.slow
def test_offloaded():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["second"],
        names_which_can_be_offloaded=["first"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    check(network, inputs(network, UNEVEN), (2, 2), tiles=(2, 1), policy=policy)


@pytest.mark.slow
def test_policies_that_see_the_graph():
    arguments = inputs(network, UNEVEN)
    check(network, arguments, (2, 2), policy=policies.resolve("sqrt"))


@pytest.mark.slow
def test_a_plan():
    arguments = inputs(network, UNEVEN)
    budget = {"budget": "60KiB", "progress": lambda line: None}
    plan = policies.plan(loss_of, *arguments, in_axes=AXES, **budget)
    assert_same(loss_of, *arguments, in_axes=AXES, policy=plan, **on(2, 2))


@pytest.mark.slow
def test_backward_rules_that_need_whole_cotangents():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, c: (jnp.clip(c, -0.5, 0.5),))

    def fun(w, x):
        return jnp.sum(jnp.sin(conv(clipped(conv(x, w)), w)))

    for tiles, rows in (((2, 1), 12), ("whole", 13)):
        image = normal(9, 1, rows, 8, 2)
        assert_same(fun, WEIGHTS[0], image, in_axes=AXES, tiles=tiles, **on(3, 2))


@pytest.mark.slow
def test_an_operation_that_mixes_positions_runs_once():
    def fun(w, x):
        y = checkpoint_name(conv(x, w), "map")
        return jnp.sin(jnp.cumsum(y, 1)).sum() + jnp.sin(y).sum()

    image = normal(9, 1, 11, 8, 2)
    for tiles in ((2, 1), "whole"):
        assert_same(
            fun, WEIGHTS[0], image, in_axes=AXES, tiles=tiles, policy=NAMES("map"), **on(4, 2)
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (lambda: {"mesh": devices(2, 2)}, r"`mesh_axes` \(=None\) must be a tuple"),
        (lambda: {"mesh_axes": ("rows", "cols")}, "needs `mesh`"),
        (lambda: on(2, 2) | {"mesh_axes": ("rows",)}, "one entry per tiled axis.*has 2"),
        (lambda: on(2, 2) | {"mesh_axes": "rows"}, "must be a tuple"),
        (
            lambda: on(2, 2) | {"mesh_axes": ("rows", "x")},
            r"'x', but `mesh` has \('rows', 'cols'\)",
        ),
        (lambda: on(2, 2) | {"mesh_axes": ("rows", "rows")}, "'rows' twice"),
        (lambda: on(2, 2) | {"mesh_axes": (None, None)}, "names no axis"),
        (lambda: on(2, 2) | {"mesh": (2, 2)}, r"`mesh` \(a tuple\) must be"),
    ],
)
def test_refusals(options, message):
    tiled = jaxtile.checkpoint(network, in_axes=AXES, tiles=(2, 2), **options())
    with pytest.raises(jaxtile.TilingError, match=message):
        tiled(*inputs(network, EVEN))
