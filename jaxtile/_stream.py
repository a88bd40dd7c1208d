"""Evaluate a function from disk to disk: `jaxtile.stream`.

The schedule is that of `checkpoint` with nothing stored. Every region then reads only arguments,
global values and results of reductions, so its loop may run on the host: read the windows of a tile
from the arguments, compute, write the targets' tiles. All tiles of a region share one compiled
program. While the device computes a tile, the next one is read by a thread and the last one is
written.

Known inefficiencies: one more pass over the source for every reduction that waits for another
(each group norm of a network, for instance), which computes all that is before it again; neighbours
read, copy and compute their common halo twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import copy_p

from ._errors import TilingError, check_callable, describe, user_line
from ._graph.build import build
from ._graph.inline import any_call
from ._graph.trace import trace
from ._graph.values import Graph, Node, Value
from ._regions.grid import Tiles
from ._regions.regions import Region, Schedule, schedule
from ._regions.tile import lookup
from ._rules import Equation
from ._run.loop import Loop, at, window


def stream(fun: Callable[..., Any], *, in_axes: Any, tiles: Tiles) -> Callable[..., Any]:
    """Evaluate `fun` tile by tile, on arrays that never exist as a whole in memory.

    The result is called as `fun` is, and has its value. A tiled argument is anything with `.shape`,
    `.dtype` and NumPy slicing, such as a `numpy.memmap` or the reader of an image file; only
    windows of it are read, each as large as a tile and its halo. A tiled output is written tile by
    tile to anything that takes `sink[slices] = array`. For a function that works pixel by pixel
    this is, in plain Python::

        def run(params, source, out):
            for tile in grid:
                out[tile] = fun(params, source[tile])

    Reductions over a tiled axis (the statistics of a group norm, a global pool) are accumulated
    over all tiles first: one more pass over the source for each that waits for another.

    Args:
      fun: any JAX function of pytrees; it is traced, not rewritten.
      in_axes: which array axes are tiled, as in `jaxtile.checkpoint`.
      tiles: tiles per tiled axis, as in `jaxtile.checkpoint`, but never `"whole"` or None.

    Returns:
      A function of the arguments of `fun`, and of two more:

      * `out`: where tiled outputs are written: the pytree that `fun` returns, with None for what is
        to be returned instead; by default nothing is written. Each position is written once.
      * `progress`: called as `progress(done, total)` after every tile.

      It returns the pytree that `fun` returns: sinks as they were given in `out`, other tiled
      outputs as NumPy arrays, untiled ones (class scores, a sum) as JAX arrays. Arguments are
      read on a thread, one window at a time. Further calls with equal shapes compile nothing.

    >>> import jax, jaxtile, numpy as np
    >>> def blur(kernel, image):
    ...     return jax.lax.conv(image.astype("float32") / 255, kernel, (1, 1), "SAME")
    >>> run = jaxtile.stream(blur, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> kernel = np.ones((1, 1, 3, 3), np.float32) / 9
    >>> image = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)  # or a numpy.memmap, ...
    >>> out = np.zeros((1, 1, 16, 16), np.float32)  # or a file
    >>> run(kernel, image, out=out) is out
    True
    >>> bool(np.allclose(out, blur(kernel, image), atol=1e-6))
    True

    There is nothing to differentiate here: use `jaxtile.checkpoint` for that. A value that `fun`
    needs whole, because an equation mixes its positions, is an error.
    """
    check_callable(fun)
    programs: dict[Any, _Program] = {}

    @functools.wraps(fun)
    def run(
        *args: Any,
        out: Any = None,
        progress: Callable[[int, int], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        shapes = [_shape(leaf) for leaf in leaves]
        key = (tree, *map(jax.typeof, shapes))
        if key not in programs:
            shaped = jax.tree.unflatten(tree, shapes)
            programs[key] = _Program(fun, *shaped, in_axes=in_axes, tiles=tiles)
        return programs[key](leaves, out, progress or (lambda done, total: None))

    return run


class _Program:
    """The passes over the sources, and the global equations between them, for given shapes."""

    def __init__(self, fun, args, kwargs, *, in_axes, tiles: Tiles):
        self.traced = traced = trace(fun, args, kwargs, in_axes)
        try:
            self.graph = build(
                traced.jaxpr,
                traced.consts,
                traced.in_axes,
                look_through=any_call,  # nothing here is differentiated
                names=traced.names,
            )
            self.held = _store_nothing(self.graph)
            outputs = {v for v in self.graph.outputs if v.node is not None}
            stored = dict.fromkeys(self.held | outputs, "device")
            plan = schedule(self.graph, stored, tiles, traced.rank)
        except TilingError as error:
            error.add_note("`jaxtile.stream` stores nothing: it has no `policy`")
            raise
        if not all(region.tiled for region in plan.regions):
            raise TilingError(
                f"`tiles` (={tiles!r}) must be numbers of tiles: `jaxtile.stream` holds no whole "
                "arrays"
            )
        self.steps: list[_Pass | _Globals] = []
        for tiled, steps in itertools.groupby(plan.steps, lambda s: isinstance(s, Region)):
            if tiled:
                self.steps += [_Pass(region) for region in steps]
            else:
                self.steps.append(_Globals(list(steps), plan))
        self.tiles = sum(region.tiles for region in plan.regions)

    def __call__(self, leaves: Sequence[Any], out: Any, progress: Callable[[int, int], Any]) -> Any:
        sinks = self._sinks(out)
        sources: dict[Value, _Source] = {}
        env: dict[Value, Any] = {}
        for value, name, leaf in zip(self.graph.inputs, self.traced.names, leaves, strict=True):
            if not value.tiled:
                env[value] = jnp.asarray(leaf)
                continue
            sources[value] = _Source(name, leaf, value.aval)
            if value in self.held:
                env[value] = jnp.asarray(sources[value].read(_all_of(value)))
        done = itertools.count(1)
        for step in self.steps:
            if isinstance(step, _Pass):
                tick = lambda: progress(next(done), self.tiles)  # noqa: E731
                env.update(step.run(env, sources, sinks, tick))
            else:
                env.update(step.run(env))
        results = []
        for value in self.graph.outputs:
            if value not in sinks:
                results.append(jnp.asarray(lookup(env, value.array)))
                continue
            sink = sinks[value].pop(0)
            if value.array in env:  # a reduction over some of the tiled axes
                sink.write(_all_of(value), np.asarray(env[value.array]))
            results.append(sink.array)
        return jax.tree.unflatten(self.traced.out_tree, results)

    def _sinks(self, out: Any) -> dict[Value, list[_Sink]]:
        """Where each tiled output goes: one place for every time that it is returned."""
        tree, outputs = self.traced.out_tree, self.graph.outputs
        try:
            given = [None] * len(outputs) if out is None else tree.flatten_up_to(out)
        except ValueError as error:
            raise TilingError(
                f"`out` must be a pytree like the function's result, {tree}, with None for what is "
                f"not written: {error}"
            ) from None
        sinks: dict[Value, list[_Sink]] = {}
        paths = jax.tree.leaves_with_path(jax.tree.unflatten(tree, outputs))
        for (path, value), array in zip(paths, given, strict=True):
            name = "out" + jax.tree_util.keystr(path)
            if value.tiled:
                sinks.setdefault(value, []).append(_Sink(name, array, value))
            elif array is not None:
                raise TilingError(
                    f"`{name}` must be None: that output, {describe(value.aval, value.axes)}, "
                    "carries no tiled axis and is returned"
                )
        return sinks


def _store_nothing(graph: Graph) -> set[Value]:
    """Make every tiled output a copy that nothing reads, so that no value inside must be held.

    Held on the device are values of one position only, which equations after the tiles read.
    """

    def reduced(value: Value) -> bool:
        return value.node is not None and value.node.reduction is not None

    held: set[Value] = set()
    for node in graph.nodes:
        for value in node.inputs:
            array = value.array
            by_window = node.tiled and (value.base is None or array.node is None)
            if array.tiled and not reduced(array) and not by_window:
                _check_size(array, node)
                held.add(array)
    copies: dict[Value, Value] = {}
    for value in graph.outputs:
        if value.array.tiled and not reduced(value.array) and value not in copies:
            copies[value] = _copy(graph, value.array)
    for value in held:
        value.name = None  # nobody chooses a grid for it
    graph.outputs[:] = [copies.get(value, value) for value in graph.outputs]
    return held


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
        source = "an argument" if value.node is None else value.node.equation.primitive.name
        raise TilingError(
            f"{value.name or source!r}, {describe(value.aval, value.axes)} (* marks a tiled "
            f"dimension), would have to be stored: `{reader.equation.primitive.name}` at "
            f"{user_line(*reader.equation.source_infos)} does not read it by windows that follow "
            "its tiles"
        )


class _Globals:
    """Global equations that run between two passes, as one program."""

    def __init__(self, nodes: list[Node], plan: Schedule):
        made = dict.fromkeys(v for node in nodes for v in node.outputs)
        read = [v.array for node in nodes for v in node.inputs]
        elsewhere = {v.array for v in plan.graph.outputs}
        for step in plan.steps:
            if isinstance(step, Region):
                elsewhere.update(v.array for v in (*step.inputs, *step.globals))
            elif step not in nodes:
                elsewhere.update(v.array for v in step.inputs)
        self.nodes = nodes
        self.inputs = [v for v in dict.fromkeys(read) if v not in made and v.known is None]
        self.outputs = [v for v in made if v in elsewhere]
        self.evaluate = jax.jit(self._evaluate)

    def run(self, env: dict[Value, Any]) -> dict[Value, jax.Array]:
        results = self.evaluate([lookup(env, v) for v in self.inputs])
        return dict(zip(self.outputs, results, strict=True))

    def _evaluate(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))
        for node in self.nodes:
            operands = [lookup(env, v.array) for v in node.inputs]
            env.update(zip(node.outputs, node.equation.bind(*operands), strict=True))
        return [env[v] for v in self.outputs]


class _Pass:
    """A region whose loop runs on the host: all its tiles, one after the other."""

    def __init__(self, region: Region):
        self.region, self.loop = region, Loop(region)
        self.step = jax.jit(self._step)

    def run(
        self,
        env: dict[Value, Any],
        sources: dict[Value, _Source],
        sinks: dict[Value, list[_Sink]],
        tick: Callable[[], Any],
    ) -> dict[Value, jax.Array]:
        """What the pass leaves on the device: results of reductions, and values of one position."""
        targets, rows = self.region.targets, self.loop.rows
        read = [sources.get(v.array) for v in self.region.inputs]
        arrays = [None if v.array in sources else lookup(env, v.array) for v in self.region.inputs]
        globals_ = [lookup(env, v.array) for v in self.region.globals]
        states = [t.reduction.reduction.start() if t.reduction else None for t in targets]
        shares, before = states, None
        with ThreadPoolExecutor(1, "jaxtile-read") as reader:
            ahead = reader.submit(self._read, read, rows[0])
            for i, row in enumerate(rows):
                windows = ahead.result()
                if i + 1 < len(rows):
                    ahead = reader.submit(self._read, read, rows[i + 1])
                states = [s if t.reduction else None for t, s in zip(targets, shares, strict=True)]
                shares = self.step(states, windows, arrays, globals_, row)
                if before is not None:
                    self._write(*before, sinks)
                    tick()
                before = row, shares
        self._write(row, shares, sinks)
        tick()
        return {
            t.result: t.reduction.reduction.finish(share) if t.reduction else share[0]
            for t, share in zip(targets, shares, strict=True)
            if t.reduction or t.result not in sinks
        }

    def _step(self, states, windows, arrays, globals_, row) -> list[tuple[jax.Array, ...]]:
        """Per target its tile, or the state of a reduction with one more tile.

        Each input of the region is one of the `windows`, or a whole array on the device.
        """
        row = list(row)
        inputs = [
            window(whole, slots, row) if tile is None else tile
            for tile, whole, slots in zip(windows, arrays, self.loop.input_slots, strict=True)
        ]
        return [
            share if state is None else self.loop.merged(k, state, share, row)
            for k, (state, share) in enumerate(
                zip(states, self.loop.shares(inputs, globals_, row), strict=True)
            )
        ]

    def _read(self, sources: Sequence[_Source | None], row: np.ndarray) -> list[np.ndarray | None]:
        return [
            None if source is None else source.read(_slices(slots, row))
            for source, slots in zip(sources, self.loop.input_slots, strict=True)
        ]

    def _write(self, row: np.ndarray, shares, sinks: dict[Value, list[_Sink]]) -> None:
        """Wait for a tile, and write what of it belongs to no other tile."""
        jax.block_until_ready(shares)
        for k, target in enumerate(self.region.targets):
            if target.result not in sinks or target.reduction is not None:
                continue
            tile = np.asarray(shares[k][0])
            place = list(_slices(self.loop.result_slots[k], row))
            for d, slot in self.loop.ownership[target.value]:
                place[d] = slice(place[d].start, place[d].start + int(at(slot, row)))
            tile = tile[tuple(slice(p.stop - p.start) for p in place)]
            for sink in sinks[target.result]:
                sink.write(tuple(place), tile)


class _Source:
    """A tiled argument that is read by window."""

    def __init__(self, name: str, array: Any, aval: Any):
        self.name, self.aval = name, aval
        # A window of an array on the device would be cut by a program of its own.
        self.array = np.asarray(array) if isinstance(array, jax.Array) else array

    def read(self, place: tuple[slice, ...]) -> np.ndarray:
        try:
            found = np.array(self.array[place], self.aval.dtype)
        except Exception as error:
            error.add_note(f"while `jaxtile.stream` read {_position(self.name, place)}")
            raise
        size = tuple(p.stop - p.start for p in place)
        if found.shape != size:
            raise TilingError(
                f"{_position(self.name, place)} has shape {found.shape}, not {size}: is the "
                f"argument's `shape` {self.aval.shape} right?"
            )
        return found


class _Sink:
    """What a tiled output is written to."""

    def __init__(self, name: str, array: Any, value: Value):
        shape, dtype = tuple(value.aval.shape), value.aval.dtype
        self.name, self.array = name, np.empty(shape, dtype) if array is None else array
        if array is None:
            return
        if not hasattr(array, "__setitem__") or isinstance(array, jax.Array):
            raise TilingError(f"`{name}` (a {type(array).__name__}) cannot be assigned to")
        if tuple(getattr(array, "shape", shape)) != shape:
            raise TilingError(f"`{name}` has shape {tuple(array.shape)}, the output {shape}")
        if _dtype(getattr(array, "dtype", dtype)) != dtype:
            raise TilingError(
                f"`{name}` has dtype {array.dtype}, the output {dtype}: convert in the function"
            )

    def write(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        try:
            self.array[place] = tile
        except Exception as error:
            error.add_note(f"while `jaxtile.stream` wrote {_position(self.name, place)}")
            raise


def _slices(slots, row: np.ndarray) -> tuple[slice, ...]:
    starts = [int(at(slot, row)) for slot, _ in slots]
    return tuple(slice(n, n + size) for n, (_, size) in zip(starts, slots, strict=True))


def _all_of(value: Value) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in value.aval.shape)


def _position(name: str, place: tuple[slice, ...]) -> str:
    return f"{name}[{', '.join(f'{p.start}:{p.stop}' for p in place)}]"


def _shape(leaf: Any) -> Any:
    """An argument as the function is traced with."""
    if isinstance(leaf, jax.core.Tracer):
        raise TilingError(
            "`jaxtile.stream` reads its arguments when it is called: it cannot be called inside "
            "`jit`, `grad`, `vmap` or another transformation"
        )
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
    if isinstance(leaf, Number) and not hasattr(leaf, "dtype"):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TilingError(
            f"an argument is a {type(leaf).__name__}, which has no `shape` and `dtype`"
        )
    dtype = jax.dtypes.canonicalize_dtype(_dtype(leaf.dtype))
    return jax.ShapeDtypeStruct(tuple(map(int, leaf.shape)), dtype)


def _dtype(dtype: Any) -> np.dtype:
    """In the machine's byte order; libraries have types of their own."""
    return np.dtype(getattr(dtype, "numpy_dtype", dtype)).newbyteorder("=")
