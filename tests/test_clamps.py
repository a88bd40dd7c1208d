"""ReLU and its like, whose derivative asks the result where the operand need not wait."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile._graph.build import build
from jaxtile._graph.trace import trace

from .support import assert_close, assert_same, conv, normal, parametrize_few

AXES = (None, (1, 2))


@jax.custom_jvp
def straight_through(x):
    return jnp.maximum(x, 0.0)


@straight_through.defjvp
def _(primals, tangents):
    return straight_through(*primals), tangents[0]


@jax.custom_jvp
def leaks_at_zero(x):
    return jnp.maximum(x, 0.0)


@leaks_at_zero.defjvp
def _(primals, tangents):
    return leaks_at_zero(*primals), jnp.where(primals[0] >= 0.0, tangents[0], 0.0)


@jax.custom_jvp
def looked_at(x):
    return jnp.maximum(x, 0.0)


@looked_at.defjvp
def _(primals, tangents):
    """With equations that have no results, and operands that are numbers."""
    jax.debug.callback(lambda: None)
    inside = jax.lax.bitwise_and(primals[0] > 0.0, True)
    return looked_at(*primals), jax.lax.select(inside, tangents[0], jnp.zeros_like(tangents[0]))


def network(function):
    def loss(kernels, x):
        for kernel in kernels:
            x = checkpoint_name(conv(x, kernel), "pre")
            x = checkpoint_name(function(x), "post")
        return jnp.sum(jnp.sin(conv(x, kernels[0])))

    return loss


def arguments(dtype="float64"):
    kernels = [normal(seed, 3, 3, 2, 2).astype(dtype) for seed in (0, 1)]
    return kernels, 4 * normal(2, 1, 9, 7, 2).astype(dtype)


def primitives(loss, kernels, x):
    traced = trace(loss, (kernels, x), {}, AXES)
    nodes = build(traced).nodes
    return [node.op for node in nodes]


@pytest.mark.parametrize(
    "function, restated",
    [
        (jax.nn.relu, True),
        (jax.nn.relu6, True),
        (straight_through, False),
        (leaks_at_zero, False),
        (looked_at, False),
        (lambda x: jnp.maximum(x, 0), False),
        (jax.nn.gelu, False),
    ],
)
def test_only_what_is_a_clamp_with_its_rule_is_restated(function, restated):
    loss, given = network(function), arguments()
    assert primitives(loss, *given).count("clamp_by_result") == 2 * restated
    assert_same(loss, *given, in_axes=AXES, tiles=(2, 3))


def test_after_a_norm_the_operand_is_asked():
    def loss(kernels, x):
        x = conv(x, kernels[0])
        x = jax.nn.relu(x * kernels[1][0, 0, 0])
        return jnp.sum(conv(x, kernels[0]))

    assert "clamp_by_result" not in primitives(loss, *arguments())


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.relu6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_same_bits_also_on_the_bounds(function, dtype):
    special = [0.0, -0.0, 6.0, np.inf, -np.inf, np.nan, 1e-38, -1e-38, 3.0, 7.0, -1.0, 5.9999]
    x = jnp.resize(jnp.array(special, dtype), (1, 4, 3, 1))
    one = jnp.ones((1, 1, 1, 1), dtype)

    def loss(kernel, x):
        return jnp.sum(jnp.nan_to_num(conv(function(conv(x, kernel)), kernel)))

    assert "clamp_by_result" in primitives(loss, one, x)
    expected = jax.jit(jax.grad(loss, 1))(one, x)
    for options in ({"tiles": (2, 3)}, {"tiles": None}):
        tiled = jaxtile.checkpoint(loss, in_axes=AXES, **options)
        found = jax.jit(jax.grad(tiled, 1))(one, x)
        np.testing.assert_array_equal(found, expected)


def test_second_derivatives_at_zero_are_those_of_the_rule():
    def loss(kernel, x):
        y = conv(jax.nn.relu(conv(x, kernel)), kernel)
        return jnp.sum(y**3)

    x = jnp.array([0.0, 1.0, -1.0, 2.0]).reshape(1, 2, 2, 1)
    one = jnp.ones((1, 1, 1, 1))
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(2, 1))
    assert_close(*(jax.jit(jax.hessian(f, (0, 1)))(one, x) for f in (tiled, loss)))


def test_the_operand_does_not_wait_for_the_backward_pass():
    def held(function):
        outline = jaxtile.policy.outline(network(function), *arguments(), in_axes=AXES)
        return {p.name: p.held_bytes > 0 for p in outline.parts if p.name.startswith("p")}

    names = ("pre", "post", "pre:2", "post:2")
    assert held(jax.nn.relu) == dict.fromkeys(names, True) | {"pre": False, "pre:2": False}
    assert held(straight_through) == dict.fromkeys(names, True)


def named_outputs(kernels, x):
    for k, kernel in enumerate(kernels):
        x = checkpoint_name(jax.nn.relu(conv(x, kernel) + 0.1), f"layer{k}")
    return jnp.sum(conv(x, kernels[0]) ** 3)


def in_one_piece(*stored):
    policy = jax.checkpoint_policies.save_only_these_names(*stored)
    return {"in_axes": AXES, "tiles": "whole", "policy": policy}


def test_a_stored_result_is_not_computed_again_for_its_derivative():
    given = arguments()

    def flops(fun):
        return jax.jit(jax.grad(fun)).lower(*given).compile().cost_analysis()["flops"]

    def storing(*names):
        return flops(jaxtile.checkpoint(named_outputs, **in_one_piece(*names)))

    convolution = 2 * 3 * 3 * 2 * 2 * 9 * 7  # of one layer; a little less, because of the border
    assert storing("layer0", "layer1") - flops(named_outputs) < 0.6 * convolution
    assert storing("layer1") - storing("layer0", "layer1") > 0.6 * convolution


@parametrize_few("stored", [("layer0", "layer1"), ("layer0",)])
def test_derivatives_where_results_are_known(stored):
    given, options = arguments(), in_one_piece(*stored)
    assert_same(named_outputs, *given, **options)
    tiled = jaxtile.checkpoint(named_outputs, **options)
    twice = [jax.hessian(lambda k, x, f=f: f([k, k], x)) for f in (tiled, named_outputs)]
    assert_close(*(jax.jit(run)(given[0][0], given[1]) for run in twice))
