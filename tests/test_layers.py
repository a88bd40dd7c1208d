"""Scans over layers that their author rematerialises: they stay scans, of layers in tiles."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxtile

from .meshes import devices, on
from .support import assert_close, conv, results

KEYS = jax.random.split(jax.random.key(4), 3)
WEIGHTS = (
    jax.random.normal(KEYS[0], (3, 3, 2, 4)),
    0.3 * jax.random.normal(KEYS[1], (3, 3, 3, 4, 4)),
)
IMAGE = jax.random.normal(KEYS[2], (2, 13, 11, 2))
ARGUMENTS = (WEIGHTS, IMAGE)
TILED = dict(in_axes=(None, (1, 2)), tiles=(3, 2))


def normed(x):
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)


def residual(x, w):
    hidden = checkpoint_name(conv(x, w), "hidden")
    return x + jnp.tanh(normed(hidden)), x.mean()


def over_layers(layer, **options):
    """A network with a strided convolution before the layers, and one after them."""

    def network(w, x):
        x, means = lax.scan(layer, conv(x, w[0], stride=2), w[1], **options)
        return conv(x, w[1][0], padding="VALID"), means

    return network


def carries(w, x):
    """Arrays that a layer makes tiled, numbers, integers; and an array that every layer reads."""
    image = conv(x, w[0])

    def layer(carry, w):
        x, y, total, count = carry
        x = conv(x + y, w) + image * jnp.cos(total)
        return (x, jnp.sin(x), total + x.mean(), count + 1), (x[..., 0], count)

    start = image, jnp.zeros(image.shape), 0.0, 0
    return lax.scan(jax.checkpoint(layer), start, w[1], reverse=True)


def wide(w, x):
    """Halos wider than a tile, and an array for each layer."""
    images = conv(x, w[0]) * jnp.arange(1.0, 4)[:, None, None, None, None]
    layer = jax.checkpoint(lambda x, a: (conv(x, a[0], rhs_dilation=(5, 4)) + a[1], None))
    return lax.scan(layer, jnp.sin(images[0]), (w[1], images))[0]


def scans_of_scans(w, x):
    inner = jax.checkpoint(residual)
    outer = jax.checkpoint(lambda x, w: lax.scan(inner, x, w))
    return lax.scan(outer, conv(x, w[0]), jnp.stack([w[1], w[1][::-1]]))


NETWORKS = dict(
    normed=over_layers(jax.checkpoint(residual)), carries=carries, wide=wide, nested=scans_of_scans
)


@pytest.mark.parametrize(
    "name",
    ["normed", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != "normed")],
)
def test_exact(name):
    network = NETWORKS[name]
    tiled = jaxtile.checkpoint(network, **TILED)
    assert len(tiled.explain(*ARGUMENTS).scans) == 1
    assert_close(results(tiled, ARGUMENTS), results(network, ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(tiles=None),
        dict(tiles="whole"),
        dict(skip=True),
        dict(tiles={"hidden": (2, 3), ...: (1, 2)}, policy="hidden"),
        dict(in_axes=(None, (0, 1, 2)), tiles=(2, 5, 1)),
    ],
    ids=str,
)
def test_exact_with(options):
    options = {**TILED, **options}
    if "policy" in options:
        options["policy"] = jax.checkpoint_policies.save_only_these_names(options["policy"])
    network = NETWORKS["normed"]
    tiled = jaxtile.checkpoint(network, **options)
    assert len(tiled.explain(*ARGUMENTS).scans) == 1
    assert_close(results(tiled, ARGUMENTS), results(network, ARGUMENTS))


def test_layers_smaller_than_the_grid():
    """A layer's output is not the user's, who gives no grid for it: it gets a tile per row."""

    def network(w, x):
        x = lax.scan(jax.checkpoint(residual), conv(x, w[0], stride=4), w[1])[0]
        return jnp.repeat(jnp.repeat(x, 4, 1), 4, 2)

    found = jaxtile.explain(network, *ARGUMENTS, in_axes=(None, (1, 2)), tiles=(12, 3))
    assert found.scans[0].layer.regions[-1].grid == (4, 3)


def test_nothing_grows_with_depth():
    tiled = jaxtile.checkpoint(NETWORKS["normed"], **TILED)

    def lines(depth):
        shapes = WEIGHTS[0], jax.ShapeDtypeStruct((depth, *WEIGHTS[1].shape[1:]), float)
        step = jax.grad(lambda *args: tiled(*args)[0].sum())
        return str(jax.make_jaxpr(step)(shapes, IMAGE)).count("\n")

    assert lines(100) == lines(900)


def test_what_is_stored():
    """Outputs of every layer, and what the policy inside saves."""
    saves = jax.checkpoint_policies.save_only_these_names("hidden")
    saving = over_layers(jax.checkpoint(residual, policy=saves))
    plain, stored = (
        jaxtile.explain(f, *ARGUMENTS, **TILED).scans[0] for f in (NETWORKS["normed"], saving)
    )
    carry = 2 * 7 * 6 * 4 * 8
    assert plain.layers == 3
    assert plain.layer.stored_bytes == carry + 3 * 4 * 8 + 8  # statistics, and a mean
    assert stored.layer.stored_bytes == plain.layer.stored_bytes + carry
    assert f"3 layers at {__file__}" in str(jaxtile.explain(saving, *ARGUMENTS, **TILED))


@pytest.mark.slow
def test_what_a_step_takes():
    """An array per layer; of a scan of scans, those of one round."""

    def most(network, length):
        weights = jax.ShapeDtypeStruct((length, *WEIGHTS[1].shape[1:]), float)
        step = jax.grad(lambda w, x: jaxtile.checkpoint(network, **TILED)(w, x)[0].sum())
        traced = jax.jit(step).trace((WEIGHTS[0], weights), IMAGE)
        return jaxtile.estimate_memory(traced).bytes.temporaries

    normed, nested = NETWORKS["normed"], NETWORKS["nested"]
    carry = 2 * 7 * 6 * 4 * 8
    assert most(normed, 36) - most(normed, 4) > 32 * carry
    image = 2 * 13 * 11 * 4 * 8
    assert most(nested, 36) - most(nested, 4) < 2 * 32 * image  # of 2 rounds, one at a time


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
UNROLLED = dict(
    kept=(residual, 3),
    outside=(lambda x, w: (conv(jax.checkpoint(jnp.sin)(x), w), None), 3),
    host=(jax.checkpoint(residual, policy=OFFLOAD), 3),
    one=(jax.checkpoint(residual), 1),
)


@pytest.mark.parametrize(("layer", "length"), UNROLLED.values(), ids=UNROLLED)
def test_unrolled(layer, length):
    """Layers that nobody rematerialises, that are offloaded, or only one."""
    arguments = (WEIGHTS[0], WEIGHTS[1][:length]), IMAGE
    assert not jaxtile.explain(over_layers(layer), *arguments, **TILED).scans


def test_unrolled_by_what_sees_every_layer():
    """A policy of the whole graph, and devices that send each other halos."""
    network = NETWORKS["normed"]
    for options in (dict(policy="sqrt"), on(2, 2)):
        assert not jaxtile.explain(network, *ARGUMENTS, **TILED, **options).scans


def test_refused_inside_a_layer():
    """The message has the line; and its advice works."""

    def layer(x, w):
        return jnp.sort(checkpoint_name(conv(x, w), "x"), axis=1), None

    network = over_layers(jax.checkpoint(layer))
    with pytest.raises(jaxtile.TilingError, match=r"cannot tile `sort` at .*test_layers.py:\d+"):
        jaxtile.explain(network, *ARGUMENTS, **TILED)
    saves = jax.checkpoint_policies.save_only_these_names("x")
    tiled = jaxtile.checkpoint(network, policy=saves, **TILED)
    assert_close(results(tiled, ARGUMENTS), results(network, ARGUMENTS))


def test_the_second_derivative_of_rules_in_layers():
    """Before 0.12 JAX forgets them in a scan: refused; the advice is to unroll."""

    def gradient(layer):
        tiled = jaxtile.checkpoint(over_layers(layer), **TILED)
        return jax.grad(lambda x: tiled(WEIGHTS, x)[0].sum())

    def second(layer):
        traced = lambda x: jax.jvp(gradient(layer), (x,), (x,))  # noqa: E731
        return jax.make_jaxpr(traced)(IMAGE)

    def layer(x, w):
        return jax.nn.relu(conv(x, w)), None

    jax.make_jaxpr(gradient(jax.checkpoint(layer)))(IMAGE)
    second(layer)
    if jax.__version_info__ >= (0, 12):
        second(jax.checkpoint(layer))
    else:
        with pytest.raises(jaxtile.TilingError, match="for the second time"):
            second(jax.checkpoint(layer))
        tiled = jaxtile.checkpoint(over_layers(jax.checkpoint(layer)), **TILED)
        with pytest.raises(jaxtile.TilingError, match="forward mode"):
            jax.jvp(lambda x: tiled(WEIGHTS, x), (IMAGE,), (IMAGE,))


@pytest.mark.slow
def test_derivatives_of_derivatives():
    network = NETWORKS["carries"]

    def pushed(f):
        gradient = jax.grad(lambda x: jnp.sin(f(WEIGHTS, x)[0][0]).sum())
        return jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),)))(IMAGE)

    assert_close(pushed(jaxtile.checkpoint(network, **TILED)), pushed(network))


@pytest.mark.slow
def test_linen():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(2, (3, 3), param_dtype=float)(x)
            return x + nn.BatchNorm(use_running_average=False, param_dtype=float)(nn.relu(y))

    axes = {"params": 0, "batch_stats": 0}
    network = nn.remat_scan(Block, lengths=(2, 2), variable_axes=axes)()
    variables = network.init(jax.random.key(0), IMAGE)
    apply = lambda v, x: network.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    tiled = jaxtile.checkpoint(apply, **TILED)
    (outer,) = tiled.explain(variables, IMAGE).scans  # the inner scan is not rematerialised
    assert (outer.layers, outer.layer.scans) == (2, ())
    assert_close(results(tiled, (variables, IMAGE)), results(apply, (variables, IMAGE)))


@pytest.mark.slow
def test_in_shard_map():
    mesh = devices(2, names=("data",), axis_types=(AxisType.Auto,))

    def run(f):
        def loss(w, x):
            return lax.psum(sum(jnp.sin(y).mean() for y in jax.tree.leaves(f(w, x))), "data")

        each = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(jax.value_and_grad(each, (0, 1)))(WEIGHTS, IMAGE)

    network = NETWORKS["normed"]
    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))
