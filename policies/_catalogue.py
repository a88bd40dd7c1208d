"""The catalogue: named policies, from the fastest to the smallest.

All of them see the outline of the whole function. Unless the caller gives tiles, what lies between
stored results is recomputed whole, as by `jax.checkpoint`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from typing import Any

from jaxtile._amounts import parse_bytes
from jaxtile._plan.planner import Budget
from jaxtile.policy import Choice, Outline, register

from ._frameworks import retained
from ._lower_sets import (
    ForwardGraph,
    ancestor_sets,
    cheapest_within,
    lower_sets,
    smallest_budget,
    square_root,
)

WHOLE = "whole"
_MOST_LOWER_SETS = 2000


def storing(stored: Collection[str], *, offload: bool = False) -> dict[Any, Choice]:
    """Store these results, recompute everything else whole."""
    return {**{name: Choice(WHOLE, offload) for name in stored}, ...: Choice(WHOLE)}


@register("store_all", "", "plain JAX: nothing is recomputed")
def _store_all(argument: str):
    return lambda outline: {...: Choice(None)}


@register("retained", "", "what Chainer keeps for its backward pass: elementwise work is redone")
def _retained(argument: str):
    def decide(outline: Outline):
        return storing([n for n in retained(outline.operations) if _storable(outline, n)])

    return decide


@register("store_convs", "", "results of convolutions and contractions; all between is recomputed")
def _store_convs(argument: str):
    def decide(outline: Outline):
        work = ("convolution", "contraction")
        return storing([p.name for p in outline.parts if p.tiled and p.operation.kind in work])

    return decide


@register("every", "k", "every k-th result")
def _every(argument: str):
    k = _positive(argument, "every:k")
    return lambda outline: storing([p.name for p in outline.parts if p.tiled][k - 1 :: k])


@register("sqrt", "", "Chen et al.: about sqrt(n) stretches of equal bytes; one more forward pass")
def _sqrt(argument: str):
    def decide(outline: Outline):
        graph = _tiled_graph(outline)
        return storing(square_root(graph).stored(graph))

    return decide


@register("lower_sets", "BYTES", "Kusumoto et al.: least recomputation within BYTES of activations")
def _lower_sets(argument: str):
    budget = parse_bytes(argument)

    def decide(outline: Outline):
        graph = _tiled_graph(outline)
        family = lower_sets(graph, _MOST_LOWER_SETS) or ancestor_sets(graph)
        chain = cheapest_within(graph, family, budget)
        if chain is None:
            least = smallest_budget(graph, family).peak
            raise ValueError(
                f"no schedule of lower sets fits into {budget:,} bytes of activations; the "
                f"smallest budget is {least:,} bytes. Tiles need less: 'budget:BYTES'"
            )
        return storing(chain.stored(graph))

    return decide


@register("names", "a,b,...", "the results with these names")
def _names(argument: str):
    return lambda outline: storing(_known(outline, argument))


@register("offload", "a,b,...", "the results with these names, kept in host memory meanwhile")
def _offload(argument: str):
    return lambda outline: storing(_known(outline, argument), offload=True)


@register("budget", "BYTES", "the planner: the fastest schedule whose compiled step fits BYTES")
def _budget(argument: str):
    return Budget(argument).choose


@register("recompute_all", "", "stores nothing and recomputes everything at once")
def _recompute_all(argument: str):
    return lambda outline: storing([])


@register("tiled", "HxW", "stores nothing and computes in HxW tiles: the least memory")
def _tiled(argument: str):
    grid = tuple(_positive(n, "tiled:HxW") for n in argument.lower().split("x"))

    def decide(outline: Outline):
        if len(grid) != outline.rank:
            raise ValueError(
                f"the policy 'tiled:{argument}' has {len(grid)} numbers, but `in_axes` has "
                f"{outline.rank} tiled axes"
            )
        return {...: Choice(grid)}

    return decide


def _positive(text: str, form: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} in a policy {form!r} must be a positive number")
    return int(text)


def _known(outline: Outline, argument: str) -> list[str]:
    """The results with these names; one that returns is numbered: `a`, `a:2`, and so on."""
    found = [p for p in outline.parts if p.tiled]
    stored: list[str] = []
    wanted = [n.strip() for n in argument.split(",") if n.strip()]
    if not wanted:
        raise ValueError(f"{argument!r} names no result: write names, as 'names:pool1,pool2'")
    for name in wanted:
        same = [p.name for p in found if re.fullmatch(re.escape(name) + r"(:\d+)?", p.name)]
        if not same:
            near = difflib.get_close_matches(name, [p.name for p in found], n=3)
            near = near or [p.name for p in found][:5]
            raise ValueError(
                f"no tiled result is named {name!r} (an argument, or what is not tiled, is held "
                f"anyway); there are {len(found)}, among them {', '.join(near)}"
            )
        stored += same
    return stored


def _tiled_graph(outline: Outline) -> ForwardGraph:
    """The graph of the tiled results; the others are small. One more value stands for the end of
    the function, so that what ends in a reduction is read by something.
    """
    parts = outline.parts
    tiled = {k: i for i, k in enumerate(k for k, p in enumerate(parts) if p.tiled)}
    inputs = [sum(1 << tiled[i] for i in parts[k].inputs if i in tiled) for k in tiled]
    read = {tiled[i] for k in tiled for i in parts[k].inputs if i in tiled}
    last = sum(1 << i for i in tiled.values() if i not in read)
    return ForwardGraph(
        (*(parts[k].name for k in tiled), "end"),
        (*inputs, last),
        (*(parts[k].bytes for k in tiled), 0),
        (*(parts[k].operation.flops for k in tiled), 0),
    )


def _storable(outline: Outline, name: str) -> bool:
    return any(p.name == name and p.tiled for p in outline.parts)
