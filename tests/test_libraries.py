"""Unmodified models of Flax (Linen and NNX), Haiku and Equinox."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from .support import assert_same, normal

IMAGE = normal(0, 2, 12, 10, 3)
LABELS = jnp.argmax(normal(1, 2, 12, 10, 4), -1)
AXES = (None, (1, 2))


def as_float64(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@pytest.mark.slow
def test_linen_unet_in_training_mode():
    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Conv(self.features, (3, 3), param_dtype=jnp.float64)(x)
            x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
            return nn.Dropout(0.3, deterministic=not train)(nn.leaky_relu(x))

    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            skip = Block(3)(x, train)
            deep = Block(4)(nn.max_pool(skip, (2, 2), (2, 2)), train)
            up = nn.ConvTranspose(3, (2, 2), (2, 2), param_dtype=jnp.float64)(deep)
            x = Block(3)(jnp.concatenate([skip, up], -1), train)
            x = nn.GroupNorm(1, param_dtype=jnp.float64)(nn.avg_pool(x, (3, 3), (1, 1), "SAME"))
            return nn.Conv(4, (1, 1), param_dtype=jnp.float64)(
                nn.LayerNorm(param_dtype=jnp.float64)(x)
            )

    model = UNet()
    variables = model.init(jax.random.key(0), IMAGE, False)

    def loss(variables, image, labels, key):
        logits, updates = model.apply(
            variables, image, True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return (
            optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(),
            updates,
            logits,
        )

    args = variables, IMAGE, LABELS, jax.random.key(1)
    assert_same(loss, *args, in_axes=(None, (1, 2), (1, 2), None), tiles=(3, 2))


@pytest.mark.slow
def test_nnx_residual_classifier():
    class Model(nnx.Module):
        def __init__(self, rngs):
            kwargs = {"rngs": rngs, "param_dtype": jnp.float64}
            self.stem = nnx.Conv(3, 4, (7, 7), strides=2, **kwargs)
            self.norm = nnx.BatchNorm(4, **kwargs)
            self.a = nnx.Conv(4, 4, (3, 3), **kwargs)
            self.b = nnx.Conv(4, 4, (1, 1), use_bias=False, **kwargs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(4, 3, **kwargs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), (1, 1), "SAME")
            x = nnx.relu(x + self.b(self.dropout(nnx.silu(self.a(x)))))
            return self.head(x.mean((1, 2)))

    graphdef, state = nnx.split(Model(nnx.Rngs(0)))

    def apply(state, x):
        model = nnx.merge(graphdef, state)
        out = model(x)
        return out, nnx.state(model, nnx.BatchStat)

    assert_same(apply, state, IMAGE, in_axes=AXES, tiles=(3, 2))


@pytest.mark.slow
def test_haiku_with_state():
    def forward(x):
        x = hk.Conv2D(4, 3, stride=2)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        x = hk.MaxPool((2, 2, 1), (1, 1, 1), "SAME")(jax.nn.elu(x))
        x = hk.AvgPool((3, 3, 1), (1, 1, 1), "SAME")(x)
        x = hk.Conv2DTranspose(3, 3, stride=2)(x)
        x = hk.DepthwiseConv2D(1, 3)(x)
        return hk.InstanceNorm(True, True)(x), hk.Linear(2)(x.max((1, 2)))

    model = hk.transform_with_state(forward)
    params, state = as_float64(model.init(jax.random.key(0), IMAGE))

    def apply(params, x, state):
        return model.apply(params, state, None, x)

    assert_same(apply, params, IMAGE, state, in_axes=(None, (1, 2), None), tiles=(2, 4))


@pytest.mark.slow
def test_equinox_channels_first():
    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 4, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(eqx.nn.PReLU(0.1)),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(4, 4, 3, padding="SAME", groups=2, key=keys[1]),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1, key=keys[2]),
            eqx.nn.AvgPool2d(3, 1, padding=1),
        ]
    )
    params, static = eqx.partition(as_float64(eqx.filter(model, eqx.is_array)), eqx.is_array)
    static = eqx.filter(model, eqx.is_array, inverse=True)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    assert_same(apply, params, IMAGE.transpose(0, 3, 1, 2), in_axes=(None, (2, 3)), tiles=(3, 2))
