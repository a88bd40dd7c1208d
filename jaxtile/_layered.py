"""The schedule of a function whose scans over rematerialised layers stay scans.

The body of such a scan is a tiled function by itself, with a schedule of its own: see
`_graph/layers.py`. What the policies of the function and of its `jax.checkpoint`s save inside the
body is stored for every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._derivatives.guard import once
from ._graph.build import build_layers
from ._graph.inline import bodies, plain_call
from ._graph.nodes import Policy, place
from ._graph.trace import Traced
from ._regions.grid import Tiles
from ._regions.regions import Schedule, schedule_of
from ._rules import Axes
from ._rules.derivative import only_backwards
from ._run.execute import execute


@dataclasses.dataclass(frozen=True)
class LayerBody:
    """What one layer does: a function of flat arguments."""

    schedule: Schedule

    def __call__(self, *flat: jax.Array) -> list[jax.Array]:
        return execute(self.schedule, flat)

    def outside(self, flat: Sequence[jax.Array]) -> list[jax.Array]:
        rules = any(node.is_call for node in self.schedule.graph.nodes)
        if not rules or jax.__version_info__ >= (0, 12):
            return list(flat)
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in flat]
        return [once(only_backwards(x)) if f else x for x, f in zip(flat, floats, strict=True)]

    @property
    def out_axes(self) -> list[Axes]:
        return [v.axes for v in self.schedule.graph.outputs]

    @property
    def keeps(self) -> bool:
        return any(node.layers for node in self.schedule.graph.nodes)


def layered(
    traced: Traced, policy: Policy | None, tiles: Tiles, skips: bool, is_layer: bool = False
) -> Schedule:
    """The schedule of a traced function, and those of the bodies of such scans in it."""
    inside: set[str] = set()

    def in_tiles(
        body: Any, in_axes: Sequence[Axes], policies: Sequence[Policy]
    ) -> LayerBody | None:
        inside.update(named := {*_names(body)})
        names = [f"layer's argument {i}" for i in range(len(in_axes))]
        layer = dataclasses.replace(
            traced, jaxpr=body.jaxpr, consts=body.consts, names=names, in_axes=list(in_axes)
        )
        either = _either([*([] if policy is None else [policy]), *policies])
        grids = _of_layer(tiles, named)
        found = LayerBody(layered(layer, either, grids, skips, is_layer=True))
        # Nothing is sent to the host from within a scan.
        return None if "host" in found.schedule.stored.values() else found

    graph = dataclasses.replace(build_layers(traced, policy, in_tiles), is_layer=is_layer)
    if isinstance(tiles, Mapping):
        inside -= {v.name for v in graph.stored}
        tiles = {key: grid for key, grid in tiles.items() if key not in inside}
    return schedule_of(graph, graph.stored, tiles, traced.rank, skips=skips)


def _either(policies: Sequence[Policy]) -> Policy:
    """A policy that saves what one of these does."""

    def policy(*equation: Any, **params: Any) -> Any:
        decisions = [each(*equation, **params) for each in policies]
        return next((d for d in decisions if place(d) is not None), False)

    return policy


def _of_layer(tiles: Tiles, named: Collection[str]) -> Tiles:
    """The grids of a layer with these names in it; recomputed, as its author wants it."""
    if isinstance(tiles, Mapping):
        own = {key: grid for key, grid in tiles.items() if key is ... or key in named}
        return {key: "whole" if grid is None else grid for key, grid in own.items()}
    return "whole" if tiles is None else tiles


def _names(jaxpr: Any) -> Iterator[str]:
    """What is named in a jaxpr."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        called = plain_call(eqn)
        for inner in bodies(eqn) if called is None else [called]:
            yield from _names(inner)
