"""The time of a training step on many devices, on paper: nothing is run, and no device is needed.

    python -m experiments.scaling --model=vgg16 --size=32768 --dtype=bfloat16 --devices=1,8,64,512
    python -m experiments.scaling --model=resnet50 --size=32768 --dtype=bfloat16 --tile=whole

The image is distributed over a mesh that is as square as possible. What is stored are the ends of
blocks; a region between two of them runs on each device in tiles of at most `--tile` pixels of the
image, at least two along an axis that has several devices, or in one piece (`whole`). A step takes

    compute    forward twice and backward once, halos that tiles compute in common included, at the
               rates of an H200 (`policies.Costs`); a measured step of one device corrects them
               (`--rate`)
    exchange   bytes of halos / bandwidth + messages * latency
               + 2 (D - 1) / D * bytes of the weights' gradients / bandwidth
               + sums over devices * 2 ceil(log2 D) * latency

Bytes and messages are those of `jaxtile.explain` for the device that sends most, one message after
the other. Gradients are added up once per region, with the bytes of a ring and the
latency of a tree; so are batch statistics, one layer after the other, their few bytes for nothing.

Not in the model: an exchange that overlaps with compute (jaxtile has none), several devices that
share a link, reading images, the optimizer, devices that wait for the slowest.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import AbstractMesh

import jaxtile
import models
from jaxtile._plan.assignment import Assignments
from jaxtile._plan.costs import BUILT_IN
from policies import Costs, format_bytes

from .measuring.baselines import BLOCKS
from .measuring.problems import Problem, problem, shape_of
from .program.command import dtype_flag, start
from .program.progress import Now

Tile = int | Literal["whole"]


@dataclasses.dataclass(frozen=True)
class Link:
    """How a device is connected."""

    bandwidth: float
    """Bytes per second that it sends."""
    latency: float
    """Seconds per message."""


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A training step on a mesh. Bytes and messages are those of one device."""

    mesh: tuple[int, int]
    block: tuple[int, int]
    """Pixels of the image."""
    tiles: tuple[int, int]
    stored_bytes: float
    halo_bytes: int
    messages: int
    sums: int
    """Over all devices, one after the other: statistics, and gradients once per region."""
    weight_bytes: int
    """Of the gradients that are added up."""
    compute: float
    """Seconds."""

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def exchange(self, link: Link) -> float:
        """Seconds."""
        ring = 2 * (self.devices - 1) / self.devices * self.weight_bytes
        tree = 2 * math.ceil(math.log2(self.devices))
        return (self.halo_bytes + ring) / link.bandwidth + link.latency * (
            self.messages + self.sums * tree
        )


def define_flags() -> None:
    flags.DEFINE_enum("model", "vgg16", models.names(), "the model")
    flags.DEFINE_integer("size", 32768, "height and width")
    flags.DEFINE_integer("batch", 1, "images")
    dtype_flag("bfloat16")
    flags.DEFINE_list("devices", ["1", "8", "64", "512"], "numbers of devices")
    flags.DEFINE_string("tile", "2048", "largest tile, in pixels of the image; or `whole`")
    flags.DEFINE_float(
        "bandwidth", None, "GB/s that a device sends; default: 450 up to 8 devices, else 50"
    )
    flags.DEFINE_float("rate", 1.0, "how much faster one device is than its costs say, as measured")
    flags.DEFINE_float("latency", 10.0, "microseconds per message")
    flags.DEFINE_string(
        "costs", None, "table that experiments.calibrate wrote; default: the built-in one of a GPU"
    )


def main(argv: list[str]) -> None:
    del argv
    try:
        print(run(flags.FLAGS))
    except (ValueError, TypeError, OSError, jaxtile.TilingError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def run(options: Any) -> str:
    """The table, and what it is about."""
    numbers = [_positive("devices", text) for text in options.devices]
    if not numbers:
        raise ValueError("--devices (=) must be numbers of devices, as 1,8,64")
    size, batch = _positive("size", options.size), _positive("batch", options.batch)
    tile = "whole" if options.tile == "whole" else _positive("tile", options.tile)
    if not options.rate > 0:
        raise ValueError(f"--rate (={options.rate}) must be positive")
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise ValueError(f"--bandwidth (={options.bandwidth}) must be positive")
    if not options.latency >= 0:
        raise ValueError(f"--latency (={options.latency}) must not be negative")
    costs = Costs.load(options.costs) if options.costs else BUILT_IN["gpu"]
    shape = shape_of(options.model, batch, size)
    found = problem(options.model, shape, jnp.dtype(options.dtype), abstract=True)
    with Now(file=sys.stderr) as now:
        now("counting what devices compute and send")
        steps = {
            n: scaled(found, BLOCKS[options.model], squarest(n), tile, costs, rate=options.rate)
            for n in dict.fromkeys([1, *numbers])
        }
    links = {n: link(n, options.bandwidth, options.latency) for n in numbers}
    network = "450 GB/s up to 8 devices, else 50 GB/s"
    if options.bandwidth:
        network = f"{options.bandwidth:g} GB/s"
    device = costs.device if options.rate == 1 else f"{options.rate:g} times {costs.device}"
    return (
        f"{table(steps, links)}\n\n{options.model}, batch {batch}, {size} x {size}, "
        f"{options.dtype}, tile {tile}; computed, not measured: {device}, {network}, "
        f"{options.latency:g} us per message"
    )


def squarest(devices: int) -> tuple[int, int]:
    """Rows and columns of a mesh."""
    rows = max(r for r in range(1, math.isqrt(devices) + 1) if devices % r == 0)
    return rows, devices // rows


def link(devices: int, bandwidth: float | None, latency: float) -> Link:
    """From GB/s and microseconds; by default NVLink in a machine of 8, 400 Gbit/s beyond it."""
    return Link((bandwidth or (450 if devices <= 8 else 50)) * 1e9, latency * 1e-6)


def scaled(
    found: Problem,
    stored: Sequence[str],
    mesh: tuple[int, int],
    tile: Tile,
    costs: Costs,
    *,
    rate: float = 1.0,
) -> Scaled:
    """The step of a model that stores these values, on a mesh."""
    weights, image, axes = found.arguments[0], found.arguments[2], found.in_axes[2]
    along = {1: 0, 2: 1}
    block = tuple(-(-image.shape[1 + i] // n) for i, n in enumerate(mesh))
    tiles = tuple(
        1 if tile == "whole" else max(min(2, n), -(-b // tile))
        for n, b in zip(mesh, block, strict=True)
    )
    grid = tuple(tiles[along[a]] if a in along else 1 for a in axes)
    options = {}
    if math.prod(mesh) > 1:
        names = ("rows", "cols")
        options["mesh"] = AbstractMesh(mesh, names)
        options["mesh_axes"] = tuple(names[along[a]] if a in along else None for a in axes)
    explained = jaxtile.explain(
        found.loss,
        *found.arguments,
        in_axes=found.in_axes,
        tiles="whole" if tile == "whole" else grid,
        policy=jax.checkpoint_policies.save_only_these_names(*stored),
        **options,
    )
    devices, sent = math.prod(mesh), [r.exchanged for r in explained.regions]
    on_all = tuple(
        n * (mesh[along[a]] if a in along else 1) for n, a in zip(grid, axes, strict=True)
    )
    return Scaled(
        mesh,
        block,
        tiles,
        stored_bytes=explained.stored_bytes / devices,
        halo_bytes=sum(s.forward + s.backward for s in sent),
        messages=sum(s.forward_messages + s.backward_messages for s in sent),
        sums=sum(s.forward_sums + s.backward_sums for s in sent),
        # They are added up at least in float32.
        weight_bytes=sum(w.size * max(4, w.dtype.itemsize) for w in jax.tree.leaves(weights)),
        compute=_compute(found, stored, on_all, tile, costs) / (devices * rate),
    )


def _compute(
    found: Problem, stored: Sequence[str], grid: tuple[int, ...], tile: Tile, costs: Costs
) -> float:
    """Seconds of all devices together, by the planner's model: it counts what tiles overlap."""
    outline = jaxtile.policy.outline(found.loss, *found.arguments, in_axes=found.in_axes)
    if tile == "whole":
        # One piece per device: no loops, so none that waits for a reduction either.
        parts = tuple(dataclasses.replace(p, awaits=()) for p in outline.parts)
        outline = dataclasses.replace(outline, parts=parts)
        costs = dataclasses.replace(costs, tile=1.0, loop=0.0)
    choice = jaxtile.policy.Choice(grid)
    choices = {p.name: choice for p in outline.parts if p.name in stored}
    assignments = Assignments(outline, costs)
    return assignments.estimate(assignments.of({**choices, ...: choice})).seconds


def table(steps: Mapping[int, Scaled], links: Mapping[int, Link]) -> str:
    """One row per number of devices that has a link."""
    lines = [
        "| devices | mesh | block | tiles | stored | halos sent | messages | sums | compute, s | "
        "exchange, s | step, s | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n, connected in links.items():
        s = steps[n]
        exchange = s.exchange(connected)
        step = s.compute + exchange
        cells = [
            str(n),
            *(f"{a} x {b}" for a, b in (s.mesh, s.block, s.tiles)),
            format_bytes(s.stored_bytes),
            format_bytes(s.halo_bytes),
            str(s.messages),
            str(s.sums),
            *(f"{seconds:.3g}" for seconds in (s.compute, exchange, step)),
            f"{steps[1].compute / (n * step):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _positive(name: str, text: str | int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"--{name} (={text}) must be a positive whole number")
    return number


if __name__ == "__main__":
    define_flags()
    start(main)
