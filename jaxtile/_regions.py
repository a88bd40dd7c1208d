"""Cut the graph into regions, and put them in order.

A *target* is a value that must exist as a whole array although it is tiled: stored by the policy,
an output of the function, or the operand of a reduction over tiled axes. Everything a target needs
beyond what is held already is computed inside the tiles of the *region* that computes the target;
values needed by several regions are recomputed in each. A reduction that follows a stored value
position by position (the statistics of a stored activation) rides along in the region that computes
the value, instead of reading it back in a loop of its own.

A target's level is the longest chain of targets before it. Targets of one level that share work, or
read the same stored array, are computed by one loop. Global equations run once, as they are, before
the first region that needs them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import EllipsisType

from ._errors import TilingError, describe
from ._geometry import partition
from ._rules import Windows
from ._rules._elementwise import Elementwise
from ._tile import TilePlan, plan
from ._values import Graph, Node, Value

Grid = tuple[int, ...] | None
"""Tiles per tiled axis; None: not tiled and not recomputed, the equations run as plain JAX."""

Tiles = Sequence[int] | Mapping[str | EllipsisType, Sequence[int] | None]


@dataclasses.dataclass(eq=False)
class Target:
    """A tiled value to be computed in full; or tiled values that the node `reduction` reduces."""

    operands: tuple[Value, ...]
    level: int
    grid: Grid
    reduction: Node | None = None
    rides_on: Value | None = None
    """The stored value in whose region this reduction is computed."""

    @property
    def value(self) -> Value:
        return self.operands[0]

    @property
    def label(self) -> str:
        if self.reduction is not None:
            return self.reduction.equation.primitive.name
        return self.value.name or "output"

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(a for v in self.operands for a in v.axes if a is not None)

    @property
    def result(self) -> Value:
        return self.value if self.reduction is None else self.reduction.outputs[0]


@dataclasses.dataclass(eq=False)
class Region:
    """Targets that one tile loop computes together."""

    index: int
    level: int
    targets: list[Target]
    nodes: list[Node]
    inputs: list[Value]
    """Tiled values that are read by window."""
    globals: list[Value]
    grid: dict[int, int] | None
    """Tiles per looped axis; None: no loop."""
    plan: TilePlan | None = None

    @property
    def tiles(self) -> int:
        return 1 if self.grid is None else math.prod(self.grid.values())


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
    levels = _levels(graph)
    needed = _needed(graph)
    targets = _targets(graph, levels, needed, tiles, rank)
    regions = _regions(graph, targets)
    _check_keys(tiles, regions)
    for region in regions:
        if region.grid is not None:
            region.plan = plan(
                region.nodes,
                {v: target_windows(v, region.grid) for t in region.targets for v in t.operands},
                region.grid,
            )
    steps: list[Node | Region] = [
        n
        for n in graph.nodes
        if not n.tiled and (n.equation.effects or any(v in needed for v in n.outputs))
    ]
    order = {node: i for i, node in enumerate(graph.nodes)}

    def when(step: Node | Region):
        if isinstance(step, Region):
            return step.level, 1, step.index
        return max((levels.get(v.array, 0) for v in step.inputs), default=0), 0, order[step]

    return Schedule(graph, sorted([*steps, *regions], key=when))


def target_windows(value: Value, grid: Mapping[int, int]) -> Windows:
    """Each tile's share of a target."""
    shape = value.aval.shape
    return {d: partition(a, shape[d], grid[a]) for d, a in enumerate(value.axes) if a is not None}


def _levels(graph: Graph) -> dict[Value, int]:
    """For each value the first level whose regions and equations may use it."""
    levels: dict[Value, int] = {}

    def of(value: Value) -> int:
        return levels.get(value.array, 0)

    for node in graph.nodes:
        level = max((of(v) for v in node.inputs), default=0)
        if node.reduction is not None and _rides_on(node, levels) is not None:
            level -= 1
        for value in node.outputs:
            held_after_a_loop = node.reduction is not None or (value.tiled and value.stored)
            levels[value] = level + 1 if held_after_a_loop else level
    return levels


def _rides_on(reduction: Node, levels: Mapping[Value, int]) -> Value | None:
    """The stored value that this reduction follows position by position, if there is one.

    Whatever else it needs must be there before the region of that value runs.
    """
    stored: set[Value] = set()
    others: list[Value] = []
    pending = list(reduction.inputs)
    while pending:
        value = pending.pop()
        if not value.tiled:
            others.append(value)
        elif value.stored and value.node is not None and value.node.reduction is None:
            stored.add(value)
        elif value.available:
            return None
        elif isinstance(value.node.rule, Elementwise) or not any(
            v.tiled for v in value.node.inputs
        ):
            pending.extend(value.node.inputs)
        else:
            return None
    if len(stored) != 1:
        return None
    (value,) = stored
    in_time = all(levels.get(v.array, 0) < levels[value] for v in others)
    return value if in_time and not value.whole_cotangent else None


def _needed(graph: Graph) -> set[Value]:
    """All values that an output depends on."""
    needed = {v.array for v in graph.outputs}
    for node in reversed(graph.nodes):
        if node.equation.effects or any(v in needed for v in node.outputs):
            needed.update(v.array for v in node.inputs)
    return needed


def _targets(graph: Graph, levels, needed, tiles: Tiles, rank: int) -> list[Target]:
    targets = []
    for node in graph.nodes:
        if node.reduction is not None and node.outputs[0] in needed:
            carrier = _rides_on(node, levels)
            grid = _grid_of(tiles, None if carrier is None else carrier.name, rank)
            level = levels[node.outputs[0]] - 1
            targets.append(Target(node.inputs, level, grid, node, carrier))
        elif node.tiled and node.reduction is None:
            for value in node.outputs:
                if value.stored and value.tiled and value in needed:
                    targets.append(
                        Target((value,), levels[value] - 1, _grid_of(tiles, value.name, rank))
                    )
    for target in targets:
        target.grid = _fitted(target)
    return targets


def _grid_of(tiles: Tiles, name: str | None, rank: int) -> Grid:
    if not isinstance(tiles, Mapping):
        return _checked(tiles, rank, "`tiles`")
    for key in (name, ...):
        if key in tiles and key is not None:
            return _checked(tiles[key], rank, f"`tiles[{'...' if key is ... else repr(key)}]`")
    raise TilingError(
        f"`tiles` (={dict(tiles)}) gives no grid for the region that computes "
        f"{name or 'an unnamed value'!r}: add that name, or the key `...` for all other regions"
    )


def _checked(grid, rank: int, what: str) -> Grid:
    if grid is None:
        return None
    if not isinstance(grid, Sequence):
        raise TilingError(
            f"{what} (={grid!r}) must be a tuple with one number of tiles per tiled axis"
        )
    grid = tuple(grid)
    if len(grid) != rank:
        raise TilingError(
            f"{what} (={grid}) must have one number per tiled axis, and `in_axes` has {rank}"
        )
    if not all(isinstance(n, Integral) and not isinstance(n, bool) and n > 0 for n in grid):
        raise TilingError(f"{what} (={grid}) must be positive integers")
    return tuple(int(n) for n in grid)


def _regions(graph: Graph, targets: list[Target]) -> list[Region]:
    cones = {t: _cone(t) for t in targets}
    groups: list[list[Target]] = []
    for target in targets:
        work = set().union(*cones[target])
        related = [
            g
            for g in groups
            if _together(g[0], target) and any(work & set().union(*cones[t]) for t in g)
        ]
        groups = [g for g in groups if g not in related]
        groups.append([t for g in related for t in g] + [target])
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups.sort(key=lambda g: (g[0].level, min(targets.index(t) for t in g)))
    regions = []
    for index, group in enumerate(groups):
        nodes = sorted(set().union(*(cones[t][0] for t in group)), key=order.__getitem__)
        inputs = dict.fromkeys(v for t in group for v in cones[t][1])
        globals_ = dict.fromkeys(
            v for n in nodes for v in n.inputs if not v.tiled and not v.array.concrete
        )
        regions.append(
            Region(
                index, group[0].level, group, nodes, list(inputs), list(globals_), _loop_grid(group)
            )
        )
    return regions


def _together(a: Target, b: Target) -> bool:
    return a.level == b.level and a.axes == b.axes and a.grid == b.grid


def _cone(target: Target) -> tuple[dict[Node, None], dict[Value, None]]:
    """The equations that compute a target from what is held, and the arrays they read."""
    nodes: dict[Node, None] = {}
    inputs: dict[Value, None] = {}
    pending = list(target.operands)
    while pending:
        value = pending.pop()
        computed = value.node is not None and value.node.reduction is None and value.base is None
        stored_here = target.rides_on if target.reduction is not None else target.value
        if computed and (value is stored_here or not value.stored):
            if value.node not in nodes:
                nodes[value.node] = None
                pending.extend(v for v in value.node.inputs if v.tiled)
        else:
            inputs[value] = None
    return nodes, inputs


def _fitted(target: Target) -> Grid:
    """The target's grid.

    What the user cannot name, a reduction or an unnamed value, gets at most one tile per row.
    """
    if target.grid is None:
        return None
    grid = list(target.grid)
    dimensions = [(v, d, a) for v in target.operands for d, a in enumerate(v.axes) if a is not None]
    for value, d, axis in dimensions:
        length = value.aval.shape[d]
        if grid[axis] > length and target.reduction is None and (value.is_output or value.name):
            raise TilingError(
                f"{grid[axis]} tiles along tiled axis {axis} are more than the {length} rows of "
                f"{target.label!r}, {describe(value.aval, value.axes)}: use at most {length}, "
                "or give its region a grid of its own with `tiles={name: grid, ...: grid}`"
            )
        grid[axis] = min(grid[axis], length)
        if target.reduction is None and value.whole_cotangent and length % grid[axis]:
            raise TilingError(
                f"{grid[axis]} tiles along tiled axis {axis} do not divide the {length} rows of "
                "the output of a `custom_vjp` function whose backward rule is not linear in the "
                "cotangent: choose a number of tiles that divides them"
            )
    return tuple(grid)


def _loop_grid(group: list[Target]) -> dict[int, int] | None:
    grid = group[0].grid
    return None if grid is None else {axis: grid[axis] for axis in sorted(group[0].axes)}


def _check_keys(tiles: Tiles, regions: list[Region]) -> None:
    if not isinstance(tiles, Mapping):
        return
    known = {
        t.value.name for r in regions for t in r.targets if t.reduction is None and t.value.name
    }
    unknown = [k for k in tiles if k is not ... and k not in known]
    if unknown:
        raise TilingError(
            f"`tiles` has a grid for {unknown[0]!r}, but no stored value has that name; stored "
            f"are {sorted(known)}. A value is stored if `policy` saves it, or if it is an output."
        )
