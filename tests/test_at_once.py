"""The region of the loss: both passes in one loop, where that is the same."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .interpreter import interpret
from .support import assert_close, conv, max_pool, normal, parametrize_few

KERNELS = [normal(i, 3, 3, 2, 2) * 0.5 for i in range(3)]
IMAGE, LABELS, WEIGHTS = normal(7, 2, 13, 11, 2), normal(8, 2, 13, 11, 2), normal(9, 2, 13, 11) ** 2
AXES = (None, (1, 2), (1, 2), (1, 2))
ARGS = KERNELS, IMAGE, LABELS, WEIGHTS


def scores(kernels, image):
    for kernel in kernels[:-1]:
        image = jax.nn.softplus(conv(image, kernel) + 0.3)
    return conv(checkpoint_name(image, "last"), kernels[-1])


def mean(kernels, image, labels, weights):
    return ((scores(kernels, image) - labels) ** 2).mean()


def weighted(kernels, image, labels, weights):
    """Of two sums, the second one does not depend on the kernels. It needs its own labels."""
    errors = ((scores(kernels, image) - labels) ** 2).sum(-1)
    return jnp.log((errors * weights).sum() / weights.sum()) + 0.1 * (kernels[0] ** 2).sum()


def beside(kernels, image, labels, weights):
    """The scores are returned, too."""
    found = scores(kernels, image)
    return ((found - labels) ** 2).mean(), found


def product(kernels, image, labels, weights):
    return jnp.vdot(scores(kernels, image), labels)


def normed(kernels, image, labels, weights):
    """The loss waits for statistics."""
    found = scores(kernels, image)
    found = (found - found.mean((0, 1, 2))) / (1 + found.var((0, 1, 2)))
    return (found * labels).sum()


def dice(kernels, image, labels, weights):
    """A ratio of two sums that both depend on the kernels: the derivative has two factors."""
    found = jax.nn.sigmoid(scores(kernels, image))
    return 1 - 2 * (found * labels).sum() / (found.sum() + labels.sum())


def pooled(kernels, image, labels, weights):
    """As many factors as channels."""
    return (scores(kernels, image).mean((0, 1, 2)) ** 2).sum()


def highest(kernels, image, labels, weights):
    return scores(kernels, image).max()


def each(kernels, image, labels, weights):
    """One loss per image."""
    return ((scores(kernels, image) - labels) ** 2).mean((1, 2, 3))


def tiled(fun, tiles=(3, 2), **options):
    return jaxtile.checkpoint(fun, in_axes=AXES, tiles=tiles, **options)


def at_once(fun, **options):
    return [r.at_once for r in tiled(fun, **options).explain(*ARGS).regions]


def convolutions(fun):
    """How many tiles' convolutions a program has in its loops."""
    text = jax.jit(fun).lower(*ARGS).as_text()
    return text.count("stablehlo.while")


@pytest.mark.parametrize("fun", [mean, weighted, product])
def test_one_loop(fun):
    """Forwards and backwards."""
    assert at_once(fun) == [True]
    assert convolutions(jax.value_and_grad(tiled(fun))) == 1
    assert convolutions(tiled(fun)) == 1


def test_only_the_last_region():
    save = jax.checkpoint_policies.save_only_these_names("last")
    assert at_once(mean, policy=save) == [False, True]
    assert at_once(normed)[-1]
    assert not any(at_once(normed)[:-1])


@pytest.mark.parametrize("fun", [dice, pooled, highest, each])
def test_more_than_one_factor(fun):
    assert not any(at_once(fun))


def test_not_where_nothing_is_gained():
    assert at_once(mean, tiles="whole") == [False]
    assert at_once(mean, tiles=(1, 1)) == [False]
    assert at_once(mean, tiles=(3, 2), skip=True) == [False]


@parametrize_few(
    ("fun", "wanted"),
    [
        (weighted, (0, 1)),
        (beside, (0,)),
        (normed, (0, 2)),
        (mean, (0, 1, 2)),
        (weighted, (0, 3)),
        (weighted, (2, 3)),
        (product, (1, 2)),
        (dice, (0, 1)),
        (pooled, (0, 1)),
        (highest, (0, 1)),
    ],
    always=3,
)
@parametrize_few("tiles", [(3, 2), (13, 11), (5, 1), (1, 4)], always=2)
@parametrize_few("save", [False, True])
def test_gradients(fun, wanted, tiles, save):
    """Where other results have cotangents after all, the backward pass runs the region again."""
    policy = jax.checkpoint_policies.save_only_these_names("last") if save else None
    options = {"argnums": wanted, "has_aux": fun is beside}
    got = jax.jit(jax.value_and_grad(tiled(fun, tiles, policy=policy), **options))(*ARGS)
    assert_close(got, interpret(jax.value_and_grad(fun, **options), *ARGS))


def test_the_result_beside_has_a_cotangent():
    def both(run, *args):
        loss, found = run(*args)
        return jnp.sin(loss) + (found**3).mean()

    got = jax.jit(jax.grad(functools.partial(both, tiled(beside)), (0, 1)))(*ARGS)
    assert_close(got, interpret(jax.grad(functools.partial(both, beside), (0, 1)), *ARGS))

    def other(run, *args):
        return (run(*args)[1] ** 3).mean()

    got = jax.jit(jax.grad(functools.partial(other, tiled(beside)), (0, 1)))(*ARGS)
    assert_close(got, interpret(jax.grad(functools.partial(other, beside), (0, 1)), *ARGS))


@parametrize_few("fun", [weighted, normed])
def test_of_several_weights_at_once(fun):
    """`vmap` over weights, and a loss that is used twice."""

    def twice(run, scale):
        loss = run([k * scale for k in KERNELS], *ARGS[1:])
        return loss**2 + jnp.sin(loss)

    scales = jnp.asarray([0.5, 1.0, 1.5])
    got = jax.vmap(jax.grad(functools.partial(twice, tiled(fun))))(scales)
    want = jax.vmap(jax.grad(functools.partial(twice, fun)))(scales)
    assert_close(got, want)


@pytest.mark.parametrize("guarded", [False, True])
def test_no_labels(guarded):
    """The mean over none has no finite derivative, but nothing that it masks has one."""

    def loss(kernel, image, labels):
        there = ~jnp.isnan(labels)
        errors = jnp.where(there, jax.nn.softplus(kernel * image) - jnp.where(there, labels, 0), 0)
        total, count = (errors**2).sum(), there.sum()
        return jnp.where(count > 0, total / count, 0) if guarded else total / count

    args = jnp.float64(1.5), IMAGE[0, ..., 0], LABELS[0, ..., 0]
    tiled = jaxtile.checkpoint(loss, in_axes=(None, (0, 1), (0, 1)), tiles=(2, 2))
    for labels in (args[2], args[2] * jnp.nan):
        got, want = (jax.grad(run, (0, 1))(*args[:2], labels) for run in (tiled, loss))
        assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("fun", [mean, weighted, normed, product])
def test_second_derivatives(fun):
    def inner(run, kernels, image):
        found = jax.grad(run, (0, 1))(kernels, image, *ARGS[2:])
        return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(found))

    got = jax.jit(jax.grad(functools.partial(inner, tiled(fun)), (0, 1)))(*ARGS[:2])
    assert_close(got, jax.grad(functools.partial(inner, fun), (0, 1))(*ARGS[:2]))


def test_not_in_float16():
    """Gradients of 1e-8 are zero in float16, unless the loss is scaled before they are computed."""

    def loss(kernel, image):
        return jnp.mean(conv(image, kernel).astype("float32") * 1e-7)

    kernel, image = jnp.full((1, 1, 1, 1), 2, jnp.float16), jnp.ones((1, 8, 8, 1), jnp.float16)
    tiled = jaxtile.checkpoint(loss, in_axes=(None, (1, 2)), tiles=(2, 2))
    assert not any(r.at_once for r in tiled.explain(kernel, image).regions)

    def scaled(run, kernel):
        return 2.0**18 * run(kernel, image)

    got, want = (jax.grad(functools.partial(scaled, run))(kernel) for run in (tiled, loss))
    assert float(want.reshape(())) == pytest.approx(2**18 * 1e-7, rel=1e-3)
    assert float(got.reshape(())) == pytest.approx(2**18 * 1e-7, rel=1e-3)


@jax.custom_jvp
def square(x):
    return (x.astype("float16") ** 2).astype(x.dtype)


@square.defjvp
def _square_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return square(x), (2 * x.astype("float16") * t.astype("float16")).astype(x.dtype)


@pytest.mark.parametrize(
    "narrow",
    [
        square,
        lambda x: jax.lax.cond(x.sum() > 0, square, jnp.negative, x),
        lambda x: x.astype(jnp.float8_e5m2).astype(x.dtype),
        lambda x: jax.lax.reduce_precision(x, 5, 10),
    ],
)
def test_small_ranges_inside(narrow):
    def loss(kernel, image):
        return jnp.sum(narrow(kernel * image) * 1e-9) * 1e9

    kernel, image = jnp.float32(1.5), jnp.ones((4, 4), jnp.float32)
    tiled = jaxtile.checkpoint(loss, in_axes=(None, (0, 1)), tiles=(2, 2))
    assert not any(r.at_once for r in tiled.explain(kernel, image).regions)
    assert float(jax.grad(tiled)(kernel, image)) == pytest.approx(float(jax.grad(loss)(1.5, image)))


def test_an_image_of_float16():
    """Its own gradient must be in range; that of weights is."""

    def loss(kernel, image):
        return jnp.sum(kernel * image.astype("float32") * 1e6) / 1e6

    kernel, image = jnp.float32(1.5), jnp.ones((4, 4), jnp.float16)
    tiled = jaxtile.checkpoint(loss, in_axes=(None, (0, 1)), tiles=(2, 2))
    assert all(r.at_once for r in tiled.explain(kernel, image).regions)
    for wanted in (0, (0, 1)):
        got, want = (jax.grad(run, wanted)(kernel, image) for run in (tiled, loss))
        assert_close(got, want, 1e-5)


def test_in_narrow_types():
    """The gradients are added up in float32, and multiplied there: each has one rounding."""
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ARGS)

    def loss(kernels, image, labels, weights):
        found = max_pool(jax.nn.relu(conv(image, kernels[0])))
        return found.astype("float32").mean() / 3

    got = jax.jit(jax.grad(tiled(loss)))(*args)[0]
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), args)
    want = jax.grad(loss)(*wide)[0]
    assert got.dtype == jnp.bfloat16
    assert float(jnp.abs(got - want).max() / jnp.abs(want).max()) < 2**-8
