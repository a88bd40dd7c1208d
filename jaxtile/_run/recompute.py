"""Regions that keep nothing of their inside: their residuals are their inputs.

`run` has a derivative of its own: here the forward and the backward pass of a region are joined.
`Loop` (in `loop`) computes a region tile by tile, `Whole` all at once; both do it again in the
backward pass, and in forward mode. What cannot be computed again bit for bit, the state of a
reduction, is kept as well. An input that the policy offloads waits for the backward pass in host
memory, and a loop reads it there by window. One that is passing does not wait: the backward pass
computes it again (`Again`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import TilingError
from .._graph.values import Node, Value
from .._regions.region import Group, Region
from .._regions.tile import known, lookup
from .._rules.derivative import apply, apply_backwards, only_backwards
from .._rules.manual import as_varying_as

T = TypeVar("T")
Array = jax.Array
Arrays = Sequence[Array]
Cotangents = Sequence[Array | None]
Wanted = tuple[Sequence[bool], Sequence[bool]]
"""Of which inputs and of which globals cotangents are wanted."""
Tangents = tuple[Cotangents, Cotangents]
"""Of inputs and of globals; None where there is none."""
Pullback = Callable[[Any], tuple[list[Array], list[Array]]]

RECOMPUTED = "rematted_computation"
"""What `jax.checkpoint` calls its recomputation in the names of operations, and so do we."""


class Recomputed(Protocol):
    """How a region is computed, and its derivative."""

    @property
    def region(self) -> Region | Group:
        """What the backward pass runs."""
        ...

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        """The results, and what the backward pass cannot compute again.

        `wanted` is what it will want the cotangents of; None: there is none.
        """
        ...

    def backward(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        begun: Cotangents,
        wanted: Wanted,
    ) -> tuple[Cotangents, Cotangents]:
        """Cotangents of the wanted inputs and globals, None for the others.

        Inputs that are passing are None: they are not there. `begun`: the sums of the inputs'
        cotangents that other readers have begun, to be added to; None: there is none yet.
        """
        ...

    def tangents(
        self, inputs: Arrays, globals_: Arrays, kept: Any, tangents: Tangents
    ) -> Cotangents:
        """Tangents of the results, None for integers."""
        ...


def run(
    body: Recomputed,
    inputs: Arrays,
    globals_: Arrays,
    hosted: Sequence[Array | None],
) -> tuple[list[Array], list[Array]]:
    """The region's results, and its inputs as the next reader should read them.

    These are the same arrays. But if the next reader takes them from here, then the sum of its
    cotangents comes back to here, and is added to: otherwise each reader would have an array of its
    own for that. `hosted`: per input, its copy in host memory, if it has one. An input that lies
    there itself has no cotangents, and None in its place.
    """
    given = list(inputs), list(globals_), list(hosted)
    forgets = jax.__version_info__ < (0, 12) and body.region.has_rules
    given = as_varying_as(given, jax.tree.leaves(given))
    found: tuple[list[Array], list[Array]]
    if forgets:
        found = apply_backwards(_Run(body), *only_backwards(given))
    else:
        found = apply(_Run(body), *given)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A region's results, and its inputs, as a function of inputs, globals and hosted inputs."""

    body: Recomputed

    def value(self, inputs: Arrays, globals_: Arrays, hosted: Any) -> tuple[Arrays, Arrays]:
        return self.body.forward(inputs, globals_)[0], _returned(inputs)

    def forward(
        self, wanted: Any, inputs: Arrays, globals_: Arrays, hosted: Sequence[Array | None]
    ) -> tuple[tuple[Arrays, Arrays], Any]:
        if any(w and on_host(x) for w, x in zip(wanted[0], inputs, strict=True)):
            raise TilingError(
                "a tiled argument in host memory has no gradient: move it to the device first, "
                "with `jax.device_put(x, jax.memory.Space.Device)`"
            )
        results, kept = self.body.forward(inputs, globals_, wanted[:2])
        on_device = [
            None if passing or h is not None else x
            for x, h, passing in zip(inputs, hosted, self.body.region.passing, strict=True)
        ]
        residuals = on_device, hosted, globals_, kept, _Static(wanted[:2])
        return (results, _returned(inputs)), residuals

    def tangents(self, residuals: Any, tangents: Any) -> tuple[Cotangents, Cotangents]:
        on_device, hosted, globals_, kept, _ = residuals
        inputs = [x if h is None else to_device(h) for x, h in zip(on_device, hosted, strict=True)]
        return self.body.tangents(inputs, globals_, kept, tangents[:2]), list(tangents[0])

    def backward(
        self, residuals: Any, given: tuple[Cotangents, Cotangents]
    ) -> tuple[Cotangents, Cotangents, list[None]]:
        on_device, hosted, globals_, kept, wanted = residuals
        cotangents, begun = given
        begun = [c if w else None for c, w in zip(begun, wanted.value[0], strict=True)]
        there = (lambda h: h) if self._loops() else (lambda h: fetch(h, cotangents))
        inputs = [x if h is None else there(h) for x, h in zip(on_device, hosted, strict=True)]
        of_inputs, of_globals = self.body.backward(
            inputs, globals_, kept, cotangents, begun, wanted.value
        )
        return of_inputs, of_globals, [None for _ in hosted]

    def _loops(self) -> bool:
        """Does the backward pass read windows of its inputs, wherever these are?"""
        region = self.body.region
        return isinstance(region, Region) and region.tiles > 1 and region.devices is None


def _returned(inputs: Arrays) -> list[Any]:
    return [None if on_host(x) else x for x in inputs]


class Whole:
    """A region whose equations run untiled, and once more in the backward pass.

    What its reductions give, the statistics of norms for example, is small. So it is kept, and the
    backward pass need not read all positions for it again.
    """

    def __init__(self, region: Region):
        self.region = region
        reductions = [n for n in region.nodes if n.reduction is not None]
        self.statistics = [v for n in reductions for v in n.outputs if not v.tiled]

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        if wanted is not None and self.region.changes_value:
            return self._vjp(inputs, globals_, wanted, {})[0], None
        env = environment(self.region, inputs, globals_)
        return evaluate(self.region, env), [env[v] for v in self.statistics]

    def backward(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        begun: Cotangents,
        wanted: Wanted,
    ) -> tuple[Cotangents, Cotangents]:
        given = [c for c in cotangents if c is not None]
        inputs, globals_ = after((inputs, globals_), given)
        (want_inputs, want_globals) = wanted
        statistics = {} if kept is None else dict(zip(self.statistics, kept, strict=True))
        with jax.named_scope(RECOMPUTED):
            inputs = with_passing(self.region, inputs, globals_)
            results, pull = self._vjp(inputs, globals_, wanted, statistics)
        of_inputs, of_globals = pull(
            [
                zero_cotangent(x) if c is None or c.dtype == jax.dtypes.float0 else c
                for x, c in zip(results, cotangents, strict=True)
            ]
        )
        return (
            added(like(self.region.inputs, want_inputs, of_inputs), begun),
            like(self.region.globals, want_globals, of_globals),
        )

    def _vjp(
        self,
        inputs: Arrays,
        globals_: Arrays,
        wanted: Wanted,
        statistics: Mapping[Value, Array],
    ) -> tuple[list[Array], Pullback]:
        function, primals = partly(self._run(statistics), (inputs, globals_), wanted)
        return jax.vjp(function, *primals)

    def tangents(
        self, inputs: Arrays, globals_: Arrays, kept: Any, tangents: Tangents
    ) -> Cotangents:
        inputs = with_passing(self.region, inputs, globals_)
        return pushed(self._run({}), (inputs, globals_), tangents)

    def _run(self, statistics: Mapping[Value, Array]) -> Callable[[Arrays, Arrays], list[Array]]:
        def run(inputs: Arrays, globals_: Arrays) -> list[Array]:
            return evaluate(self.region, environment(self.region, inputs, globals_), statistics)

        return run


class Again:
    """A region that the backward pass computes from other inputs, because some are passing, and
    some of its results are known.
    """

    def __init__(self, first: Recomputed, again: Recomputed):
        self.first, self.again = first, again
        results = first.region.results
        inputs = again.region.inputs
        self.known = [results.index(v) for v in inputs if v in results]
        given = inputs[: len(inputs) - len(self.known)]
        self.region = dataclasses.replace(again.region, inputs=given)

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        n, m = self._own()
        wanted = None if wanted is None else (wanted[0][:n], wanted[1][:m])
        results, kept = self.first.forward(inputs[:n], globals_[:m], wanted)
        return results, (kept, [results[i] for i in self.known])

    def backward(
        self,
        inputs: Arrays,
        globals_: Arrays,
        kept: Any,
        cotangents: Cotangents,
        begun: Cotangents,
        wanted: Wanted,
    ) -> tuple[Cotangents, Cotangents]:
        (n, m), (kept, known) = self._own(), kept
        wanted = (
            [*wanted[0][:n], *(False for _ in [*inputs[n:], *known])],
            [*wanted[1][:m], *(False for _ in globals_[m:])],
        )
        found, totals = self.again.backward(
            [*inputs, *known],
            globals_,
            kept,
            cotangents,
            [*begun[:n], *(None for _ in [*inputs[n:], *known])],
            wanted,
        )
        return [*found[:n], *begun[n:]], totals

    def tangents(
        self, inputs: Arrays, globals_: Arrays, kept: Any, tangents: Tangents
    ) -> Cotangents:
        (n, m), (kept, known) = self._own(), kept
        nothing = [None for _ in [*inputs[n:], *known]]
        some = [*tangents[0][:n], *nothing], [*tangents[1][:m], *(None for _ in globals_[m:])]
        return self.again.tangents([*inputs, *known], globals_, kept, some)

    def _own(self) -> tuple[int, int]:
        """How many of the inputs and globals are the region's own: the first ones."""
        return len(self.first.region.inputs), len(self.first.region.globals)


def environment(
    region: Region | Group, inputs: Sequence[Any], globals_: Arrays
) -> dict[Value, Any]:
    """The values that a region knows at its beginning, and so not those that are passing."""
    env = {v: x for v, x in zip(region.inputs, inputs, strict=True) if x is not None}
    env.update(zip(region.globals, globals_, strict=True))
    return env


def with_passing(region: Region | Group, inputs: Arrays, globals_: Arrays) -> Arrays:
    """The inputs, and those that are passing computed again, whole."""
    if not region.before:
        return inputs
    env = environment(region, inputs, globals_)
    _apply(region.before, env)
    computed = [env[v] for v, passing in zip(region.inputs, region.passing, strict=True) if passing]
    # Otherwise the compiler may hold what they are computed from, to compute them once per reader.
    env.update(zip(select(region.inputs, region.passing), _settled(computed), strict=True))
    return [env[v] for v in region.inputs]


def _settled(arrays: Arrays) -> Arrays:
    """The same arrays; the compiler cannot make what computes them part of what reads them."""
    return arrays if barriers_are_removed() else lax.optimization_barrier(list(arrays))


def evaluate(
    region: Region, env: dict[Value, Any], statistics: Mapping[Value, Array] = MappingProxyType({})
) -> list[Array]:
    """The equations of a region, whole; `env` is extended by all that they compute.

    `statistics`: results of reductions that are known from the first time.
    """
    read = _apply(region.nodes, env, statistics)
    return [
        read(t.result)
        if t.reduction is None or t.result in env
        else t.reduction.equation.bind(*map(read, t.operands))[0]
        for t in region.targets
    ]


def _apply(
    nodes: Iterable[Node],
    env: dict[Value, Any],
    statistics: Mapping[Value, Array] = MappingProxyType({}),
) -> Callable[[Value], Array]:
    """Extend `env` by what these equations compute, whole; and how to read in it."""

    def read(value: Value) -> Array:
        return lookup(env, value if value in env else value.array)

    for node in nodes:
        if any(v not in env for v in node.outputs):
            results = node.equation.bind(*map(read, node.inputs))
            for value, x in zip(node.outputs, results, strict=True):
                env[value] = known(x, statistics[value]) if value in statistics else x
    return read


def after(tree: Any, arrays: Sequence[Array]) -> Any:
    """The same values, but only once these arrays exist; the compiler cannot tell that they are the
    same, so it computes again what was computed from them.
    """
    if barriers_are_removed():
        zero = _zero_of(arrays, jax.tree.leaves(tree))
        return tree if zero is None else jax.tree.map(lambda x: _minus(x, zero), tree)
    tree, _ = lax.optimization_barrier((tree, list(arrays)))
    return tree


def barriers_are_removed() -> bool:
    """Before jax 0.12, XLA drops optimization barriers on a CPU."""
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu"


def _minus(x: Array, zero: Array) -> Array:
    there = jnp.issubdtype(x.dtype, jnp.floating) and not on_host(x)
    return x - zero.astype(x.dtype) if there else x


def _zero_of(*groups: Sequence[Array]) -> Array | None:
    """A zero that exists only once the first floating-point array of each group does.

    It is a sum of `x - x` for an element `x` of each, which the compiler cannot know to be 0: it is
    NaN for an infinite `x`, and then not used. The array is settled: else XLA computes the element
    once more, and for that holds whatever the array was computed from.
    """
    zeros = []
    for arrays in groups:
        for x in arrays:
            if jnp.issubdtype(x.dtype, jnp.floating) and x.size and not on_host(x):
                (x,) = _settled([x])
                element = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
                element = element.astype(jnp.float32)
                zeros.append(jnp.where(jnp.isfinite(element), element - element, 0))
                break
    return sum(zeros[1:], zeros[0]) if zeros else None


def zeros_after(*groups: Sequence[Array]) -> Callable[..., Array]:
    """`jnp.zeros`, but made only once the first array of each group exists.

    Zeros depend on nothing, so XLA may allocate the accumulators of all loops before the first one
    runs; and it makes all zeros of a shape one array, which a loop that adds to them must copy. A
    cotangent may be a constant, and its zero too, so a second group must be something that is not.
    """
    zero = _zero_of(*groups)
    if zero is None:
        return jnp.zeros
    return lambda shape, dtype: lax.broadcast(zero.astype(dtype), shape)


def to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


def on_host(x: Any) -> bool:
    """Does an array lie in host memory? JAX's types say so."""
    return jax.typeof(x).memory_space is jax.memory.Space.Host


def fetch(x: Array, cotangents: Sequence[Array | None]) -> Array:
    """A copy in device memory, made only once the cotangents exist."""
    given = [c for c in cotangents if c is not None]
    if barriers_are_removed():  # a CPU has one memory: there is nothing to wait for
        return after(to_device(x), given)
    return to_device(after(x, given))


@jax.tree_util.register_static
class _Static:
    """A residual that is known while tracing."""

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> str:
        return str(self.value)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key() == other._key()


def select(items: Iterable[T], wanted: Sequence[bool]) -> list[T]:
    return [x for x, w in zip(items, wanted, strict=True) if w]


def like(
    values: Sequence[Value], wanted: Sequence[bool], cotangents: Iterable[Array]
) -> list[Array | None]:
    """Cotangents in the types of the values, None where none is wanted."""
    found = iter(cotangents)
    return [
        next(found).astype(v.aval.dtype) if w else None for v, w in zip(values, wanted, strict=True)
    ]


def added(cotangents: Cotangents, begun: Cotangents) -> list[Array | None]:
    """Cotangents, and what was begun of their sums."""
    return [
        b if a is None else a if b is None else a + b
        for a, b in zip(cotangents, begun, strict=True)
    ]


def fill_in(items: Arrays, wanted: Sequence[bool], replacements: Iterable[Array]) -> list[Array]:
    found = iter(replacements)
    return [next(found) if w else x for x, w in zip(items, wanted, strict=True)]


def partly(
    function: Callable[..., Any], arguments: Sequence[Arrays], wanted: Sequence[Sequence[bool]]
) -> tuple[Callable[..., Any], list[list[Array]]]:
    """A function of lists of arrays as a function of the wanted ones, and these."""

    def of_some(*some: Arrays) -> Any:
        return function(*map(fill_in, arguments, wanted, some))

    return of_some, list(map(select, arguments, wanted))


def pushed(function: Callable[..., Any], arguments: Sequence[Arrays], tangents: Tangents) -> Any:
    """The tangents of what a function of lists of arrays returns, a pytree; None for integers."""
    wanted = [[t is not None for t in each] for each in tangents]
    of_some, primals = partly(function, arguments, wanted)
    found = jax.jvp(of_some, tuple(primals), tuple(map(select, tangents, wanted)))[1]
    return jax.tree.map(lambda t: None if t.dtype == jax.dtypes.float0 else t, found)


def zero_cotangent(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
