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
tiling it, as what kind of work it is, or in which operands it is linear. See `Traits`.

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
from typing import Any, ClassVar, Literal, Protocol, TypedDict, TypeVar, Unpack, cast

import jax
import numpy as np

from .._errors import Mixes
from .._geometry import Window, hull
from .manual import alike

T = TypeVar("T")

Axes = tuple[int | None, ...]
"""Per array dimension, the tiled axis that it carries, or None."""

Windows = dict[int, Window]
"""Per dimension that carries a tiled axis, the window of each tile."""

State = tuple[jax.Array, ...]
"""What a reduction has accumulated: arrays that are shaped like its result."""

Masks = Sequence[jax.Array | None]
"""Per operand of a reduction, which of the elements that a tile (or a device) sees are its own.

Where neighbours overlap, the others are counted elsewhere. None: all of them are its own.
"""


def masked(x: jax.Array, owned: jax.Array | None, value: Any) -> jax.Array:
    """`x` where an element is one's own, `value` elsewhere."""
    return x if owned is None else jax.numpy.where(owned, x, value)


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

    def likeness(self, eqn: Equation) -> Hashable:
        """What else alike equations have in common, beside types, axes and constant operands."""
        return tuple((name, _exact(value)) for name, value in sorted(eqn.params.items()))

    def runs_whole(self, eqn: Equation) -> str | None:
        """Why this equation must run once, on whole arrays; None: it may run in tiles."""
        return None


@dataclasses.dataclass(frozen=True)
class Share:
    """One tile's part of a reduction, as its derivatives see it."""

    operands: Sequence[jax.Array]
    owned: Masks
    remembered: State
    """What was stored of this tile."""
    state: State
    """Of all tiles together."""


class Reduction(Protocol):
    """A reduction over tiled axes, as an accumulation over tiles.

    The result is `finish` of all tiles' states, merged. A tile sees its own window of each operand.
    """

    adds: ClassVar[bool] = False
    """Is merging two states adding them?"""

    def start(self) -> State:
        """The state before the first tile."""
        ...

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        """The state of one tile."""
        ...

    def merge(self, state: State, partial: State) -> State:
        """The state of two sets of tiles together."""
        ...

    def finish(self, state: State) -> jax.Array:
        """The result, from the state of all tiles."""
        ...

    def remember(self, partial: State) -> State:
        """What the backward pass must know of this tile that it cannot recompute bit for bit.

        It is stored per tile.
        """
        return ()

    def pullback(self, share: Share, cotangent: jax.Array) -> Sequence[jax.Array]:
        """The operands' cotangents in one tile, from that of the result."""
        raise TypeError("integers have no cotangent")

    def push(self, share: Share, tangents: Sequence[jax.Array]) -> jax.Array:
        """What one tile adds to the result's tangent: the pullback, transposed."""
        own = [masked(x, mine, 0) for x, mine in zip(tangents, share.owned, strict=True)]
        pullback = jax.linear_transpose(
            lambda c: [*self.pullback(share, c)], self.finish(share.state)
        )
        return cast(jax.Array, pullback(own)[0])


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


def sole(windows: Sequence[Windows | None]) -> Windows:
    """The windows of the only output: nobody asks for a step of which nothing is wanted."""
    (window,) = windows
    assert window is not None, "the only output of an equation is always wanted"
    return window


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
