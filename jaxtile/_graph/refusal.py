"""What is said of an equation that cannot be tiled."""

from __future__ import annotations

from .._errors import Mixes, TilingError, describe, user_line
from .._rules import Equation


def refuse(equation: Equation, refusal: Mixes) -> TilingError:
    """A `TilingError` that says which primitive, where, on what shapes, why, and what to do."""
    shapes = ", ".join(
        describe(a, axes) for a, axes in zip(equation.in_avals, equation.in_axes, strict=True)
    )
    advice = refusal.advice or "apply it outside `jaxtile.checkpoint`"
    return TilingError(
        f"cannot tile `{equation.primitive.name}` at {user_line(*equation.source_infos)}: "
        f"{refusal.reason}. Its operands are {shapes} (* marks a tiled dimension). What to do: "
        f'{advice}; or name its operands (`x = jax.ad_checkpoint.checkpoint_name(x, "x")`, after '
        "`import jax.ad_checkpoint`) and save them (`policy=jax.checkpoint_policies."
        'save_only_these_names("x")`): what is stored whole may be mixed freely.'
    )
