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
    """An equation of a chain, and its operands: numbers that are known; or else those of the chain,
    and after these the results of its equations, by their places.
    """

    equation: Equation
    known: Sequence[Any]
    places: Sequence[int | None]
    """Of each operand; None: it is known."""
    like: Hashable
    """The same for equations that are alike."""

    def __call__(self, found: Sequence[jax.Array]) -> jax.Array:
        pairs = zip(self.known, self.places, strict=True)
        (result,) = self.equation.bind(*(x if k is None else found[k] for x, k in pairs))
        return result


@register("chain", kind="elementwise")
class Chain(Elementwise):
    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        def run(*operands: jax.Array) -> jax.Array:
            found = [*operands]
            for link in params["links"]:
                found.append(link(found))
            return found[-1]

        return [jax.checkpoint(run)(*operands)]

    def likeness(self, eqn: Equation) -> Hashable:
        return tuple((link.like, tuple(link.places)) for link in eqn.params["links"])
