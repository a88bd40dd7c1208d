"""A cell of a sweep: a model at a size under a policy."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

import policies

from . import baselines
from .problems import REFERENCES, problem, shape_of


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured. A policy may also be one of the baselines, as `plain`."""

    model: str
    size: int = 0
    """Height and width; 0: the reference's."""
    batch: int = 0
    """Images; 0: the reference's."""
    dtype: str = "float32"
    policy: str = baselines.PLAIN
    tiles: str = ""
    """As `4x4`: the grid of what the policy recomputes; empty: it is recomputed whole."""

    @property
    def name(self) -> str:
        """As `--only` matches it: model, size, policy, tiles, dtype, batch."""
        parts = (self.model, self.size, self.policy, self.tiles, self.dtype, self.batch)
        return ",".join(map(str, parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.model, self.batch or None, self.size or None)

    def grid(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.tiles.split("x"))


def check(cell: Cell) -> None:
    """Raise a `ValueError` that names the field, if the cell cannot be meant. Nothing runs."""
    if cell.model not in REFERENCES:
        raise ValueError(f"there is no model {cell.model!r}; known are {', '.join(REFERENCES)}")
    if cell.policy not in baselines.NAMES:
        policies.resolve(cell.policy)
    if cell.tiles and not all(n.isdigit() and int(n) > 0 for n in cell.tiles.split("x")):
        raise ValueError(f"`tiles` (={cell.tiles!r}) must be numbers, as '4x4'")
    if cell.tiles and cell.policy in baselines.NAMES:
        raise ValueError(
            f"{cell.policy} has no tiles (={cell.tiles!r}); use the policy recompute_all"
        )
    if min(cell.size, cell.batch) < 0:
        raise ValueError(f"`size` (={cell.size}) and `batch` (={cell.batch}) must not be negative")
    wrong = _refusal(cell.model, cell.shape, cell.dtype)
    if wrong:
        raise ValueError(wrong)


@functools.cache
def _refusal(model: str, shape: tuple[int, ...], dtype: str) -> str | None:
    """Why the model does not take such images, or what must be installed for it."""
    try:
        problem(model, shape, jnp.dtype(dtype), abstract=True)
    except (ImportError, TypeError, ValueError) as error:
        return f"{model} at {shape}, {dtype}: {error}"
    return None
