"""What `jaxtile.checkpoint` returns, and its `budget`."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxtile
from jaxtile import nn

from .support import assert_close, assert_same, conv, normal

IMAGE = normal(0, 1, 64, 64, 8)
WEIGHTS = [normal(i, 3, 3, 8, 8) for i in range(1, 4)]
AXES = (None, (1, 2))


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(conv(x, w))
    return jnp.mean(x**2)


def compiled(fun):
    return jaxtile.Bytes.of(jax.jit(jax.value_and_grad(fun)).lower(WEIGHTS, IMAGE).compile()).total


def test_a_budget_is_kept_and_planned_once(capfd):
    budget = compiled(loss) // 2
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, budget=budget)
    assert compiled(tiled) <= budget
    planned = capfd.readouterr().err.count("plan:")
    assert planned > 0
    gradients = jax.jit(jax.grad(tiled))(WEIGHTS, IMAGE)
    assert_close(gradients, jax.jit(jax.grad(loss))(WEIGHTS, IMAGE))
    assert tiled.explain(WEIGHTS, IMAGE).regions
    assert capfd.readouterr().err.count("plan:") == 0


@pytest.mark.slow
def test_a_budget_of_a_function_of_modules():
    model = nn.Conv(8, 8, (3, 3), rngs=nnx.Rngs(0))

    def total(model, x):
        return jnp.sum(jnp.tanh(model(jnp.tanh(model(x)))) ** 2)

    tiled = nn.checkpoint(total, in_axes=AXES, budget="600KiB")
    got, want = (nnx.jit(nnx.grad(fun))(model, IMAGE) for fun in (tiled, total))
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(want))
    assert tiled.explain(model, IMAGE).regions


def test_a_budget_and_a_policy():
    with pytest.raises(jaxtile.TilingError, match="both say what is stored"):
        jaxtile.checkpoint(loss, in_axes=AXES, budget="1GiB", policy="sqrt")
    with pytest.raises(ValueError, match="is not an amount of memory"):
        jaxtile.checkpoint(loss, in_axes=AXES, budget="much")


def test_it_is_the_function_that_it_wraps():
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(2, 2))
    assert tiled.__name__ == "loss"
    assert tiled.__wrapped__ is loss
    assert repr(tiled).startswith("jaxtile.checkpoint(<function loss")

    class Model:
        weights = WEIGHTS

        def loss(self, x):
            return loss(self.weights, x)

        tiled = jaxtile.checkpoint(lambda self, x: self.loss(x), in_axes=AXES, tiles=(2, 2))

    jax.tree_util.register_static(Model)
    assert_close(Model().tiled(IMAGE), loss(WEIGHTS, IMAGE))


def test_arrays_that_have_some_of_the_tiled_axes():
    rows, columns = normal(5, 64, 1, 8), normal(6, 64, 8)

    def fun(x, rows, columns):
        return jnp.tanh(x * rows - columns)

    axes = ((1, 2), (0, None), (None, 0))
    assert_same(fun, IMAGE, rows, columns, in_axes=axes, tiles=(4, 2))
