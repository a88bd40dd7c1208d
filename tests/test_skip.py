"""Tiles that are skipped: the result is that of the plain function, and they are not computed."""

from collections import Counter

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile import TilingError
from jaxtile._run.tile import Tile

from .random_networks import networks
from .support import assert_close, assert_same, conv, max_pool, normal
from .test_random_networks import _SETTINGS
from .test_stream import Source
from .test_stream_gradients import normalised

W = {"a": normal(1, 3, 3, 3, 4), "b": normal(2, 3, 3, 4, 4), "bias": normal(3, 4)}
AXES = (None, (1, 2), (1, 2))
SAVED = jax.checkpoint_policies.save_only_these_names("one")


def network(p, x, labels):
    """f(0) != 0, batch statistics, and labels of which 0 counts for nothing."""
    x = checkpoint_name(conv(x / 255.0, p["a"]) + p["bias"], "one")
    x = max_pool(conv(jax.nn.sigmoid(normalised(x)), p["b"]) + 1)
    return jnp.where(labels[..., None] > 0, x**2, 0).mean()


def slide(size=64, first=24, last=40):
    """An image and its labels, with something in a sixteenth of it only."""
    chance, inside = np.random.default_rng(0), (slice(None), slice(first, last), slice(first, last))
    image = np.full((1, size, size, 3), 255, np.uint8)
    image[inside] = chance.integers(0, 256, image[inside].shape)
    labels = np.zeros((1, size // 2, size // 2), np.uint8)
    labels[:, first // 2 : last // 2, first // 2 : last // 2] = 1
    return image, labels


@pytest.fixture
def computed(monkeypatch):
    """How many tiles of each region are computed, while they are."""
    counts, evaluate = Counter(), Tile._evaluate

    def counted(self, windows, globals_, row):
        jax.debug.callback(lambda: counts.update([self.region.index]))
        return evaluate(self, windows, globals_, row)

    monkeypatch.setattr(Tile, "_evaluate", counted)
    return counts


def test_in_loops_and_from_disk(computed):
    image, labels = slide()
    want = jax.jit(jax.value_and_grad(network))(W, image, labels)
    tiled = jaxtile.checkpoint(network, in_axes=AXES, tiles=(16, 16), policy=SAVED, skip=True)
    assert_close(jax.jit(jax.value_and_grad(tiled))(W, image, labels), want)
    jax.effects_barrier()
    in_loops = dict(computed)
    computed.clear()
    # 36 of 256 tiles read something, and 9 are the first of their kind; forwards and backwards.
    assert in_loops[0] == in_loops[2] == 2 * (36 + 9)
    assert in_loops[1] < 2 * 256 / 3  # without a halo those at the border are all of one kind
    streamed = jaxtile.stream(network, in_axes=AXES, tiles=(16, 16), policy=SAVED, skip=True)
    seen = []
    tell = lambda done, total: seen.append((done, total, streamed.skipped))  # noqa: E731
    assert_close(streamed.value_and_grad(W, image, labels, progress=tell), want)
    jax.effects_barrier()
    assert dict(computed) == in_loops
    done, total, skipped = seen[-1]
    assert done == total == skipped + sum(in_loops.values())


def test_explain_counts_those_of_the_forward_pass(computed):
    image, labels = slide()
    tiled = jaxtile.checkpoint(network, in_axes=AXES, tiles=(16, 16), policy=SAVED, skip=True)
    found = tiled.explain(W, image, labels)
    jax.jit(tiled)(W, image, labels)
    jax.effects_barrier()
    at_most = [256 - region.skipped for region in found.regions]
    assert at_most[0] == computed[0] == 36 + 9
    assert all(computed[i] <= n < 256 for i, n in enumerate(at_most))
    assert f"skips at least {found.regions[0].skipped} of 256 tiles" in str(found)


@pytest.mark.slow
def test_without_cotangents(computed):
    """Half of the image counts for nothing: its noise is read, and not differentiated."""

    def loss(w, x):
        y = checkpoint_name(conv(x, w["a"]), "one")
        return jnp.tanh(conv(y, w["b"]))[:, :32].sum()

    tiled = jaxtile.checkpoint(loss, in_axes=AXES[:2], tiles=(8, 4), policy=SAVED, skip=True)
    image = normal(0, 1, 64, 64, 3)
    want = jax.jit(jax.grad(loss))(W, image)
    assert_close(jax.jit(jax.grad(tiled))(W, image), want)
    jax.effects_barrier()
    assert computed[0] == 32 + (4 + 1) * 4  # one row of tiles lies in the halo of what counts
    streamed = jaxtile.stream(loss, in_axes=AXES[:2], tiles=(8, 4), policy=SAVED, skip=True)
    assert_close(streamed.value_and_grad(W, image)[1], want)
    jax.effects_barrier()
    assert computed[0] == 2 * (32 + (4 + 1) * 4)


def test_what_depends_on_positions_is_computed(computed):
    """Dropout, a coordinate, and -0.0, which equals 0.0."""

    def fun(x):
        x = x + jnp.arange(24.0)[:, None, None] * jax.random.bernoulli(
            jax.random.key(0), 0.5, x.shape
        )
        return jnp.tanh(x)

    assert_same(fun, jnp.zeros((1, 24, 24, 2)), in_axes=((1, 2),), tiles=(4, 3), skip=True)
    jax.effects_barrier()
    assert computed[0] == 2 * 12
    image = jnp.zeros((1, 8, 8, 1)).at[:, 4:].set(-0.0)
    tiled = jaxtile.checkpoint(lambda x: 1 / x, in_axes=((1, 2),), tiles=(2, 2), skip=True)
    np.testing.assert_array_equal(jax.jit(tiled)(image), 1 / image)


def test_second_derivatives():
    """Tiles that read the same have other tangents, and zero cotangents have some as well."""
    blank = jnp.full((1, 12, 8, 3), 0.5).at[:, :4].set(normal(5, 1, 4, 8, 3))
    loss = lambda w, x: (jnp.tanh(conv(x, w["a"])) ** 3).sum()  # noqa: E731
    tiled = jaxtile.checkpoint(loss, in_axes=AXES[:2], tiles=(6, 2), skip=True)

    def found(fun):
        first = jax.grad(fun, (0, 1))
        sines = lambda *args: sum(jnp.sin(g).sum() for g in jax.tree.leaves(first(*args)))  # noqa: E731
        scaled = lambda s: sines(W, blank) + jax.grad(lambda x: s * fun(W, x))(blank).sum()  # noqa: E731
        pushed = jax.jvp(lambda x: first(W, x), (blank,), (normal(6, *blank.shape),))
        return jax.grad(sines, (0, 1))(W, blank), jax.grad(scaled)(0.0), pushed

    assert_close(jax.jit(lambda: found(tiled))(), jax.jit(lambda: found(loss))())


def test_a_mask_that_does_not_divide():
    source, mask = np.ones((1, 1000), np.uint8), np.zeros((1, 600))
    mask[0, 400:] = 1
    np.testing.assert_array_equal(
        np.flatnonzero(jaxtile.masked(source, mask)[0:1, 0:1000]), range(667, 1000)
    )
    digits = np.arange(1, 11, dtype=np.uint8)[None]
    assert jaxtile.masked(digits, np.array([[0, 0, 0, 0, 0, 0, 1]]))[0:1, 5:10].tolist() == [
        [0, 0, 0, 0, 10]
    ]


def test_a_mask_of_a_source():
    """A coarse one, over noise: what is masked is not read, and not computed."""
    noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
    mask = np.zeros((1, 8, 8, 1), bool)
    mask[:, 3:5, 3:5] = True
    source = Source(noise)
    loss = lambda w, x: (conv(x / 255.0, w["a"]) ** 2).mean()  # noqa: E731
    run = jaxtile.stream(loss, in_axes=AXES[:2], tiles=(8, 8), skip=True)
    found = run.value_and_grad(W, jaxtile.masked(source, mask, (250, 240, 245)))
    fine = mask.repeat(8, 1).repeat(8, 2)
    want = np.where(fine, noise, np.array([250, 240, 245], np.uint8))
    assert_close(found, jax.jit(jax.value_and_grad(loss))(W, want))
    assert run.skipped > 64
    assert source.reads == 2 * 4 * 4  # forwards and backwards: what counts, and its neighbours
    with pytest.raises(TilingError, match="as many dimensions as the source"):
        jaxtile.masked(noise, mask[0])


@pytest.mark.slow
@hypothesis.settings(max_examples=25, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks())
def test_random_networks(network):
    hypothesis.note(repr(network))
    kernels, image = network.args
    blank = image.at[:, image.shape[1] // 3 :].set(0.5)
    options = {"in_axes": (None, (1, 2)), "tiles": network.tiles, "policy": network.policy}
    assert_same(network, kernels, blank, skip=True, **options)
    # Here the cotangents of all positions are alike too.
    loss = lambda k, x: sum((y**2).mean() for y in jax.tree.leaves(network(k, x)))  # noqa: E731
    options["tiles"] = (3, 3)
    tiled = jaxtile.checkpoint(loss, skip=True, **options)
    assert_close(jax.jit(jax.grad(tiled))(kernels, blank), jax.jit(jax.grad(loss))(kernels, blank))
    jax.clear_caches()


def test_not_on_a_mesh():
    mesh = jax.make_mesh((1, 1), ("rows", "columns"))
    with pytest.raises(TilingError, match="`skip` is not for a `mesh`"):
        jaxtile.checkpoint(
            network, in_axes=AXES, mesh=mesh, mesh_axes=("rows", "columns"), skip=True
        )
