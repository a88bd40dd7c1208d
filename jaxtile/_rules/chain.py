"""Functions of one array, position by position, that keep nothing but it to be differentiated.

JAX differentiates `0.5 * x * erfc(-x / sqrt(2))` equation by equation, and each of them keeps what
its derivative reads: `x`, and `erfc(...)`. A compiler has computed that once, so it keeps it, or
what it makes of it: beside `x` and the result there wait two more arrays as large, in every GELU.
To compute them again from `x` costs arithmetic only, in a pass over memory that is made anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from .elementwise import Elementwise
from .registry import Equation, register

chain_p = Primitive("chain")
"""Known to the graph only; it is never bound."""


@dataclasses.dataclass(frozen=True)
class Link:
    """An equation of a chain, and its operands: constants, or the numbers of what they are. 0 is
    the chain's operand, and k the result of its k-th equation.
    """

    equation: Equation
    operands: Sequence[Any]
    numbers: Sequence[int | None]
    """Of each operand; None: it is a constant."""
    like: Hashable
    """The same for equations that are alike."""

    def __call__(self, found: Sequence[jax.Array]) -> jax.Array:
        pairs = zip(self.operands, self.numbers, strict=True)
        operands = [x if k is None else found[k] for x, k in pairs]
        (result,) = self.equation.bind(*operands)
        return result


@register("chain", kind="elementwise")
class Chain(Elementwise):
    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            found = [x]
            for link in params["links"]:
                found.append(link(found))
            return found[-1]

        return [jax.checkpoint(run)(*operands)]

    def likeness(self, eqn: Equation) -> Hashable:
        return tuple((link.like, tuple(link.numbers)) for link in eqn.params["links"])
