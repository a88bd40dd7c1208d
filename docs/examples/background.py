"""What `skip=True` saves where four fifths of an image are empty.

python docs/examples/background.py

A training step of a small network, with and without, in seconds of the processor.
"""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jaxtile

SIZE, TILE, CHANNELS = 1536, 32, (3, 32, 32, 64, 64)


def loss(kernels, image):
    x = image / 255.0
    for i, kernel in enumerate(kernels):
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
        if i % 2:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = checkpoint_name(x, f"pool{i // 2}")
    return (x**2).mean()


def seconds(fun, *args):
    jax.block_until_ready(fun(*args))
    began = time.process_time()
    jax.block_until_ready(fun(*args))
    return time.process_time() - began


def main():
    chance, side = np.random.default_rng(0), int(SIZE * 0.2**0.5)
    inside = slice((SIZE - side) // 2, (SIZE + side) // 2)
    image = np.full((1, SIZE, SIZE, 3), 255, np.uint8)
    image[:, inside, inside] = chance.integers(0, 256, (1, side, side, 3))
    kernels = [
        jnp.asarray(0.1 * chance.standard_normal((3, 3, *shape)), jnp.float32)
        for shape in itertools.pairwise(CHANNELS)
    ]
    options = {
        "in_axes": (None, (1, 2)),
        "tiles": (SIZE // TILE, SIZE // TILE),
        "policy": jax.checkpoint_policies.save_only_these_names("pool0"),
    }
    times = {}
    for skip in (False, True):
        tiled = jaxtile.checkpoint(loss, skip=skip, **options)
        times[skip] = seconds(jax.jit(jax.value_and_grad(tiled)), kernels, image)
    regions = tiled.explain(kernels, image).regions
    computed = sum(r.tiles - r.skipped for r in regions) / sum(r.tiles for r in regions)
    print(f"all tiles: {times[False]:.1f} s; with skip: {times[True]:.1f} s")
    print(f"{times[True] / times[False]:.2f} of the time; {computed:.2f} of the tiles, forwards")


if __name__ == "__main__":
    main()
