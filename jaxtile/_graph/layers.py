"""A scan over layers that its author rematerialises: it stays a scan, and each layer runs in tiles.

`lax.scan(jax.checkpoint(layer), x, weights)`, which libraries have other names for, says that what
goes from layer to layer is stored, and nothing else. Then the scan can run on whole arrays, and its
body is a tiled function by itself, with the same grids: tracing does not grow with the number of
layers. In any other scan nothing need be stored between layers, so it is unrolled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from .. import _rules as rules
from .._rules import Axes
from .._rules.manual import as_varying_as
from .inline import plain_call, remat


class Body(Protocol):
    """A tiled function of flat arguments."""

    @property
    def schedule(self) -> Any: ...

    @property
    def out_axes(self) -> Sequence[Axes]: ...

    @property
    def keeps(self) -> bool:
        """Has it such a scan too, which keeps what goes from layer to layer?"""
        ...

    def outside(self, flat: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Its arguments, as they are given to the scan."""
        ...

    def __call__(self, *flat: jax.Array) -> list[jax.Array]: ...


InTiles = Callable[[Any, Sequence[Axes], Sequence[Any]], Body | None]
"""What makes a tiled function of a jaxpr, from the axes of its arguments and policies that say what
is stored; None: it had better not be one."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a `scan`'s operands, and its parameters."""

    params: Any
    consts: int
    carry: int

    @classmethod
    def of(cls, params: Any) -> Scan:
        if "ft_in" in params:  # from jax 0.12 on
            consts, carry, _ = map(len, params["ft_in"].unpack())
            return cls(params, consts, carry)
        return cls(params, params["num_consts"], params["num_carry"])

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, what is carried, and what is scanned over."""
        first, last = self.consts, self.consts + self.carry
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])


@dataclasses.dataclass(frozen=True)
class Layers:
    """A `scan` as a function of whole arrays, whose body runs in tiles."""

    scan: Scan
    body: Body
    out_axes: list[Axes]

    @property
    def length(self) -> int:
        found: int = self.scan.params["length"]
        return found

    def __call__(self, *flat: jax.Array) -> list[jax.Array]:
        params, count = self.scan.params, self.scan.carry
        consts, carry, xs = self.scan.split(as_varying_as(self.body.outside(flat), flat))
        # A scan in the body would keep its carries, for every layer of this one.
        run = jax.checkpoint(self.body, prevent_cse=False) if self.body.keeps else self.body

        def layer(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = run(*consts, *carry, *xs)
            return results[:count], results[count:]

        given = {k: params[k] for k in ("length", "reverse", "unroll")}
        last, ys = lax.scan(layer, carry, xs, **given)
        return [*last, *ys]


def layers_of(eqn: Any, in_axes: Sequence[Axes], in_tiles: InTiles) -> Layers | None:
    """A `scan` over rematerialised layers, if it is one, and not along a tiled axis."""
    scan, body = Scan.of(eqn.params), eqn.params["jaxpr"]
    policies = _policies(body)
    consts, carry, xs = scan.split(in_axes)
    along = any(axes[0] is not None for axes in xs)
    if policies is None or along or eqn.effects or scan.params["length"] < 2:
        return None
    while True:  # What one layer makes tiled, the next one gets so.
        found = in_tiles(body, [*consts, *carry, *(axes[1:] for axes in xs)], policies)
        if found is None:
            return None
        made = [_wider(*both) for both in zip(carry, found.out_axes[: scan.carry], strict=True)]
        if made == carry:
            return Layers(
                scan, found, [*carry, *((None, *a) for a in found.out_axes[scan.carry :])]
            )
        carry = made


def _wider(axes: Axes, more: Axes) -> Axes:
    """The axes that dimensions carry before, or at least after a layer."""
    free = [b if a is None and b not in axes else a for a, b in zip(axes, more, strict=True)]
    return tuple(free)


def _policies(body: Any) -> list[Any] | None:
    """The policies of the `jax.checkpoint`s that all convolutions and the like of a jaxpr are in;
    None: they are not, or there are none."""
    found = list(_outermost(body))
    remats = [params for eqn in found if (params := remat(eqn)) is not None]
    bare = any(rules.traits(e.primitive).works for e in found if remat(e) is None)
    if bare or not remats or any(p.get("differentiated") for p in remats):
        return None
    return [p["policy"] for p in remats if p["policy"] is not None]


def _outermost(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of what it calls, but not those in a `jax.checkpoint`."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = plain_call(eqn) if remat(eqn) is None else None
        if inner is None:
            yield eqn
        else:
            yield from _outermost(inner)
