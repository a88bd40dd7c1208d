"""A region that leads to the loss: one loop for both passes.

The loss is a sum over tiles, and whatever its cotangent will be, that is one number: a factor of
all gradients. So the loop of the forward pass differentiates each tile of the sum, with the
cotangent 1, while the tile is there, and the backward pass multiplies. Nothing of the region is
computed twice; a function that is nothing but such a region costs no more than without tiles.

If other results of the region turn out to have cotangents (that of a map which is returned beside
the loss, say), the backward pass runs its own loop, and what was found is not used. So it does if
the cotangents of an image of float16 are wanted, which must have the factor (`_graph/loss.py`).

Known inefficiency: in forward mode the gradients are traced, though nothing needs them; XLA removes
them from the loop.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._graph.loss import has_small_range
from .._graph.values import Value, moving
from .._rules.manual import as_varying_as
from .arrays import Array, Arrays, Cotangents, Tangents, Wanted, added, like, select
from .loop import Loop
from .recompute import Given, Saved


class AtOnce:
    """A loop over tiles, of which one target, a sum, is the loss."""

    def __init__(self, loop: Loop):
        self.loop, self.region = loop, loop.region
        self.number = next(k for k, t in enumerate(self.region.targets) if t is self.region.loss)

    def forward(
        self, inputs: Arrays, globals_: Arrays, wanted: Wanted | None = None
    ) -> tuple[list[Array], Any]:
        loop = self.loop
        if wanted is None or any(has_small_range(v.aval.dtype) for v in self._of(wanted)):
            results, kept = loop.forward(inputs, globals_)
            return results, (kept, None)
        aval = self.region.targets[self.number].result.aval
        one = jnp.ones(aval.shape, aval.dtype)
        cotangents: list[Array | None] = [None] * len(self.region.targets)
        cotangents[self.number] = as_varying_as(one, [*inputs, *globals_])
        n = len(inputs)
        given = Given(cotangents, wanted, begun=[None] * n, hosted=[False] * n)
        (states, sums), remembered = loop.at_once(inputs, globals_, given)
        results, kept = loop.finished(states, remembered)
        return results, (kept, sums)

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        kept, sums = saved.kept
        factor = given.cotangents[self.number]
        others = [given.cotangents[k] for k in self._others(given.wanted)]
        if sums is None or any(c is not None for c in others):
            return self.loop.backward(Saved(saved.inputs, saved.globals, kept), given)
        if factor is None:
            return given.begun, [None] * len(saved.globals)
        of_inputs, of_globals = ([_times(x, factor) for x in found] for found in sums)
        wanted_inputs, wanted_globals = given.wanted
        return (
            added(like(self.region.inputs, wanted_inputs, of_inputs), given.begun),
            like(self.region.globals, wanted_globals, of_globals),
        )

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        kept, _ = saved.kept
        return self.loop.tangents(Saved(saved.inputs, saved.globals, kept), tangents)

    def _of(self, wanted: Wanted) -> list[Value]:
        """Which inputs and globals these are."""
        return [*select(self.region.inputs, wanted[0]), *select(self.region.globals, wanted[1])]

    def _others(self, wanted: Wanted) -> list[int]:
        """The other targets that have derivatives with respect to what is wanted."""
        differentiated = {v.array for v in self._of(wanted)}
        return [
            k
            for k, t in enumerate(self.region.targets)
            if k != self.number
            and not differentiated.isdisjoint(moving(self.region.equations, [t.result]))
        ]


def _times(x: Array, factor: Array) -> Array:
    """The product. Of a mean over no labels the factor is infinite, or NaN; what was masked in each
    tile, before the factor came, stays 0.
    """
    dtype = jnp.promote_types(x.dtype, factor.dtype)
    factor = factor.reshape(()).astype(dtype)
    factors = jnp.where((x != 0) | jnp.isfinite(factor), factor, 0)
    return (x.astype(dtype) * factors).astype(x.dtype)
