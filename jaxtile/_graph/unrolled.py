"""Loops over tiled values: a `scan` over equal layers, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from .joint import Joint
from .layers import Scan
from .values import Value, constants_of


class Walks(Protocol):
    """What adds equations to a graph."""

    def walk(
        self, jaxpr: Any, constants: Sequence[Value], arguments: Sequence[Value]
    ) -> list[Value]: ...

    def call(self, fun: Callable[..., Any], inputs: Sequence[Value]) -> Value: ...


def over_merged(eqn: Any, inputs: Sequence[Value]) -> bool:
    """Is it over positions that were merged?"""
    items = Scan.of(eqn.params).split(inputs)[2]
    return any(isinstance(x, Joint) and len(x.groups[0]) > 1 for x in items)


def unrolled(eqn: Any, inputs: Sequence[Value], walks: Walks) -> list[Value]:
    """The results of a `scan`, one iteration after the other."""
    params, body, scan = eqn.params, eqn.params["jaxpr"], Scan.of(eqn.params)
    (consts, carry, xs), n_carry = scan.split(inputs), scan.carry
    steps = range(params["length"])
    collected: list[list[Value]] = []
    for i in reversed(steps) if params["reverse"] else steps:
        items = [walks.call(lambda x, i=i: x[i], [x]) for x in xs]
        out = walks.walk(body.jaxpr, constants_of(body.consts), [*consts, *carry, *items])
        carry = out[:n_carry]
        collected.append(out[n_carry:])
    if params["reverse"]:
        collected.reverse()
    stacked = [
        walks.call(
            lambda *parts, aval=var.aval: (
                jnp.stack(parts) if parts else jnp.zeros(aval.shape, aval.dtype)
            ),
            parts,
        )
        for var, *parts in zip(eqn.outvars[n_carry:], *collected, strict=True)
    ]
    return [*carry, *stacked]
