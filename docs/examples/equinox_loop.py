"""An ordinary loop of Equinox and optax. The two lines with `# jaxtile` are all that is new."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxtile  # jaxtile


class Net(eqx.Module):
    layers: list

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=one),
            eqx.nn.GroupNorm(4, 16),
            jax.nn.relu,
            eqx.nn.Conv2d(16, 16, 3, padding=1, key=two),
            jax.nn.relu,
            eqx.nn.Conv2d(16, 2, 1, key=three),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, images, labels):
    scores = jax.vmap(model)(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.moveaxis(scores, 1, -1), labels)
    return losses.mean()


axes = (None, (2, 3), (1, 2))  # Equinox has channels first
loss_fn = jaxtile.checkpoint(loss_fn, in_axes=axes, budget="24MiB")  # jaxtile


@eqx.filter_jit
def train_step(model, state, images, labels):
    loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state, loss


model, optimizer = Net(jax.random.key(0)), optax.adam(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_array))
for step in range(5):
    images = jax.random.normal(jax.random.key(step), (1, 1, 256, 256))
    labels = (images[:, 0] > 0).astype(jnp.int32)
    model, state, loss = train_step(model, state, images, labels)
    print(f"step {step}: loss {loss:.4f}")
