"""Time and memory of one network on finer and finer grids, beside the work that `explain` counts.

    python -m experiments.grids --size=512

Ratios to plain JAX: compiled temporaries, measured time, counted operations. Time should follow the
operations, not the number of tiles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

import jaxtile

from .measuring.measure import measure
from .program.command import start
from .program.progress import Now

_SIZE = flags.DEFINE_integer("size", 512, "height and width of the image", 1)
_CHANNELS = flags.DEFINE_integer("channels", 16, "channels of every layer", 1)
_LAYERS = flags.DEFINE_integer("layers", 8, "3 x 3 convolutions", 1)
_GRIDS = flags.DEFINE_multi_integer("grid", [1, 2, 4, 8, 16], "tiles per axis", 1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed steps", 1)


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in params:
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims))
    return x


def main(argv: list[str]) -> None:
    del argv
    size, channels = _SIZE.value, _CHANNELS.value
    keys = jax.random.split(jax.random.key(0), _LAYERS.value + 1)
    params = [0.1 * jax.random.normal(k, (3, 3, channels, channels)) for k in keys[1:]]
    image = jax.random.normal(keys[0], (1, size, size, channels))
    with Now(file=sys.stderr) as now:
        compare(params, image, now)


def compare(params: list[jax.Array], image: jax.Array, now: Now) -> None:
    """Plain JAX, and then a row for each grid."""
    size, channels = image.shape[1], image.shape[-1]
    now("plain JAX")
    plain = measure(step(network), params, image, repeats=_REPEATS.value)
    now.hide()
    print(
        f"{_LAYERS.value} convolutions 3 x 3, {size} x {size} x {channels}, {jax.default_backend()}"
    )
    print(f"plain JAX: {plain.seconds * 1e3:.0f} ms, {plain.temporary_bytes / 2**20:.1f} MiB\n")
    print("| tiles | memory | time | operations |\n|---|---|---|---|")
    for n in _GRIDS.value:
        now(f"{n} x {n} tiles")
        schedule = {"in_axes": (None, (1, 2)), "tiles": (n, n)}
        tiled = jaxtile.checkpoint(network, **schedule)
        ours = measure(step(tiled), params, image, repeats=_REPEATS.value)
        work = jaxtile.explain(network, params, image, **schedule).overhead
        memory = ours.temporary_bytes / plain.temporary_bytes
        now.hide()
        ratios = memory, ours.seconds / plain.seconds, work
        print(f"| {n} x {n} |", " | ".join(f"{r:.3f}" for r in ratios), "|", flush=True)


def step(fun: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Value and gradients of a loss."""
    return jax.value_and_grad(lambda p, x: jnp.mean(fun(p, x) ** 2))


if __name__ == "__main__":
    start(main)
