"""The models: exact when tiled, at any size, with every option; and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtile.nn
import models

from .support import assert_close, assert_same, normal, parametrize_few

NAMES = jax.checkpoint_policies.save_only_these_names
FLOAT64 = {"param_dtype": jnp.float64}


def make(name, *args, **options):
    return models.create(name, *args, rngs=nnx.Rngs(0), **FLOAT64, **options)


def drawn(name, *args, **options):
    """The same, with weights from NumPy: JAX would compile an initialiser for each shape."""
    model, rng = nnx.eval_shape(lambda: make(name, *args, **options)), np.random.default_rng(0)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):  # of random numbers, the key or the count
            return jax.random.key(0) if leaf.dtype != "uint32" else jnp.zeros((), leaf.dtype)
        shape, weights = leaf.shape, max(1, np.prod(leaf.shape[:-1]))
        drawn = rng.standard_normal(shape) / weights**0.5 if len(shape) > 1 else rng.random(shape)
        return jnp.asarray(drawn, leaf.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


def labels(*shape, classes=3):
    return jnp.asarray(np.random.default_rng(0).integers(-1, classes, shape))


def output(model, shape):
    """The shape of the model's output."""
    image = jax.ShapeDtypeStruct(shape, "float64")
    return nnx.eval_shape(lambda model, image: model(image), model, image).shape


def assert_tiled_same(model, *args, axes, tiles, policy=None):
    """Loss, all gradients and the updated statistics, in training mode."""
    model.train()
    graphdef, state = nnx.split(model)

    def loss(state, *args):
        merged = nnx.merge(graphdef, state)
        return merged.loss(*args), nnx.state(merged, nnx.BatchStat)

    assert_same(loss, state, *args, in_axes=(None, *axes), tiles=tiles, policy=policy)


MAPS = ((1, 2), (1, 2))
"""An image and a map of labels."""


def saves_convolutions(primitive, *_, **params):
    return primitive.name == "conv_general_dilated"


UNETS = {
    "valid": (dict(channels=3, depth=2), (2, 52, 60, 1), (3, 2), None),
    "ResNet-50's encoder, batch statistics": (
        dict(channels=4, encoder="resnet50", blocks=(1, 1), padding="SAME", norm="batch"),
        (2, 24, 16, 1),
        (3, 2),
        saves_convolutions,
    ),
    "one level, many tiles": (dict(channels=2, depth=1), (1, 24, 30, 1), (7, 5), NAMES("d0c")),
    "same, batch norm": (
        dict(channels=2, depth=1, padding="SAME", norm="batch"),
        (2, 16, 12, 1),
        {"d1a": (2, 2), "u0b": (2, 1), ...: (4, 3)},
        NAMES("d0b.pre", "d0c.pre", "d1a", "d1b.pre", "d1c.pre", "u0b", "u0c.pre"),
    ),
    "bilinear, group norm": (
        dict(channels=[2, 8], padding="SAME", norm="group", upsampling="bilinear", dropout=0.2),
        (1, 16, 20, 1),
        (2, 3),
        NAMES("d0c.pre", "d1a", "u0b"),
    ),
    "nearest, 3-D": (
        dict(channels=2, depth=1, padding="SAME", spatial=3, upsampling="nearest"),
        (1, 6, 8, 4, 1),
        (2, 3, 1),
        None,
    ),
    "1-D": (dict(channels=2, depth=1, spatial=1), (2, 40, 1), (4,), NAMES("u0b")),
    "ResNet-50's encoder, frozen, 3-D": (
        dict(channels=2, encoder="resnet50", blocks=(1,), padding="SAME", spatial=3, frozen=True),
        (1, 8, 12, 8, 1),
        (2, 3, 1),
        None,
    ),
    "ResNet-50's encoder, batch statistics, 3-D": (
        dict(channels=2, encoder="resnet50", blocks=(1,), padding="SAME", spatial=3),
        (2, 8, 12, 4, 1),
        (2, 3, 1),
        saves_convolutions,
    ),
}


@parametrize_few("name", UNETS)
def test_unet(name):
    options, shape, tiles, policy = UNETS[name]
    model = drawn("unet", 1, 3, **options)
    size = [model.output_size(n) for n in shape[1:-1]]
    assert output(model, shape)[1:-1] == tuple(size)
    axes = [tuple(range(1, len(shape) - 1))] * 2
    image, target = normal(1, *shape), labels(shape[0], *size)
    assert_tiled_same(model, image, target, axes=axes, tiles=tiles, policy=policy)


RESNETS = {
    "batch statistics, nothing stored": (dict(blocks=(1,), width=2), (2, 21, 17, 3), (3, 2), None),
    "batch statistics, convolutions stored": (
        dict(blocks=(1, 2), width=2),
        (2, 37, 30, 3),
        (2, 2),
        saves_convolutions,
    ),
    "frozen": (
        dict(blocks=(1, 1, 1), width=2, frozen=True),
        (1, 43, 50, 3),
        {"layer1.0.bias_relu": (4, 3), ...: (2, 2)},
        NAMES("layer1.0.bias_relu"),
    ),
    "folded": (dict(blocks=(1, 1), width=2, folded=True), (1, 40, 33, 3), (3, 3), NAMES("maxpool")),
}


@parametrize_few("name", RESNETS)
def test_resnet50(name):
    options, shape, tiles, policy = RESNETS[name]
    model = drawn("resnet50", 5, **options)
    args = normal(1, *shape), labels(shape[0], classes=5)
    assert_tiled_same(model, *args, axes=((1, 2), None), tiles=tiles, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False])
def test_a_block_of_resnet50_may_start_as_its_shortcut(zero):
    model = make("resnet50", 5, blocks=(2,), width=2, zero_init_residual=zero)
    first, second = model.layer1
    x = normal(1, 2, 9, 7, 2)
    y = first(x, "first")
    shortcut = jnp.maximum(first.downsample(x, "shortcut"), 0)
    assert bool(jnp.allclose(y, shortcut)) == zero
    assert bool(jnp.allclose(second(y, "second"), y)) == zero
    gradient = nnx.grad(lambda block: (block(y, "second") ** 2).sum())(second)
    assert jnp.abs(gradient["conv3"]["norm"]["scale"][...]).min() > 0  # it learns


@pytest.mark.slow
def test_resnet50_of_full_depth():
    """53 batch norms amplify rounding: with only 2 channels, one unit in the last place of the
    image changes the plain gradients by more than the tolerance. 16 channels are enough.
    """
    model = make("resnet50", 5, width=16)
    args = normal(1, 2, 70, 65, 3), labels(2, classes=5)
    policy = saves_convolutions
    assert_tiled_same(model, *args, axes=((1, 2), None), tiles=(2, 2), policy=policy)


@parametrize_few("tiles, policy", [((3, 2), NAMES("pool2")), ((2, 1), None)])
def test_alexnet(tiles, policy):
    args = (normal(1, 1, 79, 67, 3),)
    tiles = {"pool2": tiles, ...: (1, 1)} if policy else tiles
    assert_tiled_same(drawn("alexnet", width=4), *args, axes=((1, 2),), tiles=tiles, policy=policy)


@pytest.mark.slow
def test_alexnet_classifier():
    args = normal(1, 1, 230, 224, 3), labels(1, classes=5)
    policy = NAMES("pool5", "fc6")
    tiles = {"pool5": (3, 2), ...: None}
    model = make("alexnet", 5, width=4)
    assert_tiled_same(model, *args, axes=((1, 2), None), tiles=tiles, policy=policy)


@pytest.mark.slow
@pytest.mark.parametrize("tiles, policy", [({"pool2": (3, 2), ...: (2, 2)}, NAMES("pool2"))])
def test_vgg16(tiles, policy):
    args = (normal(1, 1, 64, 70, 3),)
    assert_tiled_same(make("vgg16", width=4), *args, axes=((1, 2),), tiles=tiles, policy=policy)


@pytest.mark.slow
def test_vgg16_in_one_region():
    args = (normal(1, 1, 64, 70, 3),)
    assert_tiled_same(make("vgg16", width=4), *args, axes=((1, 2),), tiles=(2, 2))


@parametrize_few(
    "tiles, policy",
    [
        ((3, 2), NAMES("L1.filterNL")),
        ({"L0.filterNL": (4, 4), ...: (1, 3)}, NAMES("L0.filterNL")),
        ((2, 2), None),
    ],
)
def test_local_cnn(tiles, policy):
    model = drawn("local_cnn", (13, 11), 2, channels=3, kernels=(3, 4), num_classes=5)
    args = normal(1, 4, 13, 11, 2), labels(4, classes=5)
    assert_tiled_same(model, *args, axes=((1, 2), None), tiles=tiles, policy=policy)


@pytest.mark.slow
def test_local_cnn_against_a_numpy_loop():
    """Scores, and gradients by the chain rule written out in loops."""
    model = make("local_cnn", (7, 6), 2, channels=3, kernels=(3, 2), num_classes=4)
    model.L0.a[...], model.L1.a[...] = jnp.array(1.3), jnp.array(0.7)
    model.L0.b[...], model.L1.b[...] = normal(3, 5, 4, 3), normal(4, 4, 3, 3)
    x = np.asarray(normal(1, 2, 7, 6, 2))
    cotangent = np.asarray(normal(2, 2, 4))
    graphdef, state = nnx.split(model)
    scores, pull = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, jnp.asarray(x))
    gradients, image_gradient = pull(jnp.asarray(cotangent))

    def filter_loop(x, w):
        y = np.zeros((len(x), *w.shape[:2], w.shape[-1]))
        for i, j in np.ndindex(*w.shape[:2]):
            window = x[:, i : i + w.shape[2], j : j + w.shape[3]]
            y[:, i, j] = np.einsum("nabc,abcd->nd", window, w[i, j])
        return y

    def filter_gradient(x, w, g):
        gw, gx = np.zeros_like(w), np.zeros_like(x)
        for i, j in np.ndindex(*w.shape[:2]):
            rows, columns = slice(i, i + w.shape[2]), slice(j, j + w.shape[3])
            gw[i, j] = np.einsum("nabc,nd->abcd", x[:, rows, columns], g[:, i, j])
            gx[:, rows, columns] += np.einsum("abcd,nd->nabc", w[i, j], g[:, i, j])
        return gw, gx

    weights = {k: np.asarray(v[...]) for k, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    head = weights["classifier", "kernel"]
    trail = []
    for i in ("L0", "L1"):
        w, a, b = weights[i, "filter", "kernel"], weights[i, "a"], weights[i, "b"]
        y = filter_loop(x, w)
        trail.append((i, x, w, a, b, y))
        x = np.tanh(a * (y + b))
    assert_close(scores, jnp.asarray(np.einsum("nhwc,hwcd->nd", x, head)))
    wanted = {("classifier", "kernel"): np.einsum("nhwc,nd->hwcd", x, cotangent)}
    g = np.einsum("nd,hwcd->nhwc", cotangent, head)
    for i, x, w, a, b, y in reversed(trail):
        g = g * (1 - np.tanh(a * (y + b)) ** 2)
        wanted[i, "a"] = np.asarray((g * (y + b)).sum())
        g = g * a
        wanted[i, "b"] = g.sum(0)
        wanted[i, "filter", "kernel"], g = filter_gradient(x, w, g)
    found = {k: v[...] for k, v in nnx.to_flat_state(gradients)}
    assert_close({k: jnp.asarray(v) for k, v in wanted.items()}, found)
    assert_close(jnp.asarray(g), image_gradient)


@pytest.mark.slow
def test_a_module_is_trained_as_without_tiles():
    """Loss, gradients and the module itself after two steps under `nnx.jit`."""

    def run(wrap):
        model = make("unet", 1, 3, channels=2, depth=1, padding="SAME", norm="batch")
        loss = wrap(lambda model, image, target: model.loss(image, target))

        @nnx.jit
        def step(model, image, target):
            value, gradients = nnx.value_and_grad(loss)(model, image, target)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))
            return value

        image, target = normal(1, 2, 12, 10, 1), labels(2, 12, 10)
        values = [step(model, image, target) for _ in range(2)]
        return values, nnx.state(model, (nnx.Param, nnx.BatchStat, nnx.RngCount))

    tiled = functools.partial(
        jaxtile.nn.checkpoint,
        in_axes=(None, *MAPS),
        tiles=(3, 2),
        policy=NAMES("d0b.pre", "d0c.pre", "d1b.pre", "d1c.pre", "u0b"),
    )
    assert_close(run(tiled), run(lambda loss: loss))


@pytest.mark.slow
def test_dropout_is_off_in_evaluation():
    model = make("unet", channels=2, depth=1)
    x = normal(1, 1, 24, 24, 1)
    model.eval()
    assert_close(model(x), model(x))
    model.train()
    assert not jnp.allclose(model(x), model(x))


@pytest.mark.slow
def test_folding_keeps_the_function():
    model = make("resnet50", 5, blocks=(2, 1), width=2)
    for path, unit in nnx.iter_graph(model):
        if isinstance(unit, nnx.BatchNorm):
            seed, n = len(str(path)), unit.mean.shape[0]
            unit.mean[...], unit.var[...] = normal(seed, n), jnp.exp(normal(seed + 1, n))
            unit.scale[...], unit.bias[...] = normal(seed + 2, n), normal(seed + 3, n)
    model.eval()
    x = normal(1, 2, 33, 40, 3)
    folded = models.fold_batch_norm(model)
    assert_close(folded(x), model(x))
    assert not nnx.state(folded, nnx.BatchStat)
    with pytest.raises(ValueError, match="folded already"):
        models.fold_batch_norm(folded)


def test_names_are_the_references():
    model = nnx.eval_shape(lambda: make("resnet50", 5, blocks=(1, 1), width=2))
    image = jax.ShapeDtypeStruct((1, 33, 33, 3), "float64")
    found = jaxtile.nn.operations(lambda model, x: model(x), model, image)
    named = {o.name for o in found.operations}
    assert {"maxpool", "layer1.0.add", "layer2.0.downsample", "layer2.0.bias_relu", "fc"} <= named


@pytest.mark.parametrize("name", models.names())
def test_types(name):
    """Weights in float32, computation in bfloat16, loss in float32."""
    options = {
        "unet": dict(channels=2, depth=1),
        "resnet50": dict(blocks=(1,), width=2, num_classes=3),
        "local_cnn": dict(size=12, channels=2, kernels=(3, 3), num_classes=3),
    }.get(name, {})
    shape = {
        "unet": (1, 24, 24, 1),
        "local_cnn": (1, 12, 12, 1),
        "vgg16": (1, 32, 32, 3),
    }.get(name, (1, 67, 67, 3))
    model = nnx.eval_shape(
        lambda: models.create(name, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    )
    image = jax.ShapeDtypeStruct(shape, "bfloat16")
    target = {"unet": (1, 8, 8), "resnet50": (1,), "local_cnn": (1,)}.get(name)
    args = [image] if target is None else [image, jax.ShapeDtypeStruct(target, "int32")]
    graphdef, state = nnx.split(model)
    assert jax.eval_shape(lambda s, x: nnx.merge(graphdef, s)(x), state, image).dtype == "bfloat16"
    loss = jax.eval_shape(lambda s, *a: nnx.merge(graphdef, s).loss(*a), state, *args)
    assert loss.dtype == "float32"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}


SMALL_UNET = functools.partial(make, "unet", channels=2, depth=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: make("u-net"), "no model 'u-net'; did you mean 'unet'"),
        (lambda: make("unet", padding="full"), "'VALID', 'SAME'"),
        (lambda: make("unet", norm="layer"), "None, 'batch', 'group'"),
        (lambda: make("unet", channels=[2, 4], depth=3), "depth of 1, but `depth` is 3"),
        (lambda: make("unet", depth=0), "must be positive"),
        (lambda: SMALL_UNET()(jnp.ones((1, 51, 52, 1))), "51 pixels along axis 1.*48 and 52"),
        (lambda: SMALL_UNET()(jnp.ones((1, 52, 7, 1))), "7 pixels along axis 2.*fit are 44"),
        (lambda: SMALL_UNET(padding="SAME")(jnp.ones((1, 18, 16, 1))), "16 and 20"),
        (lambda: SMALL_UNET()(jnp.ones((52, 52, 1))), "N, H, W, 1"),
        (lambda: SMALL_UNET()(jnp.ones((1, 1, 52, 52))), "channels last"),
        (lambda: make("vgg16", width=1)(jnp.ones((1, 31, 32, 3))), "31 pixels.*fit are 32"),
        (lambda: make("alexnet", width=1)(jnp.ones((1, 67, 20, 3))), "20 pixels"),
        (lambda: make("vgg16", width=1).loss(jnp.ones((1, 32, 32, 3)), 0), "takes no labels"),
        (lambda: make("alexnet", 2, width=1).loss(jnp.ones((1, 224, 224, 3))), "needs labels"),
        (
            lambda: make("local_cnn", 12, channels=2, num_classes=2, kernels=(3, 3))(
                jnp.ones((1, 12, 13, 1))
            ),
            r"size \(12, 12\).*LocalCNN\(size=\(12, 13\)\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)


def test_nearest_sizes_are_right():
    """The sizes that the errors name run, and those between them do not."""
    model = nnx.eval_shape(SMALL_UNET)
    fits = [n for n in range(40, 80) if model._fits(n)]
    for n in range(44, 70):
        if n in fits:
            assert output(model, (1, n, n, 1)) == (1, n - 40, n - 40, 2)
        else:
            with pytest.raises(ValueError, match="nearest sizes"):
                output(model, (1, n, n, 1))
    alexnet = nnx.eval_shape(lambda: make("alexnet"))
    least = next(n for n in range(200) if alexnet._fits(n))
    assert output(alexnet, (1, least, least, 3)) == (1, 1, 1, 256)


def test_vgg16_with_a_pooled_classifier():
    @nnx.jit
    def both(model, image):
        features = image
        for block in range(1, 6):
            features = model.block(features, block)
        fc = model.classifier.fc
        return model(image), features.mean((1, 2)) @ fc.kernel[...] + fc.bias[...]

    found, expected = both(drawn("vgg16", 3, pooled=True, width=2), normal(0, 2, 64, 96, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def with_a_score_for_each_pixel():
    return drawn("vgg16", 3, dense=True, width=2), normal(0, 1, 64, 96, 3)


@pytest.mark.slow
def test_vgg16_with_a_score_for_each_pixel():
    """Each score stands for 32 x 32 pixels."""
    model, image = with_a_score_for_each_pixel()
    scores = np.asarray(nnx.jit(lambda model, image: model(image))(model, image))
    coarse = scores[:, ::32, ::32]
    np.testing.assert_array_equal(scores, coarse.repeat(32, 1).repeat(32, 2))
    assert np.ptp(coarse) > 0
    with pytest.raises(ValueError, match="64, 80"):
        output(model, (1, 64, 80, 3))
    with pytest.raises(ValueError, match="`dense` wants `num_classes`"):
        models.VGG16(dense=True, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_tiles_that_do_not_fit_the_squares_of_scores():
    model, image = with_a_score_for_each_pixel()
    labels = np.random.default_rng(0).integers(0, 3, (1, 64, 96))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, image, labels):
        return nnx.merge(graphdef, params, rest, copy=True).loss(image, labels)

    axes = (None, (1, 2), (1, 2))
    tiled = jaxtile.checkpoint(loss, in_axes=axes, tiles=(2, 5))
    args = params, image, labels
    assert_close(jax.jit(jax.grad(tiled))(*args), jax.jit(jax.grad(loss))(*args))
