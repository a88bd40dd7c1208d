"""Evaluate and differentiate a function on arrays that stay on disk: `jaxtile.stream`.

An image may be larger than the memory of the machine. Then tiles must be read from a file, and
results written to a file, one after the other.

The schedule is that of `checkpoint`, and its loops run on the host: read the windows of a tile,
compute on the device, write the tile of the result. What the policy stores, and the cotangents of
that, lie in host memory or in files between the passes, and are read and written by window too. All
tiles of a region share one compiled program, forwards, and another one backwards. While the device
computes a tile, a thread reads the next one, and another writes the one before. Small tiles can be
computed in batches (`batches`).

Limits: without a policy, for every reduction that waits for another (each group norm of a network,
for instance) there is one more pass over the source, which computes all that is before it again;
neighbouring tiles read and compute their common halo twice; results of reductions, and of what they
remember for each tile, stay in memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from numbers import Integral, Number
from typing import Any

import jax
import jax.numpy as jnp

from .._amounts import parse_bytes
from .._errors import TilingError, check_callable, describe
from .._graph.nodes import Policy
from .._graph.static import shown
from .._graph.trace import only_arrays, trace
from .._graph.values import is_float
from .._regions.grid import Tiles
from .._schedule import Options
from ..policy import GraphPolicy
from .ends import dtype_of
from .program import Folder, Program, Progress


def stream(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Tiles,
    policy: Policy | GraphPolicy | str | None = None,
    store: str | os.PathLike[str] | None = None,
    skip: bool = False,
    batch_bytes: int | str = 0,
) -> Streamed:
    """Evaluate and differentiate `fun` tile by tile, on arrays that are never whole in memory.

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
      policy: what is stored between passes, as in `jaxtile.checkpoint`. `None` stores nothing, and
        each pass computes from the source what it needs.
      store: the folder in which that is stored, in files without names: nothing is left of them
        when the call ends, or the process, however it ends. `None`: in the memory of the host.
      skip: may tiles be skipped, as in `jaxtile.checkpoint`? The attribute `skipped` of what is
        returned says how many were, also while it runs.
      batch_bytes: what tiles that are computed at once may need, as `"1GiB"`: so many are that fit
        by an estimate, of those that differ in what they read alone (at a border, tiles do not).
        By default it is one after the other. Without `skip`, and not for gradients.

    Returns:
      A function of the arguments of `fun`, and of two more:

      * `out`: where tiled outputs are written: the pytree that `fun` returns, with None for what is
        to be returned instead; by default nothing is written. Each position is written once. If a
        sink has a method `has`, tiles for which `sink.has(slices)` is true are not computed: so a
        call goes on where one that was stopped had come to.
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

    Of a function that returns a number, `value_and_grad` also computes the gradients of what is not
    streamed, as a rule the parameters:

    >>> loss = lambda kernel, image: (blur(kernel, image) ** 2).mean()
    >>> streamed = jaxtile.stream(loss, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> value, grads = streamed.value_and_grad(kernel, image)
    >>> bool(np.allclose(grads, jax.grad(loss)(kernel, image), rtol=1e-5))
    True

    It is not for use inside `jit` or `grad`: it reads files while it runs. A value that `fun` needs
    whole, because an equation mixes its positions, is an error.
    """
    check_callable(fun)
    if store is not None and not os.path.isdir(store):
        raise TilingError(f"`store` (={os.fspath(store)!r}) must be a folder that exists")
    options = Options.of(in_axes, tiles, policy, skip=skip)
    return Streamed(fun, options, store, parse_bytes(batch_bytes) if batch_bytes else 0)


class Streamed:
    """What `stream` returns: a function whose loops run on the host."""

    def __init__(self, fun: Callable[..., Any], options: Options, store: Folder, batch_bytes: int):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._options, self._store = fun, options, store
        self._batch_bytes = batch_bytes
        self._programs: dict[Any, Program] = {}
        self._last: Program | None = None

    @property
    def skipped(self) -> int:
        """With `skip`, how many tiles of the last call, or of the one under way, were skipped."""
        return 0 if self._last is None else self._last.skipped

    def __call__(
        self, *args: Any, out: Any = None, progress: Progress = None, **kwargs: Any
    ) -> Any:
        args, kwargs = only_arrays(self._fun, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        program = self._program(leaves, tree)
        results = program.run(leaves, out, self._store, progress)
        return jax.tree.unflatten(program.traced.out_tree, results)

    def value_and_grad(
        self,
        *args: Any,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        progress: Progress = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """The function's value, and its gradients with respect to arguments that are not streamed.

        As `jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)`: the value is a number, or,
        with `has_aux`, a number and anything else. Tiled results in the latter are NumPy arrays.
        `progress` is called as `progress(done, total)` after every tile of every pass.
        """
        args, kwargs = only_arrays(self._fun, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        one = isinstance(argnums, Integral)
        numbers: Any = (argnums,) if one else argnums
        right = isinstance(numbers, Sequence) and all(
            isinstance(i, Integral) and -len(args) <= int(i) < len(args) for i in numbers
        )
        if not right:
            raise TilingError(
                f"`argnums` (={argnums!r}) must be numbers of positional arguments, of which there "
                f"are {len(args)} here"
            )
        where = [_flat(args, i % len(args)) for i in numbers]
        wanted = tuple(dict.fromkeys(i for each in where for i in each))
        program = self._program(leaves, tree, wanted, has_aux)
        results, grads = program.value_and_grad(leaves, self._store, progress)
        found = dict(zip(wanted, grads, strict=True))
        trees = [
            shown(jax.tree.unflatten(jax.tree.structure(args[n]), [found[i] for i in each]))
            for n, each in zip(numbers, where, strict=True)
        ]
        value = jax.tree.unflatten(program.traced.out_tree, results)
        return value, trees[0] if one else tuple(trees)

    def _program(
        self, leaves: Sequence[Any], tree: Any, wanted: tuple[int, ...] = (), has_aux: bool = False
    ) -> Program:
        shapes = [_shape(leaf) for leaf in leaves]
        key = (tree, wanted, has_aux, *map(jax.typeof, shapes))
        if key not in self._programs:
            args, kwargs = jax.tree.unflatten(tree, shapes)
            traced = trace(self._fun, args, kwargs, self._options.in_axes)
            program = Program(traced, self._options, wanted, self._batch_bytes)
            if wanted:
                _check_differentiable(program, has_aux)
            self._programs[key] = program
        self._last = self._programs[key]
        return self._last


def _flat(args: Sequence[Any], number: int) -> list[int]:
    """Which of the flat arguments this argument is made of."""
    before = sum(len(jax.tree.leaves(x)) for x in args[:number])
    return list(range(before, before + len(jax.tree.leaves(args[number]))))


def _check_differentiable(program: Program, has_aux: bool) -> None:
    for i in program.wanted:
        value, name = program.graph.inputs[i], program.traced.names[i]
        if value.tiled:
            raise TilingError(
                f"`{name}`, {describe(value.aval, value.axes)}, is streamed, and has no gradient "
                "here: `argnums` must be arguments that `in_axes` does not tile"
            )
        if not is_float(value):
            raise TilingError(
                f"`{name}`, {describe(value.aval, value.axes)}, has no gradient: `argnums` must be "
                "arguments of floating-point numbers; give this one as another argument"
            )
    tree, outputs = program.traced.out_tree, program.graph.outputs
    parts = tree.children() if has_aux else [tree]
    if has_aux and (len(parts) != 2 or tree.node_data()[0] is not tuple):
        raise TilingError(f"with `has_aux` the function must return a pair, and not {tree}")
    number = parts[0].num_leaves == 1 and outputs[0].aval.shape == ()
    if not number or not jnp.issubdtype(outputs[0].aval.dtype, jnp.floating):
        avals = [describe(v.aval, v.axes) for v in outputs[: parts[0].num_leaves]]
        raise TilingError(
            f"only a function that returns one real number has a gradient; this one returns "
            f"{', '.join(avals) or 'nothing'}" + ("" if has_aux else "; see also `has_aux`")
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
