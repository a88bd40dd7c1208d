"""Convolutions of volumes, which are computed as convolutions of planes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p

import jaxtile
from jaxtile._plan.costs import BUILT_IN
from jaxtile._plan.kernels import durations
from jaxtile._rules import planes
from jaxtile._rules.convolve import convolve

from .support import assert_close, conv, normal, parametrize_few

LAST, FIRST = ("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")
MIXED = ("DCNHW", "HOWDI", "WNHCD")


def shape(order, **sizes):
    return [sizes[letter] for letter in order]


def restated(fun, *args):
    """The one convolution of a function, as a tile computes it."""
    params = jax.make_jaxpr(fun)(*args).eqns[-1].params
    return lambda lhs, rhs: convolve(lhs, rhs, params, in_loop=True)


def derivatives(fun, x, w):
    y, pull = jax.vjp(fun, x, w)
    cotangent = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    return y, pull(cotangent), jax.jvp(fun, (x, w), (jnp.sin(x), jnp.sin(w)))[1]


def convolutions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is conv_general_dilated_p:
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from convolutions(getattr(inner, "jaxpr", inner))


def _is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


PLAIN = dict(strides=(1, 1, 1), lhs_dilation=(1, 1, 1), rhs_dilation=(1, 1, 1))
CASES = [
    (LAST, (3, 2, 3), ((0, 0), (0, 0), (1, 1)), {}),
    (MIXED, (3, 3, 1), ((2, -1), (0, 2), (0, 0)), dict(strides=(2, 1, 2), rhs_dilation=(2, 1, 1))),
    (FIRST, (2, 2, 2), ((1, 1), (1, 1), (1, 1)), dict(lhs_dilation=(2, 2, 2))),
    (LAST, (3, 1, 2), ((3, -2), (0, 1), (2, 0)), dict(lhs_dilation=(2, 1, 3), strides=(3, 1, 1))),
    (LAST, (1, 3, 3), ((0, 0), (1, 1), (1, 1)), {}),
    (MIXED, (3, 3, 3), ((-1, 4), (1, 1), (1, 1)), dict(lhs_dilation=(3, 1, 1))),
    (FIRST, (3, 3, 3), ((1, 1), (1, 1), (1, 1)), dict(strides=(2, 2, 2))),
]


@parametrize_few("piece", [1, 2**30])
@parametrize_few("order, kernel, padding, others", CASES, always=4)
def test_convolutions_and_derivatives(order, kernel, padding, others, piece, monkeypatch):
    monkeypatch.setattr(planes, "_LARGEST", piece)
    options = PLAIN | others
    d, h, w = kernel
    x = normal(0, *shape(order[0], N=2, D=6, H=5, W=4, C=2))
    kernel = normal(1, *shape(order[1], D=d, H=h, W=w, I=2, O=3))

    def plain(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            options["strides"],
            padding,
            lhs_dilation=options["lhs_dilation"],
            rhs_dilation=options["rhs_dilation"],
            dimension_numbers=order,
        )

    ours = restated(plain, x, kernel)
    want, got = jax.jit(lambda *args: [derivatives(f, *args) for f in (plain, ours)])(x, kernel)
    assert_close(got, want)


def test_second_derivatives_and_vmap():
    x, w = normal(0, 2, 1, 4, 3, 3, 2), normal(1, 3, 2, 2, 2, 2)

    def curvature(fun):
        def energy(x, w):
            return jnp.sum(jax.vmap(fun, (0, None))(x, w) ** 3)

        return jax.grad(lambda *args: sum(map(jnp.sum, jax.grad(energy, (0, 1))(*args))), (0, 1))

    ours = restated(conv, x[0], w)
    want, got = jax.jit(lambda *args: [curvature(f)(*args) for f in (conv, ours)])(x, w)
    assert_close(got, want)


def test_types():
    x, w = (a.astype(jnp.bfloat16) for a in (normal(0, 1, 5, 4, 4, 3), normal(1, 3, 3, 3, 3, 2)))

    def plain(x, w):
        return conv(x, w, preferred_element_type=jnp.float32)

    ours = restated(plain, x, w)
    want, got = jax.jit(lambda *args: [derivatives(f, *args) for f in (plain, ours)])(x, w)
    assert got[0].dtype == jnp.float32
    assert_close(got[0], want[0], 1e-6)
    assert_close(got, want, 2**-7)


def test_a_tile_convolves_planes_only():
    """Forwards and backwards, with strides and of a transposed convolution."""
    x, w = normal(0, 1, 16, 12, 12, 2), normal(1, 3, 3, 3, 2, 2)

    def loss(w, x):
        x = jnp.sin(conv(x, w))
        below = jnp.sin(conv(x, w, 2))
        up = conv(below, w[:2, :2, :2], padding=((1, 1),) * 3, lhs_dilation=(2, 2, 2))
        return jnp.sum((x + up) ** 2)

    tiled = jaxtile.checkpoint(loss, in_axes=(None, (1, 2, 3)), tiles=(2, 2, 2))
    found = list(convolutions(jax.make_jaxpr(jax.grad(tiled, (0, 1)))(w, x).jaxpr))
    assert len(found) >= 9
    assert {eqn.invars[0].aval.ndim for eqn in found} == {4}
    assert len(list(convolutions(jax.make_jaxpr(loss)(w, x).jaxpr))) == 3


def test_inside_a_derivative_rule():
    """There JAX must be able to transpose them."""
    x, w = normal(0, 1, 8, 4, 4, 2), normal(1, 3, 2, 2, 2, 2)

    def up(x, w):
        return conv(x, w, padding=((2, 1), (1, 1), (1, 1)), lhs_dilation=(2, 2, 2))

    @jax.custom_jvp
    def layer(x):
        return jnp.sin(up(conv(x, w), w))

    @layer.defjvp
    def layer_jvp(primals, tangents):
        return layer(*primals), up(conv(*tangents, w), w)  # not its derivative, but linear

    tiled = jaxtile.checkpoint(lambda x: layer(x) ** 2, in_axes=((1, 2, 3),), tiles=(2, 1, 1))
    want, got = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x))))(x) for f in (lambda x: layer(x) ** 2, tiled)
    )
    assert_close(got, want)


@pytest.mark.parametrize("groups", [dict(feature_group_count=2), dict(batch_group_count=2)])
def test_groups_are_left_to_the_compiler(groups):
    features = 2 if "batch_group_count" in groups else 1
    x, w = normal(0, 2, 4, 4, 4, 2), normal(1, 3, 2, 2, features, 4)

    def plain(x, w):
        return conv(x, w, **groups)

    ours = restated(plain, x, w)
    want, got = jax.jit(lambda *args: [derivatives(f, *args) for f in (plain, ours)])(x, w)
    assert_close(got, want)


def test_wide_planes_are_not_kept():
    x, w = (
        jax.ShapeDtypeStruct((1, 9, 8, 8, 4), "float32"),
        jax.ShapeDtypeStruct((3, 3, 3, 4, 4), "float32"),
    )
    ours = restated(conv, x, w)
    kept = jax.eval_shape(lambda *args: jax.vjp(ours, *args)[1], x, w)
    assert sum(leaf.size for leaf in jax.tree.leaves(kept)) <= x.size + w.size


def test_pieces_are_small(monkeypatch):
    x, w = normal(0, 1, 20, 8, 8, 4), normal(1, 3, 3, 3, 4, 4)
    ours = restated(conv, x, w)

    def largest():
        jaxpr = jax.make_jaxpr(lambda *args: derivatives(ours, *args))(x, w).jaxpr
        return max(v.aval.size * 8 for eqn in convolutions(jaxpr) for v in eqn.invars)

    assert largest() >= 3 * x.nbytes
    monkeypatch.setattr(planes, "_LARGEST", x.nbytes)
    assert largest() <= 1.1 * x.nbytes


@pytest.mark.parametrize(
    "size, channels, milliseconds",
    [(128, (32, 32), 1.79), (128, (96, 32), 5.06), (128, (64, 64), 3.39), (64, (128, 128), 1.13)],
)
def test_times_are_near_those_that_were_measured(size, channels, milliseconds):
    """On an H200, forwards and both gradients."""
    x = jax.ShapeDtypeStruct((1, *(size + 2,) * 3, channels[0]), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 3, *channels), jnp.bfloat16)

    def layer(w, x):
        return conv(x, w, padding="VALID")

    outline = jaxtile.policy.outline(layer, w, x, in_axes=(None, (1, 2, 3)))
    found = sum(d.whole for both in durations(outline, BUILT_IN["gpu"]).values() for d in both)
    assert found == pytest.approx(milliseconds / 1e3, rel=0.5)
