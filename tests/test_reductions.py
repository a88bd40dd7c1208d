"""Reductions over tiled axes: exact forwards and backwards, whatever they feed."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .support import assert_same, conv, normal, parametrize_few

IMAGE = normal(0, 2, 11, 9, 4)
PARAMS = {"w": normal(1, 3, 3, 4, 4), "m": normal(2, 4, 4)}


def batch_norm(p, x):
    x = conv(x, p["w"])
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return conv((x - mean) * jax.lax.rsqrt(var + 1e-5), p["w"]), mean, var


def group_norm(p, x):
    x = conv(x, p["w"]).reshape(2, 11, 9, 2, 2)
    mean, var = x.mean((1, 2, 4), keepdims=True), x.var((1, 2, 4), keepdims=True)
    return ((x - mean) / jnp.sqrt(var + 1e-3)).reshape(2, 11, 9, 4)


def squeeze_excite(p, x):
    x = conv(x, p["w"])
    gate = jax.nn.sigmoid(jax.nn.relu(x.mean((1, 2)) @ p["m"]) @ p["m"])
    return conv(x * gate[:, None, None], p["w"])


def classifier(p, x):
    features = jax.nn.relu(conv(x, p["w"])).mean((1, 2))
    return jax.nn.log_softmax(jnp.tanh(features @ p["m"]) @ p["m"])


def global_max(p, x):
    return conv(x, p["w"]).max((1, 2)) @ p["m"], x.min((0, 1)), jnp.abs(x).max()


def ties(p, x):
    """Ties share the gradient, inside a tile and across tiles."""
    return (
        jnp.round(x).max((1, 2)),
        jnp.round(x).min((1, 2, 3)),
        jax.nn.relu(conv(x, p["w"]) - 3).min((1, 2)),
    )


def one_axis(p, x):
    """Values that carry one of the two tiled axes only, broadcast back to both."""
    x = conv(x, p["w"])
    rows, columns = x.mean(2), x.max(1)
    smooth = jax.lax.conv_general_dilated(
        rows, p["w"][0], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return x - smooth[:, :, None] * columns[:, None], rows


def spatial_softmax(p, x):
    logits = conv(x, p["w"])
    weights = jnp.exp(logits - logits.max((1, 2), keepdims=True))
    weights /= weights.sum((1, 2), keepdims=True)
    return (weights * jnp.arange(11)[:, None, None]).sum((1, 2)), (weights * x).sum((1, 2))


def logical(p, x):
    return (x > 2).any((1, 2)), (x > -4).all(), (x > 0).sum(), (x * 3).astype(jnp.int32).max((1, 2))


def beside_a_reader_that_jumps(p, x):
    """The reduced value is also read on windows that do not follow the tiles in order."""
    y = conv(x, p["w"])
    return y.mean(), jnp.concatenate([y, y], 1), jnp.flip(y, 2) * y.max((1, 2), keepdims=True)


def to_one_position(p, x):
    """The tiled dimensions shrink to size 1 and are dropped."""
    y = conv(x, p["w"])
    pooled = jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 11, 9, 1), (1, 1, 1, 1), "VALID")
    peak = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 11, 9, 1), (1, 1, 1, 1), "VALID")
    return (
        y[:, 0, 0] @ p["m"],
        pooled.reshape(2, 4) @ p["m"],
        y[:, 3, 2:3] * y[:, :, 1],
        (peak * peak).sum(),
    )


def sums_of_products(p, x):
    """Contractions over positions: a dense layer on a whole map, a Gram matrix, one axis only."""
    y, weights = jnp.tanh(conv(x, p["w"])), jnp.sin(jnp.arange(11.0 * 9 * 4).reshape(11, 9, 4)) / 9
    dense = jnp.einsum("nhwc,hwc->n", y, weights * p["w"].mean())
    gram = jnp.einsum("nhwc,nhwd->ncd", y, y * y) / 99
    rows = jnp.einsum("nhwc,hd->nwcd", y, p["w"].mean() * weights[:, 0])
    return dense, gram, rows, jnp.einsum("nhwc,nhwc->", y, y) / 99


def of_stored_values(p, x):
    """Riding reductions: elementwise on one stored value, beside a reader with a halo; of two
    stored values; of a stored reduction.
    """
    y = checkpoint_name(conv(x, p["w"]), "y")
    z = checkpoint_name(jnp.tanh(conv(y, p["w"])), "z")
    rows = checkpoint_name(z.mean(2), "rows")
    shifted = ((y - p["w"][0, 0, 0]) ** 2).mean((0, 1, 2))
    return (y - y.mean()) * shifted, (y * z).mean((1, 2)), z.max((1, 2)), (rows**2).mean(1)


FUNCTIONS = [
    sums_of_products,
    beside_a_reader_that_jumps,
    to_one_position,
    batch_norm,
    group_norm,
    squeeze_excite,
    classifier,
    global_max,
    ties,
    one_axis,
    spatial_softmax,
    logical,
]


@parametrize_few("fun", FUNCTIONS, always=6, ids=lambda f: f.__name__)
def test_reduction(fun):
    assert_same(fun, PARAMS, IMAGE, in_axes=(None, (1, 2)), tiles=(3, 4))


@parametrize_few(
    "tiles",
    [
        (3, 4),
        {"y": (2, 3), ...: (4, 1)},
        {"y": None, "z": (2, 2), ...: (3, 3)},
        {"z": None, ...: (3, 2)},
        {"y": (3, 1), ...: None},
    ],
    always=2,
)
@parametrize_few("saved", [("y", "z", "rows"), ("y", "z")])
def test_reductions_of_stored_values(tiles, saved):
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    options = {"in_axes": (None, (1, 2)), "tiles": tiles, "policy": policy}
    assert_same(of_stored_values, PARAMS, IMAGE, **options)


def test_statistics_of_a_stored_value_have_no_loop_of_their_own():
    def fun(p, x):
        y = checkpoint_name(conv(x, p["w"]), "y")
        return (y - y.mean((0, 1, 2))) / jnp.sqrt((y * y).mean((0, 1, 2)) + 1)

    policy = jax.checkpoint_policies.save_only_these_names("y")
    first, second = jaxtile.explain(
        fun, PARAMS, IMAGE, in_axes=(None, (1, 2)), tiles=(3, 2), policy=policy
    ).regions
    assert [use.name for use in first.writes] == ["y", "reduce_sum", "reduce_sum"]
    assert [use.name for use in second.writes] == ["output"]


@parametrize_few(
    "by_position, fun",
    [
        (True, lambda y, w: conv(y, w[:1, :1])),
        (True, lambda y, w: jnp.einsum("bhwc,cd->bhwd", y, w[0, 0])),
        (True, lambda y, w: jnp.swapaxes(conv(y, w[:1, :1]), 1, 2)),
        (False, lambda y, w: conv(y, w)),
        (False, lambda y, w: conv(y, w[:1, :1], 2)),
        (False, lambda y, w: conv(y[:, ::-1], w[:1, :1])),
    ],
    always=3,
)
def test_statistics_of_what_follows_position_by_position(by_position, fun):
    """Those of a convolution of one pixel are added up where its image is made."""

    def network(p, x):
        y = checkpoint_name(jax.nn.softplus(conv(x, p["w"])), "y")
        z = fun(y, p["v"])
        return jnp.sum(jnp.tanh(z - (z * z).mean((0, 1, 2))))

    params = {"w": PARAMS["w"], "v": normal(3, 3, 3, PARAMS["w"].shape[-1], 2)}
    policy = jax.checkpoint_policies.save_only_these_names("y")
    options = {"in_axes": (None, (1, 2)), "tiles": (3, 2), "policy": policy}
    assert_same(network, params, IMAGE, **options)
    first = jaxtile.explain(network, params, IMAGE, **options).regions[0]
    assert [use.name for use in first.writes] == ["y", "reduce_sum"][: 1 + by_position]


def test_weights_reshaped_to_a_map_of_one_row():
    def fun(p, x):
        rows = jnp.concatenate([x, p["m"].reshape(1, 1, 4, 4)], 0)
        return jnp.einsum("nhwc,hwc->n", jnp.tanh(x), p["m"].reshape(1, 4, 4)), rows

    assert_same(fun, PARAMS, IMAGE[:, :1, :4], in_axes=(None, (1, 2)), tiles=(1, 3))


def test_batch_statistics_with_a_tiled_batch():
    assert_same(batch_norm, PARAMS, IMAGE, in_axes=(None, (0, 1)), tiles=(2, 2))


def test_a_map_smaller_than_the_grid_is_reduced_in_fewer_tiles():
    def fun(p, x):
        small = conv(x, p["w"], 4)
        return conv(x - small.mean((1, 2), keepdims=True), p["w"])

    assert_same(fun, PARAMS, IMAGE, in_axes=(None, (1, 2)), tiles=(5, 5))


def test_narrow_sums_accumulate_in_float32():
    """4096 bfloat16 ones over 64 tiles: in bfloat16 the sum would stop at 256."""
    import jaxtile

    tiled = jaxtile.checkpoint(
        lambda w, x: jnp.sum(x * w, (0, 1)), in_axes=(None, (0, 1)), tiles=(64, 64)
    )
    x, w = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((), jnp.bfloat16)
    assert float(tiled(w, x)) == 4096
    assert float(jax.grad(tiled)(w, x)) == 4096
    row = jnp.ones((1, 64), jnp.bfloat16)
    by_row = jaxtile.checkpoint(lambda r, x: x * r, in_axes=((0, 1), (0, 1)), tiles=(64, 1))
    tall = jnp.ones((4096, 64), jnp.bfloat16)
    assert float(jax.grad(lambda r: by_row(r, tall).astype(jnp.float32).sum())(row)[0, 0]) == 4096


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.bool_])
def test_extremes_of_small_types(dtype):
    image = (IMAGE * 4).astype(dtype)
    tiled = jaxtile.checkpoint(lambda x: (x.max((1, 2)), x.min()), in_axes=((1, 2),), tiles=(3, 2))
    most, least = tiled(image)
    assert (most == image.max((1, 2))).all()
    assert least == image.min()
