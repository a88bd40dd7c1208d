"""Group the targets into regions, and put them in order.

Everything that a target needs beyond what is held already is computed by the *region* that computes
the target; values needed by several regions are recomputed in each. Targets of one level that share
work, or read the same stored array, are computed by one region. Global equations run once, as they
are, before the first region that needs them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from .._errors import TilingError
from .._geometry import partition
from .._graph.values import Graph, Node, Storage, Value
from .._mesh.collectives import reduction_step
from .._mesh.devices import Devices
from .._mesh.halos import Exchange, Halo
from .._rules import Windows
from .demands import plan
from .grid import Grid, Tiles
from .targets import Target, Targets
from .tile import TilePlan


@dataclasses.dataclass(eq=False)
class Region:
    """Targets that are computed together: by one tile loop, or whole."""

    index: int
    level: int
    targets: list[Target]
    nodes: list[Node]
    inputs: list[Value]
    """Tiled values that are read, by window if there is a loop."""
    globals: list[Value]
    grid: Grid
    """On a mesh, that of each device."""
    plan: TilePlan | None = None
    devices: Devices | None = None

    @property
    def tiled(self) -> bool:
        return self.grid.tiles is not None

    @property
    def loops(self) -> dict[int, int]:
        """Tiles per looped axis, on each device; none if there is no loop."""
        if self.grid.tiles is None:
            return {}
        return {axis: self.grid.tiles[axis] for axis in sorted(self.targets[0].axes)}

    @property
    def split(self) -> dict[int, int]:
        """Tiles per axis, on all devices together. Untiled on a mesh is one tile per device."""
        if self.devices is None:
            return self.loops
        pieces = dict.fromkeys(self.axes, 1) | self.loops
        return {axis: n * self.devices.count(axis) for axis, n in pieces.items()}

    @property
    def axes(self) -> list[int]:
        """The tiled axes of what is computed here."""
        values = [v for n in self.nodes for v in (*n.inputs, *n.outputs)]
        values += [v for t in self.targets for v in t.operands]
        return sorted({a for v in values for a in v.axes if a is not None})

    @property
    def changes_value(self) -> bool:
        """May its results differ when it is differentiated?"""
        return any(n.rule.changes_value for n in self.nodes)

    @property
    def tiles(self) -> int:
        return math.prod(self.split.values())

    def windows(self, value: Value) -> Windows:
        """Each tile's share of a target."""
        split, count = self.split, (lambda axis: self.devices.count(axis) if self.devices else 1)
        return {
            d: partition(a, n, split[a] // count(a), count(a))
            for d, (a, n) in enumerate(zip(value.axes, value.aval.shape, strict=True))
            if a is not None
        }

    def exchange(self, value: Value) -> Exchange:
        """What devices must know of each other's blocks of an input."""
        assert self.devices is not None
        assert self.plan is not None
        shape, axes = value.aval.shape, value.array.axes
        blocks, windows = self.devices.blocks(shape, axes), self.plan.windows.get(value, {})
        return Exchange(
            tuple(blocks[d].size if d in blocks else n for d, n in enumerate(shape)),
            tuple(Halo.of(d, b, windows[d]) for d, b in blocks.items() if d in windows),
        )


@dataclasses.dataclass(eq=False)
class Schedule:
    """Global equations and regions, in the order in which they run."""

    graph: Graph
    stored: Storage
    steps: list[Node | Region]
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
        return [step for step in self.steps if isinstance(step, Region)]


def schedule_of(
    graph: Graph, stored: Storage, tiles: Tiles, rank: int, devices: Devices | None = None
) -> Schedule:
    """Regions that compute what is stored, on the given grids."""
    targets = Targets(graph, stored, tiles, rank, devices)
    order = {node: i for i, node in enumerate(graph.nodes)}
    regions = _regions(list(targets), order, devices)
    _check_keys(tiles, regions)
    for region in regions:
        reduce = None
        if devices is not None and not region.tiled:
            _take_in_reductions(region, order)
            reduce = functools.partial(reduction_step, devices, region.axes)
        if region.tiled or devices is not None:
            wanted = {v: region.windows(v) for t in region.targets for v in t.operands}
            region.plan = plan(region.nodes, wanted, region.split, reduce=reduce)
    steps: list[Node | Region] = [
        n
        for n in graph.nodes
        if not n.tiled and (n.equation.effects or any(v in targets.needed for v in n.outputs))
    ]

    def when(step: Node | Region) -> tuple[int, int, int]:
        if isinstance(step, Region):
            return step.level, 1, step.index
        return max((targets.level(v) for v in step.inputs), default=0), 0, order[step]

    return Schedule(graph, stored, sorted([*steps, *regions], key=when), devices)


def _take_in_reductions(region: Region, order: Mapping[Node, int]) -> None:
    """On a mesh, reductions in one piece per device are equations: devices add up on the way."""
    nodes = {*region.nodes, *(t.reduction for t in region.targets if t.reduction is not None)}
    region.nodes = sorted(nodes, key=order.__getitem__)
    region.targets = [
        dataclasses.replace(t, operands=(t.result,), reduction=None) for t in region.targets
    ]


def _regions(
    targets: list[Target], order: Mapping[Node, int], devices: Devices | None
) -> list[Region]:
    groups: list[list[Target]] = []
    for target in targets:
        related = [g for g in groups if any(_together(t, target, devices) for t in g)]
        groups = [g for g in groups if g not in related]
        groups.append([t for g in related for t in g] + [target])
    first = {t: i for i, t in enumerate(targets)}
    groups.sort(key=lambda g: (g[0].level, min(first[t] for t in g)))
    return [
        Region(
            index,
            group[0].level,
            group,
            sorted({n for t in group for n in t.nodes}, key=order.__getitem__),
            list(dict.fromkeys(v for t in group for v in t.inputs)),
            list(dict.fromkeys(v for t in group for v in t.globals)),
            group[0].grid,
            devices=devices,
        )
        for index, group in enumerate(groups)
    ]


def _together(a: Target, b: Target, devices: Devices | None) -> bool:
    """Are these computed by one region?"""
    whole = a.grid.tiles is None and (a.grid.recomputed or devices is not None)
    if a.level != b.level or a.grid != b.grid or (not whole and a.axes != b.axes):
        return False
    shared = not a.nodes.keys().isdisjoint(b.nodes) or not a.inputs.keys().isdisjoint(b.inputs)
    return shared or a.rides_on is b.result or b.rides_on is a.result


def _check_keys(tiles: Tiles, regions: list[Region]) -> None:
    if not isinstance(tiles, Mapping):
        return
    known = {
        t.value.name for r in regions for t in r.targets if t.reduction is None and t.value.name
    }
    unknown = [k for k in tiles if isinstance(k, str) and k not in known]
    if unknown:
        raise TilingError(
            f"`tiles` has a grid for {unknown[0]!r}, but no stored value has that name; stored "
            f"are {sorted(known)}. A value is stored if `policy` saves it, or if it is an output."
        )
