"""VGG16 features on one large image: plain JAX against recomputed and tiled schedules.

    python -m experiments.vgg16 --size=4096 --dtype=bfloat16

Each schedule runs in a process of its own, because the peak of the allocator never goes down.
Printed per schedule: milliseconds per step (forward and backward of all weights, median), compiled
bytes (temporaries), peak of the allocator, and ratios to plain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .measure import measure

_SIZE = flags.DEFINE_integer("size", 4096, "height and width of the image")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "type of weights and activations")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed steps")
PLAIN, REMAT, REST_PLAIN, TWO_REGIONS, ONE_REGION = SCHEDULES = (
    "plain JAX",
    "jax.checkpoint per block",
    "blocks 1-2 tiled + rest plain",
    "blocks 1-2 tiled + rest in tiles twice as large",
    "one tiled region",
)
_ONLY = flags.DEFINE_multi_enum("only", SCHEDULES, SCHEDULES, "schedules to run")
_TILE = flags.DEFINE_integer("tile", 1024, "size of a tile of the image in blocks 1 and 2")
_RUN = flags.DEFINE_enum("run", None, SCHEDULES, "run this one schedule, in this process")
_LIMIT = flags.DEFINE_integer("limit", 300, "seconds allowed per schedule")

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def grids(schedule: str):
    """`tiles` of a schedule: `size / tile` tiles per axis in the first two blocks."""
    n = _SIZE.value // _TILE.value
    return {
        REST_PLAIN: {"pool2": (n, n), ...: None},
        TWO_REGIONS: {"pool2": (n, n), ...: (n // 2, n // 2)},
        ONE_REGION: (n, n),
    }.get(schedule)


def main(argv: list[str]) -> None:
    del argv
    if _RUN.value:
        print(json.dumps(run(_RUN.value)))
        return
    rows = []
    for name in _ONLY.value:
        command = [sys.executable, "-m", "experiments.vgg16", f"--run={name}"]
        command += [f"--{f.name}={f.value}" for f in (_SIZE, _DTYPE, _REPEATS, _TILE)]
        environment = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **os.environ,
        }
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT.value, env=environment
            )
            row = outcome(done)
        except subprocess.TimeoutExpired:
            row = {"error": f"took longer than {_LIMIT.value} s"}
        rows.append((name, row))
        print(name, row, file=sys.stderr, flush=True)
    print(table(rows))


def outcome(done: subprocess.CompletedProcess) -> dict:
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "RESOURCE" in line]
    return {"error": (errors or ["no message"])[-1][:200]}


def table(rows: list[tuple[str, dict]]) -> str:
    """A Markdown table with ratios to the plain schedule."""
    plain = next((row for name, row in rows if name == PLAIN and "ms" in row), None)
    lines = [
        "| schedule | ms | ratio | GiB | ratio | allocator's peak GiB | compile s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        if "error" in row:
            lines.append(f"| {name} | {row['error']!r} | | | | | |")
            continue
        time_ratio = f"{row['ms'] / plain['ms']:.2f}" if plain else "-"
        memory_ratio = f"{row['gib'] / plain['gib']:.3f}" if plain else "-"
        peak = f"{row['peak_gib']:.2f}" if row["peak_gib"] is not None else "-"
        lines.append(
            f"| {name} | {row['ms']:.1f} | {time_ratio} | {row['gib']:.2f} | {memory_ratio} | "
            f"{peak} | {row['compile_s']:.0f} |"
        )
    return "\n".join(lines)


def run(name: str) -> dict:
    """Measure one schedule in this process."""
    step, params, image = vgg16_step(name, _SIZE.value, jnp.dtype(_DTYPE.value))
    found = measure(step, params, image, repeats=_REPEATS.value)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "ms": found.seconds * 1e3,
        "gib": found.temporary_bytes / 2**30,
        "peak_gib": stats["peak_bytes_in_use"] / 2**30 if stats else None,
        "compile_s": found.compile_seconds,
    }


def vgg16_step(schedule, size: int, dtype):
    """The gradient of the mean of the last pool, with respect to all weights."""

    def block(params, x, index: int):
        for kernel, bias in params:
            x = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + bias)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return checkpoint_name(x, f"pool{index}")

    def features(params, x):
        for index, layers in enumerate(params, start=1):
            wrapped = jax.checkpoint(block, static_argnums=2) if schedule == REMAT else block
            x = wrapped(layers, x, index)
        return x

    tiles = grids(schedule)
    if tiles is not None:
        saved = ["pool2"] if schedule != ONE_REGION else []
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        features = jaxtile.checkpoint(features, in_axes=(None, (1, 2)), tiles=tiles, policy=policy)

    def loss(params, image):
        return features(params, image).astype(jnp.float32).mean()

    key, channels, params = jax.random.key(0), 3, []
    for widths in _BLOCKS:
        layers = []
        for width in widths:
            key, sub = jax.random.split(key)
            kernel = jax.random.normal(sub, (3, 3, channels, width)) * (2 / (9 * channels)) ** 0.5
            layers.append((kernel.astype(dtype), jnp.zeros(width, dtype)))
            channels = width
        params.append(layers)
    image = jax.random.normal(key, (1, size, size, 3), dtype)
    return jax.value_and_grad(loss), params, image


if __name__ == "__main__":
    app.run(main)
