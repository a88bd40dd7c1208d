"""Regions that are recomputed whole, and values that wait in host memory."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile._run import whole
from jaxtile._run.tile import Tile
from jaxtile._run.whole import by_halves

from .support import assert_close, assert_same, conv, normal, parametrize_few

IMAGE = normal(0, 2, 13, 11, 3)
WEIGHTS = [normal(i, 3, 3, 3, 3) for i in range(1, 5)]
AXES = (None, (1, 2))


def network(weights, x):
    """Convolutions and batch norms, with the statistics as outputs too."""
    means = []
    for i, w in enumerate(weights):
        x = checkpoint_name(conv(x, w), f"conv{i}")
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        means.append(mean)
        x = checkpoint_name(jax.nn.relu((x - mean) / jnp.sqrt(var + 1e-3)), f"relu{i}")
    return jnp.sum(jnp.sin(x) ** 2), means


def saved(*names: str):
    return jax.checkpoint_policies.save_only_these_names(*names)


@parametrize_few(
    "tiles",
    [
        {"relu1": "whole", ...: (3, 2)},
        {"relu1": (3, 2), ...: "whole"},
        "whole",
        {"relu1": "whole", ...: None},
        {"relu1": None, ...: "whole"},
        {"conv2": (2, 2), "relu1": "whole", ...: "whole"},
        {"conv2": "whole", "relu1": (2, 3), ...: (2, 2)},
    ],
)
def test_mixed_with_tiles(tiles):
    names = ["relu1", *(k for k in tiles if isinstance(tiles, dict) and k is not ...)]
    assert_same(network, WEIGHTS, IMAGE, in_axes=AXES, tiles=tiles, policy=saved(*names))


def test_norms_are_not_cuts():
    explained = jaxtile.explain(network, WEIGHTS, IMAGE, in_axes=AXES, policy=saved("relu1"))
    assert [r.grid for r in explained.regions] == ["whole", "whole"]
    assert [r.ops["conv_general_dilated"] for r in explained.regions] == [2, 2]
    # One more forward pass, but for the last operations of each region.
    assert 0.98 * explained.forward_flops < explained.recomputed_flops < explained.forward_flops


def test_a_reduction_takes_the_grid_of_the_value_it_belongs_to():
    tiles = {"relu1": (4, 4), ...: (2, 2)}
    explained = jaxtile.explain(
        network, WEIGHTS, IMAGE, in_axes=AXES, tiles=tiles, policy=saved("relu1")
    )
    grids = [r.grid for r in explained.regions]
    assert grids[0] == (4, 4)
    assert grids[-1] == (2, 2)
    assert grids == sorted(grids, reverse=True)


def offloaded(*names: str):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["conv2"],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


@parametrize_few("tiles", ["whole", (3, 2), {"relu1": (3, 2), ...: "whole"}])
def test_offloaded(tiles):
    assert_same(network, WEIGHTS, IMAGE, in_axes=AXES, tiles=tiles, policy=offloaded("relu1"))
    tiled = jaxtile.checkpoint(network, in_axes=AXES, tiles=tiles, policy=offloaded("relu1"))
    traced = str(jax.make_jaxpr(jax.grad(lambda w: tiled(w, IMAGE)[0]))(WEIGHTS))
    assert "Host" in traced
    assert "Device" in traced


def test_recomputation_survives_compilation():
    def convolutions(fun):
        step = jax.value_and_grad(fun, has_aux=True)
        return jaxtile.memory(step, WEIGHTS, IMAGE).compiled.convolutions

    plain = convolutions(network)
    for policy in (None, saved("relu1")):
        again = jaxtile.checkpoint(network, in_axes=AXES, policy=policy)
        assert convolutions(again) == plain + len(WEIGHTS)


@pytest.mark.slow
def test_second_derivatives_through_host_memory():
    def fun(w, x):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x * w), "relu1")))

    for policy in (saved("relu1"), offloaded("relu1")):
        again = jaxtile.checkpoint(fun, in_axes=AXES, policy=policy)
        got, want = (jax.grad(jax.grad(f))(0.7, IMAGE) for f in (again, fun))
        assert_close(got, want)


def test_offloaded_under_vmap():
    def fun(w, x):
        return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x * w), "relu1")))

    again = jaxtile.checkpoint(fun, in_axes=AXES, policy=offloaded("relu1"))
    weights = jnp.array([1.0, 2.0])
    got, want = (jax.vmap(jax.grad(f), (0, None))(weights, IMAGE) for f in (again, fun))
    assert_close(got, want)


def test_the_sign_of_zero_survives():
    def fun(w, x):
        return jnp.sum(jnp.where(jnp.signbit(x), 2 * x * w.sum(), 3 * x))

    zeros = -jnp.zeros_like(IMAGE)
    again = jaxtile.checkpoint(fun, in_axes=AXES)
    got, want = (jax.jit(jax.grad(f, 1))(WEIGHTS[0], zeros) for f in (again, fun))
    assert jnp.array_equal(got, want)


def test_results_that_are_python_numbers_become_arrays():
    out = jaxtile.checkpoint(lambda w, x: (3.0, conv(x, w), 2), in_axes=AXES)(WEIGHTS[0], IMAGE)
    assert all(isinstance(x, jax.Array) for x in out)


def until_large(w, x):
    """A `while` on what is stored: it has no derivative, and needs none here."""
    x = checkpoint_name(conv(x, w), "stored")
    large = jax.lax.while_loop(lambda y: y.max() < 9, lambda y: y * 1.5, 1 + x**2)
    return conv(jax.lax.stop_gradient(checkpoint_name(large, "large")) + x, w)


@pytest.mark.parametrize("names", [("stored",), ("stored", "large")])
@pytest.mark.parametrize("tiles", [(3, 2), "whole"])
def test_what_has_no_cotangent_does_not_run_backwards(tiles, names):
    w = WEIGHTS[0]
    assert_same(until_large, w, IMAGE, in_axes=AXES, tiles=tiles, policy=saved(*names))


def test_a_teacher_runs_forwards_only():
    def distance(student, teacher, x, z):
        wanted = checkpoint_name(network(teacher, z)[0] * z, "wanted")
        return ((network(student, x)[0] - jax.lax.stop_gradient(wanted)) ** 2).mean()

    axes = (None, None, (1, 2), (1, 2))
    tiled = jaxtile.checkpoint(distance, in_axes=axes, tiles=(2, 2), policy=saved("wanted"))

    def pulled_back(*argnums):
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            pullback = Tile.pullback
            patch.setattr(Tile, "pullback", lambda t, *a: seen.append(t.region) or pullback(t, *a))
            jax.make_jaxpr(jax.grad(tiled, argnums))(WEIGHTS[:2], WEIGHTS[2:], IMAGE, -IMAGE)
        return {region.index for region in seen}

    assert pulled_back(0) == pulled_back(0, 1)


@pytest.mark.parametrize("shape", [(2, 13, 11, 3), (1, 13, 12, 3), (1, 13, 11, 3), (1, 1, 1, 2)])
def test_sums_by_halves(shape):
    """With derivatives."""
    total, x = normal(0, *shape), normal(1, *shape)
    assert (jax.jit(by_halves)(total, x) == total + x).all()
    both = jax.grad(lambda a, b: jnp.sum(by_halves(a, b) ** 3), (0, 1))(total, x)
    assert_close(both, (3 * (total + x) ** 2,) * 2)


def test_large_sums_are_added_by_halves(monkeypatch):
    """As on a GPU: two regions in one piece read one stored array."""
    monkeypatch.setattr(whole, "_LARGE", 0)
    monkeypatch.setattr(whole.lax, "platform_dependent", lambda *x, cpu, default: default(*x))
    policy = saved("conv0", "relu1", "conv2")
    tiled = jaxtile.checkpoint(skipping, in_axes=AXES, tiles="whole", policy=policy)
    step = jax.make_jaxpr(jax.grad(tiled))(WEIGHTS, IMAGE)
    assert "dynamic_update_slice" in str(step)
    assert_same(skipping, WEIGHTS, IMAGE, in_axes=AXES, tiles="whole", policy=policy)


def skipping(weights, x):
    """A stored result that is read again, two layers later."""
    first = checkpoint_name(conv(x, weights[0]), "conv0")
    x = checkpoint_name(jax.nn.relu(conv(first, weights[1])), "relu1")
    x = checkpoint_name(conv(x, weights[2]) + jnp.tanh(first), "conv2")
    return jnp.sum(jnp.sin(conv(x, weights[3])) ** 2)
