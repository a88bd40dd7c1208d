"""Inside a `jax.shard_map` of the user, and on meshes whose axes are part of types."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile
from jaxtile import nn

from .meshes import devices
from .support import assert_close, conv, max_pool, normal, parametrize_few, scalar, words

WEIGHTS = [normal(i, 3, 3, 2, 2) for i in range(2)]
IMAGES = normal(9, 4, 9, 7, 2)
KEY = jax.random.key(3)
TILED = {"in_axes": (None, (1, 2)), "tiles": (3, 2)}


def normed(x, across=None):
    mean = x.mean((0, 1, 2))
    square = (x * x).mean((0, 1, 2))
    if across is not None:
        mean, square = lax.pmean((mean, square), across)
    return (x - mean) / jnp.sqrt(square - mean * mean + 1e-2)


def network(w, x):
    x = checkpoint_name(normed(conv(x, w[0])), "norm")
    return conv(max_pool(jax.nn.relu(x), 2, 2, "SAME") + 0.3, w[1])


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, c: (jnp.clip(c, -0.1, 0.1),))


def dropped(w, x):
    kept = jax.random.bernoulli(KEY, 0.5, x.shape)
    return conv(jnp.where(kept, x, 0), w[0]).max((1, 2))


def layers(w, x):
    return lax.scan(lambda x, k: (jnp.tanh(conv(x, k)), x.mean()), x, jnp.stack(w))


NETWORKS = {
    "network": network,
    "norm over devices": lambda w, x: conv(jnp.tanh(normed(conv(x, w[0]), "data")), w[1]),
    "maximum": lambda w, x: conv(x, w[0]).max((1, 2)),
    "dropout": dropped,
    "layers": layers,
    "clipped": lambda w, x: conv(clipped(conv(x, w[0])), w[1]),
    "softmax": lambda w, x: (
        jax.nn.log_softmax(conv(x, w[0])).mean((0, 1)) + jax.nn.gelu(w[1][0]).sum()
    ),
    "coordinates": lambda w, x: (
        x * jnp.arange(9.0)[:, None, None] + w[0].sum() + lax.axis_index("data")
    ),
    "resized": lambda w, x: jax.image.resize(conv(x, w[0]), (x.shape[0], 14, 11, 2), "bilinear"),
    "padded": lambda w, x: conv(jnp.pad(x, ((0, 0), (2, 1), (1, 1), (0, 0)), "reflect"), w[0]),
    "contracted": lambda w, x: jnp.einsum("nhwc,nhwd->ncd", conv(x, w[0]), x),
}


def data_parallel(fun, weights_vary=False):
    """Value and gradients, on each device of its own images, and outside of all of them."""
    mesh = devices(4, names=("data",), axis_types=(AxisType.Auto,))
    of_weights = P("data") if weights_vary else P()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(of_weights, P("data")), out_specs=P("data")
    )
    def inside(w, x):
        w = jax.tree.map(lambda a: a[0], w) if weights_vary else w

        def loss(w, x):
            out = fun(w, x)
            return scalar(out), out

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)
        return jax.tree.map(lambda a: a[None], (out, grads))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(of_weights, P("data")), out_specs=P())
    def mean(w, x):
        w = jax.tree.map(lambda a: a[0], w) if weights_vary else w
        return lax.pmean(scalar(fun(w, x)), "data")

    def both(w, x):
        return inside(w, x), jax.grad(mean, argnums=(0, 1))(w, x)

    weights = jax.tree.map(lambda a: jnp.stack([a, -a, a / 2, a + 1]), WEIGHTS)
    return jax.jit(both)(weights if weights_vary else WEIGHTS, IMAGES)


plain = functools.cache(data_parallel)


@parametrize_few("name", NETWORKS, always=4)
def test_inside_shard_map(name):
    fun = NETWORKS[name]
    assert_close(data_parallel(jaxtile.checkpoint(fun, **TILED)), plain(fun))


@parametrize_few(
    "options",
    [
        {"tiles": "whole"},
        {
            "policy": jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["norm"],
                offload_src="device",
                offload_dst="pinned_host",
            )
        },
        {"tiles": (5, 4)},
        {"tiles": None},
        {"tiles": (1, 1)},
        {"policy": "sqrt"},
        {"policy": "passing:2x2"},
    ],
    always=2,
    ids=words,
)
def test_schedules_inside_shard_map(options):
    tiled = jaxtile.checkpoint(network, **(TILED | options))
    assert_close(data_parallel(tiled), plain(network))


def test_a_plan_is_made_outside():
    """For the shapes that one device has."""
    local = jax.ShapeDtypeStruct((1, *IMAGES.shape[1:]), IMAGES.dtype)
    with pytest.raises(jaxtile.TilingError, match=r"make a plan outside, .* with `jaxtile.plan`"):
        data_parallel(jaxtile.checkpoint(network, in_axes=(None, (1, 2)), budget="1MB"))
    plan = jaxtile.plan(network, WEIGHTS, local, in_axes=(None, (1, 2)), budget="1MB")
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), policy=plan)
    assert_close(data_parallel(tiled), plain(network))


@pytest.mark.slow
def test_weights_that_differ_between_devices():
    tiled = jaxtile.checkpoint(network, **TILED)
    assert_close(data_parallel(tiled, weights_vary=True), data_parallel(network, weights_vary=True))


def test_results_that_do_not_depend_on_the_images_are_the_same_on_all_devices():
    mesh = devices(4, names=("data",), axis_types=(AxisType.Auto,))

    def fun(w, x):
        return conv(x, w[0]), {"norm": (w[1] ** 2).sum(), "mean": lax.pmean(x.mean(), "data")}

    def run(f):
        specs = (P("data"), P())
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=specs))

    got = run(jaxtile.checkpoint(fun, **TILED))(WEIGHTS, IMAGES)
    assert_close(got, run(fun)(WEIGHTS, IMAGES))


def test_closures_inside_shard_map():
    def run(f):
        return lambda w, x: f(lambda x, y: conv(x, w[0]) + y)(x, jnp.tanh(x))

    plain, tiled = (
        data_parallel(run(f))
        for f in (
            lambda g: g,
            lambda g: jaxtile.checkpoint(g, in_axes=((1, 2), (1, 2)), tiles=(3, 2)),
        )
    )
    assert_close(tiled, plain)


@pytest.mark.slow
def test_vmap_and_second_derivatives_inside_shard_map():
    def small(w, x):
        return conv(jnp.tanh(conv(x, w[0])), w[1])

    def first(f):
        def each(w, x):
            return jax.vmap(lambda x: f(w, x[None]))(x)

        return jax.grad(lambda w, x: scalar(each(w, x)))

    plain, tiled = (data_parallel(first(f)) for f in (small, jaxtile.checkpoint(small, **TILED)))
    assert_close(tiled, plain)


def test_modules_inside_shard_map():
    norm = nn.BatchNorm(2, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    graph, state = nnx.split(norm)

    def run(checkpoint):
        def fun(w, x):
            module = nnx.merge(
                graph, jax.tree.map(lambda a: lax.pcast(a, "data", to="varying"), state)
            )
            return checkpoint(lambda m, x: m(conv(x, w[0])))(module, x), nnx.state(module)

        return data_parallel(lambda w, x: jax.tree.leaves(fun(w, x)))

    assert_close(run(functools.partial(nn.checkpoint, **TILED)), run(lambda f: f))


def explicit(fun, shape, images, jit):
    """Value, gradients and their types, on a mesh whose axes are part of types."""
    mesh = devices(*shape, names=("data", "model"), axis_types=(AxisType.Explicit,) * len(shape))
    with jax.set_mesh(mesh):
        weights = jax.device_put(WEIGHTS, NamedSharding(mesh, P()))
        x = jax.device_put(IMAGES, NamedSharding(mesh, images))
        run = jax.value_and_grad(lambda w, x: (scalar(fun(w, x)), fun(w, x)), (0, 1), has_aux=True)
        found = (jax.jit(run) if jit else run)(weights, x)
    return found, [jax.typeof(a) for a in jax.tree.leaves(found)]


@parametrize_few("jit", [True, False])
@parametrize_few(
    "shape, images", [((4,), P("data")), ((2, 2), P("data")), ((2, 2), P(("data", "model")))]
)
@parametrize_few("tiles", [(3, 2), "whole", None])
def test_explicit_meshes(tiles, shape, images, jit):
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=tiles)
    (got, types), (want, wanted) = (explicit(f, shape, images, jit) for f in (tiled, network))
    assert_close(got, want)
    assert types == wanted


def test_modules_on_explicit_meshes():
    def run(checkpoint):
        mesh = devices(4, names=("data",))
        with jax.set_mesh(mesh):
            module = nn.BatchNorm(2, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            x = jax.device_put(IMAGES, NamedSharding(mesh, P("data")))
            out = checkpoint(lambda m, x: m(x))(module, x)
            return out, jax.tree.leaves(nnx.state(module))

    assert_close(run(functools.partial(nn.checkpoint, **TILED)), run(lambda f: f))


@parametrize_few("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_of_which_one_axis_is_mapped(kind):
    mesh = devices(2, 2, names=("data", "model"), axis_types=(kind, kind))
    shardings = [NamedSharding(mesh, p) for p in (P(), P("data"))]

    def run(f):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
        )
        def mapped(w, x):
            return lax.pmean(jax.value_and_grad(lambda w: scalar(f(w, x)))(w), "data")

        with jax.set_mesh(mesh):
            return jax.jit(mapped)(*jax.device_put((WEIGHTS, IMAGES), tuple(shardings)))

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))
