"""What the backward pass computes again, and from what.

A stored value is kept from the forward pass to the backward pass. Two other kinds of values are
whole arrays in the forward pass, and are not kept.

A *passing* value is computed again by window, in each region that reads it, from what is kept. A
network of convolutions and batch norms of which only the input is kept is an example. Forwards,
each convolution's result passes to the next region, and everything is computed once. Backwards, the
region of the third convolution computes the first two again in each tile, and pulls the cotangent
back through the third one only: what it finds for the second one's result is a whole array, and
where the region before it begins.

A *restored* value is computed again once, as a whole array. When the backward pass comes to its
readers, the steps from the region that computes it to the last one that reads it are run again,
forwards, as a *group*, and then differentiated: as by `jax.checkpoint` around these steps. In
between, while the rest of the network needs the memory, nothing of it is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from .._graph.values import Graph, Node, Place, Storage, Value, is_held
from .._mesh.devices import Devices
from .grid import Grid
from .region import Group, Region
from .targets import Target, source_of

Piece = Node | Region


def possible(graph: Graph, stored: Storage, devices: Devices | None) -> Storage:
    """What cannot pass or be restored is kept: outputs, what is read as a view, and what depends on
    a function whose value may change when it is differentiated. Nothing is restored on a mesh, or
    if the function has effects, which must not happen twice.
    """
    effects = any(n.equation.effects for n in graph.nodes if not n.tiled)
    kept = {v.array for v in graph.outputs}
    kept |= {v.base for n in graph.nodes for v in n.inputs if v.base is not None}
    changed: set[Value] = set()
    for node in graph.nodes:
        if not node.tiled:
            continue
        if node.changes_value or any(v.array in changed for v in node.inputs):
            changed.update(v for v in node.outputs if v.tiled)

    def kept_after_all(value: Value) -> bool:
        wanted = stored[value]
        if wanted == "restored" and (devices is not None or effects):
            return True
        return wanted in ("passing", "restored") and (value in kept or value in changed)

    return {v: "device" if kept_after_all(v) else place for v, place in stored.items()}


def together(steps: Sequence[Piece], stored: Storage) -> Iterator[list[Piece]]:
    """Runs of steps that restored values join: from what computes one to its last reader."""
    last: dict[Value, int] = {}
    for i, step in enumerate(steps):
        for value in [*_reads(step), *_makes(step)]:
            if stored.get(value) == "restored":
                last[value] = i
    run: list[Piece] = []
    end = -1
    for i, step in enumerate(steps):
        end = max([end, *(last.get(v, -1) for v in _makes(step))])
        run.append(step)
        if end <= i:
            yield run
            run = []


def prepare(run: Sequence[Piece], stored: Storage, order: Mapping[Node, int]) -> None:
    """What the backward pass runs of each region, if these steps are run again together."""
    kept = _kept(stored)
    if len(run) > 1:  # then all that they read is there, and what they restore
        inside = {v for step in run for v in _makes(step)}
        read = {v for step in run for v in _reads(step)}
        restored = {v for v in inside if stored.get(v) == "restored"}
        kept |= dict.fromkeys(read - inside | restored, "device")
    for region in run:
        if isinstance(region, Region) and region.loss is not None:
            region.grid = Grid(region.grid.tiles)  # one pass, with what there is
        elif isinstance(region, Region):
            region.again = _again(region, kept, order)
            if region.grid.forward is not None and _may_differ(region):
                region.again = region.again or dataclasses.replace(region)
                region.grid = Grid(region.grid.forward)


def grouped(
    steps: Sequence[Piece], graph: Graph, stored: Storage, order: Mapping[Node, int]
) -> list[Node | Region | Group]:
    """The steps, with those that are run again together as groups."""
    found = [_joined(run, stored, order) for run in together(steps, stored)]
    used = {v.array for v in graph.outputs}
    for step in reversed(found):
        if isinstance(step, Group):
            made = dict.fromkeys(v for inner in step.steps for v in _makes(inner))
            step.results = [v for v in made if v in used]
            if step.again is not None:
                step.again.results = step.results
        used.update(_reads(step))
    return found


def _joined(run: Sequence[Piece], stored: Storage, order: Mapping[Node, int]) -> Piece | Group:
    if len(run) == 1:
        return run[0]
    made = {v for step in run for v in _makes(step)}
    read = dict.fromkeys(v for step in run for v in _reads(step))
    outside = [v for v in read if v not in made and not v.concrete]
    tiled, others = ([v for v in outside if v.tiled == t] for t in (True, False))
    group = Group(list(run), tiled, others)
    passing = [v for v in group.inputs if not is_held(v, _kept(stored))]
    if passing:
        inputs, globals_, before = _from(passing, group, _kept(stored), order)
        group.again = dataclasses.replace(group, inputs=inputs, globals=globals_, before=before)
    return group


def _kept(stored: Storage) -> dict[Value, Place]:
    return {v: place for v, place in stored.items() if place in ("device", "host")}


def _reads(step: Piece | Group) -> list[Value]:
    """The arrays that a step reads, also in the backward pass."""
    if isinstance(step, Node):
        return [v.array for v in step.inputs]
    results = set(step.results) if isinstance(step, Region) else set()
    inputs = [*step.inputs, *(step.again.inputs if step.again else ())]
    globals_ = [*step.globals, *(step.again.globals if step.again else ())]
    return [v.array for v in (*inputs, *globals_) if v.array not in results]


def _makes(step: Piece) -> list[Value]:
    return list(step.outputs) if isinstance(step, Node) else step.results


def _may_differ(region: Region) -> bool:
    """May the forward pass have other tiles? Not if it must remember something of each of them."""
    reductions = [t.reduction.reduction for t in region.targets if t.reduction is not None]
    return region.devices is None and all(r is not None and r.adds for r in reductions)


def _again(region: Region, kept: Storage, order: Mapping[Node, int]) -> Region | None:
    """What the backward pass runs, if only these values are kept; None: the same.

    What it need not compute again it reads: results that were kept, and that reductions follow; in
    one piece also those of a ReLU after a convolution. (To compute a window of these, in a tile,
    takes less memory than to hold all.)
    """
    passing = [v for v in region.inputs if not is_held(v, kept)]
    in_one = not region.tiled and region.devices is None
    read = {t.rides_on for t in region.targets if t.reduction is not None}
    read |= {t.value for t in region.targets if in_one and t.value.clamp is not None}
    known = [t.value for t in region.targets if not t.reduction and t.value in read]
    known = known if region.tiled or in_one else []
    known = [v for v in known if kept.get(v) == "device"]
    if not region.grid.recomputed or not (passing or known):
        return None
    inputs, globals_, before = _from(passing, region, kept, order)
    return dataclasses.replace(region, inputs=[*inputs, *known], globals=globals_, before=before)


def _from(
    passing: Sequence[Value], step: Region | Group, kept: Storage, order: Mapping[Node, int]
) -> tuple[list[Value], list[Value], list[Node]]:
    """The inputs, the globals and the first equations of a step that computes passing inputs."""
    sources = [source_of(Target((v,), Grid()), kept) for v in passing]
    return (
        list(dict.fromkeys([*step.inputs, *(v for s in sources for v in s.inputs)])),
        list(dict.fromkeys([*step.globals, *(v for s in sources for v in s.globals)])),
        sorted({n for s in sources for n in s.nodes}, key=order.__getitem__),
    )
