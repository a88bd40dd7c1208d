"""What must exist as a whole array, on which grid it is computed, and when.

A *target* is a value that must exist as a whole array although it is tiled: stored by the policy,
an output of the function, or the operand of a reduction over tiled axes. A reduction belongs to the
first stored value that depends on it, its *home*, and takes the grid of that value.

In tiles a reduction is a cut: it needs every tile before anything downstream can run. If it follows
a stored value position by position (the statistics of a stored activation) it rides along in the
loop that computes the value, instead of reading it back in a loop of its own. Where everything is
recomputed whole, reductions are equations like any other: they ride along with their home.

A target's level is the longest chain of targets before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from .._errors import TilingError, describe
from .._graph.values import Graph, Node, Storage, Value, is_held
from .._mesh.devices import Devices
from .grid import Grid, Tiles, grid_of


@dataclasses.dataclass(frozen=True)
class Source:
    """The equations that compute something from what is held, and what they read."""

    nodes: dict[Node, None] = dataclasses.field(default_factory=dict)
    inputs: dict[Value, None] = dataclasses.field(default_factory=dict)
    """The tiled values that they read."""
    globals: dict[Value, None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Target:
    """A tiled value to be computed in full; or tiled values that the node `reduction` reduces."""

    operands: tuple[Value, ...]
    grid: Grid
    reduction: Node | None = None
    rides_on: Value | None = None
    """The target in whose region this reduction is computed."""
    level: int = 0
    inside: frozenset[Node] = frozenset()
    """Reductions that are computed on the way to it, and not before it."""
    source: Source = dataclasses.field(default_factory=Source)

    @property
    def value(self) -> Value:
        return self.operands[0]

    @property
    def label(self) -> str:
        if self.reduction is not None:
            return self.reduction.op
        return self.value.name or "output"

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(a for v in self.operands for a in v.axes if a is not None)

    @property
    def result(self) -> Value:
        return self.value if self.reduction is None else self.reduction.outputs[0]


class Targets:
    """All targets of a graph, in topological order, with their grids, equations and levels."""

    def __init__(
        self,
        graph: Graph,
        stored: Storage,
        tiles: Tiles,
        rank: int,
        devices: Devices | None = None,
    ):
        self._stored, self._tiles, self._rank, self._devices = stored, tiles, rank, devices
        self._outputs = {v.array for v in graph.outputs if not graph.is_layer}
        self._levels: dict[Value, int] = {}
        self._found: dict[Value, Target] = {}
        self._settled: set[Target] = set()
        self.needed = _needed(graph)
        homes = _homes(graph, stored, self.needed)
        for node in graph.nodes:
            if node.reduction is not None and node.outputs[0] in self.needed:
                home = homes[node]
                grid = self._grid(home if home.tiled and home in stored else None)
                carried = home if self._in_one_piece(grid) else None
                self._add(Target(node.inputs, grid, node, carried))
            elif node.tiled and node.reduction is None:
                for value in node.outputs:
                    if value in stored and value.tiled and value in self.needed:
                        self._add(Target((value,), self._grid(value)))
        for value in self._found:
            self.level(value)

    def __iter__(self) -> Iterator[Target]:
        return iter(self._found.values())

    def level(self, value: Value) -> int:
        """The first level whose regions and equations may use a value."""
        value = value.array
        if value not in self._levels:
            if value in self._found:
                self._settle(self._found[value])
                self._levels[value] = self._found[value].level + 1
            elif value.node is None:
                self._levels[value] = 0
            else:
                self._levels[value] = max((self.level(v) for v in value.node.inputs), default=0)
        return self._levels[value]

    def _add(self, target: Target) -> None:
        self._found[target.result] = target

    def _grid(self, value: Value | None) -> Grid:
        return grid_of(self._tiles, value, self._rank)

    def _in_one_piece(self, grid: Grid) -> bool:
        return grid.in_one_piece(self._devices is not None)

    def _settle(self, target: Target) -> None:
        """Where a target is computed, from what, and when: with others of its region, once."""
        if target in self._settled:
            return
        self._settled.add(target)
        if target.reduction is not None and not self._in_one_piece(target.grid):
            target.rides_on = self._carrier(target.reduction)
        if target.rides_on in (None, target.result):
            self._lead(target)
        else:
            self._follow(target, self._found[target.rides_on])
        target.grid = self._fitted(target)

    def _lead(self, target: Target) -> None:
        """It is computed as soon as all is there that it reads; in one piece, and that its riders
        read, which are equations on the way to it.
        """
        together = [target, *self._riders(target)]
        inside = _reductions(together) if self._in_one_piece(target.grid) else frozenset()
        for each in together:
            each.inside = inside
            each.source = source_of(each, self._stored)
        read = [v for t in together for v in (*t.source.inputs, *t.source.globals)]
        target.level = max((self.level(v) for v in read), default=0)

    def _follow(self, target: Target, leader: Target) -> None:
        """It is computed where its leader is. In one piece the leader has found its equations."""
        self._settle(leader)
        target.level = leader.level
        if self._in_one_piece(target.grid):
            return
        target.grid = leader.grid
        if self._in_one_piece(leader.grid):
            target.inside = _reductions(self._riders(leader))
        target.source = source_of(target, self._stored)

    def _fitted(self, target: Target) -> Grid:
        """The target's grid.

        What the user cannot name, a reduction or an unnamed value, gets at most one tile per row.
        On a mesh so does everything: how many rows a device has is not for the user to count.
        """
        if target.grid.tiles is None:
            return target.grid
        tiles, devices = list(target.grid.tiles), self._devices
        for value in target.operands:
            for length, axis in zip(value.aval.shape, value.axes, strict=True):
                if axis is None:
                    continue
                rows = length if devices is None else -(-length // devices.count(axis))
                nameable = target.reduction is None and (value in self._outputs or value.name)
                if tiles[axis] > rows and nameable and devices is None:
                    raise TilingError(
                        f"{tiles[axis]} tiles along tiled axis {axis} are more than the {rows} rows"
                        f" of {target.label!r}, {describe(value.aval, value.axes)}: use at most "
                        f"{rows}, or give {_named(value)} a grid of its own with `tiles={{name: "
                        "grid, ...: grid}`"
                    )
                tiles[axis] = min(tiles[axis], rows)
        forward = target.grid.forward
        if forward is not None:
            forward = tuple(min(n, m) for n, m in zip(forward, tiles, strict=True))
        return Grid(tuple(tiles), forward=forward)

    def _riders(self, leader: Target) -> list[Target]:
        """Reductions that are recomputed whole together with this target."""
        return [
            t
            for t in self._found.values()
            if self._in_one_piece(t.grid) and t.rides_on is leader.result and t is not leader
        ]

    def _carrier(self, reduction: Node) -> Value | None:
        """The stored value that this reduction follows position by position, if there is one.

        Whatever else it needs must be there before the region of that value runs. (What reads
        around a position would be exact, too, but would make the region's windows larger.)
        """
        stored: set[Value] = set()
        others: list[Value] = []
        pending = list(reduction.inputs)
        while pending:
            value = pending.pop()
            node = value.node
            if not value.tiled:
                others.append(value)
            elif value in self._stored and node is not None and node.reduction is None:
                stored.add(value)
            elif node is None or is_held(value, self._stored):
                return None
            elif node.by_position or not any(v.tiled for v in node.inputs):
                pending.extend(node.inputs)
            else:
                return None
        if len(stored) != 1:
            return None
        (value,) = stored
        in_time = all(self.level(v) < self.level(value) for v in others)
        return value if in_time else None


def _named(value: Value) -> str:
    return "it" if value.name else "it a name with `jax.ad_checkpoint.checkpoint_name`, and then"


def _reductions(targets: Iterable[Target]) -> frozenset[Node]:
    return frozenset(t.reduction for t in targets if t.reduction is not None)


def _needed(graph: Graph) -> set[Value]:
    """All values that an output depends on."""
    needed = {v.array for v in graph.outputs}
    for node in reversed(graph.nodes):
        if node.equation.effects or any(v in needed for v in node.outputs):
            needed.update(v.array for v in node.inputs)
    return needed


def _homes(graph: Graph, storage: Storage, needed: set[Value]) -> dict[Node, Value]:
    """Per reduction, the first stored value that depends on it; failing that, the last reduction
    that does, which may be itself.
    """
    position = {v: i for i, n in enumerate(graph.nodes) for v in n.outputs}
    first: dict[Value, Value] = {}
    homes: dict[Node, Value] = {}
    for node in reversed(graph.nodes):
        if not any(v in needed for v in node.outputs):
            continue
        stored = [v for v in node.outputs if v in storage and v.tiled and node.reduction is None]
        ahead = [first[v] for v in node.outputs if v in first]
        end = min(stored or ahead, key=position.__getitem__, default=None)
        if node.reduction is not None:
            homes[node] = end = node.outputs[0] if end is None else end
        if end is None:
            continue
        for value in node.inputs:
            known = first.get(value.array)
            if known is None or position[end] < position[known]:
                first[value.array] = end
    return homes


def source_of(target: Target, stored: Storage) -> Source:
    """From what a target is computed, if these values are stored."""
    own = target.rides_on if target.reduction is not None else target.value
    inside, found = target.inside, Source()
    dependent: dict[Value, bool] = {}

    def follows(value: Value) -> bool:
        """Does a global value depend on a reduction inside?"""
        value = value.array
        if value not in dependent:
            node = value.node
            dependent[value] = node in inside or (
                node is not None
                and node.reduction is None
                and not value.tiled
                and any(follows(v) for v in node.inputs)
            )
        return dependent[value]

    pending = list(target.operands)
    while pending:
        value = pending.pop()
        node = value.array.node
        if value.tiled and value.base is None and node is not None and node.reduction is None:
            computed = value is own or value not in stored
        else:
            computed = bool(inside) and follows(value)
        if not computed:
            if value.tiled:
                found.inputs[value] = None
            elif not value.array.concrete:
                found.globals[value] = None
        elif node is not None and node not in found.nodes:
            found.nodes[node] = None
            pending.extend(node.inputs)
    return found
