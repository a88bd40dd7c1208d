"""Evaluate a function from disk to disk: `jaxtile.stream`.

An image may be larger than the memory of the machine. To evaluate a network on it, tiles must be
read from a file and results written to a file, one after the other.

The schedule is that of `checkpoint` with nothing stored. Then every region reads only arguments,
global values and results of reductions, and its loop can run on the host: read the windows of a
tile from the arguments, compute on the device, write the tile of the result. All tiles of a region
share one compiled program. While the device computes a tile, a thread reads the next one, and the
one before is written.

Limits: for every reduction that waits for another (each group norm of a network, for instance)
there is one more pass over the source, which computes all that is before it again; neighbouring
tiles read and compute their common halo twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import copy_p

from .._errors import TilingError, check_callable, describe, user_line
from .._graph.build import build
from .._graph.inline import any_call
from .._graph.trace import Traced, only_arrays, trace
from .._graph.values import Graph, Node, Storage, Value
from .._regions.grid import Tiles
from .._regions.region import Region
from .._regions.regions import schedule_of
from .._regions.tile import lookup
from .._rules import Equation
from .ends import Sink, Source, all_of, dtype_of
from .passes import Globals, Pass


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
        args, kwargs = only_arrays(fun, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        shapes = [_shape(leaf) for leaf in leaves]
        key = (tree, *map(jax.typeof, shapes))
        if key not in programs:
            args, kwargs = jax.tree.unflatten(tree, shapes)
            programs[key] = _Program(trace(fun, args, kwargs, in_axes), tiles)
        return programs[key](leaves, out, progress or (lambda done, total: None))

    return run


class _Program:
    """The passes over the sources, and the global equations between them, for given shapes."""

    def __init__(self, traced: Traced, tiles: Tiles):
        self.traced = traced
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
            stored: Storage = dict.fromkeys(self.held | outputs, "device")
            plan = schedule_of(self.graph, stored, tiles, traced.rank)
        except TilingError as error:
            error.add_note(
                "`jaxtile.stream` stores nothing: it has no `policy`. What needs whole arrays can "
                "be done to its result."
            )
            raise
        if not all(region.tiled for region in plan.regions):
            raise TilingError(
                f"`tiles` (={tiles!r}) must be numbers of tiles: `jaxtile.stream` holds no whole "
                "arrays"
            )
        self.steps: list[Pass | Globals] = []
        for _, steps in itertools.groupby(plan.flat, lambda s: isinstance(s, Region)):
            found = list(steps)
            nodes = [step for step in found if isinstance(step, Node)]
            self.steps += [Pass(step) for step in found if isinstance(step, Region)]
            self.steps += [Globals(nodes, plan)] if nodes else []
        self.tiles = sum(region.tiles for region in plan.regions)

    def __call__(self, leaves: Sequence[Any], out: Any, progress: Callable[[int, int], Any]) -> Any:
        sinks = self._sinks(out)
        sources: dict[Value, Source] = {}
        env: dict[Value, Any] = {}
        for value, name, leaf in zip(self.graph.inputs, self.traced.names, leaves, strict=True):
            if not value.tiled:
                env[value] = jnp.asarray(leaf)
                continue
            sources[value] = Source(name, leaf, value.aval)
            if value in self.held:
                env[value] = jnp.asarray(sources[value].read(all_of(value)))
        done = itertools.count(1)
        for step in self.steps:
            if isinstance(step, Pass):
                tick = lambda: progress(next(done), self.tiles)  # noqa: E731
                env.update(step.run(env, sources, sinks, tick))
            else:
                env.update(step.run(env))
        results: list[Any] = []
        for value in self.graph.outputs:
            if value not in sinks:
                results.append(jnp.asarray(lookup(env, value.array)))
                continue
            sink = sinks[value].pop(0)
            if value.array in env:  # a reduction over some of the tiled axes
                sink.write(all_of(value), np.asarray(env[value.array]))
            results.append(sink.array)
        return jax.tree.unflatten(self.traced.out_tree, results)

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


def _shape(leaf: Any) -> Any:
    """What the function is traced with instead of an argument."""
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
    dtype = jax.dtypes.canonicalize_dtype(dtype_of(leaf.dtype))
    return jax.ShapeDtypeStruct(tuple(map(int, leaf.shape)), dtype)
