"""`gather`.

Label look-ups (cross-entropy), embeddings, and fixed indices along a tiled axis (nearest resizing).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._errors import Mixes
from .registry import Axes, Equation, Need, Rule, Step, Windows, agree, merge, register, sole
from .shape import local_shape


@register("gather", kind="movement", linear="first")
class Gather(Rule):
    """Tiled dimensions may be batched, taken whole, or (one of them) indexed by constants."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        dims = eqn.params["dimension_numbers"]
        operand, indices = (list(axes) for axes in eqn.in_axes)
        if indices and indices[-1] is not None:
            raise Mixes("`gather` reads its index vectors along a tiled dimension")
        for o, i in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            agree(eqn.primitive, (operand, o), (indices, i))
        fixed = _fixed(eqn)
        out: list[int | None] = [None] * len(eqn.out_avals[0].shape)
        for o, d in _window_dims(eqn).items():
            out[o] = operand[d]
        for o, i in _batch_dims(eqn).items():
            out[o] = indices[i]
        for d, axis in enumerate(operand):
            if axis is None or d in dims.operand_batching_dims or d == fixed:
                continue
            whole = eqn.params["slice_sizes"][d] == eqn.in_avals[0].shape[d]
            if not whole or d in dims.collapsed_slice_dims:
                raise Mixes(
                    f"`gather` indexes tiled dimension {d} other than with one vector of constants",
                    "name and save what it reads: that is read whole, and its indices may be tiled",
                )
        if fixed is not None:
            out[next(iter(_batch_dims(eqn)))] = operand[fixed]
        return [tuple(operand), tuple(indices)], [merge(eqn.primitive, [tuple(out)])]

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window, dims = sole(windows), eqn.params["dimension_numbers"]
        fixed, constants = _fixed(eqn), eqn.constant(1)
        operand = {d: window[o] for o, d in _window_dims(eqn).items() if o in window}
        indices = {i: window[o] for o, i in _batch_dims(eqn).items() if o in window}
        for o, i in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            if i in indices:
                operand[o] = indices[i]
        if fixed is None or constants is None:
            sizes = local_shape(
                eqn.params["slice_sizes"],
                {d: w for d, w in operand.items() if d in _window_dims(eqn).values()},
            )
            return Step(
                [Need(operand), Need(indices)],
                lambda scalars, x, i: eqn.bind(x, i, slice_sizes=sizes),
            )

        (along,) = _batch_dims(eqn)
        tiles = window[along]
        length = eqn.in_avals[0].shape[fixed]
        index = np.clip(constants[:, 0].astype(np.int64), 0, length - 1)
        wanted = np.stack([index[start : start + tiles.size] for start in tiles.starts])
        lo = wanted.min(axis=1)
        size = int(np.max(wanted.max(axis=1) + 1 - lo))
        lo = np.minimum(lo, length - size)
        operand[fixed] = tiles.moved(lo, size)
        table = (wanted - lo[:, None]).astype(np.int32)[..., None]
        sizes = local_shape(
            eqn.params["slice_sizes"], {d: w for d, w in operand.items() if d != fixed}
        )

        def evaluate(scalars: Sequence[jax.Array], x: jax.Array, _: jax.Array) -> list[jax.Array]:
            local = jnp.asarray(table)[scalars[0]]
            return eqn.bind(
                x, local, slice_sizes=sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
            )

        tile = tiles.moved(np.arange(len(lo)), 1)
        return Step([Need(operand), None], evaluate, positions=[tile])


def _window_dims(eqn: Equation) -> dict[int, int]:
    """Output dimension -> operand dimension, for the dimensions of a slice."""
    dims = eqn.params["dimension_numbers"]
    dropped = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    kept = [d for d in range(len(eqn.in_avals[0].shape)) if d not in dropped]
    return dict(zip(dims.offset_dims, kept, strict=True))


def _batch_dims(eqn: Equation) -> dict[int, int]:
    """Output dimension -> dimension of the indices."""
    rest = [
        o
        for o in range(len(eqn.out_avals[0].shape))
        if o not in eqn.params["dimension_numbers"].offset_dims
    ]
    return {o: i for i, o in enumerate(rest)}


def _fixed(eqn: Equation) -> int | None:
    """The tiled dimension that is indexed by one vector of constants, if there is one."""
    dims = eqn.params["dimension_numbers"]
    if len(dims.start_index_map) != 1 or len(eqn.in_avals[1].shape) != 2:
        return None
    (d,) = dims.start_index_map
    index, length = eqn.constant(1), eqn.in_avals[0].shape[d]
    if eqn.in_axes[0][d] is None or d not in dims.collapsed_slice_dims or index is None:
        return None
    outside = (index < 0) | (index >= length)
    if eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP and outside.any():
        raise Mixes(f"`gather` along tiled dimension {d} reads outside the array")
    return d
