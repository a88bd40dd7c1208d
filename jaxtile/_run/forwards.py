"""What a region's forward loop does for a tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from .arrays import Array, Arrays, Wanted, select
from .slots import Hosted, Row, Zeros, fetched, filled, hosted, nothing, unfetched, write
from .tile import State, Tile, reducer
from .work import Work


class Written(NamedTuple):
    """Where a loop writes."""

    sent: Sequence[bool]
    """Is a target written to host memory?"""
    replaced: Mapping[int, int]
    """Inputs whose place a target takes."""
    zeros: Zeros


class Forwards(Work):
    """Read windows of the inputs, compute, and write the targets' tiles, or reduce them.

    The carry has, per target, its array or the state of a reduction.
    """

    def __init__(
        self,
        tile: Tile,
        inputs: Arrays,
        globals_: Arrays,
        wanted: Wanted | None,
        written: Written,
    ):
        """`wanted`: what is being differentiated, if anything is."""
        self.tile, self.inputs, self.globals_, self.wanted = tile, inputs, globals_, wanted
        self.sent, self.replaced, self.zeros = written

    def fetch(self, row: Row) -> list[Array | None]:
        return fetched(self.inputs, self.tile.input_slots, row)

    def read(self, carry: list[State], x: Any, fetched: Sequence[Array | None]) -> list[Array]:
        given = unfetched(self.inputs, fetched)
        for i, k in self.replaced.items():
            (given[i],) = carry[k]
        windows = filled(fetched, self.tile.windows(given, list(x[0])))
        for i in self.replaced:  # read once, before it is written
            windows[i] = lax.optimization_barrier(windows[i])
        return windows

    def compute(self, windows: Arrays, x: Any) -> list[State]:
        return self.tile.shares(windows, self.globals_, list(x[0]), self.wanted)

    def put(
        self, carry: list[State], shares: list[State], x: Any
    ) -> tuple[list[State], list[State], list[Array]]:
        tile, row = self.tile, list(x[0])
        new: list[State] = []
        remembered: list[State] = []
        for k, (target, share) in enumerate(zip(tile.region.targets, shares, strict=True)):
            if target.reduction is not None:
                new.append(tile.merged(k, carry[k], share, row))
                remembered.append(reducer(target).remember(share))
            elif self.sent[k]:
                new.append(carry[k])
            else:
                new.append((write(carry[k][0], share[0], tile.result_slots[k], row),))
        pairs = zip(carry, shares, strict=True)
        waiting = [share[0].astype(state[0].dtype) for state, share in select(pairs, self.sent)]
        return new, remembered, waiting

    def send(self, carry: list[State], waiting: Arrays, row: Row) -> list[State]:
        tiles = iter(waiting)
        return [
            (write(state[0], next(tiles), slots, row),) if sent else state
            for state, slots, sent in zip(carry, self.tile.result_slots, self.sent, strict=True)
        ]

    def unsent(self, carry: list[State], row: Row) -> list[Array]:
        """Every element is written by its own tile."""
        pairs = zip(carry, self.tile.result_slots, strict=True)
        return [nothing(state[0], slots, self.zeros) for state, slots in select(pairs, self.sent)]

    def hosted(self, carry: list[State]) -> list[Hosted]:
        pairs = zip(carry, self.tile.result_slots, strict=True)
        written = [(state[0].shape, slots) for state, slots in select(pairs, self.sent)]
        return [*hosted(self.inputs, self.tile.input_slots), *written]

    def blank(self, found: Arrays) -> Any:
        return self.tile.blank(found)
