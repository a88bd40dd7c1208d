"""The schedule of a function whose scans over layers stay scans.

The body of such a scan is a tiled function by itself, with a schedule of its own: see
`_graph/layers.py`. What the policies of the function and of its `jax.checkpoint`s save inside the
body is stored for every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from ._derivatives.scanned import Layer, scanned
from ._graph.build import build_layers
from ._graph.inline import bodies, plain_call
from ._graph.layers import Remat
from ._graph.nodes import Policy, place
from ._graph.trace import Traced
from ._regions.grid import Tiles
from ._regions.regions import Running, Schedule, schedule_of
from ._rules import Axes
from ._run.execute import execute


@dataclasses.dataclass(frozen=True)
class LayerBody:
    """What one layer does: a function of flat arguments."""

    schedule: Schedule

    def __call__(self, *flat: jax.Array) -> list[jax.Array]:
        return execute(self.schedule, flat)

    def scan(
        self, layer: Layer, operands: Sequence[list[Any]], options: Mapping[str, Any], again: bool
    ) -> tuple[list[Any], list[Any]]:
        if jax.__version_info__ < (0, 12) and self.calls:
            return scanned(layer, operands, options, again)
        run = jax.checkpoint(layer, prevent_cse=False) if again else layer
        consts, carry, xs = operands
        return lax.scan(lambda carry, xs: run(consts, carry, xs), carry, xs, **options)

    @property
    def out_axes(self) -> list[Axes]:
        return [v.axes for v in self.schedule.graph.outputs]

    @property
    def calls(self) -> bool:
        return any(node.is_call for node in self.schedule.graph.nodes)

    @property
    def keeps(self) -> bool:
        return any(node.layers for node in self.schedule.graph.nodes)


def layered(
    traced: Traced, policy: Policy | None, tiles: Tiles, skips: bool, is_layer: bool = False
) -> Schedule:
    """The schedule of a traced function, and those of the bodies of such scans in it."""
    inside: set[str] = set()

    def in_tiles(body: Any, in_axes: Sequence[Axes], remat: Remat) -> LayerBody | None:
        named = {*_names(body)}
        names = [f"layer's argument {i}" for i in range(len(in_axes))]
        layer = dataclasses.replace(
            traced, jaxpr=body.jaxpr, consts=body.consts, names=names, in_axes=list(in_axes)
        )
        either = _either([*([] if policy is None else [policy]), *remat.policies])
        grids = _of_layer(tiles, named, remat.complete)
        found = LayerBody(layered(layer, either, grids, skips, is_layer=True))
        inside.update(named)
        # Nothing is sent to the host from within a scan.
        return None if "host" in found.schedule.stored.values() else found

    graph = dataclasses.replace(build_layers(traced, policy, in_tiles), is_layer=is_layer)
    if isinstance(tiles, Mapping):
        inside -= {v.name for v in graph.stored}
        tiles = {key: grid for key, grid in tiles.items() if key not in inside}
    return schedule_of(graph, graph.stored, tiles, traced.rank, Running(skips=skips))


def _either(policies: Sequence[Policy]) -> Policy:
    """A policy that saves what one of these does."""

    def policy(*equation: Any, **params: Any) -> Any:
        decisions = [each(*equation, **params) for each in policies]
        return next((d for d in decisions if place(d) is not None), False)

    return policy


def _of_layer(tiles: Tiles, named: Collection[str], recomputed: bool) -> Tiles:
    """The grids of a layer with these names in it; recomputed, if its author wants it."""

    def own(grid: Any) -> Any:
        return "whole" if grid is None and recomputed else grid

    if isinstance(tiles, Mapping):
        return {key: own(grid) for key, grid in tiles.items() if key is ... or key in named}
    return own(tiles)


def _names(jaxpr: Any) -> Iterator[str]:
    """What is named in a jaxpr."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        called = plain_call(eqn)
        for inner in bodies(eqn) if called is None else [called]:
            yield from _names(inner)
