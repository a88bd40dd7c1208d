"""What a region's backward loop does for a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .._platform import on_early_cpu
from .alike import zero
from .arrays import Array, Arrays, Cotangents, fill_in, select
from .in_place import Places
from .ordering import on_host
from .recompute import RECOMPUTED, Given, Saved
from .slots import (
    Hosted,
    Row,
    Slots,
    Zeros,
    fetched,
    filled,
    hosted,
    nothing,
    unfetched,
    window,
    write,
)
from .tile import Tile
from .work import Work

Sums = tuple[list[Array], list[Array]]
"""Of cotangents of the wanted inputs, and of the wanted globals."""


class Into(NamedTuple):
    """Where the cotangents of a tile's window go."""

    slots: Slots
    adds: bool = True
    """Is something there already?"""


Found = tuple[Arrays, list[Any], Any]
"""Windows of inputs, those of the targets' cotangents, and what a reduction remembers."""


class Backwards(Work):
    """Read the same windows, compute again, pull back this tile's share of the targets' cotangents,
    and put the result into place.

    The carry has sums of cotangents: of the wanted inputs, and of the wanted globals.
    """

    def __init__(
        self,
        tile: Tile,
        saved: Saved,
        given: Given,
        into: Sequence[Into],
        shared: Places,
        zeros: Zeros,
    ):
        """`into`: where cotangents of inputs go; `shared`: of inputs whose cotangents take the
        place of a target's, how to cut these out of the window.
        """
        self.tile, self.saved, self.given, self.shared = tile, saved, given, shared
        self.zeros = zeros
        self.into = select(into, given.wanted[0])
        self.place = {i: sum(given.wanted[0][:i]) for i, _ in shared}

    def fetch(self, row: Row) -> tuple[list[Array | None], list[Array | None]]:
        tile, given = self.tile, self.given
        return (
            fetched(self.saved.inputs, tile.input_slots, row),
            fetched(given.cotangents, tile.result_slots, row),
        )

    def read(self, carry: Sums, x: Any, fetched: tuple[Cotangents, Cotangents]) -> Found:
        of_inputs, of_results = fetched
        windows, row = self._inputs(of_inputs, list(x[0]))
        return windows, self._cotangents(of_results, carry, row), x[1]

    def _inputs(self, fetched: Cotangents, row: Row) -> tuple[Arrays, Row]:
        """Windows of the inputs: fetched, read, or computed again. And the positions of the tile,
        for what must not be read before that.
        """
        tile, inputs = self.tile, unfetched(self.saved.inputs, fetched)
        windows: Arrays = filled(fetched, tile.windows(inputs, row))
        if tile.region.skips:  # then only tiles that are not skipped compute anything
            return windows, row
        windows = self._with_passing(windows, row)
        row, passing = _late(row, select(windows, tile.region.passing))
        return fill_in(windows, tile.region.passing, passing), row

    def _cotangents(self, fetched: Cotangents, carry: Sums, row: Row) -> list[Any]:
        """Windows of the results' cotangents: fetched, or read. Where an input's cotangents take
        the place of a result's, both are one array, in the carry.
        """
        cotangents = unfetched(self.given.cotangents, fetched)
        for i, k in self.shared:
            cotangents[k] = carry[0][self.place[i]]
        return filled(fetched, self.tile.result_windows(cotangents, row))

    def compute(self, found: Found, x: Any) -> Sums:
        tile, (windows, cotangents, remembered), row = self.tile, found, list(x[0])
        if tile.region.skips:
            windows = self._with_passing(windows, row)
        with jax.named_scope(RECOMPUTED):
            values, pull = tile.pullback(windows, self.saved.globals, self.given.wanted, row)
        kept, _ = self.saved.kept
        shares = tile.cotangent_shares(values, kept, remembered, cotangents, row)
        for _, k in self.shared:  # read once, before it is written
            shares[k] = lax.optimization_barrier(shares[k])
        of_windows, of_globals = pull(shares)
        for (i, _), cut in self.shared.items():
            if cut is not None:
                of_windows[self.place[i]] = cut(of_windows[self.place[i]], row)
        return of_windows, of_globals

    def _with_passing(self, windows: Arrays, row: Row) -> Arrays:
        with jax.named_scope(RECOMPUTED):
            return self.tile.with_passing(windows, self.saved.globals, row)

    def put(self, carry: Sums, pulled: Sums, x: Any) -> tuple[Sums, None, list[Array]]:
        carry, waiting = put_in(carry, pulled, self.into, list(x[0]))
        return carry, None, waiting

    def send(self, carry: Sums, waiting: Arrays, row: Row) -> Sums:
        tiles = iter(waiting)
        return [
            write(s, next(tiles), place.slots, row) if on_host(s) else s
            for s, place in zip(carry[0], self.into, strict=True)
        ], carry[1]

    def unsent(self, carry: Sums, row: Row) -> list[Array]:
        """What is there; or anything, where each element is written by its own tile."""
        return [
            window(s, place.slots, row) if place.adds else nothing(s, place.slots, self.zeros)
            for s, place in zip(carry[0], self.into, strict=True)
            if on_host(s)
        ]

    def hosted(self, carry: Sums) -> list[Hosted]:
        return [
            *hosted(self.saved.inputs, self.tile.input_slots),
            *hosted(self.given.cotangents, self.tile.result_slots),
            *hosted(carry[0], [place.slots for place in self.into]),
        ]

    def blank(self, found: Found) -> Any:
        return self.tile.blank(found[0])

    def zero(self, found: Found) -> Any:
        return zero(found[1])


def put_in(carry: Sums, pulled: Sums, into: Sequence[Into], row: Row) -> tuple[Sums, list[Array]]:
    """The sums with one more tile; and what is to be written to those in host memory."""
    (sums, totals), (from_windows, from_globals) = carry, pulled
    late, from_globals = _late(row, from_globals)
    new, waiting = [], []
    for s, share, (slots, adds) in zip(sums, from_windows, into, strict=True):
        here = row if on_host(s) else late
        whole = (window(s, slots, here) + share if adds else share).astype(s.dtype)
        if on_host(s):
            waiting.append(whole)
        new.append(s if on_host(s) else write(s, whole, slots, here))
    totals = [
        lax.add(t, lax.convert_element_type(g, t.dtype))
        for t, g in zip(totals, from_globals, strict=True)
    ]
    return (new, totals), waiting


def _late(row: Row, arrays: list[Array]) -> tuple[Row, list[Array]]:
    """The same positions and arrays, but the first only once the second exist. XLA reads windows
    apart from where it uses them; if it may, before it computes the tile, beside which they lie
    then. So do windows of sums, and gradients of the tile's last operations, beside what computes
    passing inputs.

    What is read of a barrier is what XLA leaves in it. Positions alone would wait for nothing, and
    XLA (of jax 0.11.2) fails where it looks for how they follow from the number of the tile.
    """
    moving = {k: x for k, x in enumerate(row) if isinstance(x, jax.Array)}
    if on_early_cpu() or not moving or not arrays:
        return row, arrays
    moving, arrays = lax.optimization_barrier((moving, arrays))
    return [moving.get(k, x) for k, x in enumerate(row)], arrays
