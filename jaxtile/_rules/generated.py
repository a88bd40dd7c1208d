"""Values made from their position alone: coordinates and random bits, generated window by window.

JAX's default generator hashes the key with the element's position in the array ("partitionable"
threefry), so a window of the array can be drawn alone, with the numbers of the untiled function.
Other generators have no such structure: their bits are drawn whole, once, and read by window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import threefry2x32_p

from .registry import Axes, Equation, Need, Rule, Step, Windows, register, register_traits, sole
from .shape import coordinates, local_shape

register_traits("random_wrap", "random_unwrap", kind="movement")


@register("iota", kind="movement")
class Iota(Rule):
    """It has no operands: nobody asks for its axes, only for windows of it."""

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        return []

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window, dim = sole(windows), eqn.params["dimension"]
        shape, dtype = local_shape(eqn.params["shape"], window), eqn.params["dtype"]
        along = [window[dim]] if dim in window else []

        def evaluate(scalars: Sequence[jax.Array]) -> list[jax.Array]:
            position = coordinates(scalars[0] if along else 0, shape, dim)
            return [position.astype(dtype)]

        return Step([], evaluate, positions=along)


@register("random_bits", kind="random")
class RandomBits(Rule):
    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        keys = eqn.in_axes[0]
        return [keys], [(*keys, *(None,) * len(eqn.params["shape"]))]

    def promote(self, eqn: Equation, out_axes: Axes) -> Sequence[Axes] | None:
        threefry = str(eqn.in_avals[0].dtype) == "key<fry>"
        by_position = threefry and jax.threefry_partitionable.value
        if not by_position or math.prod(eqn.params["shape"]) >= 2**32:
            return None
        return [out_axes[: len(eqn.in_avals[0].shape)]]

    def step(self, eqn: Equation, windows: Sequence[Windows | None]) -> Step:
        window, rank, full = sole(windows), len(eqn.in_avals[0].shape), eqn.params["shape"]
        keys = {d: w for d, w in window.items() if d < rank}
        drawn = {d - rank: w for d, w in window.items() if d >= rank}
        shape = local_shape(full, drawn)
        width = eqn.params["bit_width"]

        def evaluate(scalars: Sequence[jax.Array], key: jax.Array) -> list[jax.Array]:
            starts = dict(zip(drawn, scalars, strict=True))
            counter = jnp.zeros(shape, np.uint32)
            for d in range(len(full)):
                pitch = math.prod(full[d + 1 :])
                counter += coordinates(starts.get(d, 0), shape, d).astype(np.uint32) * np.uint32(
                    pitch
                )
            data = jax.random.key_data(key)
            k1, k2 = (
                lax.broadcast_in_dim(data[..., i], (*key.shape, *shape), range(rank))
                for i in (0, 1)
            )
            counter = jnp.broadcast_to(counter, k1.shape)
            high, low = threefry2x32_p.bind(k1, k2, jnp.zeros_like(counter), counter)
            if width == 64:
                return [high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)]
            return [(high ^ low).astype(np.dtype(f"uint{width}"))]

        return Step([Need(keys)], evaluate, positions=list(drawn.values()))
