"""Reductions, scans and sorts.

Along untiled dimensions they are steps; a reduction over a tiled axis is a cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .accumulation import Masks, Reduction, Share, State, masked
from .registry import Axes, Equation, Rule, forbid, others, register


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Sums over tiles of narrow floats are accumulated in float32."""
    return (
        np.dtype(np.float32)
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
        else np.dtype(dtype)
    )


def extreme(dtype: np.dtype, lowest: bool) -> np.ndarray:
    """The lowest value of a type, or the highest: what is outside an array to a maximum, say."""
    if dtype == np.bool_:
        return np.array(not lowest)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max, dtype)
    return np.array(-np.inf if lowest else np.inf, dtype)


@register("reduce_sum", kind="reduction", linear="sum")
@register(
    "reduce_max",
    "reduce_min",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "reduce_prod",
    "argmax",
    "argmin",
    kind="reduction",
)
class Reduce(Rule):
    def places(self, eqn: Equation) -> dict[int, int]:
        return dict(enumerate(others(eqn, eqn.params["axes"])))

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        if eqn.primitive.name not in _REDUCTIONS:
            forbid(eqn, 0, eqn.params["axes"], "cannot be accumulated over tiles")
        return super().axes(eqn)

    def reduction(self, eqn: Equation) -> Reduction | None:
        over_tiled = any(eqn.in_axes[0][d] is not None for d in eqn.params["axes"])
        return _REDUCTIONS[eqn.primitive.name](eqn) if over_tiled else None


@register("reduce", kind="reduction")
class GeneralReduce(Rule):
    """A reduction with a user's own function."""

    def places(self, eqn: Equation) -> dict[int, int]:
        return dict(enumerate(others(eqn, eqn.params["dimensions"])))

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        for i in range(len(eqn.in_avals) // 2):
            forbid(eqn, i, eqn.params["dimensions"], "reduces with a function of the user's own")
        return super().axes(eqn)


@register("cumsum", kind="window", linear="sum")
@register(
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    "sort",
    "top_k",
    "approx_top_k",
    kind="window",
)
class Along(Rule):
    """Works along one dimension, which must not be tiled, and independently in all others."""

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        params = eqn.params
        dim = params.get("dimension", params.get("axis", params.get("reduction_dimension", -1)))
        dim %= len(eqn.in_axes[0])
        for i in range(len(eqn.in_axes)):
            forbid(eqn, i, [dim], f"works along dimension {dim}")
        return super().axes(eqn)


def _spread(x: jax.Array, eqn: Equation, shape: Sequence[int]) -> jax.Array:
    """A result, repeated over the reduced dimensions of one tile."""
    return lax.broadcast_in_dim(x, shape, others(eqn, eqn.params["axes"]))


@dataclasses.dataclass(frozen=True)
class Sum(Reduction):
    eqn: Equation
    adds = True

    def start(self) -> State:
        aval = self.eqn.out_avals[0]
        return (jnp.zeros(aval.shape, accumulation_dtype(aval.dtype)),)

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        (operand,), (mine,) = operands, owned
        dtype = accumulation_dtype(operand.dtype)
        x = masked(operand, mine, 0).astype(dtype)
        return (jnp.sum(x, axis=self.eqn.params["axes"], dtype=dtype),)

    def merge(self, state: State, partial: State) -> State:
        return (state[0] + partial[0],)

    def finish(self, state: State) -> jax.Array:
        return state[0].astype(self.eqn.out_avals[0].dtype)

    def pullback(self, share: Share, cotangent: jax.Array) -> Sequence[jax.Array]:
        (operand,) = share.operands
        return [_spread(cotangent.astype(operand.dtype), self.eqn, operand.shape)]

    def push(self, share: Share, tangents: Sequence[jax.Array]) -> jax.Array:
        """The sum of the tangents, in as wide a type as the sum itself."""

        def total(*operands: jax.Array) -> jax.Array:
            return self.partial(operands, share.owned)[0]

        return jax.jvp(total, tuple(share.operands), tuple(tangents))[1]


@dataclasses.dataclass(frozen=True)
class Extremum(Reduction):
    """Maximum or minimum. Ties share the cotangent equally, as in JAX, so the state counts them."""

    eqn: Equation
    better: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def _worst(self) -> np.ndarray:
        """The value that every other one is better than."""
        return extreme(self.eqn.out_avals[0].dtype, lowest=self.better is jnp.greater)

    def start(self) -> State:
        shape = self.eqn.out_avals[0].shape
        return jnp.full(shape, self._worst), jnp.zeros(shape, np.int32)

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        (operand,), (mine,) = operands, owned
        x = masked(operand, mine, self._worst)
        (best,) = self.eqn.bind(x)
        hit = x == _spread(best, self.eqn, x.shape)
        return best, jnp.sum(masked(hit, mine, False), axis=self.eqn.params["axes"], dtype=np.int32)

    def merge(self, state: State, partial: State) -> State:
        (best, count), (other, other_count) = state, partial
        # A NaN wins over everything, as it does in the untiled reduction.
        wins = self.better(other, best) | (other != other)
        tie = other == best
        total = jnp.where(wins, other_count, jnp.where(tie, count + other_count, count))
        if jnp.issubdtype(best.dtype, jnp.inexact):
            # This adds nothing, and makes a tie's derivative, where JAX takes that of the loop (in
            # a second derivative), the mean over all elements that are tied.
            weight = other_count.astype(best.dtype) / jnp.maximum(total, 1).astype(best.dtype)
            shared = jnp.where(tie & jnp.isfinite(best), weight * (best - other), 0)
            best = best - shared
        return jnp.where(wins, other, best), total

    def finish(self, state: State) -> jax.Array:
        return state[0]

    def remember(self, partial: State) -> State:
        return partial[:1]

    def pullback(self, share: Share, cotangent: jax.Array) -> Sequence[jax.Array]:
        (operand,), (mine,) = share.operands, share.owned
        # The operand was recomputed, perhaps with other roundings than in the forward pass. Which
        # tiles hold the extremum is decided by forward values alone, and where in such a tile by
        # recomputed values alone.
        x = masked(operand, mine, self._worst)
        (here,) = self.eqn.bind(x)
        (best_here,), (best, count) = share.remembered, share.state
        each = jnp.where(best_here == best, cotangent / count.astype(cotangent.dtype), 0)
        hit = masked(x == _spread(here, self.eqn, x.shape), mine, False)
        return [jnp.where(hit, _spread(each, self.eqn, x.shape), 0)]


@dataclasses.dataclass(frozen=True)
class Logical(Reduction):
    """Bitwise and boolean reductions: integers, so nothing to differentiate."""

    eqn: Equation
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    neutral: int

    @property
    def _neutral(self) -> np.ndarray | np.bool_:
        """The value that changes nothing, in the type of the result."""
        dtype = self.eqn.out_avals[0].dtype
        return np.bool_(self.neutral) if dtype == np.bool_ else np.array(self.neutral).astype(dtype)

    def start(self) -> State:
        return (jnp.full(self.eqn.out_avals[0].shape, self._neutral),)

    def partial(self, operands: Sequence[jax.Array], owned: Masks) -> State:
        (operand,), (mine,) = operands, owned
        return tuple(self.eqn.bind(masked(operand, mine, self._neutral)))

    def merge(self, state: State, partial: State) -> State:
        return (self.combine(state[0], partial[0]),)

    def finish(self, state: State) -> jax.Array:
        return state[0]


_REDUCTIONS: dict[str, Callable[[Equation], Reduction]] = {
    "reduce_sum": Sum,
    "reduce_max": lambda eqn: Extremum(eqn, jnp.greater),
    "reduce_min": lambda eqn: Extremum(eqn, jnp.less),
    "reduce_and": lambda eqn: Logical(eqn, jnp.bitwise_and, -1),
    "reduce_or": lambda eqn: Logical(eqn, jnp.bitwise_or, 0),
    "reduce_xor": lambda eqn: Logical(eqn, jnp.bitwise_xor, 0),
}
