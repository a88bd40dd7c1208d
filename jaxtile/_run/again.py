"""A region of which the forward and the backward pass run different things."""

from __future__ import annotations

import dataclasses
from typing import Any

from .arrays import Array, Arrays, Cotangents, Tangents, Wanted
from .recompute import Given, Recomputed, Saved


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

    def backward(self, saved: Saved, given: Given) -> tuple[Cotangents, Cotangents]:
        (n, m), saved = self._own(), self._saved(saved)
        others, rest = len(saved.inputs) - n, len(saved.globals) - m
        wanted, begun = given.wanted, given.begun
        found, totals = self.again.backward(
            saved,
            Given(
                given.cotangents,
                ([*wanted[0][:n], *[False] * others], [*wanted[1][:m], *[False] * rest]),
                [*begun[:n], *[None] * others],
                [*given.hosted[:n], *[False] * others],
            ),
        )
        return [*found[:n], *begun[n:]], totals

    def tangents(self, saved: Saved, tangents: Tangents) -> Cotangents:
        (n, m), saved = self._own(), self._saved(saved)
        others, rest = len(saved.inputs) - n, len(saved.globals) - m
        some = [*tangents[0][:n], *[None] * others], [*tangents[1][:m], *[None] * rest]
        return self.again.tangents(saved, some)

    def _saved(self, saved: Saved) -> Saved:
        """What `again` reads: the results that are known, too."""
        kept, known = saved.kept
        return Saved([*saved.inputs, *known], saved.globals, kept)

    def _own(self) -> tuple[int, int]:
        """How many of the inputs and globals are the region's own: the first ones."""
        return len(self.first.region.inputs), len(self.first.region.globals)
