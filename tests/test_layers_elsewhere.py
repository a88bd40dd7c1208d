"""Scans over layers as libraries write them, and inside other transformations."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxtile

from .meshes import devices
from .support import assert_close, plain_results, results
from .test_layers import ARGUMENTS, IMAGE, NETWORKS, REMATERIALISED, TILED, WEIGHTS


def check(apply, weights, scans=1):
    tiled = jaxtile.checkpoint(apply, **TILED)
    assert len(tiled.explain(weights, IMAGE).scans) == scans
    assert_close(results(tiled, (weights, IMAGE)), plain_results(apply, (weights, IMAGE)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Conv(2, (3, 3), param_dtype=float)(x)
        y = x + nn.BatchNorm(use_running_average=False, param_dtype=float)(nn.relu(y))
        return nn.Dropout(0.3, deterministic=False)(y), None


@pytest.mark.slow
@pytest.mark.parametrize("block", [Block, nn.remat(Block)], ids=["plain", "rematerialised"])
def test_linen(block):
    axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
    network = nn.scan(block, variable_axes=axes, split_rngs=rngs, length=3)()
    keys = dict(params=jax.random.key(0), dropout=jax.random.key(1))
    variables = network.init(keys, IMAGE, None)

    def apply(v, x):
        return network.apply(v, x, None, mutable=["batch_stats"], rngs=keys)

    check(apply, variables)


@pytest.mark.slow
def test_remat_scan_of_linen():
    class Carried(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Conv(2, (3, 3), param_dtype=float)(x)
            return x + nn.BatchNorm(use_running_average=False, param_dtype=float)(nn.relu(y))

    axes = {"params": 0, "batch_stats": 0}
    network = nn.remat_scan(Carried, lengths=(2, 2), variable_axes=axes)()
    variables = network.init(jax.random.key(0), IMAGE)
    apply = lambda v, x: network.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    (outer,) = jaxtile.explain(apply, variables, IMAGE, **TILED).scans
    assert (outer.layers, outer.layer.scans[0].layers) == (2, 2)
    check(apply, variables)


@pytest.mark.slow
def test_nnx():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 2, (3, 3), param_dtype=float, rngs=rngs)
            self.norm = nnx.BatchNorm(2, param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return x + self.norm(nnx.relu(self.conv(x)))

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return Block(nnx.Rngs(key))

    graph, state = nnx.split(make(jax.random.split(jax.random.key(0), 3)))

    def apply(state, x):
        blocks = nnx.merge(graph, state)
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, blocks
        )
        return x, nnx.state(blocks, nnx.BatchStat)

    check(apply, state)


@pytest.mark.slow
def test_haiku():
    def block(x):
        y = jax.nn.relu(hk.Conv2D(2, 3)(x))
        return x + (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-3)

    network = hk.without_apply_rng(hk.transform(lambda x: hk.layer_stack(3)(block)(x)))
    check(network.apply, network.init(jax.random.key(0), IMAGE))


@pytest.mark.slow
def test_equinox():
    class Block(eqx.Module):
        conv: eqx.nn.Conv2d

        def __init__(self, key):
            self.conv = eqx.nn.Conv2d(2, 2, 3, padding=1, key=key, dtype=float)

        def __call__(self, x):
            return x + jax.nn.relu(self.conv(x))

    blocks = eqx.filter_vmap(Block)(jax.random.split(jax.random.key(0), 3))
    arrays, static = eqx.partition(blocks, eqx.is_array)

    def apply(arrays, x):
        def step(x, own):
            return jax.vmap(eqx.combine(own, static))(x), None

        x, _ = lax.scan(step, x.transpose(0, 3, 1, 2), arrays)
        return x

    check(apply, arrays)


def shard_mapped(f):
    mesh = devices(2, names=("data",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        return lax.psum(sum(jnp.sin(y).mean() for y in jax.tree.leaves(f(w, x))), "data")

    each = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(jax.value_and_grad(each, (0, 1)))(*ARGUMENTS)


def mapped(f):
    def gradient(w, x):
        return jax.grad(lambda *a: sum(jnp.sin(y).sum() for y in f(*a)[0][0]), (0, 1))(w, x)

    weights = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), WEIGHTS)
    return jax.jit(jax.vmap(gradient))(weights, jnp.stack([IMAGE, IMAGE**2]))


def pushed(f):
    directions = jax.tree.map(jnp.cos, ARGUMENTS)
    return jax.jit(lambda *a: jax.jvp(f, a, directions))(*ARGUMENTS)


def again(f):
    gradient = jax.grad(lambda x: jnp.sin(f(WEIGHTS, x)[0][0]).sum())
    return jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),)))(IMAGE)


def eager(f):
    return results(f, ARGUMENTS, jit=False)


RUNS = [
    (run, name)
    for run in (shard_mapped, mapped, pushed, again, eager)
    for name in ("normed", "carries", "nested", "dropout")
    if (run, name) != (shard_mapped, "carries")  # plain JAX wants its carries cast there
]


@pytest.mark.slow
@pytest.mark.parametrize("networks", [NETWORKS, REMATERIALISED], ids=["plain", "rematerialised"])
@pytest.mark.parametrize(("run", "name"), RUNS, ids=lambda x: getattr(x, "__name__", x))
def test_inside(run, name, networks):
    tiled = jaxtile.checkpoint(networks[name], **TILED)
    if run is pushed and name == "dropout" and jax.__version_info__ < (0, 12):  # it has a ReLU
        with pytest.raises(jaxtile.TilingError, match="forward mode"):
            run(tiled)
    else:
        assert_close(run(tiled), run(networks[name]))
