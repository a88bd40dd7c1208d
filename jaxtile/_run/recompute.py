"""Regions that keep nothing of their inside: their residuals are their inputs.

`run` has a derivative of its own: here the forward and the backward pass of a region are joined.
`Loop` (in `loop`) computes a region tile by tile, `Whole` (in `whole`) all at once; both do it once
more in the backward pass, and in forward mode. What cannot be computed again bit for bit, the state
of a reduction, is kept as well. An input that the policy offloads waits for the backward pass in
host memory, and loops read it there by window. If nothing else reads it, it is there alone, and so
are its cotangents. One that is passing does not wait: the backward pass computes it again (`Again`,
in `again`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax

from .._errors import TilingError
from .._graph.static import Static
from .._regions.region import Group, Region
from .._rules.derivative import apply, apply_backwards, only_backwards
from .._rules.manual import as_varying_as
from .arrays import Array, Arrays, Cotangents, Tangents, Wanted
from .ordering import on_host, to_device, to_device_after

RECOMPUTED = "rematted_computation"
"""What `jax.checkpoint` calls its recomputation in the names of operations, and so do we."""


class Saved(NamedTuple):
    """What the derivative of a region is computed from."""

    inputs: Sequence[Any]
    """None in the place of those that are passing: they are not there."""
    globals: Arrays
    kept: Any
    """What cannot be computed again."""


class Given(NamedTuple):
    """What a backward pass begins with."""

    cotangents: Cotangents
    """Of the results."""
    wanted: Wanted
    begun: Cotangents = ()
    """Sums of the inputs' cotangents that other readers have begun, to be added to; None: there is
    none yet."""
    hosted: Sequence[bool] = ()
    """Which inputs lie in host memory, where their cotangents are wanted too; empty: none. Of
    others there may be a copy."""


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

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        """Cotangents of the wanted inputs and globals, None for the others."""
        ...

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        """Tangents of the results, None for integers."""
        ...


def run(
    body: Recomputed,
    inputs: Arrays,
    globals_: Arrays,
    hosted: Sequence[Array | None],
    *,
    run_again: bool = False,
) -> tuple[list[Array], list[Array]]:
    """The region's results, and its inputs as the next reader should read them.

    These are the same arrays. But if the next reader takes them from here, then the sum of its
    cotangents comes back to here, and is added to: otherwise each reader would have an array of its
    own for that. `hosted`: per input, its copy in host memory, if it has one; one that lies there
    itself has none. An argument in host memory has no cotangents, and None in its place.

    `run_again`: in the forward pass of a group that will be. Its derivative is not asked for here
    but for a second derivative, and then, before jax 0.12, by forward mode too.
    """
    moving, of_globals = body.region.moving
    given = _still(inputs, moving), _still(globals_, of_globals), _still(hosted, moving)
    given = as_varying_as(given, jax.tree.leaves(given))
    if jax.__version_info__ < (0, 12) and body.region.has_rules:  # JAX would forget these
        if run_again:
            results, read = _Run(body).value(*given)
        else:
            results, read = apply_backwards(_Run(body), *only_backwards(given))
    else:
        results, read = apply(_Run(body), *given)
    return [*results], [y if m else x for x, y, m in zip(inputs, read, moving, strict=True)]


def _still(arrays: Sequence[Any], moving: Sequence[bool]) -> list[Any]:
    """The same arrays. Those that results have no derivatives with respect to have none either:
    with zeros, what computes them would run backwards, and a `while` cannot.
    """
    return [
        x if m or x is None else lax.stop_gradient(x) for x, m in zip(arrays, moving, strict=True)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A region's results, and its inputs, as a function of inputs, globals and hosted inputs."""

    body: Recomputed

    def value(self, inputs: Arrays, globals_: Arrays, hosted: Any) -> tuple[Arrays, Arrays]:
        return self.body.forward(inputs, globals_)[0], self._returned(inputs)

    def forward(
        self, wanted: Any, inputs: Arrays, globals_: Arrays, hosted: Sequence[Array | None]
    ) -> tuple[tuple[Arrays, Arrays], Any]:
        if any(w and x is None for w, x in zip(wanted[0], self._returned(inputs), strict=True)):
            raise TilingError(
                "a tiled argument in host memory has no gradient: move it to the device first, "
                "with `jax.device_put(x, jax.memory.Space.Device)`"
            )
        results, kept = self.body.forward(inputs, globals_, wanted[:2])
        on_device = [
            None if passing or h is not None else x
            for x, h, passing in zip(inputs, hosted, self.body.region.passing, strict=True)
        ]
        residuals = on_device, hosted, globals_, kept, Static(tuple(map(tuple, wanted[:2])))
        return (results, self._returned(inputs)), residuals

    def tangents(self, residuals: Any, tangents: Any) -> tuple[Cotangents, Cotangents]:
        on_device, hosted, globals_, kept, _ = residuals
        inputs = [x if h is None else to_device(h) for x, h in zip(on_device, hosted, strict=True)]
        found = self.body.tangents(Saved(inputs, globals_, kept), tangents[:2])
        return found, list(tangents[0])

    def backward(
        self, residuals: Any, given: tuple[Cotangents, Cotangents]
    ) -> tuple[Cotangents, Cotangents, list[None]]:
        (on_device, hosted, globals_, kept, static), (cotangents, begun) = residuals, given
        wanted: Wanted = static.value
        begun = [c if w else None for c, w in zip(begun, wanted[0], strict=True)]
        there = (lambda h: h) if self._loops() else (lambda h: to_device_after(h, cotangents))
        inputs = [x if h is None else there(h) for x, h in zip(on_device, hosted, strict=True)]
        of_inputs, of_globals = self.body.backward(
            Saved(inputs, globals_, kept),
            Given(cotangents, wanted, begun, [x is not None and on_host(x) for x in on_device]),
        )
        return of_inputs, of_globals, [None for _ in hosted]

    def _returned(self, inputs: Arrays) -> list[Any]:
        """The inputs; None for an argument in host memory."""
        values = self.body.region.inputs
        return [
            None if v.array.node is None and on_host(x) else x
            for v, x in zip(values, inputs, strict=True)
        ]

    def _loops(self) -> bool:
        """Does the backward pass read windows of its inputs, wherever these are?"""
        region = self.body.region
        return isinstance(region, Region) and region.has_loop and region.devices is None
