"""Changes of a part of an array: `x.at[...].set(...)`, `add`, `multiply`, and updates of slices.

A part that spans the tiled dimensions (a channel, a batch element) is changed in every tile. One
that lies at a constant place along a tiled dimension (a border) is changed in the tiles that meet
it. Any other change runs once, on whole arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    agree,
    merge,
    register,
    sole,
    untiled,
)
from .shape import coordinates

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda x, new: new,
    "scatter-add": operator.add,
    "scatter-sub": operator.sub,
    "scatter-mul": operator.mul,
    "dynamic_update_slice": lambda x, new: new,
}
_REASON = "it changes positions along a tiled axis that are not one block at a constant place"


class _Update(Rule):
    """Of an array, by an array of `updates`, at places that other operands say."""

    may_run_whole = True
    updates: int
    """Which operand holds the new values."""

    def place(self, eqn: Equation) -> dict[int, int] | None:
        """Where the updates begin along each dimension, if that is constant; 0 where it is not
        said.
        """
        raise NotImplementedError

    def dims(self, eqn: Equation) -> dict[int, int]:
        """Dimension of the updates -> dimension of the array that it runs along."""
        raise NotImplementedError

    def labels(self, eqn: Equation) -> list[Axes] | None:
        """The axes of all operands, if the updates span what is tiled; None: they do not."""
        raise NotImplementedError

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        found = self.labels(eqn) or self._at_a_place(eqn)
        if found is None and eqn.inside:
            raise Mixes(_REASON)
        found = list(eqn.in_axes) if found is None else found
        return found, [found[0]]

    def runs_whole(self, eqn: Equation) -> str | None:
        return None if self.labels(eqn) or self._at_a_place(eqn) else _REASON

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window = sole(windows)
        if self.labels(eqn):
            return self.spanning(eqn, window)
        starts, sizes = self.place(eqn), self._sizes(eqn)
        assert starts is not None
        inside = {d: (starts[d], sizes[d]) for d in starts if sizes[d] != _shape(eqn)[d]}
        moved = {
            u: window[d].moved(window[d].starts - starts[d], window[d].size)
            for u, d in self.dims(eqn).items()
            if d in window and sizes[d] > 1
        }
        needs: list[Need | None] = [None] * len(eqn.in_avals)
        needs[0], needs[self.updates] = Need(window), Need(moved)
        positions = [window[d] for d in inside if d in window]
        combine = _COMBINE[eqn.primitive.name]

        def evaluate(scalars: Sequence[jax.Array], *operands: jax.Array) -> list[jax.Array]:
            x, begin = operands[0], iter(scalars)
            new = self._aligned(eqn, operands[self.updates], inside, window)
            mask: Any = True
            for d, (start, size) in inside.items():
                position = coordinates(next(begin) if d in window else 0, x.shape, d) - start
                mask &= (position >= 0) & (position < size)
            return [jnp.where(mask, combine(x, new), x)]

        return Step(needs, evaluate, positions=positions)

    def spanning(self, eqn: Equation, window: Windows) -> Step:
        """A step of an update that spans the tiled dimensions."""
        raise NotImplementedError

    def _sizes(self, eqn: Equation) -> list[int]:
        """Per dimension of the array, how many positions the updates cover."""
        found = [1] * len(_shape(eqn))
        for u, d in self.dims(eqn).items():
            found[d] = eqn.in_avals[self.updates].shape[u]
        return found

    def _at_a_place(self, eqn: Equation) -> list[Axes] | None:
        starts, sizes = self.place(eqn), self._sizes(eqn)
        if starts is None or eqn.primitive.name not in _COMBINE:
            return None
        if any(not 0 <= s <= _shape(eqn)[d] - sizes[d] for d, s in starts.items()):
            return None
        dims, given = self.dims(eqn), eqn.in_axes[self.updates]
        axes = list(eqn.in_axes[0])
        for u, d in dims.items():
            if sizes[d] > 1:
                (axes[d],) = merge(eqn.primitive, [(axes[d],), (given[u],)])
        found = [untiled(a) for a in eqn.in_avals]
        found[0] = merge(eqn.primitive, [tuple(axes)])
        found[self.updates] = tuple(
            axes[dims[u]] if sizes[dims[u]] > 1 else None for u in range(len(given))
        )
        return found

    def _aligned(
        self,
        eqn: Equation,
        new: jax.Array,
        inside: Mapping[int, tuple[int, int]],
        window: Windows,
    ) -> jax.Array:
        """The new values, at their place in the array."""
        kept = self.dims(eqn).values()
        new = lax.expand_dims(new, [d for d in range(len(_shape(eqn))) if d not in kept])
        padding = [(0, 0, 0)] * new.ndim
        for d, (start, size) in inside.items():
            if size > 1 and d not in window:
                padding[d] = (start, _shape(eqn)[d] - start - size, 0)
        return lax.pad(new, jnp.zeros((), new.dtype), padding)


@register("dynamic_update_slice", kind="movement")
class DynamicUpdateSlice(_Update):
    updates = 1

    def place(self, eqn: Equation) -> dict[int, int] | None:
        starts = [eqn.constant(2 + d) for d in range(len(_shape(eqn)))]
        room = [n - m for n, m in zip(_shape(eqn), eqn.in_avals[1].shape, strict=True)]
        found = {
            d: int(np.clip(s, 0, r))
            for d, (s, r) in enumerate(zip(starts, room, strict=True))
            if s is not None
        }
        return found if len(found) == len(starts) else None

    def dims(self, eqn: Equation) -> dict[int, int]:
        return {d: d for d in range(len(_shape(eqn)))}

    def labels(self, eqn: Equation) -> list[Axes] | None:
        axes = merge(eqn.primitive, eqn.in_axes[:2])
        pairs = zip(axes, _shape(eqn), eqn.in_avals[1].shape, strict=True)
        if any(a is not None and n != m for a, n, m in pairs):
            return None
        return [axes, axes, *map(untiled, eqn.in_avals[2:])]

    def spanning(self, eqn: Equation, window: Windows) -> Step:
        def evaluate(
            scalars: Sequence[jax.Array], x: jax.Array, update: jax.Array, *starts: jax.Array
        ) -> list[jax.Array]:
            local = [jnp.zeros_like(s) if d in window else s for d, s in enumerate(starts)]
            return [lax.dynamic_update_slice(x, update, local)]

        return Step([Need(window), Need(window), *[None] * (len(eqn.in_avals) - 2)], evaluate)


@register(
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    kind="movement",
)
class Scatter(_Update):
    updates = 2

    def place(self, eqn: Equation) -> dict[int, int] | None:
        numbers, index = eqn.params["dimension_numbers"], eqn.constant(1)
        calls = eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None
        if index is None or index.ndim != 1 or calls:
            return None
        starts = dict.fromkeys(range(len(_shape(eqn))), 0)
        found = zip(map(int, numbers.scatter_dims_to_operand_dims), index.tolist(), strict=True)
        return starts | dict(found)

    def dims(self, eqn: Equation) -> dict[int, int]:
        numbers = eqn.params["dimension_numbers"]
        dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        kept = [d for d in range(len(_shape(eqn))) if d not in dropped]
        return dict(zip(map(int, numbers.update_window_dims), kept, strict=True))

    def labels(self, eqn: Equation) -> list[Axes] | None:
        numbers, dims = eqn.params["dimension_numbers"], self.dims(eqn)
        operand, indices, updates = map(list, eqn.in_axes)
        sizes, moved = self._sizes(eqn), {*map(int, numbers.scatter_dims_to_operand_dims)}
        for u, d in dims.items():
            axis = agree(eqn.primitive, (operand, d), (updates, u))
            if axis is not None and (sizes[d] != _shape(eqn)[d] or d in moved):
                return None
        of_indices = [u for u in range(len(updates)) if u not in dims]
        batched = dict(
            zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
        )
        for i, u in enumerate(of_indices):
            if i in batched:
                agree(eqn.primitive, (operand, batched[i]), (indices, i), (updates, u))
            elif indices[i] is not None or updates[u] is not None:
                return None
        taken = {*dims.values(), *batched.values()}
        lost = any(a is not None and d not in taken for d, a in enumerate(operand))
        if lost or (indices and indices[-1] is not None):
            return None
        return [tuple(operand), tuple(indices), tuple(updates)]

    def spanning(self, eqn: Equation, window: Windows) -> Step:
        by_axis = {w.axis: w for w in window.values()}
        rest = [{d: by_axis[a] for d, a in enumerate(x) if a is not None} for x in eqn.in_axes[1:]]
        return Step([Need(window), *map(Need, rest)], lambda scalars, *given: eqn.bind(*given))


def _shape(eqn: Equation) -> tuple[int, ...]:
    return eqn.in_avals[0].shape
