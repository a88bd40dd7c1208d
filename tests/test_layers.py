"""Scans over layers: they stay scans, of layers in tiles."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .interpreter import interpret
from .meshes import on
from .random_layers import check, draw
from .random_rules import surrogate
from .support import assert_close, conv, parametrize_few, plain_results, results, scalar

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


def carries(remat):
    """Arrays that a layer makes tiled, numbers, integers; and an array that every layer reads."""

    def network(w, x):
        image = conv(x, w[0])

        def layer(carry, w):
            x, y, total, count = carry
            x = conv(x + y, w) + image * jnp.cos(total)
            return (x, jnp.sin(x), total + x.mean(), count + 1), (x[..., 0], count)

        start = image, jnp.zeros(image.shape), 0.0, 0
        return lax.scan(remat(layer), start, w[1], reverse=True)

    return network


def wide(remat):
    """Halos wider than a tile, and an array for each layer."""

    def network(w, x):
        images = conv(x, w[0]) * jnp.arange(1.0, 4)[:, None, None, None, None]
        layer = remat(lambda x, a: (conv(x, a[0], rhs_dilation=(5, 4)) + a[1], None))
        return lax.scan(layer, jnp.sin(images[0]), (w[1], images))[0]

    return network


def scans_of_scans(remat):
    def network(w, x):
        inner = remat(residual)
        outer = remat(lambda x, w: lax.scan(inner, x, w))
        return lax.scan(outer, conv(x, w[0]), jnp.stack([w[1], w[1][::-1]]))

    return network


def dropout(remat):
    """A key for each layer, and a layer that is left out at random."""

    def network(w, x):
        def layer(x, a):
            key, w = a
            y = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), jax.nn.relu(conv(x, w)), 0)
            return x + lax.cond(jax.random.bernoulli(key), lambda y: y, jnp.zeros_like, y), None

        return lax.scan(remat(layer), conv(x, w[0]), (jax.random.split(KEYS[0], 3), w[1]))

    return network


def plain(layer):
    return layer


MADE = dict(
    normed=lambda remat: over_layers(remat(residual)),
    carries=carries,
    wide=wide,
    nested=scans_of_scans,
    dropout=dropout,
)
NETWORKS = {name: make(plain) for name, make in MADE.items()}
REMATERIALISED = {name: make(jax.checkpoint) for name, make in MADE.items()}
SOME = jax.checkpoint_policies.save_only_these_names("hidden")


@parametrize_few("remat", [plain, jax.checkpoint])
@parametrize_few("name", MADE)
def test_exact(name, remat):
    network = MADE[name](remat)
    tiled = jaxtile.checkpoint(network, **TILED)
    assert len(tiled.explain(*ARGUMENTS).scans) == 1
    assert_close(results(tiled, ARGUMENTS), plain_results(network, ARGUMENTS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_layers(seed):
    chance = random.Random(seed)
    for _ in range(3):
        case = draw(chance)
        assert check(case) in ("exact, scan", "exact, unrolled", "ill-conditioned"), case
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("networks", [NETWORKS, REMATERIALISED], ids=["plain", "rematerialised"])
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
def test_exact_with(options, networks):
    options = {**TILED, **options}
    if "policy" in options:
        options["policy"] = jax.checkpoint_policies.save_only_these_names(options["policy"])
    network = networks["normed"]
    tiled = jaxtile.checkpoint(network, **options)
    assert len(tiled.explain(*ARGUMENTS).scans) == 1
    assert_close(results(tiled, ARGUMENTS), plain_results(network, ARGUMENTS))


def test_layers_smaller_than_the_grid():
    """A layer's output is not the user's, who gives no grid for it: it gets a tile per row."""

    def network(w, x):
        x = lax.scan(jax.checkpoint(residual), conv(x, w[0], stride=4), w[1])[0]
        return jnp.repeat(jnp.repeat(x, 4, 1), 4, 2)

    found = jaxtile.explain(network, *ARGUMENTS, in_axes=(None, (1, 2)), tiles=(12, 3))
    assert found.scans[0].layer.regions[-1].grid == (4, 3)


def equations(jaxpr):
    """How many there are, with those of inner programs."""
    inner = (e for eqn in jaxpr.eqns for e in jax.tree.leaves(list(eqn.params.values())))
    found = (getattr(e, "jaxpr", e) for e in inner)
    return len(jaxpr.eqns) + sum(equations(e) for e in found if hasattr(e, "eqns"))


@parametrize_few("activation", [jax.nn.relu, jnp.tanh], ids=["relu", "tanh"])
def test_nothing_grows_with_depth(activation):
    def layer(x, w):
        return x + activation(normed(conv(x, w))), None

    def size(depth, **options):
        shapes = WEIGHTS[0], jax.ShapeDtypeStruct((depth, *WEIGHTS[1].shape[1:]), float)
        tiled = jaxtile.checkpoint(over_layers(layer, **options), **TILED)
        step = jax.grad(lambda *args: tiled(*args)[0].sum())
        return equations(jax.make_jaxpr(step)(shapes, IMAGE).jaxpr)

    assert size(3) == size(900)
    assert size(3, unroll=True) > size(2, unroll=True) > size(3)


def test_what_is_stored():
    """Outputs of every layer, and what the policy inside saves."""
    saving = over_layers(jax.checkpoint(residual, policy=SOME))
    kept, stored = (
        jaxtile.explain(f, *ARGUMENTS, **TILED).scans[0] for f in (NETWORKS["normed"], saving)
    )
    carry = 2 * 7 * 6 * 4 * 8
    assert kept.layers == 3
    assert kept.layer.stored_bytes == carry + 3 * 4 * 8 + 8  # statistics, and a mean
    assert stored.layer.stored_bytes == kept.layer.stored_bytes + carry
    assert f"3 layers at {__file__}" in str(jaxtile.explain(saving, *ARGUMENTS, **TILED))


@pytest.mark.slow
def test_what_a_step_takes():
    """An array per layer; of a scan of scans that are rematerialised, those of one round."""

    def most(network, length):
        weights = jax.ShapeDtypeStruct((length, *WEIGHTS[1].shape[1:]), float)
        step = jax.grad(lambda w, x: jaxtile.checkpoint(network, **TILED)(w, x)[0].sum())
        traced = jax.jit(step).trace((WEIGHTS[0], weights), IMAGE)
        return jaxtile.estimate_memory(traced).bytes.temporaries

    normed, nested = NETWORKS["normed"], REMATERIALISED["nested"]
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
    asked=(residual, dict(unroll=True)),
    as_long=(jax.checkpoint(residual), dict(unroll=3)),
    cheap=(lambda x, w: (jnp.sin(x) * w[0, 0, 0] + x.mean(), None), {}),
    host=(jax.checkpoint(residual, policy=OFFLOAD), {}),
    one=(residual, dict(length=1)),
)


@pytest.mark.parametrize(("layer", "options"), UNROLLED.values(), ids=UNROLLED)
def test_unrolled(layer, options):
    """If the author asks for it, of layers that cost nothing or are offloaded, and of only one."""
    arguments = (WEIGHTS[0], WEIGHTS[1][: options.get("length", 3)]), IMAGE
    assert not jaxtile.explain(over_layers(layer, **options), *arguments, **TILED).scans


def test_unrolled_from_the_last_to_the_first():
    def layer(x, w):
        x = conv(x, w)
        return x, x[..., 0]

    def network(w, x):
        return lax.scan(layer, conv(x, w[0]), w[1], reverse=True, unroll=True)

    tiled = jaxtile.checkpoint(network, **TILED)
    assert not tiled.explain(*ARGUMENTS).scans
    assert_close(results(tiled, ARGUMENTS), results(network, ARGUMENTS))


def test_kept():
    """A part that is unrolled, and a part of a layer that is rematerialised, change nothing."""
    for layer in (residual, lambda x, w: (conv(jax.checkpoint(jnp.sin)(x), w), None)):
        network = over_layers(layer, unroll=2)
        assert len(jaxtile.explain(network, *ARGUMENTS, **TILED).scans) == 1


def test_unrolled_where_that_helps():
    """What no layer can do in tiles may be left out in each of them, as is known once it has a
    number."""

    def layer(x, a):
        i, w = a
        return lax.cond(i > 5, lambda x: jnp.sort(x, 1), lambda x: conv(x, w), x), None

    def network(w, x):
        return lax.scan(layer, conv(x, w[0]), (jnp.arange(3), w[1]))[0]

    tiled = jaxtile.checkpoint(network, **TILED)
    assert not tiled.explain(*ARGUMENTS).scans
    assert_close(results(tiled, ARGUMENTS), plain_results(network, ARGUMENTS))


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
    assert_close(results(tiled, ARGUMENTS), plain_results(network, ARGUMENTS))


def loop(layer, x, weights):
    """Of the second derivative of a `scan`, JAX before 0.12 forgets the rules."""
    for w in weights:
        x, _ = layer(x, w)
    return x, None


def surrogates(scan, remat=plain):
    layer = remat(lambda x, w: (x + surrogate(normed(conv(x, w))), None))
    return lambda w, x: scan(layer, conv(x, w[0]), w[1][:2])[0]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(3, 2), "whole", None])
@pytest.mark.parametrize("remat", [plain, jax.checkpoint])
def test_second_derivatives_of_rules_in_layers(remat, tiles):
    """Reverse over reverse, and forward over reverse."""

    def second(f):
        gradient = jax.grad(lambda w, x: scalar(f(w, x)), (0, 1))
        total = lambda *a: sum(jnp.sin(g).sum() for g in jax.tree.leaves(gradient(*a)))  # noqa: E731
        tangents = jax.tree.map(jnp.cos, ARGUMENTS)
        run = lambda *a: (jax.grad(total, (0, 1))(*a), jax.jvp(gradient, a, tangents))  # noqa: E731
        return interpret(run, *ARGUMENTS)

    tiled = jaxtile.checkpoint(surrogates(lax.scan, remat), **{**TILED, "tiles": tiles})
    assert len(tiled.explain(*ARGUMENTS).scans) == 1
    assert_close(second(tiled), second(surrogates(loop)), 1e-11)


def test_other_derivatives_of_rules_in_layers():
    """Before 0.12 JAX forgets them in the third one: refused; the advice is to unroll."""

    def third(tiles, **options):
        network = surrogates(lambda *args: lax.scan(*args, **options))
        tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=tiles)
        first = jax.grad(lambda x: tiled(WEIGHTS, x).sum())
        second = jax.grad(lambda x: jnp.sin(first(x)).sum())
        return jax.make_jaxpr(lambda x: jax.jvp(second, (x,), (x,)))(IMAGE)

    if jax.__version_info__ >= (0, 12):
        third("whole")
    else:
        with pytest.raises(jaxtile.TilingError, match=r"for the third time.*unroll=True"):
            third("whole")
        third("whole", unroll=True)
        tiled = jaxtile.checkpoint(surrogates(lax.scan), **TILED)
        with pytest.raises(jaxtile.TilingError, match="forward mode"):
            jax.jvp(lambda x: tiled(WEIGHTS, x), (IMAGE,), (IMAGE,))
