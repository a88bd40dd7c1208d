"""From a traced function to passes, and these passes run forwards and backwards."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import copy_p

from .._errors import TilingError, describe, user_line
from .._graph.build import build
from .._graph.inline import any_call
from .._graph.trace import Traced
from .._graph.values import Graph, Node, Storage, Value, moving
from .._regions.grid import Grid, Tiles, grid_of
from .._regions.region import Region
from .._regions.regions import Running, Schedule, schedule_of
from .._regions.stages import stage_runner
from .._regions.tile import lookup
from .._rules import Equation
from .._schedule import Options, decided
from ..policy import GraphPolicy
from .ends import Sink, Source, Store, all_of
from .held import Active, Globals, Held
from .passes import Kept, Pass

Progress = Callable[[int, int], Any] | None
Folder = str | os.PathLike[str] | None


class Program:
    """The passes over the tiles, and the global equations between them, for given shapes.

    `wanted`: the numbers of the flat arguments that it is differentiated with respect to.
    `batch_bytes`: what tiles that are computed at once may need.
    """

    def __init__(
        self, traced: Traced, options: Options, wanted: Collection[int] = (), batch_bytes: int = 0
    ):
        self.traced, self.wanted = traced, list(wanted)
        schedule, self.held = _schedule(traced, options, bool(self.wanted))
        self.graph = schedule.graph
        if not all(region.tiled for region in schedule.regions):
            raise TilingError(
                f"`tiles` (={options.tiles!r}) must be numbers of tiles: `jaxtile.stream` holds no "
                "whole arrays; (1, 1) is one tile"
            )
        active, run_stage = _active(self.graph, self.wanted), stage_runner()
        self.steps: list[Pass | Globals] = []
        for _, steps in itertools.groupby(schedule.flat, lambda s: isinstance(s, Region)):
            found = list(steps)
            nodes = [step for step in found if isinstance(step, Node)]
            regions = [step for step in found if isinstance(step, Region)]
            self.steps += [Pass(r, run_stage, active, batch_bytes) for r in regions]
            self.steps += [Globals(nodes, schedule, active)] if nodes else []
        self.passes = [step for step in self.steps if isinstance(step, Pass)]
        outputs = {v.array for v in self.graph.outputs}
        results = {t.value for p in self.passes for t in p.region.targets if not t.reduction}
        self.stored = {v: schedule.stored[v] for v in results if v not in self.held | outputs}
        """What is between the passes, in host memory or in files."""
        self.sum_dtypes = self._sum_dtypes()

    def run(self, leaves: Sequence[Any], out: Any, folder: Folder, progress: Progress) -> list[Any]:
        """The outputs."""
        tick = self._tick(sum(p.region.tiles for p in self.passes), progress)
        with _Room(folder) as room:
            held, sinks = self._arguments(leaves), self._sinks(out)
            self._forward(held, sinks, room, tick)
            return self._outputs(held, sinks)

    def value_and_grad(
        self, leaves: Sequence[Any], folder: Folder, progress: Progress
    ) -> tuple[list[Any], list[jax.Array]]:
        """The outputs, and the gradients of the first one, with respect to what is wanted."""
        loss = self.graph.outputs[0]
        tiles = sum(p.region.tiles + p.differentiated * p.back.region.tiles for p in self.passes)
        tick = self._tick(tiles, progress)
        with _Room(folder) as room:
            held, sinks = self._arguments(leaves), self._sinks(None)
            kept = self._forward(held, sinks, room, tick)
            outputs = self._outputs(held, sinks)
            one = jnp.ones((), loss.aval.dtype)
            cotangents = Held({loss.array: one})

            def store(value: Value) -> Store:
                return room.store(value, self.sum_dtypes[value])

            for step, known in zip(reversed(self.steps), reversed(kept), strict=True):
                if isinstance(step, Globals):
                    step.backward(held, cotangents)
                    continue
                if step.differentiated:
                    step.backward(held, cotangents, known, store, tick)
                held.drop(step.region.results)
                cotangents.drop(step.region.results)
        wanted = [self.graph.inputs[i] for i in self.wanted]
        found = [(cotangents.arrays.get(v), v.aval) for v in wanted]
        return outputs, [
            jnp.zeros(a.shape, a.dtype) if c is None else c.astype(a.dtype) for c, a in found
        ]

    def _forward(
        self, held: Held, sinks: dict[Value, list[Any]], room: _Room, tick: Callable[[], Any]
    ) -> list[Kept]:
        """Run all steps; per step, what the backward pass must know besides what is stored."""
        last = self._last_readers()
        kept: list[Kept] = []
        for i, step in enumerate(self.steps):
            if isinstance(step, Globals):
                step.forward(held)
                kept.append(([], []))
            else:
                results = [v for v in step.region.results if v in self.stored]
                new = {v: room.store(v, v.aval.dtype) for v in results}
                held.by_window.update(new)
                kept.append(step.forward(held, sinks | {v: [s] for v, s in new.items()}, tick))
            held.drop([v for v in self.stored if last.get(v) == i])
        return kept

    def _last_readers(self) -> dict[Value, int]:
        """After which pass nobody reads a value; none for what the backward pass reads."""
        found: dict[Value, int] = {}
        for i, step in enumerate(self.steps):
            if isinstance(step, Globals):
                found.update((v, i) for v in step.inputs)
                continue
            region = step.region
            read = (*region.results, *region.inputs, *region.globals)
            found.update((v.array, i) for v in read)
        waits = [v for v, place in self.stored.items() if self.wanted and place != "passing"]
        return {v: i for v, i in found.items() if v not in waits}

    def _sum_dtypes(self) -> dict[Value, Any]:
        """In what the cotangents of each array are added up: the widest that a reader asks for."""
        found: dict[Value, Any] = {}
        for step in self.passes:
            tile = step.back
            for value, slots in zip(tile.region.inputs, tile.input_slots, strict=True):
                dtype = tile.sum_dtype(value, slots, tile.region.tiles)
                found[value.array] = jnp.promote_types(found.get(value.array, dtype), dtype)
        return found

    @property
    def skipped(self) -> int:
        """Tiles of the last run so far that were not computed."""
        return sum(p.skipped for p in self.passes)

    def _tick(self, total: int, progress: Progress) -> Callable[[], Any]:
        done = itertools.count(1)
        for each in self.passes:
            each.skipped = 0
        return lambda: progress and progress(next(done), total)

    def _arguments(self, leaves: Sequence[Any]) -> Held:
        held = Held()
        for value, name, leaf in zip(self.graph.inputs, self.traced.names, leaves, strict=True):
            if not value.tiled:
                held.arrays[value] = jnp.asarray(leaf)
                continue
            source = Source(name, leaf, value.aval)
            if value in self.held:
                held.arrays[value] = jnp.asarray(source.read(all_of(value)))
            else:
                held.by_window[value] = source
        return held

    def _outputs(self, held: Held, sinks: Mapping[Value, list[Sink]]) -> list[Any]:
        results: list[Any] = []
        for value in self.graph.outputs:
            if value not in sinks:
                results.append(jnp.asarray(lookup(held.arrays, value.array)))
                continue
            sink = sinks[value].pop(0)
            if value.array in held.arrays:  # a reduction over some of the tiled axes
                sink.write(all_of(value), np.asarray(held.arrays[value.array]))
            results.append(sink.array)
        return results

    def _sinks(self, out: Any) -> dict[Value, list[Sink]]:
        """Where each tiled output goes: one place for every time that it is returned."""
        tree, outputs = self.traced.out_tree, self.graph.outputs
        try:
            given = [None] * len(outputs) if out is None else tree.flatten_up_to(out)
        except ValueError as error:
            raise TilingError(
                f"`out` must be a pytree like the function's result, {tree}, with None for what is "
                f"not written: {error}"
            ) from None
        sinks: dict[Value, list[Sink]] = {}
        paths = jax.tree.leaves_with_path(jax.tree.unflatten(tree, outputs))
        for (path, value), array in zip(paths, given, strict=True):
            name = "out" + jax.tree_util.keystr(path)
            if value.tiled:
                sinks.setdefault(value, []).append(Sink(name, array, value))
            elif array is not None:
                raise TilingError(
                    f"`{name}` must be None: that output, {describe(value.aval, value.axes)}, "
                    "carries no tiled axis and is returned"
                )
        return sinks


class _Room(contextlib.ExitStack):
    """Where stores are made, and closed at the end, whatever happens."""

    def __init__(self, folder: Folder):
        super().__init__()
        self.folder = folder

    def store(self, value: Value, dtype: Any) -> Store:
        return self.enter_context(contextlib.closing(Store(value, dtype, self.folder)))


def _schedule(
    traced: Traced, options: Options, differentiated: bool
) -> tuple[Schedule, set[Value]]:
    """The schedule, and what is held on the device."""
    try:
        graph, stored, tiles = _decided(traced, options, differentiated)
        held = _held(graph, stored)
        _copy_outputs(graph)
        outputs = {v for v in graph.outputs if v.node is not None}
        stored = {**stored, **dict.fromkeys(held | outputs, "device")}
        running = Running(skips=options.skip, both_passes=False)
        return schedule_of(graph, stored, tiles, traced.rank, running), held
    except TilingError as error:
        if options.policy is None:
            error.add_note(
                "`jaxtile.stream` stores nothing, unless it has a `policy`. What needs whole "
                "arrays can be done to its result."
            )
        raise


def _decided(
    traced: Traced, options: Options, differentiated: bool
) -> tuple[Graph, Storage, Tiles]:
    """As for `checkpoint`, but what is restored there is kept here, and one piece is one tile."""
    if options.policy is None and not differentiated:
        return build(traced, look_through=any_call), {}, options.tiles
    graph, stored, tiles = decided(traced, options)
    read = {v.array for node in graph.nodes for v in node.inputs}
    stored = {
        v: "device" if place == "restored" else place
        for v, place in stored.items()
        if v in read and v.node is not None
    }
    if isinstance(options.policy, GraphPolicy) and isinstance(tiles, Mapping):
        one = Grid((1,) * traced.rank)
        in_one_piece = {key: grid_of({...: grid}, None, traced.rank) for key, grid in tiles.items()}
        tiles = {key: one if g.tiles is None else g for key, g in in_one_piece.items()}
    return graph, stored, tiles


def _active(graph: Graph, wanted: Sequence[int]) -> Active:
    """What depends on these arguments, and what the first output depends on."""
    dependent = graph.dependent(graph.inputs[i] for i in wanted)
    return dependent & moving(graph.nodes, graph.outputs[:1])


def _held(graph: Graph, stored: Storage) -> set[Value]:
    """What is held on the device: values of one position, which equations after the tiles read."""
    held: set[Value] = set()
    for node in graph.nodes:
        for value in node.inputs:
            array = value.array
            whole = not node.tiled or (value.base is not None and array.node is not None)
            if array.tiled and not _reduced(array) and whole and array not in stored:
                _check_size(array, node)
                array.name = None  # nobody chooses a grid for it
                held.add(array)
    return held


def _reduced(value: Value) -> bool:
    return value.node is not None and value.node.reduction is not None


def _copy_outputs(graph: Graph) -> None:
    """Make every tiled output a copy that nothing reads: what is written is never read back."""
    copies: dict[Value, Value] = {}
    for value in graph.outputs:
        if value.array.tiled and not _reduced(value.array) and value not in copies:
            copies[value] = _copy(graph, value.array)
    graph.outputs[:] = [copies.get(value, value) for value in graph.outputs]


def _copy(graph: Graph, value: Value) -> Value:
    aval, axes = (value.aval,), (value.axes,)
    equation = Equation(
        primitive=copy_p, params={}, in_avals=aval, in_axes=axes, out_avals=aval, out_axes=axes
    )
    node = Node(equation, (value,))
    copy = Value(value.aval, value.axes, node=node, name=value.name)
    node.outputs = (copy,)
    graph.nodes.append(node)
    return copy


def _check_size(value: Value, reader: Node) -> None:
    sizes = [n for n, axis in zip(value.aval.shape, value.axes, strict=True) if axis is not None]
    if any(n > 1 for n in sizes):
        source = "an argument" if value.node is None else value.node.op
        raise TilingError(
            f"{value.name or source!r}, {describe(value.aval, value.axes)} (* marks a tiled "
            f"dimension), would have to be whole: `{reader.op}` at "
            f"{user_line(*reader.equation.source_infos)} does not read it by windows that follow "
            "its tiles"
        )
