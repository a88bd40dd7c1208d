"""One training step of a small network on a large image: plain JAX against jaxtile.

    python -m experiments.demo

Expect, within two minutes on two CPU cores: the same loss, gradients that differ by rounding only,
and a fraction of the memory for less than twice the time.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import optax
from absl import app, flags, logging
from flax import nnx

import jaxtile

_SIZE = flags.DEFINE_integer("size", 1024, "height and width of the image")
_TILES = flags.DEFINE_integer("tiles", 8, "tiles per axis")


class Network(nnx.Module):
    """Six 3 x 3 convolutions with a skip, and a map of logits."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(4)])
        self.head = nnx.Conv(width, 2, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = x = nnx.relu(self.stem(x))
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x + skip)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    size, tiles = _SIZE.value, (_TILES.value,) * 2
    graphdef, params = nnx.split(Network(nnx.Rngs(0)))
    image = jax.random.normal(jax.random.key(0), (1, size, size, 3))
    labels = (image.mean(-1) > 0).astype(jnp.int32)
    optimiser = optax.adam(1e-3)

    def loss(params, image, labels):
        logits = nnx.merge(graphdef, params)(image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    axes = (None, (1, 2), (1, 2))
    tiled = jaxtile.checkpoint(loss, in_axes=axes, tiles=tiles)

    def step(loss):
        def run(params, state, image, labels):
            value, gradients = jax.value_and_grad(loss)(params, image, labels)
            updates, state = optimiser.update(gradients, state, params)
            return value, gradients, optax.apply_updates(params, updates), state

        return run

    arguments = params, optimiser.init(params), image, labels
    backend = f"{jax.default_backend()}, jax {jax.__version__}"
    print(f"one training step on a {size} x {size} image, {backend}")
    print(jaxtile.explain(loss, params, image, labels, in_axes=axes, tiles=tiles), "\n")
    plain_step, tiled_step = measure(step(loss), arguments), measure(step(tiled), arguments)
    rows = {"plain JAX": plain_step, f"jaxtile, {tiles[0]} x {tiles[1]} tiles": tiled_step}
    print(f"{'':22}{'loss':>12}{'temporary bytes':>18}{'seconds':>10}")
    for name, (outputs, temporary, seconds) in rows.items():
        print(f"{name:22}{float(outputs[0]):12.7f}{temporary / 2**20:14.1f} MiB{seconds:10.2f}")
    difference = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(*(jax.tree.leaves(r[0][1]) for r in (tiled_step, plain_step)), strict=True)
    )
    print(
        f"\nlargest difference of a gradient, relative: {difference:.1e} (float32)\n"
        f"memory: {tiled_step[1] / plain_step[1]:.3f} of plain; "
        f"time: {tiled_step[2] / plain_step[2]:.2f}x plain"
    )


def measure(step, arguments):
    """Outputs, temporary bytes of the compiled program, and seconds of its second run."""
    compiled = jax.jit(step).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    begin = time.perf_counter()
    outputs = jax.block_until_ready(compiled(*arguments))
    seconds = time.perf_counter() - begin
    return outputs, compiled.memory_analysis().temp_size_in_bytes, seconds


if __name__ == "__main__":
    app.run(main)
