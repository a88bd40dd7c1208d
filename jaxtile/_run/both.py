"""What one loop does for a tile that is differentiated as soon as it is computed."""

from __future__ import annotations

from typing import Any

from .arrays import Array, Arrays
from .backwards import Backwards, Sums
from .forwards import Forwards
from .slots import Hosted, Row
from .tile import State, reducer
from .work import Work

Carry = tuple[list[State], Sums]


class Both(Work):
    """Forwards and backwards, with one computation of the tile.

    The cotangents of the results are known, and no sum of cotangents lies in host memory.
    """

    def __init__(self, forwards: Forwards, backwards: Backwards):
        self.forwards, self.backwards = forwards, backwards
        self.tile, self.zeros = forwards.tile, forwards.zeros

    def fetch(self, row: Row) -> list[Array | None]:
        return self.forwards.fetch(row)

    def read(self, carry: Carry, x: Any, fetched: Any) -> list[Array]:
        return self.forwards.read(carry[0], x, fetched)

    def compute(self, windows: Arrays, x: Any) -> tuple[list[State], Sums]:
        tile, given, row = self.tile, self.backwards.given, list(x[0])
        values, pull = tile.pullback(windows, self.forwards.globals_, given.wanted, row)
        found = tile.shares_of(values, row)
        reduced = [(t, s) for t, s in zip(tile.region.targets, found, strict=True) if t.reduction]
        # The derivative of a sum needs no state. Other reductions have no cotangent here.
        states, notes = [s for _, s in reduced], [reducer(t).remember(s) for t, s in reduced]
        cotangents = tile.result_windows(given.cotangents, row)
        return found, pull(tile.cotangent_shares(values, states, notes, cotangents, row))

    def put(
        self, carry: Carry, results: tuple[list[State], Sums], x: Any
    ) -> tuple[Carry, list[State], list[Array]]:
        states, remembered, waiting = self.forwards.put(carry[0], results[0], x)
        sums, _, _ = self.backwards.put(carry[1], results[1], x)
        return (states, sums), remembered, waiting

    def send(self, carry: Carry, waiting: Arrays, row: Row) -> Carry:
        return self.forwards.send(carry[0], waiting, row), carry[1]

    def unsent(self, carry: Carry, row: Row) -> list[Array]:
        return self.forwards.unsent(carry[0], row)

    def hosted(self, carry: Carry) -> list[Hosted]:
        return self.forwards.hosted(carry[0])

    def blank(self, found: Arrays) -> Any:
        return self.tile.blank(found)
