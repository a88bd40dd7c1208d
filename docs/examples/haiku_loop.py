"""An ordinary loop of Haiku and optax. The two lines with `# jaxtile` are all that is new."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import jaxtile  # jaxtile


def forward(images, is_training):
    x = hk.Conv2D(16, 3)(images)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    x = jax.nn.relu(hk.Conv2D(16, 3)(x))
    return hk.Conv2D(2, 1)(x)


model = hk.transform_with_state(forward)


def loss_fn(params, state, images, labels):
    scores, state = model.apply(params, state, None, images, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), state


axes = (None, None, (1, 2), (1, 2))  # height and width of images and labels are tiled
loss_fn = jaxtile.checkpoint(loss_fn, in_axes=axes, budget="24MiB")  # jaxtile


@jax.jit
def train_step(params, state, moments, images, labels):
    (loss, state), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
        params, state, images, labels
    )
    updates, moments = optimizer.update(gradients, moments)
    return optax.apply_updates(params, updates), state, moments, loss


optimizer = optax.adam(1e-2)
params, state = model.init(jax.random.key(0), jnp.zeros((1, 256, 256, 1)), is_training=True)
moments = optimizer.init(params)
for step in range(5):
    images = jax.random.normal(jax.random.key(step), (1, 256, 256, 1))
    labels = (images[..., 0] > 0).astype(jnp.int32)
    params, state, moments, loss = train_step(params, state, moments, images, labels)
    print(f"step {step}: loss {loss:.4f}")
