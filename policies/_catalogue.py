"""Named policies, from fastest to smallest: one registry.

`resolve` turns what a config or a flag says (`"sqrt"`, `"names:pool1,pool2"`, `"budget:2GiB"`) into
a policy for `jaxtile.checkpoint`. All of them see the outline of the whole function. Unless the
caller gives tiles, what lies between stored results is recomputed whole, as by `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import difflib
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
    name, _, argument = text.strip().partition(":")
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1)
        raise ValueError(
            f"there is no policy {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f" Known are {', '.join(names())}."
        )
    entry = _ENTRIES[name]
    if bool(argument) != bool(entry.argument):
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
    wanted = [n.strip() for n in argument.split(",") if n.strip()]
    return lambda outline: storing([_known(outline, n) for n in wanted])


@register("offload", "a,b,...", "the results with these names, kept in host memory meanwhile")
def _offload(argument: str):
    wanted = [n.strip() for n in argument.split(",") if n.strip()]
    return lambda outline: storing([_known(outline, n) for n in wanted], offload=True)


@register("budget", "BYTES", "the planner: the fastest schedule whose compiled step fits BYTES")
def _budget(argument: str):
    budget = parse_bytes(argument)

    def decide(outline: Outline):
        from ._plan import plan_outline

        return plan_outline(outline, budget).choices

    return decide


@register("recompute_all", "", "stores nothing and recomputes everything at once")
def _recompute_all(argument: str):
    return lambda outline: storing([])


@register("tiled", "HxW", "stores nothing and computes in HxW tiles: the least memory")
def _tiled(argument: str):
    grid = tuple(_positive(n, "tiled:HxW") for n in argument.lower().split("x"))
    return lambda outline: {...: Choice(grid)}


def _positive(text: str, form: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} in a policy {form!r} must be a positive number")
    return int(text)


def _known(outline: Outline, name: str) -> str:
    found = {p.name: p for p in outline.parts}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=3) or list(found)[:5]
        raise ValueError(f"no result is named {name!r}; there are {', '.join(near)}, ...")
    if not _storable(outline, name):
        raise ValueError(f"the result {name!r} is not tiled, so it is held anyway")
    return name


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
