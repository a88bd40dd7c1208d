"""Primitives that work position by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Unpack

from .registry import Axes, Equation, Need, Rule, Step, Windows, joint, merge, register
from .traits import TraitWords


def _register(
    primitives: str, **traits: Unpack[TraitWords]
) -> Callable[[type[Elementwise]], type[Elementwise]]:
    """Register the primitives in a string; their kind is elementwise where none is said."""
    words: TraitWords = {"kind": "elementwise", **traits}
    return register(*primitives.split(), **words)


@_register(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e clamp clz cos cosh
    digamma eq eq_to erf erf_inv erfc exp2 expm1 ge gt igamma igamma_grad_a igammac integer_pow
    is_finite le le_to lgamma log log1p log2 lt lt_to mulhi ne nextafter not one_minus_square or
    polygamma polynomial population_count pow regularized_incomplete_beta rem shift_left
    shift_right_arithmetic shift_right_logical sin sinh square tan xor zeta
    """
)
@_register("ceil floor round sign", flat=True)
@_register("cbrt exp logistic max min rsqrt sqrt tanh", reads_result=True)
@_register("add add_any complex conj imag real reduce_precision sub", linear="sum")
@_register("neg", linear="sum", free=True)
@_register("mul", linear="product")
@_register("div", linear="first")
@_register("select_n", linear="cases")
@_register("convert_element_type", kind="movement", linear="sum", free=True)
@_register("copy", kind="movement", linear="sum", view=True, free=True)
@_register("stop_gradient", kind="movement", view=True, free=True, flat=True)
@_register("threefry2x32", kind="random")
class Elementwise(Rule):
    """Operands have the output's shape, or size 1 where they are repeated, or are scalars."""

    by_position = True

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        out = merge(eqn.primitive, [_contribution(eqn, i) for i in range(len(eqn.in_avals))])
        return _operand_axes(eqn, out), (out,) * len(eqn.out_avals)

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        return _operand_axes(eqn, out_axes)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window = joint(eqn, windows)
        needs = [
            Need(_repeated(aval, axes, window))
            for aval, axes in zip(eqn.in_avals, eqn.in_axes, strict=True)
        ]
        return Step(
            needs,
            lambda scalars, *operands: eqn.bind(*operands),
            produced=[window] * len(eqn.out_avals),
        )


@_register("name", kind="movement", linear="sum", view=True)
class Name(Elementwise):
    """In a tile a name means nothing: no policy sees it."""

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        return dataclasses.replace(super().step(eqn, windows), evaluate=lambda scalars, x: [x])

    def likeness(self, eqn: Equation) -> Hashable:
        return ()


def _contribution(eqn: Equation, i: int) -> Axes:
    """The axes that an operand gives to the output: none where it is repeated."""
    shape, aval, axes = eqn.out_avals[0].shape, eqn.in_avals[i], eqn.in_axes[i]
    if not aval.shape:
        return (None,) * len(shape)
    return tuple(
        a if n == m and n > 1 else None for a, n, m in zip(axes, aval.shape, shape, strict=True)
    )


def _operand_axes(eqn: Equation, out: Axes) -> list[Axes]:
    """An operand carries the output's axes where it has the output's size.

    A size-1 dimension is left as it is.
    """
    shape = eqn.out_avals[0].shape
    return [
        tuple(o if n == m else a for a, o, n, m in zip(axes, out, aval.shape, shape, strict=True))
        if aval.shape
        else ()
        for aval, axes in zip(eqn.in_avals, eqn.in_axes, strict=True)
    ]


def _repeated(aval: Any, axes: Axes, out: Windows) -> Windows:
    """The windows of an operand; of a dimension of size 1 that is repeated, the whole."""
    return {
        d: w for d, w in out.items() if aval.shape and axes[d] is not None and aval.shape[d] > 1
    }
