"""`dot_general`.

1x1 convolutions, dense layers per pixel, locally connected layers, banded constants (resizing), and
sums over positions (a dense layer on a whole map, a Gram matrix), which are reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import Mixes
from .._geometry import Window
from .accumulation import Masks, Reduction, Share, State, masked
from .reductions import Sum, accumulation_dtype
from .registry import Axes, Equation, Need, Rule, Step, Windows, agree, merge, register, sole


@register("dot_general", kind="contraction", linear="product")
class DotGeneral(Rule):
    """Tiled batch and free dimensions pass through. A contraction over tiled dimensions is a
    reduction, unless one operand is a constant matrix.

    `jax.image.resize` contracts each axis with a constant matrix of interpolation weights. Each of
    its columns is zero but for a short band, so an output window needs a window of the input only.
    """

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        _, batch = eqn.params["dimension_numbers"]
        in_axes = [list(axes) for axes in eqn.in_axes]
        for left, right in zip(*batch, strict=True):
            agree(eqn.primitive, (in_axes[0], left), (in_axes[1], right))
        out = [in_axes[0][d] for d in batch[0]]
        free = [_free(eqn, side) for side in (0, 1)]
        banded = _banded(eqn)
        if banded is None:
            contract, _ = eqn.params["dimension_numbers"]
            summed: set[int | None] = set()
            for left, right in zip(*contract, strict=True):
                summed.add(agree(eqn.primitive, (in_axes[0], left), (in_axes[1], right)))
            kept = {in_axes[side][d] for side in (0, 1) for d in (*batch[side], *free[side])}
            if (summed & kept) - {None}:
                raise Mixes(
                    "`dot_general` sums over a tiled axis that its result also carries",
                    "name and save the one whose positions are summed over (the values of "
                    "attention): it is read whole, and the other stays in tiles",
                )
        for side in (0, 1):
            out += [in_axes[side][d] for d in free[side]]
        if banded is not None:
            weights, axis, _ = banded
            out[len(batch[0]) + (len(free[0]) if weights == 1 else 0)] = axis
        return [tuple(a) for a in in_axes], [merge(eqn.primitive, [tuple(out)])]

    def reduction(self, eqn: Equation) -> Reduction | None:
        contract, _ = eqn.params["dimension_numbers"]
        summed = any(eqn.in_axes[0][d] is not None for d in contract[0])
        return Contraction(eqn) if summed and _banded(eqn) is None else None

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window = sole(windows)
        batch = eqn.params["dimension_numbers"][1]
        needs: list[Windows] = [{}, {}]
        out = 0
        for pair in zip(*batch, strict=True):
            for side, d in enumerate(pair):
                if out in window:
                    needs[side][d] = window[out]
            out += 1
        for side in (0, 1):
            for d in _free(eqn, side):
                if out in window:
                    needs[side][d] = window[out]
                out += 1
        banded = _banded(eqn)
        if banded is None:
            return Step([Need(needs[0]), Need(needs[1])], lambda scalars, x, y: eqn.bind(x, y))

        weights, _, matrix = banded
        needs[weights] = {}
        other = 1 - weights
        (contracted,), (along,) = eqn.params["dimension_numbers"][0][other], _free(eqn, weights)
        out = len(batch[0]) + (len(_free(eqn, 0)) if weights == 1 else 0)
        needs[other][contracted], blocks = _band(matrix if along == 1 else matrix.T, window[out])
        tile = window[out].moved(np.arange(len(blocks)), 1)

        def evaluate(scalars: Sequence[jax.Array], *operands: jax.Array) -> list[jax.Array]:
            block = jnp.asarray(blocks)[scalars[0]]
            local = list(operands)
            local[weights] = block if along == 1 else block.T
            return eqn.bind(*local)

        return Step(
            [Need(n) if s == other else None for s, n in enumerate(needs)],
            evaluate,
            positions=[tile],
        )


class Contraction(Sum):
    """A sum over positions of products: each tile's own product, added up."""

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        x, y = (masked(x, mask, 0) for x, mask in zip(operands, owned, strict=True))
        dtype = accumulation_dtype(self.eqn.out_avals[0].dtype)
        return tuple(self.eqn.bind(x, y, preferred_element_type=dtype))

    def pullback(self, share: Share, cotangent: jax.Array) -> Sequence[jax.Array]:
        (value,), pull = jax.vjp(lambda *x: self.partial(x, share.owned), *share.operands)
        return pull((cotangent.astype(value.dtype),))


def _free(eqn: Equation, side: int) -> list[int]:
    """The dimensions of one operand that are neither summed over nor shared with the other."""
    contract, batch = eqn.params["dimension_numbers"]
    return [
        d
        for d in range(len(eqn.in_avals[side].shape))
        if d not in contract[side] and d not in batch[side]
    ]


def _banded(eqn: Equation) -> tuple[int, int, np.ndarray] | None:
    """The operand that is a constant matrix along a tiled axis of the other, that axis, and the
    matrix.
    """
    contract, batch = eqn.params["dimension_numbers"]
    tiled = [
        (side, axis)
        for side in (0, 1)
        for d in contract[side]
        if (axis := eqn.in_axes[side][d]) is not None
    ]
    if len(tiled) != 1:
        return None
    ((side, axis),) = tiled
    weights = 1 - side
    is_matrix = len(eqn.in_avals[weights].shape) == 2 and len(contract[0]) == 1 and not batch[0]
    matrix = eqn.constant(weights) if is_matrix else None
    return None if matrix is None else (weights, axis, matrix)


def _band(matrix: np.ndarray, window: Window) -> tuple[Window, np.ndarray]:
    """Per tile, the rows in which its columns are not all zero, and that block of the matrix."""
    rows = matrix.shape[0]
    used = matrix != 0
    first = np.where(used.any(0), used.argmax(0), rows)
    last = np.where(used.any(0), rows - used[::-1].argmax(0), 0)
    spans = [slice(start, start + window.size) for start in window.starts]
    lo = np.array([min(first[s].min(), rows - 1) for s in spans])
    hi = np.maximum(lo + 1, np.array([last[s].max() for s in spans]))
    size = int((hi - lo).max())
    lo = np.minimum(lo, rows - size)
    blocks = np.stack([matrix[start : start + size, s] for start, s in zip(lo, spans, strict=True)])
    return window.moved(lo, size), blocks
