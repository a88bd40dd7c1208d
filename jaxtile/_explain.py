"""What a schedule will do, before it runs: `jaxtile.explain`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import user_line
from ._geometry import Window, partition
from ._graph.build import Policy
from ._graph.values import Node, Value
from ._graph.work import flops, fused, whole_flops
from ._regions.grid import GridSpec, Tiles
from ._regions.regions import Region, Schedule
from ._regions.targets import Target
from ._regions.tile import Instruction
from ._rules import Windows, traits
from ._schedule import Options, scheduled
from .policy import GraphPolicy


@dataclasses.dataclass(frozen=True)
class ArrayUse:
    """An array that a region reads by window or writes by tile.

    Windows and halos are per tiled axis, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    window: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    """Positions read before and after the tile's own share, in a tile that touches no border."""


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Bytes of halos that devices send to each other, and what they add up together.

    The backward pass sends those that it recomputes from once more, and the cotangents of what
    earlier regions computed.
    """

    forward: int = 0
    """Of one device, the one that sends most."""
    backward: int = 0
    forward_in_all: int = 0
    """Of all devices together."""
    backward_in_all: int = 0
    forward_messages: int = 0
    """In how many pieces one device sends its bytes, the one that sends most."""
    backward_messages: int = 0
    forward_sums: int = 0
    """Sums over devices: statistics, a loss. Those that do not wait for each other count as one, as
    XLA combines them."""
    backward_sums: int = 0
    """Of statistics that are recomputed, of their cotangents, and of the gradients of weights."""


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """One region: one loop over `tiles` tiles, run once forwards and once backwards."""

    index: int
    grid: tuple[int, ...] | Literal["whole"] | None
    """On a mesh, that of each device."""
    tiles: int
    """On all devices together."""
    ops: dict[str, int]
    reads: tuple[ArrayUse, ...]
    writes: tuple[ArrayUse, ...]
    stored_bytes: int
    tile_bytes: int
    """Bytes of all values of one tile together: an upper bound of what the loop's body holds."""
    plain_flops: int
    """Forward operations of the region's equations at full size."""
    tiled_flops: int
    """Forward operations over all tiles, halos included."""
    recomputed_flops: int
    """Those of them that the backward pass does again: what no derivative needs is left out."""
    devices: tuple[int, ...] = ()
    """Per axis of the grid; on a mesh only."""
    exchanged: Exchanged = Exchanged()

    @property
    def halo_share(self) -> float:
        """The share of the forward operations that is halo, or overlap if sizes do not divide."""
        return max(0.0, 1 - self.plain_flops / self.tiled_flops) if self.tiled_flops else 0.0


@dataclasses.dataclass(frozen=True)
class WholeReport:
    """A function with a derivative rule that is not proved to be right in tiles."""

    op: str
    where: str
    """The user's line."""
    reason: str
    bytes: int
    """Of its results, which are held whole, as its operands are."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The regions of a schedule and their cost. `print` it."""

    regions: tuple[RegionReport, ...]
    plain_flops: int
    """Forward operations of the untransformed function."""
    global_flops: int
    """Those of them that run once, outside all regions."""
    whole: tuple[WholeReport, ...] = ()
    """What runs once, on whole arrays, although it reads tiled values."""

    @property
    def forward_flops(self) -> int:
        return self.global_flops + sum(r.tiled_flops for r in self.regions)

    @property
    def step_flops(self) -> int:
        """Forward and backward.

        A pullback counts as twice the forward pass; a region is computed once more before it.
        """
        return 3 * self.forward_flops + self.recomputed_flops

    @property
    def recomputed_flops(self) -> int:
        return sum(r.recomputed_flops for r in self.regions)

    @property
    def overhead(self) -> float:
        """Operations of a training step, halos and recomputation included, relative to plain."""
        return self.step_flops / (3 * self.plain_flops) if self.plain_flops else 1.0

    @property
    def stored_bytes(self) -> int:
        return sum(r.stored_bytes for r in self.regions) + sum(w.bytes for w in self.whole)

    @property
    def tile_bytes(self) -> int:
        return max((r.tile_bytes for r in self.regions), default=0)

    def __str__(self) -> str:
        lines = []
        for r in self.regions:
            lines.append(
                f"region {r.index}: {_grid(r.grid)}{_devices(r)}; "
                + ", ".join(f"{n} {op}" for op, n in r.ops.items())
            )
            for verb, uses in (("reads", r.reads), ("writes", r.writes)):
                for use in uses:
                    lines.append(
                        f"  {verb:6} {use.name} {use.dtype}{list(use.shape)}, "
                        f"{_bytes(use.bytes)}{_window(use)}"
                    )
            lines.append(
                f"  stores {_bytes(r.stored_bytes)}; one tile holds at most "
                f"{_bytes(r.tile_bytes)}; forward "
                f"{_count(r.tiled_flops)} operations, {r.halo_share:.1%} of them halo"
            )
            if r.devices:
                sent = r.exchanged
                lines.append(
                    f"  each device sends at most {_bytes(sent.forward)} forwards and "
                    f"{_bytes(sent.backward)} backwards; all together "
                    f"{_bytes(sent.forward_in_all)} and {_bytes(sent.backward_in_all)}"
                )
        for w in self.whole:
            lines.append(
                f"whole: {w.op} at {w.where} runs once, on whole arrays: {w.reason}\n"
                f"  stores {_bytes(w.bytes)}, beside its operands"
            )
        lines.append(
            f"in all: stores {_bytes(self.stored_bytes)}, largest tile {_bytes(self.tile_bytes)}; "
            "a training step does "
            f"{self.overhead:.2f}x the operations of the plain function "
            f"({_count(3 * self.plain_flops)}); recomputation is "
            f"{self.recomputed_flops / max(1, self.step_flops):.1%} of them"
        )
        return "\n".join(lines)


def explain(
    fun: Callable[..., Any],
    *args: Any,
    in_axes: Any,
    tiles: Tiles = "whole",
    policy: Policy | GraphPolicy | str | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    mesh_axes: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Describe what `checkpoint(fun, ...)(*args)` does, without running it.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s. On a mesh, regions also say what devices
    send each other; the mesh may be a `jax.sharding.AbstractMesh`, of devices that are not here.

    >>> import jax, jaxtile
    >>> def blur(kernel, image):
    ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
    >>> kernel = jax.ShapeDtypeStruct((1, 1, 3, 3), "float32")
    >>> image = jax.ShapeDtypeStruct((1, 1, 64, 64), "float32")
    >>> explanation = jaxtile.explain(blur, kernel, image, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> explanation.regions[0].reads[0].halo
    ((1, 1), (1, 1))
    """
    options = Options(in_axes, tiles, policy, mesh, mesh_axes)
    return report(scheduled(fun, args, kwargs, options)[0])


def report(plan: Schedule) -> Explanation:
    costs = fused(plan.graph.nodes)
    regions = tuple(_region(r, costs) for r in plan.regions)
    inside = {n for r in plan.regions for n in r.nodes} | {
        t.reduction for r in plan.regions for t in r.targets if t.reduction
    }
    outside = [n for n in plan.steps if isinstance(n, Node) and n not in inside]
    global_flops = sum(whole_flops(n, costs) for n in outside)
    plain_flops = global_flops + sum(whole_flops(n, costs) for n in inside)
    whole = tuple(
        WholeReport(
            n.equation.primitive.name,
            user_line(*n.equation.source_infos),
            n.runs_whole,
            sum(v.bytes for v in n.outputs),
        )
        for n in outside
        if n.runs_whole is not None
    )
    return Explanation(regions, plain_flops, global_flops, whole)


def _region(region: Region, costs: dict[Node, int]) -> RegionReport:
    reductions = [t.reduction for t in region.targets if t.reduction]
    nodes = list(dict.fromkeys([*region.nodes, *reductions]))
    work = {n: whole_flops(n, costs) for n in nodes}
    plain = sum(work.values())
    windows = region.plan.windows if region.plan is not None else {}
    if region.plan is not None:
        tile = {
            i.node: _in_tile(i, windows, costs)
            for i in region.plan.instructions
            if isinstance(i, Instruction)
        }
        tile |= {t.reduction: _reduced(t, windows, costs) for t in region.targets if t.reduction}
        work = {n: flops * region.tiles for n, flops in tile.items()}
    again = _needed_again(region) if region.grid.recomputed else ()
    return RegionReport(
        index=region.index,
        grid=region.grid.spec(sorted(region.targets[0].axes)),
        tiles=region.tiles,
        ops=dict(Counter(n.equation.primitive.name for n in nodes)),
        reads=tuple(_read(v, region) for v in region.inputs),
        writes=tuple(_written(t, region) for t in region.targets),
        stored_bytes=sum(t.result.bytes for t in region.targets),
        tile_bytes=sum(math.prod(_local(v, windows)) * v.aval.dtype.itemsize for v in windows),
        plain_flops=plain,
        tiled_flops=sum(work.values()),
        recomputed_flops=sum(flops for n, flops in work.items() if n in again),
        devices=tuple(region.devices.count(a) for a in region.split) if region.devices else (),
        exchanged=_exchanged(region),
    )


def _exchanged(region: Region) -> Exchanged:
    if region.devices is None:
        return Exchanged()
    devices = region.devices.mesh.size
    sent = _sums(region)
    for value in region.inputs:
        exchange, itemsize = region.exchange(value), value.aval.dtype.itemsize
        again = region.grid.recomputed
        back = value.array.node is not None and jnp.issubdtype(value.aval.dtype, jnp.inexact)
        forward, forward_messages = exchange.sent(1, 0)
        backward, backward_messages = exchange.sent(again, back)
        every = exchange.sent_by_all(devices) * itemsize
        sent.update(
            forward=forward * itemsize,
            backward=backward * itemsize,
            forward_in_all=every,
            backward_in_all=every * (again + back),
            forward_messages=forward_messages,
            backward_messages=backward_messages,
        )
    return Exchanged(**sent)


def _sums(region: Region) -> Counter:
    """How often, one time after the other, all devices add something up."""
    depth: dict[Value, int] = {}
    again, kept = _needed_again(region), not region.grid.recomputed
    forward = recomputed = 0

    def across(node: Node) -> bool:
        reduced = {a for v in node.inputs for a in v.axes} - set(node.outputs[0].axes)
        return any(region.devices.name(a) is not None for a in reduced)

    for node in region.nodes:
        adds = node.reduction is not None and across(node)
        here = adds + max((depth.get(v.array, 0) for v in node.inputs), default=0)
        depth.update(dict.fromkeys(node.outputs, here))
        forward = max(forward, here)
        if node in again and not kept:
            recomputed = max(recomputed, here)
    weights = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in region.globals)
    after = any(across(t.reduction) for t in region.targets if t.reduction is not None)
    return Counter(forward_sums=forward + after, backward_sums=recomputed + forward + weights)


def _needed_again(region: Region) -> set[Node]:
    """The equations whose results the derivative of a region needs.

    The derivative of a linear equation needs none of its operands, that of `tanh` its result, that
    of most others their operands.
    """
    needed: set[Value] = set()
    again: set[Node] = set()
    for target in region.targets:
        if (
            target.reduction is not None
            and traits(target.reduction.equation.primitive).linear != "sum"
        ):
            needed.update(v.array for v in target.operands)
    for node in reversed(region.nodes):
        known = traits(node.equation.primitive)
        if known.reads_result or any(v in needed for v in node.outputs):
            again.add(node)
        linear = known.linear == "sum" or known.kind in ("movement", "random")
        if node in again or not linear:
            needed.update(v.array for v in node.inputs)
    return again


def _in_tile(item: Instruction, windows: dict[Value, Windows], costs: dict[Node, int]) -> int:
    """Operations of one equation in one tile: on what it produces, before the caller crops."""
    produced = item.step.produced or [windows.get(v, {}) for v in item.node.outputs]
    out_shapes = [_shape(v.aval.shape, w) for v, w in zip(item.node.outputs, produced, strict=True)]
    in_shapes = [
        _shape(v.aval.shape, n.windows if n else {})
        for v, n in zip(item.node.inputs, item.step.needs, strict=True)
    ]
    return flops(item.node, costs, in_shapes, out_shapes)


def _reduced(target: Target, windows: dict[Value, Windows], costs: dict[Node, int]) -> int:
    """Operations of a reduction in one tile."""
    sizes = {w.axis: w.size for v in target.operands for w in windows[v].values()}
    result = target.result
    shape = [
        n if a is None else sizes[a] for n, a in zip(result.aval.shape, result.axes, strict=True)
    ]
    return flops(target.reduction, costs, [_local(v, windows) for v in target.operands], [shape])


def _shape(shape: Sequence[int], windows: Windows) -> tuple[int, ...]:
    return tuple(windows[d].size if d in windows else n for d, n in enumerate(shape))


def _local(value: Value, windows: dict[Value, Windows]) -> tuple[int, ...]:
    return _shape(value.aval.shape, windows.get(value, {}))


def _read(value: Value, region: Region) -> ArrayUse:
    array = value.array
    name = array.name or ("constant" if array.node is None else array.node.equation.primitive.name)
    if region.plan is None:
        return _use(name, value, (), ())
    ordered = sorted(region.plan.windows[value].items(), key=lambda item: item[1].axis)
    sizes = tuple(w.size for _, w in ordered)
    halos = tuple(
        _halo(
            [demand[d] for demand in region.plan.demands[value]],
            value.aval.shape[d],
            region.split.get(w.axis, 1),
            region.devices.count(w.axis) if region.devices else 1,
        )
        for d, w in ordered
    )
    return _use(name, value, sizes, halos)


def _written(target: Target, region: Region) -> ArrayUse:
    if region.plan is None or target.reduction is not None:
        return _use(target.label, target.result, (), ())
    ordered = sorted(region.plan.windows[target.value].values(), key=lambda w: w.axis)
    return _use(
        target.label, target.value, tuple(w.size for w in ordered), ((0, 0),) * len(ordered)
    )


def _use(name: str, value: Value, sizes, halos) -> ArrayUse:
    return ArrayUse(name, tuple(value.aval.shape), str(value.aval.dtype), value.bytes, sizes, halos)


def _halo(demands: Sequence[Window], length: int, tiles: int, devices: int) -> tuple[int, int]:
    """How far the demands of a tile go beyond its own share of the axis.

    Tiles at the border read further inwards instead of outwards, so the smallest reach is that of a
    tile in the middle.
    """
    own = partition(0, length, tiles // devices, devices)
    if len(own.starts) == 1:
        return 0, 0
    lo = np.min([np.broadcast_to(d.starts, own.starts.shape) for d in demands], axis=0)
    hi = np.max([np.broadcast_to(d.stops, own.starts.shape) for d in demands], axis=0)
    return int((own.starts - lo)[1:].min()), int((hi - own.stops)[:-1].min())


def _grid(grid: GridSpec) -> str:
    if not isinstance(grid, tuple):
        return "untiled" if grid is None else "untiled, recomputed"
    return " x ".join(map(str, grid)) + " tiles"


def _devices(region: RegionReport) -> str:
    return f" on each of {' x '.join(map(str, region.devices))} devices" if region.devices else ""


def _window(use: ArrayUse) -> str:
    if not use.window:
        return ""
    halo = ", ".join(f"{before}+{after}" for before, after in use.halo)
    return f", window {' x '.join(map(str, use.window))}, halo {halo}"


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"
