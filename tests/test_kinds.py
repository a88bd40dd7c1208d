"""Tiles inside an image have a loop of their own, in which no read is shifted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile

from .support import assert_same, conv, max_pool, normal, parametrize_few

AXES = (None, (1, 2))


def network(kernels, x):
    first, second = kernels
    y = jnp.tanh(conv(x, first) + 1.0)
    y = max_pool(y, 3, 1, "SAME") + conv(y, second, 1, "SAME", rhs_dilation=(2, 2))
    y = (y - y.mean((1, 2))) * jax.lax.rsqrt(y.var((1, 2)) + 0.1)
    return conv(jax.nn.relu(y), second, 2), y.max((1, 2))


def arguments(height, width, batch=1):
    kernels = 0.3 * normal(0, 3, 3, 2, 4), 0.3 * normal(1, 3, 3, 4, 4)
    return kernels, normal(2, batch, height, width, 2)


def inner(eqn) -> list:
    called = [*eqn.params.values(), *eqn.params.get("branches", ())]
    found = [getattr(p, "jaxpr", p) for p in called]
    return [jaxpr for jaxpr in found if hasattr(jaxpr, "eqns")]


def loops(jaxpr) -> list[tuple[int, int]]:
    """Per loop over tiles, in order: how many tiles, and how many reads at traced positions."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found.append((eqn.params["length"], sum(map(reads, inner(eqn)))))
        else:
            found += [loop for body in inner(eqn) for loop in loops(body)]
    return found


def reads(jaxpr) -> int:
    own = sum(eqn.primitive.name == "dynamic_slice" for eqn in jaxpr.eqns)
    return own + sum(reads(body) for eqn in jaxpr.eqns for body in inner(eqn))


@pytest.mark.parametrize("skip", [False, True])
def test_inside_only_the_input_is_read_at_a_position_of_the_tile(skip):
    def three(kernel, x):
        for _ in range(3):
            x = jnp.tanh(conv(x, kernel))
        return x

    tiled = jaxtile.checkpoint(three, in_axes=AXES, tiles=(8, 8), skip=skip)
    kernel, x = normal(0, 3, 3, 1, 1), normal(1, 1, 64, 64, 1)
    border, inside = loops(jax.make_jaxpr(tiled)(kernel, x).jaxpr)
    assert (border[0], inside) == (64 - 36, (36, 1))
    assert border[1] == 4  # and what each convolution reads of the window before it


def test_few_tiles_have_one_loop():
    tiled = jaxtile.checkpoint(lambda k, x: conv(conv(x, k), k), in_axes=AXES, tiles=(3, 3))
    kernel, x = normal(0, 3, 3, 1, 1), normal(1, 1, 64, 64, 1)
    assert [n for n, _ in loops(jax.make_jaxpr(tiled)(kernel, x).jaxpr)] == [9]


@parametrize_few("size, tiles", [((23, 5), (9, 1)), ((24, 24), (8, 8)), ((29, 26), (7, 9))])
def test_values_and_gradients(size, tiles):
    assert_same(network, *arguments(*size), in_axes=AXES, tiles=tiles)


def test_tiles_keep_their_order_for_what_is_remembered():
    """Of a maximum, each tile remembers something: it must get that back, and not another's."""

    def peaks(kernel, x):
        y = conv(x, kernel)
        return y.max((1, 2)) + 2 * y.min(2).sum(1)

    x = normal(1, 2, 31, 9, 1)
    assert_same(peaks, normal(0, 3, 3, 1, 2), x, in_axes=AXES, tiles=(10, 1))
    assert_same(peaks, normal(0, 3, 3, 1, 2), jnp.round(x), in_axes=AXES, tiles=(8, 3))


def test_random_numbers_are_those_of_the_position():
    def noisy(kernel, x):
        y = conv(x, kernel)
        return conv(y * jax.random.bernoulli(jax.random.key(3), 0.5, y.shape), kernel)

    assert_same(noisy, normal(0, 3, 3, 2, 2), normal(1, 1, 40, 8, 2), in_axes=AXES, tiles=(9, 2))


@pytest.mark.slow
def test_under_vmap_and_jvp():
    def loss(kernel, x):
        return jnp.sum(jnp.sin(conv(jnp.tanh(conv(x, kernel)), kernel)))

    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(8, 1))
    kernel, x = normal(0, 3, 3, 1, 1), normal(1, 3, 1, 24, 7, 1)
    for fun in (jax.grad, jax.jacfwd, jax.hessian):
        got, want = (jax.jit(jax.vmap(fun(f), (None, 0)))(kernel, x) for f in (tiled, loss))
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
