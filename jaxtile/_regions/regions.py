"""Group the targets into regions, and put them in order.

Everything that a target needs beyond what is held already is computed by the *region* that computes
the target; values needed by several regions are recomputed in each. Targets of one level that share
work, or read the same stored array, are computed by one region. Global equations run once, as they
are, before the first region that needs them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from .._errors import TilingError
from .._graph.loss import loss_of
from .._graph.values import Graph, Node, Storage, Value, moving
from .._mesh.collectives import reduction_step
from .._mesh.devices import Devices
from .again import grouped, possible, prepare, together
from .demands import plan
from .grid import Tiles
from .region import Group, Region
from .targets import Target, Targets


@dataclasses.dataclass(eq=False)
class Schedule:
    """Global equations and regions, in the order in which they run."""

    graph: Graph
    stored: Storage
    steps: list[Node | Region | Group]
    devices: Devices | None = None

    @property
    def specs(self) -> list[PartitionSpec]:
        """How the outputs are distributed."""
        arrays = [v.array for v in self.graph.outputs]
        if self.devices is None:
            return [PartitionSpec() for _ in arrays]
        return [self.devices.even(v.aval.shape, v.axes) for v in arrays]

    @property
    def regions(self) -> list[Region]:
        return [step for step in self.flat if isinstance(step, Region)]

    @property
    def flat(self) -> list[Node | Region]:
        """The steps, with those of groups one by one."""
        groups = [s.steps if isinstance(s, Group) else [s] for s in self.steps]
        return [step for group in groups for step in group]


class Running(NamedTuple):
    """How loops run."""

    devices: Devices | None = None
    skips: bool = False
    """May a tile that reads what another one has read be skipped?"""
    both_passes: bool = True
    """May one loop do both passes? Not on the host."""

    @property
    def at_once(self) -> bool:
        return self.devices is None and not self.skips and self.both_passes


def schedule_of(
    graph: Graph, stored: Storage, tiles: Tiles, rank: int, running: Running
) -> Schedule:
    """Regions that compute what is stored, on the given grids."""
    devices, skips = running.devices, running.skips
    stored = possible(graph, stored, devices)
    targets = Targets(graph, stored, tiles, rank, devices)
    order = {node: i for i, node in enumerate(graph.nodes)}
    regions = _regions(list(targets), order, devices)
    _check_keys(tiles, regions)
    steps: list[Node | Region] = [
        n
        for n in graph.nodes
        if not n.tiled and (n.equation.effects or any(v in targets.needed for v in n.outputs))
    ]

    def when(step: Node | Region) -> tuple[int, int, int]:
        if isinstance(step, Region):
            return step.level, 1, step.index
        return max((targets.level(v) for v in step.inputs), default=0), 0, order[step]

    ordered = sorted([*steps, *regions], key=when)
    runs = list(together(ordered, stored))
    if running.at_once:
        _mark_loss(graph, runs, stored)
    for run in runs:
        prepare(run, stored, order)
    moved = moving(graph.nodes, graph.outputs)
    for region in regions:
        for each in filter(None, (region, region.again)):
            _plan(each, order)
            each.moved, each.skips = moved, skips
    return Schedule(graph, stored, grouped(ordered, graph, stored, order), devices)


def _mark_loss(graph: Graph, runs: Sequence[Sequence[Node | Region]], stored: Storage) -> None:
    """If the last region leads to the loss, in tiles, these are differentiated at once.

    Not if the cotangents of what it reads lie in host memory: a factor comes later.
    """
    loss, with_regions = loss_of(graph), [r for r in runs if any(isinstance(s, Region) for s in r)]
    if loss is None or not with_regions or len(with_regions[-1]) > 1:
        return
    (region,) = with_regions[-1]
    assert isinstance(region, Region)
    hosted = any(stored.get(v.array) == "host" for v in region.inputs)
    if region.has_loop and not hosted:
        region.loss = next((t for t in region.targets if t.reduction is loss), None)


def _plan(region: Region, order: Mapping[Node, int]) -> None:
    """The windows of a region's tiles, if it has any."""
    devices, reduce = region.devices, None
    if devices is not None and not region.tiled:
        _take_in_reductions(region, order)
        reduce = functools.partial(reduction_step, devices, region.axes)
    if region.tiled or devices is not None:
        nodes = sorted({*region.before, *region.nodes}, key=order.__getitem__)
        wanted = {v: region.windows(v) for t in region.targets for v in t.operands}
        region.plan = plan(nodes, wanted, region.split, reduce=reduce)


def _take_in_reductions(region: Region, order: Mapping[Node, int]) -> None:
    """On a mesh, reductions in one piece per device are equations: devices add up on the way."""
    region.nodes = sorted({*region.equations}, key=order.__getitem__)
    region.targets = [
        dataclasses.replace(t, operands=(t.result,), reduction=None) for t in region.targets
    ]


def _regions(
    targets: list[Target], order: Mapping[Node, int], devices: Devices | None
) -> list[Region]:
    groups: list[list[Target]] = []
    for target in targets:
        related = [g for g in groups if any(_share_a_region(t, target, devices) for t in g)]
        groups = [g for g in groups if g not in related]
        groups.append([t for g in related for t in g] + [target])
    first = {t: i for i, t in enumerate(targets)}
    groups.sort(key=lambda g: (g[0].level, min(first[t] for t in g)))
    return [
        Region(
            index,
            group[0].level,
            group,
            sorted({n for t in group for n in t.source.nodes}, key=order.__getitem__),
            list(dict.fromkeys(v for t in group for v in t.source.inputs)),
            list(dict.fromkeys(v for t in group for v in t.source.globals)),
            group[0].grid,
            devices=devices,
        )
        for index, group in enumerate(groups)
    ]


def _share_a_region(a: Target, b: Target, devices: Devices | None) -> bool:
    """Are these computed by one region?"""
    whole = a.grid.in_one_piece(devices is not None)
    if a.level != b.level or a.grid != b.grid or (not whole and a.axes != b.axes):
        return False
    one, other = a.source, b.source
    shared = not one.nodes.keys().isdisjoint(other.nodes)
    shared = shared or not one.inputs.keys().isdisjoint(other.inputs)
    return shared or a.rides_on is b.result or b.rides_on is a.result


def _check_keys(tiles: Tiles, regions: list[Region]) -> None:
    if not isinstance(tiles, Mapping):
        return
    known = {
        t.value.name for r in regions for t in r.targets if t.reduction is None and t.value.name
    }
    unknown = [k for k in tiles if k is not ... and not isinstance(k, Value) and k not in known]
    if unknown:
        raise TilingError(
            f"`tiles` has a grid for {unknown[0]!r}, but no stored value has that name; stored "
            f"are {sorted(known)}. A value is stored if `policy` saves it, or if it is an output."
        )
