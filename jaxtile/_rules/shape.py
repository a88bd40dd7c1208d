"""Primitives that move values around.

Broadcasts, transposes, slices, pads, concatenations, reversals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import Mixes
from .registry import (
    Axes,
    Equation,
    Need,
    Rule,
    Step,
    Windows,
    forbid,
    joint,
    merge,
    others,
    register,
    sole,
    tiled,
    untiled,
)


def coordinates(start: jax.Array | int, shape: Sequence[int], dim: int) -> jax.Array:
    """The position along `dim` of every element of a window that begins at `start`."""
    return start + lax.broadcasted_iota(np.int32, tuple(shape), dim)


def local_shape(shape: Sequence[int], windows: Windows) -> tuple[int, ...]:
    """The shape of a part of an array: in dimensions that have a window, the window's size."""
    return tuple(windows[d].size if d in windows else n for d, n in enumerate(shape))


class _Moved(Rule):
    """Each dimension of the result is one of the operands', or has one position for all."""

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        found = [list(axes) for axes in eqn.in_axes]
        for o, d in self.places(eqn).items():
            for operand in found:
                operand[d] = out_axes[o]
        return list(map(tuple, found))


@register("broadcast_in_dim", kind="movement", linear="sum")
class Broadcast(_Moved):
    def places(self, eqn: Equation) -> dict[int, int]:
        """A repeated dimension has only one position: it gives the output no axis."""
        sizes, shape = eqn.in_avals[0].shape, eqn.params["shape"]
        dims = enumerate(eqn.params["broadcast_dimensions"])
        return {o: i for i, o in dims if sizes[i] == shape[o]}

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        dims, shape = (
            eqn.params["broadcast_dimensions"],
            local_shape(eqn.params["shape"], sole(windows)),
        )
        return dataclasses.replace(
            super().step(eqn, windows),
            evaluate=lambda scalars, x: [lax.broadcast_in_dim(x, shape, dims)],
        )


@register("transpose", kind="movement", linear="sum")
class Transpose(_Moved):
    def places(self, eqn: Equation) -> dict[int, int]:
        return dict(enumerate(eqn.params["permutation"]))


@register("squeeze", kind="movement", linear="sum", view=True)
class Squeeze(_Moved):
    """Dropping a tiled dimension of size 1 is allowed: every tile then reads that one position."""

    def places(self, eqn: Equation) -> dict[int, int]:
        return dict(enumerate(others(eqn, eqn.params["dimensions"])))


@register("slice", kind="movement", linear="sum")
class Slice(Rule):
    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
        strides = list(eqn.params["strides"] or (1,) * len(starts))
        need = {}
        for d, window in sole(windows).items():
            size = (window.size - 1) * strides[d] + 1
            need[d] = window.moved(window.starts * strides[d] + starts[d], size)
            starts[d], limits[d] = 0, size
        return Step([Need(need)], lambda scalars, x: [lax.slice(x, starts, limits, strides)])


@register("split", kind="movement", linear="sum")
class Split(Rule):
    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        dim, sizes = eqn.params["axis"], eqn.params["sizes"]
        if eqn.in_axes[0][dim] is None:
            return super().step(eqn, windows)
        # What is read for all parts together holds each of them: the caller crops a part out of it.
        begins = np.cumsum([0, *sizes[:-1]])
        shifted = [
            w and {**w, dim: w[dim].moved(w[dim].starts + begin, w[dim].size)}
            for w, begin in zip(windows, begins, strict=True)
        ]
        read = joint(eqn, shifted, eqn.in_avals[0].shape)
        along = read[dim]
        produced = [
            {**read, dim: along.moved(along.starts - begin, along.size)} for begin in begins
        ]
        return Step([Need(read)], lambda scalars, x: [x] * len(sizes), produced=produced)


@register("dynamic_slice", kind="movement", linear="first")
class DynamicSlice(Rule):
    """A slice whose start is known only at run time, and that does not take the tiled dimensions
    whole, runs once: a tile would not know what to read.
    """

    may_run_whole = True

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        if eqn.inside and (reason := self.runs_whole(eqn)) is not None:
            raise Mixes(reason)
        return super().axes(eqn)

    def runs_whole(self, eqn: Equation) -> str | None:
        for d, axis in enumerate(eqn.in_axes[0]):
            whole = eqn.params["slice_sizes"][d] == eqn.in_avals[0].shape[d]
            if axis is not None and not whole and eqn.constant(1 + d) is None:
                return f"where it starts along tiled dimension {d} is computed at run time"
        return None

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        sizes = local_shape(eqn.params["slice_sizes"], sole(windows))
        need = {}
        for d, window in sole(windows).items():
            room = eqn.in_avals[0].shape[d] - eqn.params["slice_sizes"][d]
            start = eqn.constant(1 + d) if room else np.zeros((), np.int64)
            assert start is not None, "`axes` refuses this"
            need[d] = window.moved(window.starts + int(np.clip(start, 0, room)), window.size)

        def evaluate(
            scalars: Sequence[jax.Array], x: jax.Array, *starts: jax.Array
        ) -> list[jax.Array]:
            local = [jnp.zeros_like(s) if d in need else s for d, s in enumerate(starts)]
            return [lax.dynamic_slice(x, local, sizes)]

        return Step([Need(need), *[None] * (len(eqn.in_avals) - 1)], evaluate)


@register("rev", kind="movement", linear="sum")
class Reverse(Rule):
    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        length = eqn.in_avals[0].shape
        need = {
            d: w.moved(length[d] - w.stops, w.size) if d in eqn.params["dimensions"] else w
            for d, w in sole(windows).items()
        }
        return Step([Need(need)], lambda scalars, x: eqn.bind(x))


@register("bitcast_convert_type", kind="movement")
class Bitcast(Rule):
    """The same bits in another type: a narrower one adds a last dimension, a wider one takes it."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        before, after = len(eqn.in_avals[0].shape), len(eqn.out_avals[0].shape)
        if after < before:
            forbid(eqn, 0, [before - 1], "makes one number of its last dimension")
        return eqn.in_axes, [(*eqn.in_axes[0], None)[:after]]

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        before = len(eqn.in_avals[0].shape)
        return None if tiled(out_axes[before:]) else [(*out_axes, None)[:before]]


@register("concatenate", kind="movement", linear="sum")
class Concatenate(Rule):
    """Operands without elements stay untiled, and take no part."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        axes = merge(eqn.primitive, eqn.in_axes)
        parts = self._parts(eqn)
        in_axes = [axes if i in parts else untiled(a) for i, a in enumerate(eqn.in_avals)]
        return in_axes, [axes]

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        return [out_axes] * len(eqn.in_axes) if out_axes[eqn.params["dimension"]] is None else None

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window, dim, parts = sole(windows), eqn.params["dimension"], self._parts(eqn)
        ends = np.cumsum([eqn.in_avals[i].shape[dim] for i in parts])
        needs: list[Need | None] = [None] * len(eqn.in_avals)
        for i, begin in zip(parts, [0, *ends[:-1]], strict=True):
            along = {d: w.moved(w.starts - begin, w.size) for d, w in window.items() if d == dim}
            needs[i] = Need({**window, **along})

        def evaluate(scalars: Sequence[jax.Array], *operands: jax.Array) -> list[jax.Array]:
            found = [operands[i] for i in parts]
            if dim not in window:
                return eqn.bind(*found)
            # Every part was read on the whole window, zeros where it has nothing; each position
            # takes its own part.
            position = coordinates(scalars[0], found[0].shape, dim)
            out = found[-1]
            for part, end in zip(found[-2::-1], ends[-2::-1], strict=True):
                out = jnp.where(position < int(end), part, out)
            return [out]

        return Step(needs, evaluate, positions=[window[dim]] if dim in window else [])

    @staticmethod
    def _parts(eqn: Equation) -> list[int]:
        dim = eqn.params["dimension"]
        return [i for i, aval in enumerate(eqn.in_avals) if aval.shape[dim]]


@register("stack", kind="movement", linear="sum")
class Stack(_Moved):
    """A new dimension, never tiled, beside those of the operands."""

    def places(self, eqn: Equation) -> dict[int, int]:
        return {o: d for d, o in enumerate(others(eqn, [eqn.params["axis"]], of_result=True))}

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        new = out_axes[eqn.params["axis"]]
        return super().promote(eqn, out_axes) if new is None else None


@register("unstack", kind="movement", linear="sum")
class Unstack(Rule):
    def places(self, eqn: Equation) -> dict[int, int]:
        return dict(enumerate(others(eqn, [eqn.params["axis"]])))

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        forbid(eqn, 0, [eqn.params["axis"]], "takes a dimension apart")
        return super().axes(eqn)


@register("tile", kind="movement", linear="sum")
class Repeat(Rule):
    """`lax.tile`: the array repeated as a whole, which along a tiled axis would need it all."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        forbid(eqn, 0, [d for d, n in enumerate(eqn.params["reps"]) if n > 1], "repeats the array")
        return super().axes(eqn)


@register("pad", kind="movement", linear="sum")
class Pad(Rule):
    """Padding before, after (both may be negative: a crop) and between elements."""

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        return [out_axes, ()]

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window, value, padding = sole(windows), eqn.constant(1), list(eqn.params["padding_config"])
        need: Windows = {}
        produced: Windows = {}
        masked: dict[int, tuple[int, int, int]] = {}
        for d, w in window.items():
            before, _, between = padding[d]
            pitch = between + 1
            misaligned = (w.starts - before) % pitch
            first = (w.starts - misaligned - before) // pitch
            size = w.size + int(misaligned.max())
            count = -(-size // pitch)
            need[d] = w.moved(first, count)
            produced[d] = w.moved(w.starts - misaligned, size)
            padding[d] = (0, size - ((count - 1) * pitch + 1), between)
            masked[d] = (before, pitch, eqn.in_avals[0].shape[d])
        if value is not None:
            fill = value[()]
            return Step(
                [Need(need, fill), None],
                lambda scalars, x, v: [lax.pad(x, v, padding)],
                produced=[produced],
            )

        def evaluate(scalars: Sequence[jax.Array], x: jax.Array, v: jax.Array) -> list[jax.Array]:
            inside: jax.Array | bool = True
            out = lax.pad(x, v, padding)
            for (d, (before, pitch, length)), start in zip(masked.items(), scalars, strict=True):
                position = coordinates(start, out.shape, d) - before
                inside &= (position >= 0) & (position < (length - 1) * pitch + 1)
            return [jnp.where(inside, out, v)]

        return Step(
            [Need(need), None], evaluate, positions=list(produced.values()), produced=[produced]
        )
