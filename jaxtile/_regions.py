"""Group the targets into regions, and put them in order.

Everything that a target needs beyond what is held already is computed by the *region* that computes
the target; values needed by several regions are recomputed in each. Targets of one level that share
work, or read the same stored array, are computed by one region. Global equations run once, as they
are, before the first region that needs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from ._errors import TilingError
from ._geometry import partition
from ._rules import Windows
from ._targets import WHOLE, Target, Targets, Tiles
from ._tile import TilePlan, plan
from ._values import Graph, Node, Value


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
    grid: dict[int, int] | Literal["whole"] | None
    """Tiles per looped axis; or there is no loop."""
    plan: TilePlan | None = None

    @property
    def tiled(self) -> bool:
        return isinstance(self.grid, dict)

    @property
    def tiles(self) -> int:
        return math.prod(self.grid.values()) if isinstance(self.grid, dict) else 1


@dataclasses.dataclass(eq=False)
class Schedule:
    """Global equations and regions, in the order in which they run."""

    graph: Graph
    steps: list[Node | Region]

    @property
    def regions(self) -> list[Region]:
        return [step for step in self.steps if isinstance(step, Region)]


def schedule(graph: Graph, tiles: Tiles, rank: int) -> Schedule:
    """Regions of the graph on the given grids."""
    targets = Targets(graph, tiles, rank)
    regions = _regions(graph, list(targets))
    _check_keys(tiles, regions)
    for region in regions:
        if region.tiled:
            region.plan = plan(
                region.nodes,
                {v: target_windows(v, region.grid) for t in region.targets for v in t.operands},
                region.grid,
            )
    steps: list[Node | Region] = [
        n
        for n in graph.nodes
        if not n.tiled and (n.equation.effects or any(v in targets.needed for v in n.outputs))
    ]
    order = {node: i for i, node in enumerate(graph.nodes)}

    def when(step: Node | Region):
        if isinstance(step, Region):
            return step.level, 1, step.index
        return max((targets.level(v) for v in step.inputs), default=0), 0, order[step]

    return Schedule(graph, sorted([*steps, *regions], key=when))


def target_windows(value: Value, grid: Mapping[int, int]) -> Windows:
    """Each tile's share of a target."""
    shape = value.aval.shape
    return {d: partition(a, shape[d], grid[a]) for d, a in enumerate(value.axes) if a is not None}


def _regions(graph: Graph, targets: list[Target]) -> list[Region]:
    groups: list[list[Target]] = []
    for target in targets:
        related = [g for g in groups if any(_together(t, target) for t in g)]
        groups = [g for g in groups if g not in related]
        groups.append([t for g in related for t in g] + [target])
    order = {node: i for i, node in enumerate(graph.nodes)}
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
            _region_grid(group),
        )
        for index, group in enumerate(groups)
    ]


def _together(a: Target, b: Target) -> bool:
    """Are these computed by one region?"""
    if a.level != b.level or a.grid != b.grid or (a.grid != WHOLE and a.axes != b.axes):
        return False
    shared = not a.nodes.keys().isdisjoint(b.nodes) or not a.inputs.keys().isdisjoint(b.inputs)
    return shared or a.rides_on is b.result or b.rides_on is a.result


def _region_grid(group: list[Target]) -> dict[int, int] | Literal["whole"] | None:
    grid = group[0].grid
    if not isinstance(grid, tuple):
        return grid
    return {axis: grid[axis] for axis in sorted(group[0].axes)}


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
