"""What a rule is, and the table of all rules.

A rule answers three questions about one primitive, and knows nothing of loops, regions or policies:

* `axes`: which dimensions of the outputs carry which tiled axis, given those of the inputs;
* `step`: to produce these windows of the outputs, which windows of the inputs are needed, and how
  is it computed from them;
* `promote`: could this equation, so far untiled, be evaluated window by window (`iota`, a
  broadcast, random bits)?

A reduction over a tiled axis is not a step, because it needs every tile: such a rule also answers
`reduction`.

Beside its rule a primitive has *traits*: what the rest of jaxtile wants to know of it without
tiling it. They are said where the rule is registered, so that a new primitive touches one place.

Rules are registered by primitive *name*: some primitives exist only in some of the supported JAX
versions, and several are not exported at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax
import numpy as np

from .._errors import Mixes
from .._geometry import Window, hull

Axes = tuple[int | None, ...]
"""Per array dimension, the tiled axis that it carries, or None."""

Windows = dict[int, Window]
"""Per dimension that carries a tiled axis, the window of each tile."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One application of a primitive, as a rule sees it.

    `out_axes` is empty while the rule is asked for it.
    """

    primitive: Any
    params: Mapping[str, Any]
    in_avals: tuple[Any, ...]
    in_axes: tuple[Axes, ...]
    out_avals: tuple[Any, ...]
    out_axes: tuple[Axes, ...] = ()
    constant: Callable[[int], np.ndarray | None] = lambda i: None
    """The value of operand `i` if it does not depend on any argument of the function."""
    source_infos: tuple[Any, ...] = (None,)
    """Where it was traced, and the calls that it was inlined from, innermost first."""
    effects: Any = ()
    inside: bool = False
    """Is it part of a function with a derivative rule, or of that rule, and not of the graph?"""

    def bind(self, *operands: jax.Array, **changed: Any) -> list[jax.Array]:
        """Apply the primitive to other operands, with some of its parameters changed."""
        bind = getattr(find(self.primitive), "bind", _bind)
        return bind(self.primitive, operands, {**self.params, **changed})


def _bind(
    primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
) -> list[jax.Array]:
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


@dataclasses.dataclass(frozen=True)
class Need:
    """The windows wanted of one operand.

    They may stick out of the array; `fill` is what is read there.
    """

    windows: Windows
    fill: Any = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """How to produce windows of an equation's outputs.

    `evaluate(scalars, *operands)` gets every operand cut to exactly what was needed of it (untiled
    operands whole; a tiled dimension that no window was asked for, whole), and for each window in
    `positions` its start in the current tile. It returns the outputs on the windows in `produced`,
    by default exactly those that were asked for; the caller crops.
    """

    needs: Sequence[Need | None]
    evaluate: Callable[..., Sequence[jax.Array]]
    positions: Sequence[Window] = ()
    produced: Sequence[Windows] | None = None


class Rule(Protocol):
    """The rule of a primitive.

    See the module's docstring. Most rules override `axes` and `step` only.
    """

    by_position: ClassVar[bool] = False
    """Does every position of a result come from the same position of the operands?"""
    apart: ClassVar[bool] = False
    """Does each result come from the operand in its place alone? The graph has an equation each."""
    is_call: ClassVar[bool] = False
    """Is it a function with a derivative rule of its own?"""
    changes_value: ClassVar[bool] = False
    """May its value differ when it is differentiated, as that of a `custom_vjp` may?"""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        """The axes that the inputs must carry, and those of the outputs."""
        ...

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        """How to produce these windows of the outputs.

        None: that output is not wanted; a sole output always is.
        """
        ...

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        """Axes that the inputs need so that the output carries `out_axes`.

        None if it must be computed whole.
        """
        return None

    def reduction(self, eqn: Equation) -> Reduction | None:
        """How to accumulate over tiles, if this equation reduces over a tiled axis."""
        return None

    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        """Apply the primitive: where JAX's own derivative is slow, with another."""
        return _bind(primitive, operands, params)

    def alone(self, params: Mapping[str, Any], operand: int) -> Mapping[str, Any]:
        """The parameters of an equation that has one of the operands only."""
        return params

    def runs_whole(self, eqn: Equation) -> str | None:
        """Why this equation must run once, on whole arrays; None: it may run in tiles."""
        return None


class Reduction(Protocol):
    """A reduction over tiled axes, as an accumulation over tiles.

    A state is a tuple of arrays shaped like the result. Of each operand a tile sees its own share;
    `owned` is False where an element belongs to another tile as well, and None if none does.
    """

    adds: ClassVar[bool] = False
    """Is merging two states adding them?"""

    def start(self) -> tuple[jax.Array, ...]: ...

    def partial(
        self, operands: Sequence[jax.Array], owned: Sequence[jax.Array | None]
    ) -> tuple[jax.Array, ...]:
        """The state of one tile."""
        ...

    def merge(
        self, state: tuple[jax.Array, ...], partial: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]: ...

    def finish(self, state: tuple[jax.Array, ...]) -> jax.Array: ...

    def remember(self, partial: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """What the backward pass must know of this tile that it cannot recompute bit for bit.

        It is stored per tile.
        """
        return ()

    def pullback(self, operands, owned, remembered, state, cotangent) -> Sequence[jax.Array]:
        """The operands' cotangents in one tile, from the final state and the result's cotangent."""
        ...


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
Linear = Literal["sum", "product", "first", "cases"]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What is to be known of a primitive without tiling it."""

    kind: Kind = "other"
    """Its kind of work. A compiler makes elementwise work and movement part of what reads it."""
    linear: Linear | None = None
    """In which operands it is linear, as `jaxtile._derivatives.linear` proves it of functions:
    `sum`, in all of them together; `product`, in one while the other is fixed; `first`, in the
    first while the others are fixed; `cases`, in all but the first while that is fixed."""
    view: bool = False
    """Is its result its operand, under another name or shape?"""
    free: bool = False
    """Can what reads it do its arithmetic along the way: a change of sign, of type?"""
    reads_result: bool = False
    """Does its derivative read its result, and not its operands?"""

    @property
    def fuses(self) -> bool:
        return self.kind in ("elementwise", "movement", "random")


_RULES: dict[str, Rule] = {}
_TRAITS: dict[str, Traits] = {}
_UNKNOWN = Traits()


def register(*primitives: str, **traits: Any) -> Callable[[type], type]:
    """Class decorator: one instance of the class is the rule of each of the named primitives, which
    have these traits.
    """

    def decorate(cls: type) -> type:
        rule = cls()
        for name in primitives:
            if name in _RULES:
                raise ValueError(f"primitive {name!r} has a rule already")
            _RULES[name] = rule
        register_traits(*primitives, **traits)
        return cls

    return decorate


def register_traits(*primitives: str, **traits: Any) -> None:
    """Of primitives without a rule: they are met in functions, or parts of them, without tiles."""
    _TRAITS.update(dict.fromkeys(primitives, Traits(**traits)))


def find(primitive: Any) -> Rule | None:
    return _RULES.get(primitive.name)


def traits(primitive: Any) -> Traits:
    return _TRAITS.get(primitive.name, _UNKNOWN)


def names() -> list[str]:
    """The primitives that have a rule."""
    return sorted(_RULES)


def tiled(axes: Axes) -> bool:
    return any(a is not None for a in axes)


def untiled(aval: Any) -> Axes:
    return (None,) * len(aval.shape)


def merge(primitive: Any, axes: Sequence[Axes]) -> Axes:
    """The axes of a value that is combined position by position from values with these axes."""
    merged = []
    for dim, labels in enumerate(zip(*axes, strict=True)):
        found = {label for label in labels if label is not None}
        if len(found) > 1:
            raise Mixes(
                f"`{primitive.name}` combines different tiled axes {sorted(found)} in dimension "
                f"{dim}"
            )
        merged.append(found.pop() if found else None)
    repeated = {a for a in merged if a is not None and merged.count(a) > 1}
    if repeated:
        raise Mixes(f"`{primitive.name}` would carry tiled axis {min(repeated)} in two dimensions")
    return tuple(merged)


def joint(
    eqn: Equation, windows: Sequence[Windows | None], shape: Sequence[int] | None = None
) -> Windows:
    """One window that holds those of all outputs, for primitives whose outputs are alike."""
    wanted = [w for w in windows if w is not None]
    shape = eqn.out_avals[0].shape if shape is None else shape
    return {d: hull([w[d] for w in wanted], shape[d]) for d in wanted[0]}


def forbid(eqn: Equation, operand: int, dims: Sequence[int], what: str) -> None:
    """Refuse if one of these dimensions of an operand is tiled."""
    for dim in dims:
        if eqn.in_axes[operand][dim] is not None:
            raise Mixes(
                f"`{eqn.primitive.name}` {what}, and dimension {dim} of operand {operand} is tiled"
            )
