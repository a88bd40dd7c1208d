"""Named policies, from fastest to smallest: one registry.

`resolve` turns what a config or a flag says (`"sqrt"`, `"names:pool1,pool2"`, `"budget:2GiB"`) into
a policy for `jaxtile.checkpoint`. All of them see the outline of the whole function. Unless the
caller gives tiles, what lies between stored results is recomputed whole, as by `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxtile import Choice, Outline

from ._bytes import parse_bytes
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


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy that sees the whole function; what `jaxtile.checkpoint(policy=...)` takes."""

    name: str
    decide: Callable[[Outline], Mapping[Any, Choice]]

    def choose(self, outline: Outline) -> Mapping[Any, Choice]:
        return self.decide(outline)

    def __repr__(self) -> str:
        return f"policies.resolve({self.name!r})"


class _Entry(NamedTuple):
    name: str
    argument: str
    trade: str
    make: Callable[[str], Callable[[Outline], Mapping[Any, Choice]]]


_ENTRIES: dict[str, _Entry] = {}


def register(name: str, argument: str, trade: str):
    """Enter a policy: `make(argument)` gives what decides about an outline."""

    def decorate(make):
        _ENTRIES[name] = _Entry(name, argument, trade, make)
        return make

    return decorate


def names() -> dict[str, str]:
    """All policies from the fastest to the smallest, each with its trade-off.

    >>> import policies
    >>> list(policies.names())[0], list(policies.names())[-1]
    ('store_all', 'tiled:HxW')
    """
    return {e.name + (f":{e.argument}" if e.argument else ""): e.trade for e in _ENTRIES.values()}


def resolve(text: str) -> Policy:
    """The policy that a string names.

    >>> import policies
    >>> policies.resolve("names:pool1,pool2")
    policies.resolve('names:pool1,pool2')
    """
    if not isinstance(text, str):
        raise ValueError(f"a policy (={text!r}) must be a string, as 'sqrt' or 'budget:2GiB'")
    name, colon, argument = text.strip().partition(":")
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1)
        raise ValueError(
            f"there is no policy {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known are {', '.join(names())}."
        )
    entry = _ENTRIES[name]
    if bool(argument) != bool(entry.argument) or bool(colon) != bool(entry.argument):
        wanted = f"{name}:{entry.argument}" if entry.argument else name
        raise ValueError(f"the policy {text!r} must be written {wanted!r}")
    return Policy(text.strip(), entry.make(argument))


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
    budget = parse_bytes(argument)
    plans: dict[str, Mapping[Any, Choice]] = {}

    def decide(outline: Outline):
        from ._planner import plan_outline

        if not outline.parts:
            return {...: Choice(None)}
        known = outline.fingerprint
        if known not in plans:
            plans[known] = plan_outline(outline, budget).choices
        return plans[known]

    return decide


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
