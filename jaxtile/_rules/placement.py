"""Primitives that change no number: barriers, and where an array is to lie.

A barrier keeps the compiler from moving work across it, and does so in every tile. A sharding
constraint, or a copy to another device or memory, is about the whole array: it runs on that, and
what it is given is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import Mixes
from .elementwise import Elementwise
from .registry import Axes, Equation, register


@register("optimization_barrier", kind="movement", linear="sum", view=True)
class Barrier(Elementwise):
    apart = True


@register("sharding_constraint", "device_put", kind="movement", linear="sum", view=True)
class Placement(Elementwise):
    apart = True

    def alone(self, params: Mapping[str, Any], operand: int) -> dict[str, Any]:
        """Those of `device_put` are lists, with an entry for each operand."""
        several = ("devices", "srcs", "copy_semantics")
        return {k: (v[operand],) if k in several else v for k, v in params.items()}

    def axes(self, eqn: Equation) -> tuple[Sequence[Axes], Sequence[Axes]]:
        if eqn.inside and self.runs_whole(eqn) is not None:
            raise Mixes(f"`{eqn.primitive.name}` says where the whole array is to lie")
        return super().axes(eqn)

    def runs_whole(self, eqn: Equation) -> str | None:
        stays = all(d is None for d in eqn.params.get("devices", [eqn.params.get("sharding")]))
        return None if stays else "it says where the whole array is to lie"
