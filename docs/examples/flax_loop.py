"""An ordinary loop of Flax NNX and optax. The three lines with `# jaxtile` are all that is new."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxtile  # jaxtile
import jaxtile.nn  # jaxtile


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.last = nnx.Conv(16, 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x)))
        return self.last(nnx.relu(self.second(x)))


def loss_fn(model, images, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
    return losses.mean()


axes = (None, (1, 2), (1, 2))  # the model is not tiled; height and width of images and labels are
loss_fn = jaxtile.nn.checkpoint(loss_fn, in_axes=axes, budget="24MiB")  # jaxtile


@nnx.jit
def train_step(model, optimizer, images, labels):
    loss, gradients = nnx.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
for step in range(5):
    images = jax.random.normal(jax.random.key(step), (1, 256, 256, 1))
    labels = (images[..., 0] > 0).astype(jnp.int32)
    loss = train_step(model, optimizer, images, labels)
    print(f"step {step}: loss {loss:.4f}")
