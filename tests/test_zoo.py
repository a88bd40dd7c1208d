"""Networks of other libraries, unmodified, in training mode: value, state and all gradients."""

import importlib
import os

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from .support import assert_same, normal

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
    model = keras.Model(model.input, model.layers[layers].output)
    trained = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def apply(trained, x, others):
        return model.stateless_call(trained, others, x, training=True)

    image, axes = normal(0, 2, 32, 36, 3) * 50 + 100, (None, (1, 2), None)
    assert "f32[2," not in str(jax.make_jaxpr(apply)(trained, image, others))
    schedule = {"in_axes": axes, "tiles": (2, 2), "policy": store_convolutions}
    assert_same(apply, trained, image, others, **schedule)
