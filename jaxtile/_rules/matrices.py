"""Functions of small matrices: one at each position, as the structure tensor of an image.

JAX's factorisations and solvers take arrays of matrices. Their last dimensions are those of a
matrix, or of a vector, and all others count matrices, each of which is computed by itself. So those
may be tiled, and the last ones may not.

Limit: a system of equations (`jnp.linalg.solve`, `inv`) runs once, on whole arrays: JAX keeps how
to solve it as functions that were traced for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._errors import Mixes
from .registry import Axes, Equation, Need, Rule, Step, Windows, forbid, hulls, merge, register


@register(
    *"cholesky eigh lu qr svd geqrf householder_product triangular_solve tridiagonal_solve".split(),
    kind="window",
)
class Matrices(Rule):
    own = 2
    """Dimensions of the first operand that are those of a matrix."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        count = self._count(eqn)
        for i, aval in enumerate(eqn.in_avals):
            forbid(eqn, i, range(count, len(aval.shape)), "takes whole matrices")
        many = merge(eqn.primitive, [axes[:count] for axes in eqn.in_axes])

        def all_of(avals: Sequence[Any]) -> list[Axes]:
            return [many + (None,) * (len(x.shape) - count) for x in avals]

        return all_of(eqn.in_avals), all_of(eqn.out_avals)

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window = hulls([w for w in windows if w is not None], eqn.out_avals[0].shape)
        return Step(
            [Need(window) for _ in eqn.in_avals],
            lambda scalars, *operands: eqn.bind(*operands),
            produced=[window for _ in eqn.out_avals],
        )

    def _count(self, eqn: Equation) -> int:
        return len(eqn.in_avals[0].shape) - self.own


@register("lu_pivots_to_permutation", kind="window")
class OfVectors(Matrices):
    own = 1


_REASON = "its functions were traced for the whole array"


@register("custom_linear_solve", kind="window")
class Solve(Rule):
    """Its last operands are right sides, which the results are like."""

    may_run_whole = True

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        if eqn.inside:
            raise Mixes(f"`{eqn.primitive.name}` cannot run in tiles: {_REASON}")
        return eqn.in_axes, eqn.in_axes[-len(eqn.out_avals) :]

    def runs_whole(self, eqn: Equation) -> str | None:
        return _REASON
