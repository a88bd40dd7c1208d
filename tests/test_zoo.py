"""Networks of other libraries, unmodified, in training mode: value, state and all gradients."""

import importlib
import os

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models

from .support import assert_close, assert_same, normal

pytestmark = pytest.mark.slow

IMAGE = normal(0, 2, 36, 33, 3)


def store_convolutions(primitive, *avals, **params):
    """A policy: without it, every norm computes all that is before it again."""
    return primitive.name == "conv_general_dilated"


def as_float64(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def resnet(version):
    return hk.nets.ResNet(
        (1, 1, 0, 0),
        5,
        resnet_v2=version == 2,
        channels_per_group=(8, 12, 8, 8),
        initial_conv_config={"output_channels": 4},
    )


HAIKU = {
    "resnet v1": lambda: resnet(1),
    "resnet v2": lambda: resnet(2),
    "mobilenet": lambda: hk.nets.MobileNetV1((1, 2), (4, 6), 5),
}


@pytest.mark.parametrize("name", HAIKU)
def test_haiku(name):
    model = hk.transform_with_state(lambda x: HAIKU[name]()(x, is_training=True))
    params, state = as_float64(model.init(jax.random.key(0), IMAGE))

    def apply(params, state, x):
        return model.apply(params, state, None, x)

    axes = (None, None, (1, 2))
    assert_same(apply, params, state, IMAGE, in_axes=axes, tiles=(3, 2), policy=store_convolutions)


class ConvNorm(nn.Module):
    """As jax-resnet and flaxmodels state a layer of a ResNet."""

    features: int
    size: int = 1
    strides: int = 1
    groups: int = 1
    act: bool = True

    @nn.compact
    def __call__(self, x):
        around, kernel, strides = self.size // 2, (self.size,) * 2, (self.strides,) * 2
        options = {"padding": [(around, around)] * 2, "use_bias": False, "param_dtype": float}
        options |= {"feature_group_count": self.groups}
        x = nn.Conv(self.features, kernel, strides, **options)(x)
        x = nn.BatchNorm(False, momentum=0.9, param_dtype=float)(x)
        return nn.relu(x) if self.act else x


class SplitAttention(nn.Module):
    """The 3 x 3 convolution of ResNeSt: two halves, weighted by what is in all of both."""

    features: int

    @nn.compact
    def __call__(self, x):
        x = ConvNorm(2 * self.features, 3, groups=2)(x)
        halves = jnp.split(x, 2, -1)
        seen = ConvNorm(6)(sum(halves).mean((1, 2), keepdims=True))
        weights = nn.Conv(2 * self.features, (1, 1), param_dtype=float)(seen).reshape(
            x.shape[0], -1
        )
        weights = nn.softmax(weights.reshape(x.shape[0], 1, 2, -1).swapaxes(1, 2), 1)
        weights = jnp.split(weights.reshape(x.shape[0], 1, 1, -1), 2, -1)
        return sum(w * half for w, half in zip(weights, halves, strict=True))


class Bottleneck(nn.Module):
    """With the skip connection of ResNet-D."""

    features: int
    strides: int = 1
    attention: bool = False

    @nn.compact
    def __call__(self, x):
        y = ConvNorm(self.features)(x)
        if self.attention:
            y = SplitAttention(self.features)(y)
            y = nn.avg_pool(y, (3, 3), (self.strides,) * 2, [(1, 1)] * 2)
        else:
            y = ConvNorm(self.features, 3, self.strides)(y)
        y = ConvNorm(4 * self.features, act=False)(y)
        if self.strides > 1:
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.relu(y + ConvNorm(4 * self.features, act=False)(x))


class Linen(nn.Module):
    attention: bool

    @nn.compact
    def __call__(self, x):
        x = ConvNorm(4, 3, 2)(x)
        x = nn.max_pool(ConvNorm(6, 3)(x), (3, 3), (2, 2), ((1, 1), (1, 1)))
        for strides in (1, 2):
            x = Bottleneck(4, strides, self.attention)(x)
        return nn.Dense(5, param_dtype=float)(x.mean((-2, -3)))


@pytest.mark.parametrize("attention", [False, True], ids=["resnet-d", "resnest"])
def test_linen(attention):
    model, image = Linen(attention), normal(0, 2, 40, 32, 3)
    variables = model.init(jax.random.key(0), image)

    def apply(params, state, x):
        return model.apply({"params": params, **state}, x, mutable=["batch_stats"])

    params, axes = variables.pop("params"), (None, None, (1, 2))
    schedule = {"in_axes": axes, "tiles": (2, 3), "policy": store_convolutions}
    assert_same(apply, params, variables, image, **schedule)


class ShuffleUnit(eqx.Module):
    """As eqxvision states ShuffleNet V2."""

    branches: list
    strides: int = eqx.field(static=True)

    def __init__(self, channels, strides, key):
        keys, half = jax.random.split(key, 5), channels // 2

        def layer(i, size, strides=1, groups=1, n=half):
            around = size // 2
            conv = eqx.nn.Conv2d(n, half, size, strides, around, 1, groups, False, key=keys[i])
            return [conv, eqx.nn.GroupNorm(1, half), eqx.nn.Lambda(jax.nn.relu)]

        n = channels if strides > 1 else half
        main = [*layer(0, 1, n=n), *layer(1, 3, strides, half), *layer(2, 1)]
        other = [*layer(3, 3, strides, half, n=n), *layer(4, 1)] if strides > 1 else []
        self.branches, self.strides = [*map(eqx.nn.Sequential, (other, main))], strides

    def __call__(self, x, key=None):
        both = (x, x) if self.strides > 1 else jnp.split(x, 2, 0)
        x = jnp.concatenate([run(y) for run, y in zip(self.branches, both, strict=True)], 0)
        return x.reshape(2, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def test_equinox_channel_shuffle_and_adaptive_pools():
    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, 2, 1, key=keys[0]),
            eqx.nn.MaxPool2d(3, 2, 1),
            ShuffleUnit(8, 2, keys[1]),
            ShuffleUnit(8, 1, keys[2]),
            eqx.nn.AdaptiveAvgPool2d((1, 1)),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(8, 5, key=keys[3]),
        ]
    )
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply(weights, x):
        return jax.vmap(eqx.combine(weights, rest))(x)

    image = normal(0, 2, 3, 40, 32)
    assert_same(apply, as_float64(weights), image, in_axes=(None, (2, 3)), tiles=(2, 2))


class Equinox(eqx.Module):
    """A residual block with batch statistics, spectral norm and dropout, for one image."""

    stem: eqx.nn.SpectralNorm
    norm: eqx.nn.BatchNorm
    conv: eqx.nn.Conv2d
    act: eqx.nn.PReLU
    pool: eqx.nn.MaxPool2d
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 4)
        stem = eqx.nn.Conv2d(3, 4, 3, 2, 1, key=keys[0])
        self.stem = eqx.nn.SpectralNorm(stem, "weight", key=keys[1])
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.conv = eqx.nn.Conv2d(4, 4, 3, padding="SAME", key=keys[2])
        self.act, self.pool = eqx.nn.PReLU(0.1), eqx.nn.MaxPool2d(3, 2, 1)
        self.dropout = eqx.nn.Dropout(0.3)
        self.head = eqx.nn.Linear(4, 5, key=keys[3])

    def __call__(self, x, state, key):
        x, state = self.stem(x, state)
        x, state = self.norm(x, state)
        x = self.pool(self.act(x))
        x = x + self.dropout(jax.nn.gelu(self.conv(x)), key=key)
        return self.head(x.mean((1, 2))), state


def test_equinox_with_state_and_a_mapped_batch():
    def to_float64(leaf):
        return leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf

    model, state = jax.tree.map(to_float64, eqx.nn.make_with_state(Equinox)())
    keys = jax.random.split(jax.random.key(1), 2)

    def apply(model, x, state):
        run = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
        scores, state = run(x, state, keys)
        return scores, jax.tree.leaves(state)

    image, (weights, rest) = IMAGE.transpose(0, 3, 1, 2), eqx.partition(model, eqx.is_inexact_array)

    def of_weights(weights, x, state):
        return apply(eqx.combine(weights, rest), x, state)

    axes = (None, (2, 3), None)
    assert_same(of_weights, weights, image, state, in_axes=axes, tiles=(3, 2))


LINEN = {
    "jax_resnet.ResNet18": ({"n_classes": 5}, {}),
    "flaxmodels.VGG16": (
        {"pretrained": None, "include_head": False, "normalize": False, "dtype": "float64"},
        {"train": True},
    ),
}
"""Networks of packages, options, and arguments of a call. (flaxmodels' norms round to float32.)"""


@pytest.mark.parametrize("name", LINEN)
def test_packages_for_linen(name):
    package, _, network = name.partition(".")
    options, arguments = LINEN[name]
    model = getattr(pytest.importorskip(package), network)(**options)
    image, dropout = normal(0, 2, 68, 64, 3), {"dropout": jax.random.key(1)}
    variables = as_float64(model.init(jax.random.key(0), image, **arguments))
    params = variables.pop("params")

    def apply(params, state, x):
        given = {"params": params, **state}
        return model.apply(given, x, rngs=dropout, mutable=["batch_stats"], **arguments)

    schedule = {"in_axes": (None, None, (1, 2)), "tiles": (2, 2), "policy": store_convolutions}
    assert_same(apply, params, variables, image, **schedule)


KERAS = {
    "MobileNetV2": (26, {"alpha": 0.35}),
    "MobileNetV3Small": (22, {"alpha": 0.75}),
    "EfficientNetB0": (30, {}),
    "ResNet50V2": (16, {}),
    "DenseNet121": (20, {}),
    "ConvNeXtTiny": (14, {}),
}
"""The name of a network, how many of its layers are compared, and options."""


@pytest.fixture
def keras(monkeypatch):
    """Keras, made to compute in float64: on JAX its norms would round to float32."""
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))
    found = pytest.importorskip("keras")
    dtypes = importlib.import_module("keras.src.backend.common.dtypes")
    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    found.config.set_floatx("float64")
    found.config.set_dtype_policy("float64")
    return found


@pytest.mark.parametrize("name", KERAS)
def test_keras(keras, name):
    """Their first layers: a compiler takes minutes for all of them."""
    layers, options = KERAS[name]
    network = getattr(keras.applications, name)
    model = network(weights=None, input_shape=(32, 36, 3), include_top=False, **options)
    compare_keras(keras.Model(model.input, model.layers[layers].output), normal(0, 2, 32, 36, 3))


@pytest.mark.parametrize(
    "name, options",
    [
        ("MobileNet", {"alpha": 0.25}),
        ("MobileNetV2", {"alpha": 0.35}),
        ("ResNet50", {}),
        ("ResNet50V2", {}),
        ("ConvNeXtTiny", {}),
        ("EfficientNetB0", {}),
        ("DenseNet121", {}),
    ],
)
def test_keras_in_full(keras, name, options):
    """Four images of 64 pixels: at the end, statistics of sixteen numbers. Of two they would be
    nothing but the sign of a difference, and gradients mostly rounding. A compiler takes minutes.
    """
    common = {"input_shape": (64, 64, 3), "classes": 5, "classifier_activation": None}
    model = getattr(keras.applications, name)(weights=None, **common, **options)
    compare_keras(model, normal(0, 4, 64, 64, 3))


def compare_keras(model, image):
    trained = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def apply(trained, x, others):
        return model.stateless_call(trained, others, x, training=True)

    image, axes = image * 50 + 100, (None, (1, 2), None)
    assert f"f32[{len(image)}," not in str(jax.make_jaxpr(apply)(trained, image, others))
    schedule = {"in_axes": axes, "tiles": (2, 2), "policy": store_convolutions}
    assert_same(apply, trained, image, others, **schedule)


@pytest.mark.parametrize(
    "name, size, options", [("ResNet50", 64, {"stride_first": True}), ("VGG16", 224, {})]
)
def test_weights_of_keras(keras, tmp_path, name, size, options):
    """The same scores as Keras', whose images are BGR."""
    theirs = getattr(keras.applications, name)(
        weights=None, classes=5, classifier_activation=None, input_shape=(size, size, 3)
    )
    random = np.random.default_rng(0)
    for w in theirs.weights:
        deviation = np.sqrt(2 / np.prod(w.shape[:-1])) if len(w.shape) > 1 else 0.1
        w.assign(np.asarray(w) + deviation * np.abs(random.standard_normal(w.shape)))
    theirs.save_weights(tmp_path / "a.weights.h5")
    types = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    ours = models.create(name.lower(), 5, **options, **types)
    models.load_weights(ours, tmp_path / "a.weights.h5")
    ours.eval()
    image = normal(0, 1, size, size, 3)
    assert_close(ours(image), jnp.asarray(theirs(image[..., ::-1], training=False)), 1e-12)
