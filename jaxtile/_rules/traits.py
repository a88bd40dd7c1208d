"""What is to be known of a primitive without tiling it."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypedDict

Kind = Literal[
    "convolution",
    "contraction",
    "max_pool",
    "window",
    "random",
    "reduction",
    "elementwise",
    "movement",
    "other",
]
"""A primitive's kind of work.

A compiler makes elementwise work, movement and random numbers part of what reads them. A window is
work that reads several positions for each result, along whatever dimension, as a pool or a sort;
take it for linear algebra on small matrices, too. `max_pool` is apart because
its gradient costs more than that of other windows. Other: not known.
"""

Linear = Literal["sum", "product", "first", "cases"]
"""In which operands a primitive is linear.

`sum`: in all of them together. `product`: in one of two, while the other is fixed. `first`: in the
first, while the others are fixed. `cases`: in all but the first, while that is fixed.
"""


@dataclasses.dataclass(frozen=True)
class Traits:
    """What is to be known of a primitive without tiling it.

    Where a primitive does not say, the traits are those of an expensive function of which nothing
    is known.
    """

    kind: Kind = "other"
    """Its kind of work: what it costs, and what a compiler does with it."""
    linear: Linear | None = None
    """In which operands it is linear. `jaxtile._derivatives.linear` proves from this that a whole
    function is."""
    view: bool = False
    """Is its result its operand, under another name or shape, so that it needs no memory?"""
    free: bool = False
    """Can what reads it do its arithmetic along the way: a change of sign, of type?"""
    reads_result: bool = False
    """Does its derivative read its result, as that of `exp` or `tanh` does?"""
    flat: bool = False
    """Is its derivative zero everywhere, to JAX, although its result is a float?"""

    @property
    def fuses(self) -> bool:
        return self.kind in ("elementwise", "movement", "random")

    @property
    def works(self) -> bool:
        """Does what it computes cost enough to be stored, or measured?"""
        return self.kind in ("convolution", "contraction", "max_pool", "window")

    @property
    def forgets(self) -> bool:
        """Does its derivative need none of its operands?"""
        return self.linear == "sum" or self.kind in ("movement", "random")


class TraitWords(TypedDict, total=False):
    """The traits as keywords of `register`, so that a type checker finds a misspelt one."""

    kind: Kind
    linear: Linear
    view: bool
    free: bool
    reads_result: bool
    flat: bool
