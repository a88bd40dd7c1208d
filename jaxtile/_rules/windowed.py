"""Convolutions and pools: primitives that slide a window along the tiled axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._errors import Mixes
from .._geometry import Stencil, Window
from .convolve import convolve
from .max_pool import pool
from .reductions import extreme
from .registry import (
    Axes,
    Equation,
    Need,
    Rule,
    Step,
    Windows,
    agree,
    forbid,
    merge,
    register,
    sole,
)


@dataclasses.dataclass(frozen=True)
class Slide:
    """One axis of a sliding-window primitive in one region.

    What it reads, and the padding left to apply to that.
    """

    need: Window
    padding: tuple[int, int]
    produced: Window

    @classmethod
    def of(cls, stencil: Stencil, window: Window) -> Slide:
        """Read what `window` of the output demands.

        Between the inputs of a base-dilated (transposed) convolution lie zeros, so the padding
        before the first input read depends on the output's position modulo a period. Tiles share
        one program: where their positions differ modulo the period, each produces a few outputs
        more, from an aligned position on.
        """
        base = stencil.base_dilation
        period = base // math.gcd(stencil.stride, base)
        misaligned = (window.starts - window.starts[0]) % period
        aligned = window.starts - misaligned
        size = window.size + int(misaligned.max())
        lo, hi = stencil.demand(aligned, aligned + size)
        read = max(1, int((hi - lo).max()))
        first = aligned * stencil.stride - stencil.before
        before = int((lo * base - first)[0])
        span = (size - 1) * stencil.stride + stencil.extent
        after = span - before - ((read - 1) * base + 1)
        return cls(window.moved(lo, read), (before, after), window.moved(aligned, size))


@register("conv_general_dilated", kind="convolution", linear="product")
class Convolution(Rule):
    """`lax.conv_general_dilated`.

    Spatial dimensions slide, the batch passes through, features are contracted: those of one group.
    Tiles of groups (a `vmap` over images and kernels makes a batch into groups) have their own
    kernels.
    """

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        dims, grouped = eqn.params["dimension_numbers"], eqn.params["feature_group_count"] > 1
        batch, feature = dims.lhs_spec[:2]
        if not grouped:
            forbid(eqn, 0, [feature], "contracts the feature dimension")
        forbid(eqn, 1, dims.rhs_spec[1 if grouped else 0 :], "needs its whole kernel")
        if eqn.params["batch_group_count"] > 1:
            forbid(eqn, 0, [batch], "with `batch_group_count` folds the batch dimension")
        lhs, rhs = map(list, eqn.in_axes)
        agree(eqn.primitive, (lhs, feature), (rhs, dims.rhs_spec[0]))
        out: list[int | None] = [None] * len(dims.out_spec)
        for o, i in zip(dims.out_spec, dims.lhs_spec, strict=True):
            out[o] = lhs[i]
        return [tuple(lhs), tuple(rhs)], [merge(eqn.primitive, [tuple(out)])]

    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        lhs, rhs = operands
        return [convolve(lhs, rhs, params, in_loop=False)]

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        dims, params = eqn.params["dimension_numbers"], dict(eqn.params)
        (out_batch, out_feature, *out_spatial) = dims.out_spec
        (batch, feature, *spatial), (of_kernel, *_) = dims.lhs_spec, dims.rhs_spec
        kernel = [eqn.in_avals[1].shape[d] for d in dims.rhs_spec[2:]]
        window, padding = sole(windows), list(params["padding"])
        produced, need, of_groups = dict(window), Windows(), Windows()
        if out_batch in window:
            need[batch] = window[out_batch]
        if out_feature in window:
            need[feature], made, count = _groups(eqn, window[out_feature])
            produced[out_feature] = of_groups[of_kernel] = made
            params["feature_group_count"] = count
        for k, (o, i) in enumerate(zip(out_spatial, spatial, strict=True)):
            if o not in window:
                continue
            slide = Slide.of(
                Stencil(
                    kernel=kernel[k],
                    stride=params["window_strides"][k],
                    dilation=params["rhs_dilation"][k],
                    base_dilation=params["lhs_dilation"][k],
                    before=params["padding"][k][0],
                ),
                window[o],
            )
            need[i], padding[k], produced[o] = slide.need, slide.padding, slide.produced
        params["padding"] = tuple(padding)
        return Step(
            [Need(need), Need(of_groups) if of_groups else None],
            lambda scalars, lhs, rhs: [convolve(lhs, rhs, params, in_loop=True)],
            produced=[produced],
        )


def _groups(eqn: Equation, window: Window) -> tuple[Window, Window, int]:
    """The features that a convolution reads for a window of its results, those that it produces of
    them, and how many groups these are.
    """
    dims, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    read = eqn.in_avals[0].shape[dims.lhs_spec[1]] // groups
    made = eqn.in_avals[1].shape[dims.rhs_spec[0]] // groups
    first = window.starts // made
    count = int(((window.stops - 1) // made + 1 - first).max())
    return window.moved(first * read, count * read), window.moved(first * made, count * made), count


class _Pool(Rule):
    """Every dimension of a pool slides, most of them with a window of one position."""

    def fill(self, eqn: Equation) -> Any:
        """What it reads outside the array: the value that changes nothing."""
        name, dtype = eqn.primitive.name, eqn.in_avals[0].dtype
        return 0 if name == "reduce_window_sum" else extreme(dtype, name == "reduce_window_max")

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        params, padding = eqn.params, list(eqn.params["padding"])
        produced, need = Windows(), Windows()
        for d, window in sole(windows).items():
            slide = Slide.of(
                Stencil(
                    kernel=params["window_dimensions"][d],
                    stride=params["window_strides"][d],
                    dilation=params["window_dilation"][d],
                    base_dilation=params["base_dilation"][d],
                    before=params["padding"][d][0],
                ),
                window,
            )
            need[d], padding[d], produced[d] = slide.need, slide.padding, slide.produced
        return Step(
            [Need(need, self.fill(eqn)), *[None] * (len(eqn.in_avals) - 1)],
            lambda scalars, *operands: eqn.bind(*operands, padding=tuple(padding)),
            produced=[produced],
        )


@register("reduce_window_max", kind="max_pool")
@register("reduce_window_min", kind="window")
@register("reduce_window_sum", kind="window", linear="sum")
class Pool(_Pool):
    """Max, min and sum pools."""

    def bind(
        self, primitive: Any, operands: Sequence[jax.Array], params: Mapping[str, Any]
    ) -> list[jax.Array]:
        if primitive.name == "reduce_window_sum":
            return super().bind(primitive, operands, params)
        (x,) = operands
        return [pool(primitive, x, params)]


@register("reduce_window", kind="window")
class GeneralPool(_Pool):
    """A pool with a user's own function of two arguments.

    Outside the array it reads its initial value.
    """

    def fill(self, eqn: Equation) -> Any:
        return eqn.constant(1)

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        if len(eqn.in_avals) != 2:
            raise Mixes(
                "`reduce_window` over several arrays at once is not tiled",
                "reduce one array at a time",
            )
        if eqn.constant(1) is None:
            raise Mixes(
                "`reduce_window` starts from a value that is computed at run time",
                "start from a constant",
            )
        return super().axes(eqn)
