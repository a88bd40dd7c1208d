"""Every primitive on several grids, against the plain function: value and gradients, in float64."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

import jaxtile
from jaxtile import _rules as rules
from jaxtile._platform import on_early_cpu
from jaxtile._rules import convolve

from .support import assert_close, assert_same, conv, max_pool, normal

GRIDS = [pytest.param((2, 3), marks=pytest.mark.slow), (5, 4)]
CASES = {}


def case(fun):
    CASES[fun.__name__] = fun
    return fun


def cases(name, **variants):
    """Register one function per variant: `name-variant`."""
    for variant, fun in variants.items():
        CASES[f"{name}-{variant}"] = fun


IMAGE = normal(0, 2, 12, 10, 4)
WEIGHTS = {
    "w": normal(1, 3, 3, 4, 4),
    "wide": normal(2, 4, 2, 4, 4),
    "grouped": normal(3, 3, 3, 2, 4),
    "depthwise": normal(4, 3, 3, 1, 4),
    "matrix": normal(5, 4, 4),
    "map": normal(6, 12, 10, 4),
    "scalar": normal(7),
}
LABELS = jnp.asarray(np.random.default_rng(8).integers(0, 4, (2, 12, 10)))

cases(
    "conv",
    same=lambda p, x: conv(x, p["w"]),
    valid=lambda p, x: conv(x, p["w"], padding="VALID"),
    stride2=lambda p, x: conv(x, p["w"], 2),
    rectangular=lambda p, x: conv(x, p["wide"]),
    asymmetric=lambda p, x: conv(x, p["w"], padding=((3, 0), (1, 4))),
    cropping=lambda p, x: conv(x, p["w"], padding=((-1, 2), (1, -2))),
    dilated=lambda p, x: conv(x, p["w"], rhs_dilation=(2, 3)),
    stride3_dilated=lambda p, x: conv(x, p["wide"], 3, ((4, 4), (4, 4)), rhs_dilation=(2, 2)),
    transposed=lambda p, x: lax.conv_transpose(x, p["w"], (2, 2), "SAME"),
    transposed_valid=lambda p, x: lax.conv_transpose(x, p["wide"], (2, 3), "VALID"),
    base_dilated=lambda p, x: conv(x, p["w"], 2, ((3, 2), (1, 3)), lhs_dilation=(3, 2)),
    sparse=lambda p, x: conv(x, p["w"][:1, :1], padding=((0, 0), (0, 0)), lhs_dilation=(3, 3)),
    feature_groups=lambda p, x: conv(x, p["grouped"], feature_group_count=2),
    depthwise=lambda p, x: conv(x, p["depthwise"], feature_group_count=4),
    batch_groups=lambda p, x: conv(x, p["w"], batch_group_count=2),
    other_order=lambda p, x: lax.conv_general_dilated(
        x.transpose(1, 3, 0, 2),
        p["w"].transpose(2, 0, 3, 1),
        (1, 2),
        "SAME",
        dimension_numbers=("HCNW", "IHOW", "WNCH"),
    ),
)

cases(
    "pool",
    max=lambda p, x: max_pool(x),
    max_overlapping=lambda p, x: max_pool(x, 3, 2, "SAME"),
    max_of_ties=lambda p, x: max_pool(jnp.round(x), 3, 1, "SAME"),
    min=lambda p, x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 3, 1), (1, 1, 2, 1), "SAME"),
    sum=lambda p, x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
    max_dilated=lambda p, x: lax.reduce_window(
        lax.stop_gradient(x),
        -jnp.inf,
        lax.max,
        (1, 2, 2, 1),
        (1, 1, 2, 1),
        ((0, 0), (2, 1), (0, 2), (0, 0)),
        window_dilation=(1, 3, 2, 1),
    ),
    sum_dilated=lambda p, x: lax.reduce_window(
        x,
        0.0,
        lax.add,
        (1, 2, 2, 1),
        (1, 1, 2, 1),
        ((0, 0), (2, 1), (0, 2), (0, 0)),
        window_dilation=(1, 3, 2, 1),
    ),
    base_dilated=lambda p, x: lax.reduce_window(
        x,
        0.0,
        lax.add,
        (1, 3, 3, 1),
        (1, 2, 1, 1),
        ((0, 0), (2, 1), (0, 2), (0, 0)),
        base_dilation=(1, 2, 3, 1),
    ),
    channels=lambda p, x: lax.reduce_window(x**2, 0.0, lax.add, (1, 1, 1, 3), (1, 1, 1, 1), "SAME"),
    own_function=lambda p, x: lax.reduce_window(
        lax.stop_gradient(x), 1.0, lambda a, b: a * b, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"
    ),
)

cases(
    "elementwise",
    unary=lambda p, x: [
        jnp.exp(x),
        jnp.tanh(x),
        lax.rsqrt(x**2 + 1),
        jax.nn.gelu(x),
        jax.scipy.special.erf(x),
        x**3,
    ],
    binary=lambda p, x: [
        jnp.arctan2(x, x + 1),
        jnp.maximum(x, 0.3),
        x * p["scalar"],
        x / (2 + x**2),
        x > 0.2,
    ],
    per_position=lambda p, x: x * p["map"] + p["map"][:, :1],
    where=lambda p, x: jnp.where(x > 0, x, p["scalar"] * p["map"]),
    clamp=lambda p, x: lax.clamp(-0.5, x, 0.5),
    cast=lambda p, x: [
        x.astype(jnp.float32).astype(jnp.float64),
        (x * 10).astype(jnp.int32),
        jnp.isfinite(x),
    ],
    relu_at_zero=lambda p, x: jax.nn.relu(jnp.round(x)),
    softmax=lambda p, x: [jax.nn.softmax(x), jax.nn.log_softmax(x), jax.nn.logsumexp(x, -1)],
    size_one=lambda p, x: x[:, :1] * x + x[:, :, 3:4],
)

cases(
    "shape",
    broadcast=lambda p, x: (
        jnp.broadcast_to(x[:, :, :, None, :], (2, 12, 10, 3, 4)) * p["matrix"][:3]
    ),
    transpose=lambda p, x: conv(x, p["w"]).transpose(3, 2, 0, 1),
    slices=lambda p, x: [x[:, 1:-2], x[:, ::2, 1::2], x[:, 0], x[:, :, 5]],
    one_row=lambda p, x: [x + x[:, :1], x - x[:, :, -1:], x * x[:, 3][:, None]],
    pad=lambda p, x: jnp.pad(x, ((0, 0), (2, 1), (0, 3), (1, 0)), constant_values=1.5),
    pad_learned=lambda p, x: lax.pad(x, p["scalar"], ((0, 0, 0), (1, 2, 1), (-1, 3, 2), (0, 0, 0))),
    pad_negative=lambda p, x: lax.pad(x, 0.0, ((0, 0, 0), (-2, -3, 0), (-1, 0, 1), (0, 0, 0))),
    pad_edges=lambda p, x: [
        jnp.pad(x, ((0, 0), (2, 1), (3, 0), (0, 0)), mode=m) for m in ("edge", "reflect")
    ],
    concatenate=lambda p, x: [
        jnp.concatenate([x, x**2], -1),
        jnp.concatenate([x, x[:, :3], x**2], 1),
    ],
    concatenate_map=lambda p, x: jnp.concatenate([x, jnp.broadcast_to(p["map"], x.shape)], 3),
    reverse=lambda p, x: conv(jnp.flip(x, (1, 2, 3)), p["w"]),
    stack=lambda p, x: [
        jnp.stack([x, x**2], 2),
        [a * i for i, a in enumerate(jnp.unstack(x, axis=3))],
    ],
    split=lambda p, x: [jnp.split(x, [5, 7], axis=1)[::2], jnp.split(x, 2, axis=3)],
    tile=lambda p, x: jnp.tile(x, (1, 1, 1, 2)),
    roll=lambda p, x: jnp.roll(x, 2, axis=1),
    update=lambda p, x: lax.dynamic_update_slice(x, x[..., :2] ** 2, (0, 0, 0, 1)),
    dynamic_slice=lambda p, x: [
        lax.dynamic_slice(x, (0, 2, 0, 0), (2, 5, 10, 4)),
        x[..., LABELS[0, 0, 0]],
    ],
    space_to_depth=lambda p, x: (
        x.reshape(2, 6, 2, 5, 2, 4).transpose(0, 1, 3, 2, 4, 5).reshape(2, 6, 5, 16)
    ),
    depth_to_space=lambda p, x: (
        x.reshape(2, 12, 10, 2, 2, 1).transpose(0, 1, 3, 2, 4, 5).reshape(2, 24, 20, 1)
    ),
    groups=lambda p, x: x.reshape(2, 12, 10, 2, 2).sum(4).reshape(2, 1, 12, 10, 2),
)

cases(
    "upsample",
    repeat=lambda p, x: jnp.repeat(jnp.repeat(x, 2, 1), 3, 2),
    nearest=lambda p, x: jax.image.resize(x, (2, 24, 25, 4), "nearest"),
    nearest_down=lambda p, x: jax.image.resize(x, (2, 5, 7, 4), "nearest"),
    bilinear=lambda p, x: jax.image.resize(x, (2, 24, 17, 4), "bilinear"),
    bilinear_down=lambda p, x: jax.image.resize(x, (2, 5, 6, 4), "bilinear"),
    cubic=lambda p, x: jax.image.resize(x, (2, 18, 20, 4), "cubic"),
)

cases(
    "contraction",
    dense=lambda p, x: x @ p["matrix"],
    einsum=lambda p, x: jnp.einsum("nhwc,cd->dnhw", x, p["matrix"]),
    locally_connected=lambda p, x: jnp.einsum(
        "nhwc,hwcd->nhwd", x, p["map"][..., None] * p["matrix"]
    ),
    attention_in_channels=lambda p, x: jnp.einsum("nhwc,nhwd->nhwcd", x, x),
)

cases(
    "along_channels",
    sums=lambda p, x: [
        x.sum(-1),
        x.max(-1),
        x.prod(-1),
        x.mean((0, 3)),
        jnp.argmax(x, -1),
        jnp.argmin(x, 3),
    ],
    scans=lambda p, x: [
        jnp.cumsum(x, 3),
        jnp.cumprod(x, -1),
        lax.cummax(x, 3),
        lax.cumlogsumexp(x, 3),
    ],
    sorts=lambda p, x: [jnp.sort(x, -1), jnp.argsort(x, -1), lax.top_k(x, 2)],
    own_reduction=lambda p, x: lax.reduce(lax.stop_gradient(x), 1.0, lambda a, b: a * b, (3,)),
    look_up=lambda p, x: jnp.take_along_axis(x, LABELS[..., None], axis=-1),
    embed=lambda p, x: p["matrix"][LABELS] * x,
    one_hot=lambda p, x: jax.nn.one_hot(LABELS, 4) * x,
    choose=lambda p, x: x[..., jnp.array([2, 0, 2])],
)


def symmetric(x):
    """A positive definite 2 x 2 matrix at each position: a structure tensor, for instance."""
    m = x.reshape(*x.shape[:-1], 2, 2)
    return m @ m.swapaxes(-1, -2) + jnp.eye(2)


cases(
    "matrices",
    factors=lambda p, x: [
        jnp.linalg.cholesky(symmetric(x)),
        jnp.linalg.det(symmetric(conv(x, p["w"]))),
        jnp.linalg.slogdet(symmetric(x))[1],
    ],
    values=lambda p, x: [
        jnp.linalg.eigvalsh(symmetric(x)),
        jnp.abs(jnp.linalg.eigh(symmetric(x))[1]),
        jnp.linalg.svd(x.reshape(2, 12, 10, 2, 2), compute_uv=False),
    ],
    triangles=lambda p, x: jax.scipy.linalg.solve_triangular(
        jnp.linalg.cholesky(symmetric(x)), x[..., :2, None], lower=True
    ),
    orthogonal=lambda p, x: jnp.abs(jnp.linalg.qr(x.reshape(2, 12, 10, 2, 2) + jnp.eye(2))[1]),
    systems=lambda p, x: [
        jnp.linalg.solve(symmetric(conv(x, p["w"])), x[..., :2, None]),
        conv(jnp.linalg.inv(symmetric(x)).reshape(x.shape), p["w"]),
    ],
    before_windows=lambda p, x: conv(jnp.linalg.cholesky(symmetric(x)).reshape(x.shape), p["w"]),
)

cases(
    "generated",
    coordinates=lambda p, x: x * jnp.arange(10)[:, None] + jnp.linspace(-1, 1, 12)[:, None, None],
    grid=lambda p, x: jnp.concatenate(
        [x, jnp.broadcast_to(jnp.stack(jnp.mgrid[:12, :10], -1), (2, 12, 10, 2))], -1
    ),
    dropout=lambda p, x: jnp.where(
        jax.random.bernoulli(jax.random.key(1), 0.4, x.shape), conv(x, p["w"]), 0
    ),
    normal=lambda p, x: x + jax.random.normal(jax.random.PRNGKey(2), x.shape[1:]),
    bits=lambda p, x: [
        jax.random.bits(jax.random.key(3), x.shape, dtype) + (x > 0).astype(dtype)
        for dtype in ("uint8", "uint16", "uint32", "uint64")
    ],
    keys=lambda p, x: (
        x
        * jax.vmap(lambda k: jax.random.uniform(k, x.shape[1:]))(
            jax.random.split(jax.random.key(4), 2)
        )
    ),
    other_generator=lambda p, x: x * jax.random.uniform(jax.random.key(5, impl="rbg"), x.shape),
    constant=lambda p, x: [x + jnp.zeros_like(x), jnp.ones((12, 10, 1)) * x],
)


@jax.custom_vjp
def surrogate(x, scale):
    return jnp.where(x > 0, scale, 0.0)


surrogate.defvjp(
    lambda x, s: (surrogate(x, s), (x, s)),
    lambda r, g: (g * jax.nn.sigmoid(r[0]) * r[1], (g * r[0] ** 2).sum()),
)


@jax.custom_jvp
def blur(w, x):
    return jnp.tanh(conv(x, w))


blur.defjvps(None, lambda dx, out, w, x: conv(dx, w) * out)


@jax.custom_jvp
def own_exp(x):
    return jnp.exp(x)


own_exp.defjvp(lambda x, dx: (own_exp(*x), own_exp(*x) * dx[0] * 2.0))


@jax.custom_vjp
def pair(x):
    return x, jnp.sin(x)


pair.defvjp(lambda x: (pair(x), x), lambda x, g: (g[0] + g[1] * jnp.cos(x),))


@jax.custom_jvp
def partly_tiled(x, scale):
    return x * scale, scale**2


@partly_tiled.defjvp
def partly_tiled_jvp(primals, tangents):
    (x, scale), (dx, ds) = primals, tangents
    return partly_tiled(x, scale), (dx * scale + x * ds, 2 * scale * ds)


def two_outputs(p, x):
    a, b = pair(conv(x, p["w"]))
    return conv(a, p["w"]) + b


cases(
    "vmap",
    reshape=lambda p, x: [
        lax.reshape(x, (8, 12, 10), (3, 0, 1, 2)),
        x.reshape(2, 12, 10, 2, 2, order="F"),
        jnp.ravel(x, order="F").reshape(-1, 8).mean(0),
        x[:, :10] * lax.reshape(p["map"][:10], (10, 10, 4), (1, 0, 2)),
    ],
    kernels=lambda p, x: jax.vmap(
        lambda x, s: conv(jnp.tanh(conv(x[None], p["w"] * s, 2)), p["w"])[0]
    )(x, jnp.stack([p["scalar"], 2.0])),
    ensemble=lambda p, x: jax.vmap(lambda s: conv(max_pool(conv(x, p["w"] * s)), p["w"] + s))(
        p["matrix"][0, :3]
    ),
)

cases(
    "update",
    channel=lambda p, x: x.at[..., 1].set(p["scalar"]).at[..., 2:].multiply(jnp.sin(x[..., :2])),
    batch=lambda p, x: x.at[0].add(p["map"]).at[1].set(x[0]),
    into_zeros=lambda p, x: jnp.zeros((2, 14, 13, 4)).at[:, 1:-1, 2:12].set(x),
    borders=lambda p, x: x.at[:, :1].set(0.0).at[:, -1].multiply(p["map"][-1]).at[:, :, 0].add(2),
    block=lambda p, x: x.at[:, 2:5, 1:7, 1:3].add(x[:, 4:7, 2:8, :2] * p["scalar"]),
    pixel=lambda p, x: x.at[:, 3, 4, 1].set(p["scalar"]).at[:, -1:].subtract(x[:, :1]),
    by_pixel=lambda p, x: jax.vmap(jax.vmap(jax.vmap(lambda v: v.at[jnp.argmax(v)].set(0.0))))(x),
    slice=lambda p, x: lax.dynamic_update_slice(x, x[:, :2, :3], (0, 50, -3, 0)),
)

cases(
    "custom",
    partly_tiled=lambda p, x: conv(math.prod(partly_tiled(x, p["scalar"])), p["w"]),
    two_outputs=two_outputs,
    empty_scan=lambda p, x: lax.scan(lambda c, w: (conv(c, w), c), x, jnp.zeros((0, 3, 3, 4, 4)))[
        0
    ],
    complex=lambda p, x: jnp.abs(conv(x + 1j, p["w"].astype(complex))),
    dead_code=lambda p, x: [conv(x, p["w"]), jnp.fft.fft(x, axis=1)][0],
    surrogate=lambda p, x: conv(surrogate(conv(x, p["w"]), p["scalar"]), p["w"]),
    spatial_jvp=lambda p, x: conv(blur(p["w"], x), p["wide"]),
    calls_itself=lambda p, x: conv(own_exp(x * 0.1), p["w"]),
    remat=lambda p, x: jax.checkpoint(lambda x: jnp.sin(conv(x, p["w"])))(x),
    scan=lambda p, x: lax.scan(
        lambda c, w: (jnp.tanh(conv(c, w)), c[..., :1]), x, jnp.stack([p["w"]] * 3)
    ),
    jit=lambda p, x: jax.jit(lambda x: jax.jit(jnp.sin)(conv(x, p["w"])))(x),
)

BORDERS = {
    "sigmoid": jax.nn.sigmoid,
    "bias": lambda x: x + 3.0,
    "normalised": lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True)),
}


def read_by(fun) -> dict:
    """The weights that a case reads: a gradient of zeros is one more kernel to compile."""
    names = set()

    class Weights(dict):
        def __getitem__(self, name):
            names.add(name)
            return super().__getitem__(name)

    jax.eval_shape(lambda x: fun(Weights(WEIGHTS), x), IMAGE)
    return {name: WEIGHTS[name] for name in names}


@pytest.mark.parametrize("tiles", GRIDS)
@pytest.mark.parametrize("name", CASES)
def test_rule(name, tiles):
    fun = CASES[name]
    assert_same(fun, read_by(fun), IMAGE, in_axes=(None, (1, 2)), tiles=tiles)


@pytest.mark.parametrize("act", BORDERS)
def test_borders_read_the_padding_of_the_op_that_follows(act):
    """After an activation with f(0) != 0, or one that is undefined at 0, several halos deep."""

    def fun(p, x):
        for _ in range(2):
            x = BORDERS[act](conv(x, p["w"]))
        return max_pool(-jnp.abs(x), 3, 1, "SAME")

    assert_same(fun, WEIGHTS, IMAGE, in_axes=(None, (1, 2)), tiles=(4, 5))


def test_one_pixel_tiles_and_halos_wider_than_a_tile():
    def fun(p, x):
        return conv(
            jnp.tanh(conv(jnp.tanh(conv(x, p["w"])), p["w"], rhs_dilation=(2, 2))), p["wide"]
        )

    assert_same(fun, WEIGHTS, IMAGE[:, :7, :5], in_axes=(None, (1, 2)), tiles=(7, 5))


def test_a_tiled_batch_of_one():
    def fun(p, x):
        y = surrogate(conv(x, p["w"]), p["scalar"])
        a, b = pair(jax.nn.relu(conv(y, p["w"])))
        return conv(a, p["w"]) * b, (a - a.mean((0, 1, 2))).max((0, 1))

    assert_same(fun, WEIGHTS, IMAGE[:1], in_axes=(None, (0, 1, 2)), tiles=(1, 2, 3))


def test_batch_axis_and_all_axes_together():
    def fun(p, x):
        return max_pool(jax.nn.relu(conv(x, p["w"]) + p["scalar"]))

    assert_same(fun, WEIGHTS, IMAGE, in_axes=(None, (0,)), tiles=(2,))
    assert_same(fun, WEIGHTS, IMAGE, in_axes=(None, (0, 1, 2)), tiles=(2, 3, 2))
    assert_same(fun, WEIGHTS, IMAGE, in_axes=(None, (2,)), tiles=(3,))


def modulated(p, x):
    """Kernels of their own for all images, by what is in these."""
    kernels = p["w"] * jnp.tanh(x.mean((1, 2)))[:, None, None, None]
    return jax.vmap(lambda w, x: conv(jnp.sin(conv(x[None], w, 2)), p["w"])[0])(kernels, x)


def grouped(p, x):
    return jax.vmap(lambda w, x: conv(x[None], w, feature_group_count=2)[0])(
        jnp.stack([p["grouped"] * s for s in range(3)]), x
    )


GROUPS = {
    "modulated": (modulated, (0, 1), (2, 3)),
    "sizes that do not divide": (modulated, (0,), (2,)),
    "groups of groups": (grouped, (0, 2), (2, 2)),
    "channels": (lambda p, x: conv(x, p["depthwise"], feature_group_count=4), (1, 3), (2, 3)),
    "parts of groups": (lambda p, x: conv(x, p["grouped"], feature_group_count=2), (3,), (4,)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_tiles_of_groups(name):
    fun, axes, tiles = GROUPS[name]
    assert_same(fun, WEIGHTS, normal(9, 3, 6, 5, 4), in_axes=(None, axes), tiles=tiles)


@pytest.mark.parametrize("rank", [1, 3])
def test_one_and_three_dimensions(rank):
    x = normal(0, 1, *(9, 8, 7)[:rank], 2)
    w = normal(1, *(3,) * rank, 2, 2)

    def fun(w, x):
        y = max_pool(jnp.tanh(conv(x, w)))
        return lax.conv_transpose(y, w, (2,) * rank, "SAME")

    assert_same(fun, w, x, in_axes=(None, tuple(range(1, rank + 1))), tiles=(3, 2, 2)[:rank])


def test_inputs_of_different_resolution():
    def fun(w, skip, coarse, labels):
        up = jax.image.resize(coarse, (2, 12, 10, 4), "bilinear")
        logits = conv(jnp.concatenate([skip, up], -1), jnp.concatenate([w, w], 2))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return logits, -picked.mean()

    args = WEIGHTS["w"], IMAGE, normal(9, 2, 6, 5, 4), LABELS
    assert_same(fun, *args, in_axes=(None, (1, 2), (1, 2), (1, 2)), tiles=(3, 4))


def primitives():
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("jax")]
    return {v.name: v for m in modules for v in vars(m).values() if isinstance(v, Primitive)}


def test_every_rule_is_that_of_a_primitive():
    """A misspelt name would be a rule that nothing reaches."""
    only_in_newer_versions = {"log2", "one_minus_square", "polynomial"}
    assert set(rules.names()) - set(primitives()) <= only_in_newer_versions


A, B, POINT = normal(10, 3, 4), normal(11, 3, 4), normal(12)
KERNEL, ROWS = normal(13, 2, 3, 1, 1), normal(14, 4, 2)
COMPLEX, MASK = lax.complex(A, B), normal(15, 3, 4) > 0
FIRST_COLUMN = lax.GatherDimensionNumbers((0,), (1,), (1,))
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
APPLIED = {
    "add": (lax.add, A, B),
    "add_any": (lambda x, y: primitives()["add_any"].bind(x, y), A, B),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), A),
    "complex": (lax.complex, A, B),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), A, B),
    "conj": (lax.conj, COMPLEX),
    "conv_general_dilated": (lambda x, w: conv(x, w), A[None, :, :, None], KERNEL),
    "convert_element_type": (lambda x: lax.convert_element_type(x, complex), A),
    "copy": (lambda x: primitives()["copy"].bind(x), A),
    "cumsum": (lax.cumsum, A),
    "device_put": (jax.device_put, A),
    "div": (lax.div, A, B),
    "dot_general": (lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))), A, ROWS),
    "dynamic_slice": (
        lambda x, i, j: lax.dynamic_slice_p.bind(x, i, j, slice_sizes=(2, 2)),
        A,
        jnp.int32(1),
        jnp.int32(2),
    ),
    "gather": (lambda x, i: lax.gather(x, i, FIRST_COLUMN, (3, 1)), A, np.array([[2], [0]])),
    "imag": (lax.imag, COMPLEX),
    "mul": (lax.mul, A, B),
    "name": (lambda x: checkpoint_name(x, "a name"), A),
    "neg": (lax.neg, A),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), A, B),
    "pad": (lambda x, value: lax.pad(x, value, ((1, 0, 2), (0, -1, 0))), A, POINT),
    "real": (lax.real, COMPLEX),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 11, 52), A),
    "reduce_sum": (lambda x: lax.reduce(x, 0.0, lax.add, (1,)), A),
    "reduce_window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 2), "SAME"),
        A,
    ),
    "reshape": (lambda x: lax.reshape(x, (2, 6)), A),
    "rev": (lambda x: lax.rev(x, (1,)), A),
    "select_n": (lax.select_n, MASK, A, B),
    "sharding_constraint": (lambda x: lax.with_sharding_constraint(x, HERE), A),
    "slice": (lambda x: lax.slice(x, (0, 1), (3, 4), (2, 1)), A),
    "split": (lambda x: lax.split(x, (1, 3), 1), A),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), A[None]),
    "stack": (lambda x, y: primitives()["stack"].bind(x, y, axis=1), A, B),
    "sub": (lax.sub, A, B),
    "tile": (lambda x: lax.tile(x, (2, 1)), A),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), A),
    "unstack": (lambda x: primitives()["unstack"].bind(x, axis=1), A),
}
"""Every primitive that is declared linear, applied to small arrays."""


def is_linear(linear, fun, *operands):
    """Is `fun(2 a - 3 b) = 2 fun(a) - 3 fun(b)` in the operands that the trait speaks of?"""
    count = len(operands)
    groups = {
        "sum": [range(count)],
        "product": [[0], [1]],
        "first": [[0]],
        "cases": [range(1, count)],
    }
    for group in groups[linear]:
        other = [jnp.flip(x) + 0.5 if i in group else x for i, x in enumerate(operands)]
        both = [
            2 * x - 3 * y if i in group else x
            for i, (x, y) in enumerate(zip(operands, other, strict=True))
        ]
        of_both, of_first, of_other = (
            jax.tree.leaves(fun(*given)) for given in (both, operands, other)
        )
        for got, x, y in zip(of_both, of_first, of_other, strict=True):
            if not np.allclose(got, 2 * x - 3 * y, rtol=1e-12, atol=1e-12):
                return False
    return True


@pytest.mark.parametrize("name", APPLIED)
def test_traits_of(name):
    fun, *operands = APPLIED[name]
    (eqn,) = jax.make_jaxpr(fun)(*operands).eqns
    traits = rules.traits(eqn.primitive)
    assert eqn.primitive.name == name
    assert is_linear(traits.linear, fun, *operands)
    if traits.view:
        for x, out in zip(operands, jax.tree.leaves(fun(*operands)), strict=True):
            np.testing.assert_array_equal(x.ravel(), out.ravel())


READ_THEIR_RESULT = ["cbrt", "exp", "logistic", "rsqrt", "sqrt", "tanh"]


def test_traits_are_declared_where_they_can_be_tested():
    found = {name: rules.traits(p) for name, p in primitives().items() if name in rules.names()}
    assert {name for name, traits in found.items() if traits.linear} == set(APPLIED)
    in_some_versions, our_own = {"max", "min"}, {"clamp_by_result"}
    read = {name for name, traits in found.items() if traits.reads_result}
    assert read == {*READ_THEIR_RESULT, *in_some_versions} | our_own
    calls = {"call_hi_primitive", "custom_jvp_call", "custom_vjp_call"}
    assert {name for name, traits in found.items() if traits.kind == "other"} == calls
    assert all(traits.fuses for traits in found.values() if traits.view or traits.free)


@pytest.mark.parametrize(
    "linear, fun, operands",
    [
        ("sum", lax.exp, (A,)),
        ("sum", lax.mul, (A, B)),
        ("sum", lambda x: lax.add(x, 1.0), (A,)),
        ("product", lax.add, (A, B)),
        ("product", lax.div, (A, B)),
        ("first", lax.sub, (A, B)),
        ("cases", lax.clamp, (A, B, A + 1)),
    ],
)
def test_what_is_not_linear_is_found(linear, fun, operands):
    assert not is_linear(linear, fun, *operands)


@pytest.mark.parametrize("name", READ_THEIR_RESULT)
def test_derivatives_that_read_the_result(name):
    fun = getattr(lax, name)
    derivative = jax.make_jaxpr(lambda x: jax.jvp(fun, (x,), (x,))[1])(1.5)
    first, *rest = derivative.eqns
    assert rules.traits(first.primitive).reads_result
    assert any(first.outvars[0] in eqn.invars for eqn in rest)


def test_a_misspelt_trait_is_refused():
    with pytest.raises(TypeError, match="liner"):
        rules.register("a_primitive", liner="sum")


def placed(x, w):
    """Barriers, copies and constraints between convolutions."""
    device = jax.devices()[0]
    y, half = lax.optimization_barrier((conv(x, w), jnp.float64(0.5)))
    y, same = jax.device_put((y, jnp.tanh(y)))
    z = jax.device_put(jnp.tanh(y * half), device)
    z = lax.with_sharding_constraint(z, jax.sharding.SingleDeviceSharding(device))
    return jnp.sum(conv(z, w) * same)


def test_placement_keeps_its_meaning():
    x, w = normal(0, 1, 9, 8, 3), normal(1, 3, 3, 3, 3)
    assert_same(placed, x, w, in_axes=((1, 2), None), tiles=(3, 2))
    tiled = jaxtile.checkpoint(placed, in_axes=((1, 2), None), tiles=(3, 2))
    whole = [(found.op, found.reason) for found in tiled.explain(x, w).whole]
    reason = "it says where the whole array is to lie"
    assert whole == [("device_put", reason), ("sharding_constraint", reason)]
    text = str(jax.make_jaxpr(tiled)(x, w))
    ours = 0 if on_early_cpu() else 2  # before the zeros of each loop
    assert text.count("optimization_barrier") == 3 + ours  # in two regions, and for the number
    assert text.count("sharding_constraint") == 1


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("order", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_a_convolution_of_a_tile_gets_a_row_of_padding_on_a_cpu(stride, order):
    """XLA's convolutions without any are slow before jax 0.12; the numbers are the same."""
    x, w = (normal(0, 2, 12, 11, 3), normal(1, 3, 2, 3, 4))
    if order[0] == "NCHW":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (stride,) * 2, "VALID", dimension_numbers=order)

    (equation,) = jax.make_jaxpr(conv)(x, w).eqns
    padded = functools.partial(convolve._with_padding, convolve.as_given, equation.params)
    assert_close(padded(x, w), conv(x, w))
    assert convolve._is_slow_unpadded(equation.params, w) == (jax.__version_info__ < (0, 12))
    padding = {**equation.params, "padding": ((0, 0), (1, 0))}
    grouped = {**equation.params, "feature_group_count": 3}
    assert not convolve._is_slow_unpadded(padding, w)
    assert not convolve._is_slow_unpadded(grouped, w)
