"""`jaxtile.ops` and `jaxtile.nn`: tile by tile by themselves, and in the middle of a network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtile
from jaxtile import nn, ops

from .support import assert_close, assert_same, normal, parametrize_few, plain_results, results

IMAGE = normal(0, 2, 13, 11, 4)
KERNEL = normal(1, 3, 3, 4, 6)
BIAS = normal(2, 6)
KEY = jax.random.key(3)
LABELS = jnp.asarray(np.random.default_rng(4).integers(-1, 4, (2, 13, 11)))

CASES = {
    "conv": (ops.conv, (IMAGE, KERNEL, BIAS), {}),
    "strided dilated conv": (
        ops.conv,
        (IMAGE, KERNEL, BIAS),
        {"strides": (2, 3), "dilation": 2, "padding": [(1, 2), 3]},
    ),
    "grouped conv": (ops.conv, (IMAGE, KERNEL[:, :, :2], BIAS), {"groups": 2}),
    "depthwise conv": (ops.depthwise_conv, (IMAGE, normal(5, 3, 5, 1, 8)), {"padding": "VALID"}),
    "transposed conv": (ops.conv_transpose, (IMAGE, KERNEL, BIAS), {"strides": 2}),
    "transposed conv, same": (
        ops.conv_transpose,
        (IMAGE, KERNEL),
        {"strides": (3, 2), "padding": "SAME"},
    ),
    "1-D conv": (ops.conv, (normal(6, 2, 17, 3), normal(7, 4, 3, 2)), {"padding": 2}),
    "3-D conv": (ops.conv, (normal(8, 1, 5, 6, 7, 2), normal(9, 3, 3, 3, 2, 2)), {}),
    "max pool": (ops.max_pool, (IMAGE,), {"window": 3, "strides": 2, "padding": 1}),
    "max pool of ties": (ops.max_pool, (jnp.maximum(IMAGE, 0),), {}),
    "average pool": (ops.avg_pool, (IMAGE,), {"window": (2, 3), "padding": "SAME"}),
    "average pool, uncounted": (
        ops.avg_pool,
        (IMAGE,),
        {"window": 3, "strides": 2, "padding": 1, "count_padding": False},
    ),
    "local conv": (ops.local_conv, (IMAGE, normal(10, 11, 8, 3, 4, 4, 3)), {}),
    "1-D local conv": (ops.local_conv, (normal(6, 2, 17, 3), normal(11, 13, 5, 3, 2)), {}),
    "local response norm": (ops.local_response_norm, (3 * IMAGE,), {"alpha": 0.1, "radius": 1}),
    "batch norm": (ops.batch_norm, (IMAGE, BIAS[:4], BIAS[2:]), {}),
    "batch norm, running": (ops.batch_norm, (IMAGE, *([jnp.abs(BIAS[:4])] * 4)), {}),
    "batch statistics": (ops.batch_statistics, (IMAGE,), {}),
    "dropout": (ops.coordinate_dropout, (IMAGE, KEY), {"rate": 0.4}),
    "channel dropout": (
        ops.coordinate_dropout,
        (IMAGE, KEY),
        {"rate": 0.4, "broadcast_dims": (1, 2)},
    ),
    "3-D dropout": (ops.coordinate_dropout, (normal(8, 1, 5, 6, 7, 2), KEY), {"rate": 0.5}),
    "nearest": (ops.upsample, (IMAGE,), {"factor": (2, 3)}),
    "bilinear": (ops.upsample, (IMAGE,), {"factor": 3, "method": "bilinear"}),
    "crop and concatenate": (ops.crop_concat, (IMAGE, normal(12, 2, 8, 8, 3)), {}),
    "cross-entropy": (ops.softmax_cross_entropy, (IMAGE, LABELS), {}),
}


@parametrize_few("name", CASES, always=9)
def test_tile_by_tile(name):
    op, args, options = CASES[name]
    plain = functools.partial(op, **options)
    tiles = (2, 4, 3)[2 - args[0].ndim :]
    assert_close(results(functools.partial(plain, tiles=tiles), args), plain_results(plain, args))


@pytest.mark.slow
def test_the_outer_schedule_wins():
    def network(kernel, image):
        x = ops.max_pool(jax.nn.gelu(ops.conv(image, kernel, tiles=(2, 2))), tiles=(3, 3))
        x = ops.upsample(x, method="bilinear", tiles=(2, 2))
        return ops.coordinate_dropout(x, KEY, rate=0.5)

    assert_same(network, KERNEL, IMAGE, in_axes=(None, (1, 2)), tiles=(3, 2))
    schedule = jaxtile.explain(network, KERNEL, IMAGE, in_axes=(None, (1, 2)), tiles=(3, 2))
    assert [r.grid for r in schedule.regions] == [(3, 2)]


def test_a_single_conv_has_the_workspace_of_a_tile():
    image, kernel = normal(0, 1, 256, 256, 8), normal(1, 5, 5, 8, 8)

    def temporary(**options):
        fun = lambda x, k: ops.max_pool(jnp.tanh(ops.conv(x, k)), window=4, strides=4)  # noqa: E731
        if options:
            fun = jaxtile.checkpoint(fun, in_axes=((1, 2), None), **options)
        step = jax.jit(jax.grad(lambda k: fun(image, k).sum()))
        return step.lower(kernel).compile().memory_analysis().temp_size_in_bytes

    assert temporary(tiles=(8, 8)) < 0.2 * temporary()


def test_ties_go_to_the_first_in_row_major_order():
    x = jnp.zeros((1, 6, 6, 1))
    for options in ({}, {"window": 3, "strides": 1}, {"window": 3, "strides": 2, "padding": 1}):
        plain = jax.grad(lambda x: ops.max_pool(x, **options).sum())(x)
        tiled = jax.grad(lambda x: ops.max_pool(x, tiles=(3, 2), **options).sum())(x)
        np.testing.assert_array_equal(tiled, plain)
    first = np.zeros((6, 6))
    first[::2, ::2] = 1
    np.testing.assert_array_equal(jax.grad(lambda x: ops.max_pool(x).sum())(x)[0, ..., 0], first)


@pytest.mark.slow
def test_dropout_depends_on_key_and_coordinate_only():
    draw = lambda *shape: ops.coordinate_dropout(jnp.ones(shape), KEY, rate=0.3) > 0  # noqa: E731
    large = draw(3, 70, 50, 5)
    np.testing.assert_array_equal(draw(2, 30, 20, 5), large[:2, :30, :20])
    np.testing.assert_array_equal(draw(1, 7, 50, 3), large[:1, :7, :, :3])
    assert abs(float(large.mean()) - 0.7) < 0.01
    for axis in range(4):  # neighbours are independent
        a, b = (np.asarray(jnp.take(large, i, axis)).ravel() for i in (0, 1))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    other = ops.coordinate_dropout(jnp.ones(large.shape), jax.random.key(4), rate=0.3) > 0
    assert abs(np.corrcoef(np.ravel(other), np.ravel(large))[0, 1]) < 0.02


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_dropout_takes_any_kind_of_key(impl):
    key = jax.random.key(0, impl=impl)
    assert_same(
        lambda key, x: ops.coordinate_dropout(x, key, rate=0.5),
        key,
        IMAGE,
        in_axes=(None, (1, 2)),
        tiles=(3, 2),
    )


def test_dropout_at_the_ends():
    assert ops.coordinate_dropout(IMAGE, KEY, rate=0) is IMAGE
    gradient = jax.grad(lambda x: ops.coordinate_dropout(x, KEY, rate=1).sum())(IMAGE)
    assert not gradient.any()


@pytest.mark.slow
def test_cross_entropy_labels():
    logits = normal(0, 4, 3)
    plain = -jax.nn.log_softmax(logits)
    loss = lambda *labels, **o: ops.softmax_cross_entropy(logits, jnp.array(labels), **o)  # noqa: E731
    assert jnp.isclose(loss(0, -1, 2, -1), (plain[0, 0] + plain[2, 2]) / 2)
    assert jnp.isclose(loss(0, 1, 2, 1), jnp.mean(plain[jnp.arange(4), jnp.array([0, 1, 2, 1])]))
    assert jnp.isclose(loss(0, 2, 2, 2, ignore=2), plain[0, 0])
    assert loss(-1, -1, -1, -1) == 0
    assert jnp.isnan(loss(0, 1, 3, 1))
    assert jnp.isnan(loss(0, 1, -1, 1, ignore=None))
    large = ops.softmax_cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([0]))
    assert large == 0


@parametrize_few("dtype", ["int8", "uint8", "uint16", "int64"], always=2)
def test_cross_entropy_with_narrow_labels(dtype):
    """Neither the number of classes nor the ignored label wraps round."""
    logits, labels = normal(0, 1, 4, 4, 300), jnp.full((1, 4, 4), 100)
    wanted = ops.softmax_cross_entropy(logits, labels)
    assert ops.softmax_cross_entropy(logits, labels.astype(dtype)) == wanted
    last = jnp.full((1, 4, 4), 255, "uint8")
    assert ops.softmax_cross_entropy(logits, last) > 0
    assert ops.softmax_cross_entropy(logits, last, ignore=255) == 0


def test_cross_entropy_of_half_precision_is_summed_in_float32():
    logits = jnp.zeros((1, 300, 300, 2), jnp.bfloat16)
    loss = ops.softmax_cross_entropy(logits, jnp.zeros((1, 300, 300), jnp.int32), tiles=(3, 3))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)


def test_cross_entropy_counts_positions_in_floats():
    """131072 x 131072 are more than 32 bits can count."""
    shapes = (
        jax.ShapeDtypeStruct((2**17, 2**17, 2), "float32"),
        jax.ShapeDtypeStruct((2**17, 2**17), "int32"),
    )
    with jax.enable_x64(False):
        jaxpr = jax.make_jaxpr(ops.softmax_cross_entropy)(*shapes)
    dtypes = {e.outvars[0].aval.dtype for e in jaxpr.eqns if e.primitive.name == "reduce_sum"}
    assert dtypes == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.conv(IMAGE, KERNEL, strides=(1, 2, 3)), r"`strides` \(=\(1, 2, 3\)\)"),
        (lambda: ops.conv(IMAGE, KERNEL, strides=0), "positive"),
        (lambda: ops.conv(IMAGE, KERNEL, padding="FULL"), "'SAME', 'VALID'"),
        (lambda: ops.conv(IMAGE, KERNEL, padding=[1]), "2 entries"),
        (lambda: ops.conv(IMAGE, KERNEL, padding=[(1,), (1,)]), "or a pair"),
        (lambda: ops.conv(IMAGE, KERNEL, padding=1.5), "`padding`"),
        (lambda: ops.conv(IMAGE, KERNEL, strides=(1, 1.5)), "positive whole numbers"),
        (lambda: ops.conv(IMAGE, KERNEL, tiles=4), r"`tiles` \(=4\)"),
        (lambda: ops.conv(jnp.ones((2, 3)), KERNEL), "at least one spatial axis"),
        (lambda: ops.conv(jnp.ones((1,) * 6), KERNEL), "one to three spatial axes"),
        (lambda: ops.max_pool(jnp.ones((8, 8))), "at least one spatial axis"),
        (lambda: ops.center_crop(IMAGE, (4,)), "2 numbers, one per spatial axis"),
        (lambda: nn.Conv(4, 4, (3, 3), tiles=4, rngs=nnx.Rngs(0)), r"`tiles` \(=4\)"),
        (lambda: nn.LocalConv(1, 1, (3, 3), (5,), rngs=nnx.Rngs(0)), "one number per spatial axis"),
        (lambda: ops.max_pool(IMAGE, tiles=(20, 1)), "more than"),
        (lambda: ops.max_pool(IMAGE[0, 0], tiles=(2, 2)), "per spatial axis of `x`, which has 0"),
        (lambda: ops.softmax_cross_entropy(IMAGE, IMAGE[..., 0]), "must be integers"),
        (
            lambda: nn.BatchNorm(4, tiles=(2, 2), rngs=nnx.Rngs(0))(IMAGE[0, 0]),
            "at least 3 axes",
        ),
        (lambda: ops.local_conv(IMAGE, jnp.ones((9, 9, 3, 3, 4, 1))), r"size \(11, 9\)"),
        (lambda: ops.local_conv(IMAGE, KERNEL), "rows, columns"),
        (lambda: ops.coordinate_dropout(IMAGE, KEY, rate=2), r"`rate` \(=2\)"),
        (lambda: ops.upsample(IMAGE, method="cubic"), "'nearest' or 'bilinear'"),
        (lambda: ops.crop_concat(IMAGE[:, :3], IMAGE), "larger"),
        (lambda: ops.softmax_cross_entropy(IMAGE, LABELS[:, 1:]), "one entry per position"),
        (lambda: ops.batch_norm(IMAGE, BIAS[:4], BIAS[:4], BIAS[:4]), "both `mean` and `var`"),
        (
            lambda: nn.LocalConv(1, 1, (9, 9), (5, 5), rngs=nnx.Rngs(0)),
            "larger than `in_size`",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


FLOAT64 = {"param_dtype": jnp.float64}
LAYERS = {
    "conv": lambda t: nn.Conv(4, 3, (3, 3), 2, tiles=t, rngs=nnx.Rngs(0), **FLOAT64),
    "transposed": lambda t: nn.ConvTranspose(4, 3, (2, 2), 2, tiles=t, rngs=nnx.Rngs(0), **FLOAT64),
    "batch norm": lambda t: nn.BatchNorm(4, tiles=t, rngs=nnx.Rngs(0), **FLOAT64),
    "frozen": lambda t: nn.BatchNorm(4, frozen=True, tiles=t, rngs=nnx.Rngs(0), **FLOAT64),
    "dropout": lambda t: nn.Dropout(0.5, tiles=t, rngs=nnx.Rngs(0)),
    "local": lambda t: nn.LocalConv(4, 2, (3, 3), (13, 11), tiles=t, rngs=nnx.Rngs(0), **FLOAT64),
}


@parametrize_few("name", LAYERS, always=3)
def test_layers(name):
    """Outputs, gradients and state after two calls, one of them in evaluation mode."""

    def run(tiles):
        layer = LAYERS[name](tiles)

        @nnx.jit
        def step(layer, x):
            return nnx.grad(lambda layer, x: jnp.sin(layer(x)).sum(), argnums=(0, 1))(layer, x)

        gradients = step(layer, IMAGE)
        again = layer(IMAGE)
        layer.eval()
        return gradients, again, layer(IMAGE), nnx.state(layer, nnx.BatchStat)

    assert_close(run((3, 2)), run(None))


def test_layers_take_what_flax_layers_take():
    """No batch axis, two of them, keywords, and random streams given when called."""
    layer, plain = (LAYERS["conv"](t) for t in ((3, 2), None))
    for x in (IMAGE[0], IMAGE[None]):
        assert_close(layer(x), plain(x))
    assert plain(inputs=IMAGE).shape == (2, 7, 6, 3)
    masks = [
        nn.Dropout(0.5, tiles=tiles)(IMAGE, rngs=stream(nnx.Rngs(3)))
        for tiles in ((3, 2), None)
        for stream in (lambda r: r, lambda r: r.dropout, lambda r: r.dropout())
    ]
    for mask in masks[1:]:
        assert_close(mask, masks[0])


def test_what_a_tiled_function_changes_in_its_modules():
    """Statistics of two modules, a stream that is an argument, and a parameter."""

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nn.BatchNorm(4, rngs=nnx.Rngs(0), **FLOAT64)
            self.calls = nnx.Param(jnp.zeros(()))

        def __call__(self, x, rngs):
            self.calls[...] = self.calls[...] + 1
            return nn.Dropout(0.5)(self.norm(x), rngs=rngs)

    def both(a, b, x, rngs):
        return b(a(x, rngs) ** 2, rngs)

    def run(fun):
        a, b, rngs = Model(), Model(), nnx.Rngs(0)
        outputs = [fun(a, b, IMAGE, rngs) for _ in range(2)]
        return outputs, nnx.state(a), nnx.state(b), nnx.state(rngs, nnx.RngCount)

    tiled = nn.checkpoint(both, in_axes=(None, None, (1, 2), None), tiles=(3, 2))
    assert_close(run(tiled), run(both))


def test_pooling_of_integers():
    x = jnp.arange(16, dtype=jnp.uint8).reshape(1, 4, 4, 1)
    assert ops.max_pool(x, tiles=(2, 2))[0, ..., 0].tolist() == [[5, 7], [13, 15]]


def test_dropout_with_a_traced_rate():
    drop = jax.jit(lambda rate: ops.coordinate_dropout(IMAGE, KEY, rate=rate, tiles=(2, 2)))
    assert_close(drop(0.3), ops.coordinate_dropout(IMAGE, KEY, rate=0.3))


def test_frozen_batch_norm_keeps_its_statistics():
    layer = LAYERS["frozen"](None)
    layer.train()
    assert_close(layer(IMAGE), IMAGE / jnp.sqrt(1 + 1e-5))
    assert not layer.mean[...].any()
    trained = LAYERS["batch norm"](None)
    trained(IMAGE)
    assert_close(trained.mean[...], 0.01 * IMAGE.mean((0, 1, 2)))


def test_dropout_needs_random_numbers():
    with pytest.raises(ValueError, match="Dropout needs `rngs`"):
        nn.Dropout(0.5)(IMAGE)
