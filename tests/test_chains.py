"""Functions of one array, as GELU, are one equation, which keeps nothing but this array."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile._graph.build import build
from jaxtile._graph.trace import trace

from .support import assert_same, conv, normal

AXES = (None, (1, 2))
KERNELS = [0.3 * normal(seed, 3, 3, 4, 4) for seed in range(3)]
IMAGE = normal(3, 2, 9, 7, 4)


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def swish(x):
    return x * jax.nn.sigmoid(1.5 * x)


def in_a_row(x):
    return jax.nn.silu(jax.nn.gelu(x)) + jnp.sin(x)


def normed(x):
    """With numbers of channels, and of positions, beside the array."""
    scale = jax.lax.rsqrt(x.var((0, 1, 2)) + 0.1)
    return jax.nn.silu((x - x.mean((0, 1, 2))) * scale + KERNELS[0][0, 0, 0]) * x.max(-1)[..., None]


def network(function):
    def loss(kernels, x):
        for kernel in kernels:
            x = function(conv(x, kernel))
        return conv(x, kernels[0]).sum()

    return loss


def chains(function):
    traced = trace(network(function), (KERNELS, IMAGE), {}, AXES)
    return [node.op for node in build(traced).nodes].count("chain")


@pytest.mark.parametrize("function", [gelu, swish, in_a_row, normed])
def test_is_one_equation(function):
    assert chains(function) == len(KERNELS)
    assert_same(network(function), KERNELS, IMAGE, in_axes=AXES, tiles=(3, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.tanh(2 * x + 1),  # one derivative, which reads the result
        lambda x: jnp.cos(jnp.maximum(x, 0) > 0.5).astype(x.dtype) + x,  # not of floats
        lambda x: jax.nn.gelu(x + conv(x, KERNELS[0])),  # of two arrays
        lambda x: (x - x.mean((0, 1, 2))) * x.var((0, 1, 2)),  # linear but for what is small
        lambda x: x * checkpoint_name(jax.nn.sigmoid(x), "gate") + x,
        lambda x: (y := jax.nn.sigmoid(x)) * x + conv(y, KERNELS[0]),  # something else reads it
    ],
)
def test_is_not(function):
    assert chains(function) == 0


def test_what_is_saved_stays():
    def named(x):
        return x * checkpoint_name(jax.nn.sigmoid(x), "gate")

    saved = jax.checkpoint_policies.save_only_these_names("gate")
    tiled = jaxtile.checkpoint(network(named), in_axes=AXES, policy=saved, tiles=(3, 2))
    stored = [a.name for r in tiled.explain(KERNELS, IMAGE).regions for a in r.writes]
    assert stored.count("gate") == len(KERNELS)
    assert_same(network(named), KERNELS, IMAGE, in_axes=AXES, policy=saved, tiles=(3, 2))


@pytest.mark.parametrize("schedule", [{"policy": "store_all"}, {"policy": "sqrt", "tiles": (2, 2)}])
def test_second_derivatives(schedule):
    def slope(fun):
        return lambda kernels, x: (jax.grad(fun, 1)(kernels, x) ** 2).sum()

    tiled = jaxtile.checkpoint(network(gelu), in_axes=AXES, **schedule)
    got = jax.jit(jax.grad(slope(tiled)))(KERNELS, IMAGE)
    want = jax.jit(jax.grad(slope(network(gelu))))(KERNELS, IMAGE)
    for a, b in zip(got, want, strict=True):
        assert jnp.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_keeps_its_operand_only():
    """Of each layer two arrays wait: what it reads, and what the next one reads."""

    def waiting(fun):
        pull = jax.vjp(fun, KERNELS, IMAGE)[1]
        return sum(x.shape == IMAGE.shape for x in jax.tree.leaves(pull))

    tiled = jaxtile.checkpoint(network(gelu), in_axes=AXES, policy="store_all")
    assert waiting(tiled) == 2 * len(KERNELS) + 1 < waiting(network(gelu))
