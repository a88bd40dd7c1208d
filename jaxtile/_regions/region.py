"""What runs in one go: a region, or a group of regions that is run again as a whole."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection

from .._geometry import partition
from .._graph.values import Node, Value, moving
from .._mesh.devices import Devices
from .._mesh.halos import Exchange, Halo
from .._rules import Windows
from .grid import Grid
from .targets import Target
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
    moved: Collection[Value] = ()
    """What the function's outputs have derivatives with respect to."""
    skips: bool = False
    """Are tiles that read what another one has read computed once?"""
    loss: Target | None = None
    """The sum whose derivative is computed tile by tile, together with the sum."""
    before: list[Node] = dataclasses.field(default_factory=list)
    """The equations that compute passing inputs; only in what runs `again`."""
    again: Region | None = None
    """What the backward pass runs, if it is something else. Its inputs and globals are these; then
    others, which it reads to compute the passing ones; then results that it reads instead of
    computing them."""

    @property
    def passing(self) -> list[bool]:
        """Which inputs are computed inside, by `before`."""
        return _made_by(self.before, self.inputs)

    @property
    def results(self) -> list[Value]:
        return [t.result for t in self.targets]

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
    def has_loop(self) -> bool:
        return self.tiled and self.tiles > 1

    @property
    def changes_value(self) -> bool:
        """May its results differ when it is differentiated?"""
        return any(n.changes_value for n in self.nodes)

    @property
    def equations(self) -> list[Node]:
        """Its nodes, and the reductions that they lead to."""
        return [*self.nodes, *(t.reduction for t in self.targets if t.reduction is not None)]

    @functools.cached_property
    def moving(self) -> tuple[list[bool], list[bool]]:
        """With respect to which inputs and which globals its results have derivatives that the
        function has too; also of what computes passing inputs, for the second derivative.

        All of them, if being differentiated is what changes its results.
        """
        if self.changes_value:
            return _among(None, self)
        nodes = [*self.before, *self.equations]
        return _among(moving(nodes, {*self.results} & {*self.moved}), self)

    @property
    def has_rules(self) -> bool:
        """Does it call functions with derivative rules of the user?"""
        return any(n.is_call for n in self.nodes)

    @property
    def statistics(self) -> list[Value]:
        """What reductions inside give: small, as the statistics of a norm are."""
        reductions = [n for n in self.nodes if n.reduction is not None]
        return [v for n in reductions for v in n.outputs if not v.tiled]

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
class Group:
    """Regions and global equations that the backward pass runs again before it differentiates them.

    What they compute and nothing else reads is *restored*: it is not kept in between.
    """

    steps: list[Node | Region]
    inputs: list[Value]
    globals: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)
    """What others read."""
    before: list[Node] = dataclasses.field(default_factory=list)
    again: Group | None = None
    """What the backward pass runs, if some inputs are passing."""

    @property
    def passing(self) -> list[bool]:
        return _made_by(self.before, self.inputs)

    @property
    def regions(self) -> list[Region]:
        return [step for step in self.steps if isinstance(step, Region)]

    @property
    def changes_value(self) -> bool:
        return any(r.changes_value for r in self.regions)

    @property
    def statistics(self) -> list[Value]:
        targets = [t for r in self.regions for t in r.targets]
        return [t.result for t in targets if t.reduction and not t.result.tiled]

    @functools.cached_property
    def moving(self) -> tuple[list[bool], list[bool]]:
        """With respect to which inputs and which globals the group's results have derivatives."""
        if self.changes_value:
            return _among(None, self)
        found = {*self.results} & {*self.regions[0].moved}
        for step in reversed(self.steps):
            found |= moving(step.equations if isinstance(step, Region) else [step], found)
        return _among(found | moving(self.before, found), self)

    @property
    def has_rules(self) -> bool:
        return any(s.has_rules if isinstance(s, Region) else s.is_call for s in self.steps)


def _among(found: Collection[Value] | None, step: Region | Group) -> tuple[list[bool], list[bool]]:
    """Which inputs and which globals are among these; None: all are."""

    def there(values: list[Value]) -> list[bool]:
        return [found is None or v.array in found for v in values]

    return there(step.inputs), there(step.globals)


def _made_by(nodes: list[Node], values: list[Value]) -> list[bool]:
    made = {v for n in nodes for v in n.outputs}
    return [v in made for v in values]
