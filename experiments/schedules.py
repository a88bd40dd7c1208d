"""One training step of a model under hand-written schedules and policies, against plain JAX.

    python -m experiments.schedules --model=vgg16 --size=4096 --dtype=bfloat16
    python -m experiments.schedules --model=unet --policy=budget:2GB --policy=sqrt --only=plain

Each schedule runs in a process of its own, because the peak of the allocator never goes down.
Printed per schedule: milliseconds per step (forward and backward of all weights, median), compiled
bytes (temporaries), peak of the allocator, and ratios to plain; and the loss, which is the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxtile
import models
import policies

from .measure import measure
from .problems import problem, shape_of

_MODEL = flags.DEFINE_enum("model", "vgg16", models.names(), "the model")
_SIZE = flags.DEFINE_integer("size", None, "height and width; by default the reference's")
_BATCH = flags.DEFINE_integer("batch", None, "images; by default the reference's")
_DTYPE = flags.DEFINE_string("dtype", "float32", "type of weights and activations")
_TILE = flags.DEFINE_integer("tile", 1024, "size of a tile where the image is largest")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed steps")
_ONLY = flags.DEFINE_multi_string("only", [], "schedules to run: words of their names")
_POLICY = flags.DEFINE_multi_string("policy", [], "also these policies, as 'budget:2GiB'")
_RUN = flags.DEFINE_string("run", None, "run this one schedule, in this process")
_LIMIT = flags.DEFINE_integer("limit", 300, "seconds allowed per schedule")

PLAIN = "plain JAX"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is stored, and the grids; or, without grids, `jax.checkpoint`; or a policy by name."""

    saved: tuple[str, ...]
    tiles: Any = None
    policy: str | None = None

    def apply(self, loss: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
        if self.policy is not None:
            policy = policies.resolve(self.policy)
            return jaxtile.checkpoint(loss, in_axes=in_axes, policy=policy)
        policy = jax.checkpoint_policies.save_only_these_names(*self.saved)
        if self.tiles is None:
            return jax.checkpoint(loss, policy=policy)
        return jaxtile.checkpoint(loss, in_axes=in_axes, tiles=self.tiles, policy=policy)


def _vgg16(shape: tuple[int, ...]) -> dict[str, Schedule]:
    n = max(1, shape[1] // _TILE.value)
    half = (max(1, n // 2),) * 2
    pools = tuple(f"pool{i}" for i in range(1, 6))
    return {
        "jax.checkpoint, pools saved": Schedule(pools),
        "blocks 1-2 tiled + rest plain": Schedule(("pool2",), {"pool2": (n, n), ...: None}),
        "blocks 1-2 tiled + rest in tiles twice as large": Schedule(
            ("pool2",), {"pool2": (n, n), ...: half}
        ),
        "one tiled region": Schedule((), (n, n)),
    }


def _unet(shape: tuple[int, ...]) -> dict[str, Schedule]:
    batch = shape[0]
    n = max(1, shape[1] // _TILE.value)
    inputs = ("d1a", "d2a", "d3a", "d4a", "u3b", "u2b", "u1b", "u0b")
    return {
        "jax.checkpoint, level inputs saved": Schedule(inputs),
        "image by image": Schedule((), (batch, n, n)),
        "image by image, level 1 saved": Schedule(("d1a", "u1d"), (batch, n, n)),
        "image by image, 2 x 2 tiles, level 1 saved": Schedule(
            ("d1a", "u1d"), {"u1d": (batch, n, n), ...: (batch, 2 * n, 2 * n)}
        ),
    }


def _resnet50(shape: tuple[int, ...]) -> dict[str, Schedule]:
    n = max(1, shape[1] // _TILE.value)
    blocks = [f"layer{s}.{i}" for s, c in enumerate((3, 4, 6, 3), start=1) for i in range(c)]
    convs = ["conv1"]
    for block in blocks:
        convs += [f"{block}.{c}" for c in ("conv1", "conv2", "conv3")]
        convs += [f"{block}.downsample"] if block.endswith(".0") else []
    ends = [f"{block}.bias_relu" for block in blocks]

    def stored(*layers: int) -> tuple[str, ...]:
        inside = tuple(f"layer{i}." for i in layers)
        return ("conv1", *(v for v in (*convs, *ends) if v.startswith(inside)))

    def grid(*layers: int) -> dict[Any, tuple[int, int]]:
        """Tiles of one size in pixels of the map: half as many from layer to layer."""
        grids = {i: (max(1, n >> (i - 1)),) * 2 for i in layers}
        return {v: grids[int(v[5])] if v.startswith("layer") else (n, n) for v in stored(*layers)}

    return {
        "jax.checkpoint, blocks saved": Schedule(("maxpool", *ends)),
        "convolutions and blocks saved, tiled": Schedule(
            stored(1, 2, 3, 4), {**grid(1, 2, 3, 4), ...: (1, 1)}
        ),
        "layers 1-2 tiled so, rest plain": Schedule(stored(1, 2), {**grid(1, 2), ...: None}),
        "layer 1 tiled so, rest plain": Schedule(stored(1), {**grid(1), ...: None}),
    }


def _alexnet(shape: tuple[int, ...]) -> dict[str, Schedule]:
    return {
        "8 images at a time": Schedule((), (max(1, shape[0] // 8), 1, 1)),
        "8 images at a time, pool1 saved": Schedule(("pool1",), (max(1, shape[0] // 8), 1, 1)),
    }


def _local_cnn(_: tuple[int, ...]) -> dict[str, Schedule]:
    return {
        "3 x 3 tiles": Schedule((), (3, 3)),
        "3 x 3 tiles, L0.filterNL saved": Schedule(("L0.filterNL",), (3, 3)),
    }


_SCHEDULES: Mapping[str, Callable[[tuple[int, ...]], dict[str, Schedule]]] = {
    "vgg16": _vgg16,
    "unet": _unet,
    "resnet50": _resnet50,
    "alexnet": _alexnet,
    "local_cnn": _local_cnn,
}


def _shape() -> tuple[int, ...]:
    return shape_of(_MODEL.value, _BATCH.value, _SIZE.value)


def _schedules() -> dict[str, Schedule | None]:
    named = {text: Schedule((), policy=text) for text in _POLICY.value}
    return {PLAIN: None, **_SCHEDULES[_MODEL.value](_shape()), **named}


def main(argv: list[str]) -> None:
    del argv
    if _RUN.value:
        print(json.dumps(run(_RUN.value)))
        return
    schedules = _schedules()
    wanted = [*_ONLY.value, *_POLICY.value] if _ONLY.value else [""]
    chosen = [s for s in schedules if any(word in s for word in wanted)]
    if not chosen:
        raise app.UsageError(f"--only={_ONLY.value} matches none of {', '.join(schedules)}")
    rows = []
    for name in chosen:
        command = [sys.executable, "-m", "experiments.schedules", f"--run={name}"]
        same = (_MODEL, _SIZE, _BATCH, _DTYPE, _TILE, _REPEATS)
        command += [f"--{f.name}={f.value}" for f in same if f.value is not None]
        command += [f"--policy={text}" for text in _POLICY.value]
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
        "| schedule | ms | ratio | GiB | ratio | allocator's peak GiB | compile s | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows:
        if "error" in row:
            lines.append(f"| {name} | {row['error']!r} | | | | | | |")
            continue
        time_ratio = f"{row['ms'] / plain['ms']:.2f}" if plain else "-"
        memory_ratio = f"{row['gib'] / plain['gib']:.3f}" if plain else "-"
        peak = f"{row['peak_gib']:.2f}" if row["peak_gib"] is not None else "-"
        lines.append(
            f"| {name} | {row['ms']:.1f} | {time_ratio} | {row['gib']:.2f} | {memory_ratio} | "
            f"{peak} | {row['compile_s']:.0f} | {row['loss']:.6g} |"
        )
    return "\n".join(lines)


def run(name: str) -> dict:
    """Measure one schedule in this process."""
    step, *arguments = training_step(name)
    found = measure(step, *arguments, repeats=_REPEATS.value)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "ms": found.seconds * 1e3,
        "gib": found.temporary_bytes / 2**30,
        "peak_gib": stats["peak_bytes_in_use"] / 2**30 if stats else None,
        "compile_s": found.compile_seconds,
        "loss": float(found.outputs[0][0]),
    }


def training_step(name: str) -> tuple[Any, ...]:
    """Loss, new statistics, and the gradient with respect to all weights; and its arguments."""
    schedules = _schedules()
    if name not in schedules:
        raise app.UsageError(f"--run={name} is none of {', '.join(schedules)}")
    found = problem(_MODEL.value, _shape(), jnp.dtype(_DTYPE.value))
    schedule = schedules[name]
    loss = found.loss if schedule is None else schedule.apply(found.loss, found.in_axes)
    return jax.value_and_grad(loss, has_aux=True), *found.arguments


if __name__ == "__main__":
    app.run(main)
