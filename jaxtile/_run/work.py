"""What a loop does for a tile, in steps.

A loop reads windows, computes, and puts the results in their places. Transfers from and to host
memory are steps of their own, since they need not happen when the tile is computed (`beside`).
"""

from __future__ import annotations

import abc
from typing import Any

from .arrays import Arrays
from .slots import Hosted, Row, Zeros


class Work(abc.ABC):
    """Of one loop. The first part of `x` is the row of positions of a tile; a carry is what the
    loop writes to.
    """

    zeros: Zeros
    """That are made when the loop begins."""

    @abc.abstractmethod
    def fetch(self, row: Row) -> Any:
        """Windows of arrays in host memory."""

    @abc.abstractmethod
    def read(self, carry: Any, x: Any, fetched: Any) -> Any:
        """All that a tile needs: what was fetched, and windows of arrays on the device."""

    @abc.abstractmethod
    def compute(self, found: Any, x: Any) -> Any:
        """Results, from what was read."""

    @abc.abstractmethod
    def put(self, carry: Any, results: Any, x: Any) -> tuple[Any, Any, list[Any]]:
        """The carry, with the results; what is remembered of the tile; and what is to be sent."""

    @abc.abstractmethod
    def send(self, carry: Any, waiting: Arrays, row: Row) -> Any:
        """Results into those arrays of the carry that are in host memory."""

    @abc.abstractmethod
    def unsent(self, carry: Any, row: Row) -> list[Any]:
        """What may be sent to this row although its tile is not computed yet: what is there
        already, or anything, if the row is written later.
        """

    @abc.abstractmethod
    def hosted(self, carry: Any) -> list[Hosted]:
        """What is fetched from and sent to."""

    @abc.abstractmethod
    def blank(self, found: Any) -> Any:
        """Is what a tile has read next to constant? Such a tile is kept for those alike."""

    def zero(self, found: Any) -> Any:
        """Does nothing come of what a tile has read? None, if that cannot be."""
        return None

    def found(self, carry: Any, x: Any) -> Any:
        return self.read(carry, x, self.fetch(x[0]))

    def placed(self, carry: Any, results: Any, x: Any) -> tuple[Any, Any]:
        carry, out, waiting = self.put(carry, results, x)
        return self.send(carry, waiting, x[0]), out

    def body(self, carry: Any, x: Any) -> tuple[Any, Any]:
        return self.placed(carry, self.compute(self.found(carry, x), x), x)
