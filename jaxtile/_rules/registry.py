"""What a rule is, and the table of all rules.

A rule says how one primitive is computed on a part of its outputs. It knows nothing of loops,
regions or policies. It answers these questions:

* `axes`: given which dimensions of the inputs carry a tiled axis, which dimensions of the outputs
  do? A rule that cannot work in tiles along one of them raises `Mixes`.
* `step`: to produce these windows of the outputs, which windows of the inputs are needed, and how
  are the outputs computed from them?
* `promote` (optional): could an equation that has no tiled input be computed in windows all the
  same, as `iota` or a broadcast can?
* `reduction` (optional): how are the results of all tiles combined, if the equation reduces over a
  tiled axis? Such an equation needs every tile, so it is not a step.

Beside its rule a primitive has *traits*: what other parts of jaxtile want to know of it without
tiling it, as what kind of work it is, or in which operands it is linear. See `traits`.

To add a primitive, write its rule in the file of its family and register it with its traits. This
is all that a primitive needs that moves positions along no dimension but the last:

    @register("reverse_features", kind="movement", linear="sum")
    class ReverseFeatures(Rule):
        def axes(self, eqn):
            forbid(eqn, 0, [eqn.in_avals[0].ndim - 1], "reverses the last dimension")
            return eqn.in_axes, [eqn.in_axes[0]]

        def step(self, eqn, windows):
            return Step([Need(sole(windows))], lambda scalars, x: eqn.bind(x))

A primitive that works position by position needs no rule of its own: its name is added to the list
of those with the same traits in `elementwise.py`. A primitive without any traits is taken to be
neither fused nor linear, which is safe; a test wants a kind for every rule all the same.

Rules are registered by the primitive's *name*: some primitives exist only in some of the supported
JAX versions, and several are not exported at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, Unpack, cast

import jax
import numpy as np

from .._errors import Mixes
from .._geometry import Window, hull
from .accumulation import Reduction
from .manual import alike
from .traits import Traits, TraitWords

T = TypeVar("T")

Axes = tuple[int | None, ...]
"""Per array dimension, the tiled axis that it carries, or None."""

Windows = dict[int, Window]
"""Per dimension that carries a tiled axis, the window of each tile."""


@dataclasses.dataclass(frozen=True, eq=False)
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
    """Is it inside a function with a derivative rule, or inside that rule? Then it runs in a tile,
    and nothing can be stored for it."""
    _found: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What `find` returns; it is called once for each key."""
        if key not in self._found:
            self._found[key] = find()
        return cast(T, self._found[key])

    def bind(self, *operands: jax.Array, **changed: Any) -> list[jax.Array]:
        """Apply the primitive to other operands, with some of its parameters changed."""
        rule = find(self.primitive)
        bind = _bind if rule is None else rule.bind
        return bind(self.primitive, alike(operands, self.in_avals), {**self.params, **changed})


def _exact(param: Any) -> Hashable:
    """A parameter, such that equal ones are the same: 0 is neither 0.0 nor False, nor is -0.0."""
    return (float, param.hex()) if isinstance(param, float) else (type(param), param)


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

    See the module's docstring. Most rules override `axes` and `step` only, or `places`.
    """

    by_position: ClassVar[bool] = False
    """Does every position of a result come from the same position of the operands?"""
    apart: ClassVar[bool] = False
    """Does each result come from the operand in its place alone? The graph has an equation each."""
    may_run_whole: ClassVar[bool] = False
    """Does it run once, on whole arrays, where it cannot run in tiles?"""
    is_call: ClassVar[bool] = False
    """Is it a function with a derivative rule of its own?"""
    pulls_back: ClassVar[bool] = False
    """Is that a rule for cotangents, as a `custom_vjp` has?"""

    def changes_value(self, eqn: Equation) -> bool:
        """May its value differ when it is differentiated, as that of a `custom_vjp` may?"""
        return False

    def places(self, eqn: Equation) -> dict[int, int]:
        """Dimension of the outputs -> dimension of the inputs that it is; for these two answers."""
        return {d: d for d in range(len(eqn.out_avals[0].shape))}

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        """The axes that the inputs must carry, and those of the outputs.

        By default all inputs that are not numbers carry the same, and so do the outputs.
        """
        arrays = [a for a, x in zip(eqn.in_axes, eqn.in_avals, strict=True) if x.shape]
        axes = merge(eqn.primitive, arrays)
        out: list[int | None] = [None] * len(eqn.out_avals[0].shape)
        for o, d in self.places(eqn).items():
            out[o] = axes[d]
        return [axes if x.shape else () for x in eqn.in_avals], [tuple(out)] * len(eqn.out_avals)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        """How to produce these windows of the outputs; None: that output is not wanted, but a sole
        one always is.

        By default from the same windows of all inputs, by the primitive itself.
        """
        window, places = joint(eqn, windows), self.places(eqn)
        need = Need({places[o]: w for o, w in window.items() if o in places})
        return Step(
            [need if x.shape else None for x in eqn.in_avals],
            lambda scalars, *operands: eqn.bind(*operands),
            produced=[window] * len(eqn.out_avals),
        )

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

    def likeness(self, eqn: Equation) -> Hashable:
        """What else alike equations have in common, beside types, axes and constant operands."""
        return tuple((name, _exact(value)) for name, value in sorted(eqn.params.items()))

    def runs_whole(self, eqn: Equation) -> str | None:
        """Why this equation must run once, on whole arrays; None: it may run in tiles."""
        return None


_RULES: dict[str, Rule] = {}
_TRAITS: dict[str, Traits] = {}
_UNKNOWN = Traits()
_Rule = TypeVar("_Rule", bound=Rule)


def register(
    *primitives: str, **traits: Unpack[TraitWords]
) -> Callable[[type[_Rule]], type[_Rule]]:
    """Decorate a class: an instance of it is the rule of each of the named primitives.

    All of them have these traits. Where some have others, decorate the class again.
    """
    known = Traits(**traits)

    def decorate(cls: type[_Rule]) -> type[_Rule]:
        rule = cls()
        for name in primitives:
            if name in _RULES:
                raise ValueError(f"primitive {name!r} has a rule already")
            _RULES[name], _TRAITS[name] = rule, known
        return cls

    return decorate


def register_traits(*primitives: str, **traits: Unpack[TraitWords]) -> None:
    """Give traits to primitives that have no rule, because they are never tiled."""
    _TRAITS.update(dict.fromkeys(primitives, Traits(**traits)))


def find(primitive: Any) -> Rule | None:
    """The rule of a primitive, if it has one."""
    return _RULES.get(primitive.name)


def traits(primitive: Any) -> Traits:
    """The traits of a primitive. One that is not registered has the defaults."""
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
    merged: list[int | None] = []
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
        raise Mixes(
            f"`{primitive.name}` would carry tiled axis {min(repeated)} in two dimensions",
            "name and save one of its operands (the keys and the values of attention): that is "
            "read whole, and the other stays in tiles",
        )
    return tuple(merged)


def agree(primitive: Any, *dims: tuple[list[int | None], int]) -> int | None:
    """Dimensions of several operands that are one: all carry the axis that any of them does."""
    (axis,) = merge(primitive, [(axes[d],) for axes, d in dims])
    for axes, d in dims:
        axes[d] = axis
    return axis


def others(eqn: Equation, dims: Sequence[int], of_result: bool = False) -> list[int]:
    """The dimensions of the first operand, or of the first result, but for these."""
    aval = (eqn.out_avals if of_result else eqn.in_avals)[0]
    return [d for d in range(len(aval.shape)) if d not in dims]


def sole(windows: Sequence[Windows | None]) -> Windows:
    """The windows of the only output: nobody asks for a step of which nothing is wanted."""
    (window,) = windows
    assert window is not None, "the only output of an equation is always wanted"
    return window


def joint(
    eqn: Equation, windows: Sequence[Windows | None], shape: Sequence[int] | None = None
) -> Windows:
    """One window that holds those of all outputs, for primitives whose outputs are alike."""
    shape = eqn.out_avals[0].shape if shape is None else shape
    return hulls([w for w in windows if w is not None], shape)


def hulls(windows: Sequence[Windows], shape: Sequence[int]) -> Windows:
    """The smallest windows that hold all of these, of an array of some shape."""
    return {d: hull([w[d] for w in windows], shape[d]) for d in windows[0]}


def forbid(eqn: Equation, operand: int, dims: Sequence[int], what: str) -> None:
    """Refuse if one of these dimensions of an operand is tiled."""
    for dim in dims:
        if eqn.in_axes[operand][dim] is not None:
            raise Mixes(
                f"`{eqn.primitive.name}` {what}, and dimension {dim} of operand {operand} is tiled"
            )
