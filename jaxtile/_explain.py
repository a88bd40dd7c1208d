"""What a schedule will do, before it runs.

Everything is counted from the schedule, without running or compiling it: per region, the windows
and halos that a tile reads, the operations of all tiles, what is stored, and what devices send.
Operations of elementwise equations are counted as if they were fused.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ._errors import user_line
from ._explanation import (
    ArrayUse,
    Exchanged,
    Explanation,
    LayersReport,
    RegionReport,
    WholeReport,
)
from ._geometry import Window, partition
from ._graph.trace import Traced
from ._graph.values import Node, Storage, Value, is_float
from ._graph.work import flops, fused, whole_flops
from ._regions.region import Region
from ._regions.regions import Schedule
from ._regions.targets import Target
from ._regions.tile import TiledEquation
from ._rules import Windows
from ._rules.shape import local_shape
from ._run.repeats import Repeats


def report(schedule: Schedule, traced: Traced) -> Explanation:
    """The explanation of a schedule."""
    return _report(schedule, Repeats(schedule)(traced.arguments))


def _report(schedule: Schedule, skipped: Mapping[int, int]) -> Explanation:
    costs = fused(schedule.graph.nodes)
    regions = tuple(
        dataclasses.replace(_region(r, costs, schedule.stored), skipped=skipped.get(r.index, 0))
        for r in schedule.regions
    )
    inside = {n for r in schedule.regions for n in r.equations}
    outside = [n for n in schedule.flat if isinstance(n, Node) and n not in inside]
    layers = tuple(
        LayersReport(_line(n), n.layers.length, _report(n.layers.body.schedule, {}))
        for n in outside
        if n.layers is not None
    )
    global_flops = sum(whole_flops(n, costs) for n in outside if n.layers is None)
    plain_flops = global_flops + sum(whole_flops(n, costs) for n in inside)
    plain_flops += sum(each.layers * each.layer.plain_flops for each in layers)
    whole = tuple(
        WholeReport(n.op, _line(n), n.runs_whole, sum(v.bytes for v in n.outputs))
        for n in outside
        if n.runs_whole is not None
    )
    return Explanation(regions, plain_flops, global_flops, whole, layers)


def _line(node: Node) -> str:
    return user_line(*node.equation.source_infos)


def _region(region: Region, costs: dict[Node, int], stored: Storage) -> RegionReport:
    nodes = list(dict.fromkeys(region.equations))
    work, backward = _work(region, costs), region.again or region
    kept = region.loss is not None or not region.grid.recomputed
    again = set() if kept else _needed_again(region)
    passing, restored = (
        [t for t in region.targets if not t.reduction and stored.get(t.value) == place]
        for place in ("passing", "restored")
    )
    # What is restored is computed once more before the region is differentiated.
    once_more = sum(work[n] for n in region.nodes if n in work) if restored else 0
    windows = backward.plan.windows if backward.plan is not None else {}
    axes = sorted(region.targets[0].axes)
    return RegionReport(
        index=region.index,
        grid=backward.grid.spec(axes),
        forward_grid=region.grid.spec(axes),
        tiles=backward.tiles,
        passing=tuple(t.label for t in passing),
        restored=tuple(t.label for t in restored),
        ops=dict(Counter(n.op for n in nodes)),
        reads=tuple(_read(v, region) for v in region.inputs),
        writes=tuple(_written(t, region) for t in region.targets),
        stored_bytes=sum(t.result.bytes for t in region.targets if t not in passing + restored),
        tile_bytes=sum(math.prod(_local(v, windows)) * v.aval.dtype.itemsize for v in windows),
        plain_flops=sum(whole_flops(n, costs) for n in nodes),
        tiled_flops=sum(work.values()),
        recomputed_flops=_recomputed(backward, again, costs) + once_more,
        at_once=region.loss is not None,
        devices=tuple(region.devices.count(a) for a in region.split) if region.devices else (),
        exchanged=_exchanged(region),
    )


def _work(region: Region, costs: dict[Node, int]) -> dict[Node, int]:
    """Operations of each equation of a region, over all tiles."""
    if region.plan is None:
        return {n: whole_flops(n, costs) for n in {*region.before, *region.equations}}
    windows = region.plan.windows
    tile = {
        i.node: _in_tile(i, windows, costs)
        for i in region.plan.instructions
        if isinstance(i, TiledEquation)
    }
    reductions = [(t, t.reduction) for t in region.targets if t.reduction]
    tile |= {node: _reduced(t, node, windows, costs) for t, node in reductions}
    return {n: flops * region.tiles for n, flops in tile.items()}


def _recomputed(region: Region, again: set[Node], costs: dict[Node, int]) -> int:
    """What the backward pass computes again: what its inputs are not, and what derivatives need.

    Results that were kept are not computed again, if only reductions follow them.
    """
    known = {v.node for v in region.inputs if v.node in region.nodes}
    work = _work(region, costs)
    own = sum(work.get(n, 0) for n in again - known)
    return own + sum(work.get(n, 0) for n in region.before)


def _exchanged(region: Region) -> Exchanged:
    if region.devices is None:
        return Exchanged()
    devices = region.devices.mesh.size
    sent = _sums(region)
    for value in region.inputs:
        exchange, itemsize = region.exchange(value), value.aval.dtype.itemsize
        again = region.grid.recomputed
        back = value.array.node is not None and is_float(value)
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


def _sums(region: Region) -> Counter[str]:
    """How often, one time after the other, all devices add something up."""
    devices = region.devices
    assert devices is not None
    depth: dict[Value, int] = {}
    again, kept = _needed_again(region), not region.grid.recomputed
    forward = recomputed = 0

    def across(node: Node) -> bool:
        reduced = {a for v in node.inputs for a in v.axes} - set(node.outputs[0].axes)
        return any(devices.name(a) is not None for a in reduced)

    for node in region.nodes:
        adds = node.reduction is not None and across(node)
        here = adds + max((depth.get(v.array, 0) for v in node.inputs), default=0)
        depth.update(dict.fromkeys(node.outputs, here))
        forward = max(forward, here)
        if node in again and not kept:
            recomputed = max(recomputed, here)
    weights = any(is_float(v) for v in region.globals)
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
        if target.reduction is not None and target.reduction.traits.linear != "sum":
            needed.update(v.array for v in target.operands)
    for node in reversed(region.nodes):
        known = node.traits
        if known.reads_result or any(v in needed for v in node.outputs):
            again.add(node)
        if node in again or not known.forgets:
            needed.update(v.array for v in node.inputs)
    return again


def _in_tile(item: TiledEquation, windows: dict[Value, Windows], costs: dict[Node, int]) -> int:
    """Operations of one equation in one tile: on what it produces, before the caller crops."""
    produced = item.step.produced or [windows.get(v, {}) for v in item.node.outputs]
    out_shapes = [
        local_shape(v.aval.shape, w) for v, w in zip(item.node.outputs, produced, strict=True)
    ]
    in_shapes = [
        local_shape(v.aval.shape, n.windows if n else {})
        for v, n in zip(item.node.inputs, item.step.needs, strict=True)
    ]
    return flops(item.node, costs, in_shapes, out_shapes)


def _reduced(
    target: Target, reduction: Node, windows: dict[Value, Windows], costs: dict[Node, int]
) -> int:
    """Operations of a reduction in one tile."""
    sizes = {w.axis: w.size for v in target.operands for w in windows[v].values()}
    result = target.result
    shape = [
        n if a is None else sizes[a] for n, a in zip(result.aval.shape, result.axes, strict=True)
    ]
    return flops(reduction, costs, [_local(v, windows) for v in target.operands], [shape])


def _local(value: Value, windows: dict[Value, Windows]) -> tuple[int, ...]:
    return local_shape(value.aval.shape, windows.get(value, {}))


def _read(value: Value, region: Region) -> ArrayUse:
    array = value.array
    name = array.name or ("constant" if array.node is None else array.node.op)
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


def _use(
    name: str, value: Value, sizes: tuple[int, ...], halos: tuple[tuple[int, int], ...]
) -> ArrayUse:
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
