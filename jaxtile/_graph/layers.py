"""A scan over layers: it stays a scan, and each layer runs in tiles.

`lax.scan(layer, x, weights)` runs on whole arrays, and its body is a tiled function by itself, with
the same grids: tracing does not grow with the number of layers. What goes from layer to layer is
stored. Who wants that not to be stored asks `scan` to unroll (`unroll=True`), and it is unrolled
into the tiles. So is a scan without convolutions and the like, which costs nothing to compute
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax

from .. import _rules as rules
from .._errors import TilingError
from .._rules import Axes
from .._rules.manual import as_varying_as
from .inline import any_call, bodies, plain_call, remat


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

    @property
    def calls(self) -> bool:
        """Does it call functions with derivative rules of the user?"""
        ...

    def scan(
        self, layer: Any, operands: Sequence[list[Any]], options: Mapping[str, Any], again: bool
    ) -> tuple[list[Any], list[Any]]:
        """`lax.scan` of a function that calls it."""
        ...

    def __call__(self, *flat: jax.Array) -> list[jax.Array]: ...


@dataclasses.dataclass(frozen=True)
class Remat:
    """What the author of a layer wrote about storing: `jax.checkpoint`s in it."""

    policies: list[Any]
    complete: bool
    """Are all convolutions and the like in one?"""


InTiles = Callable[[Any, Sequence[Axes], Remat], Body | None]
"""What makes a tiled function of a jaxpr, from the axes of its arguments and what its author says
about storing; None: it had better not be one."""


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
    remat: Remat
    out_axes: list[Axes]

    @property
    def length(self) -> int:
        return self.scan.params["length"]

    def __call__(self, *flat: jax.Array) -> list[jax.Array]:
        def layer(
            consts: list[Any], carry: list[Any], xs: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            results = self.body(*consts, *carry, *xs)
            return results[: self.scan.carry], results[self.scan.carry :]

        operands = self.scan.split(as_varying_as(list(flat), flat))
        options = {k: self.scan.params[k] for k in ("length", "reverse", "unroll")}
        # A scan in the body would keep its carries, for every layer of this one.
        again = self.remat.complete and self.body.keeps
        last, ys = self.body.scan(layer, operands, options, again)
        return [*last, *ys]


def layers_of(eqn: Any, in_axes: Sequence[Axes], in_tiles: InTiles) -> Layers | None:
    """A `scan` over layers, if it can be one, and not along a tiled axis."""
    scan, body = Scan.of(eqn.params), eqn.params["jaxpr"]
    remat = None if eqn.params["unroll"] >= eqn.params["length"] else _remat(body)
    consts, carry, xs = scan.split(in_axes)
    along = any(axes[0] is not None for axes in xs)
    if remat is None or along or eqn.effects:
        return None
    while True:  # What one layer makes tiled, the next one gets so.
        try:
            found = in_tiles(body, [*consts, *carry, *(axes[1:] for axes in xs)], remat)
        except TilingError:  # Of one iteration, more is known: its number, say.
            return None
        if found is None:
            return None
        made = [_wider(*both) for both in zip(carry, found.out_axes[: scan.carry], strict=True)]
        if made == carry:
            ys = [(None, *axes) for axes in found.out_axes[scan.carry :]]
            return Layers(scan, found, remat, [*carry, *ys])
        carry = made


def _wider(axes: Axes, more: Axes) -> Axes:
    """The axes that dimensions carry before, or at least after a layer."""
    free = [b if a is None and b not in axes else a for a, b in zip(axes, more, strict=True)]
    return tuple(free)


def _remat(body: Any) -> Remat | None:
    """What a layer's author says about storing; None: there is no layer, but what costs nothing to
    compute again."""
    found = list(_outermost(body))
    remats = [params for eqn in found if (params := remat(eqn)) is not None]
    bare = any(map(_works, found))
    if not (bare or remats) or any(p.get("differentiated") for p in remats):
        return None
    return Remat([p["policy"] for p in remats if p["policy"] is not None], not bare)


def _works(eqn: Any) -> bool:
    """Has it convolutions and the like in it, but not in a `jax.checkpoint`?"""
    if rules.traits(eqn.primitive).works:
        return True
    called = any_call(eqn) if remat(eqn) is None else None
    inside = bodies(eqn) if called is None else [called]
    return any(_works(each) for inner in inside for each in _outermost(inner))


def _outermost(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of what it calls, but not those in a `jax.checkpoint`."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = plain_call(eqn) if remat(eqn) is None else None
        if inner is None:
            yield eqn
        else:
            yield from _outermost(inner)
