"""The catalogue: named policies, from the fastest to the smallest.

Each function below is called with what comes after the colon of a name (`k` of `every:k`), and
returns a function from the outline of the whole function to the choices: which results are stored,
and on which grid everything is computed. Unless the caller gives tiles, what lies between stored
results is recomputed whole, as by `jax.checkpoint`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from typing import Final

from jaxtile._amounts import parse_bytes
from jaxtile._graph.operations import Operation
from jaxtile._plan.planner import Budget
from jaxtile.policy import Choice, Choices, Decide, Outline, Place, register

from ._lower_sets import (
    ForwardGraph,
    ancestor_sets,
    cheapest_within,
    lower_sets,
    smallest_budget,
    square_root,
)

WHOLE: Final = "whole"
_MOST_LOWER_SETS = 2000


def storing(stored: Collection[str], place: Place = "device") -> Choices:
    """Store these results, recompute everything else whole."""
    return {**{name: Choice(WHOLE, place) for name in stored}, ...: Choice(WHOLE)}


@register("store_all", "", "plain JAX: nothing is recomputed")
def _store_all(argument: str) -> Decide:
    return lambda outline: {...: Choice(None)}


def chainer(op: Operation) -> list[str]:
    """What Chainer's gradient reads: of a convolution its input, of a ReLU its output, of a max
    pool both, of a loss its inputs.

    Dropout keeps a mask of its own, which is not a tensor of the graph; copies keep nothing.
    """
    inputs, output = [t.name for t in op.inputs], [op.output.name]
    return {
        "convolution": inputs,
        "contraction": inputs,
        "elementwise": output,
        "max_pool": inputs + output,
        "reduction": inputs,
    }.get(op.kind, [])


@register("retained", "", "what Chainer keeps for its backward pass: elementwise work is redone")
def _retained(argument: str) -> Decide:
    def decide(outline: Outline) -> Choices:
        tiled = {p.name for p in outline.parts if p.tiled}
        kept = [name for operation in outline.operations.operations for name in chainer(operation)]
        return storing([name for name in kept if name in tiled])

    return decide


@register("store_convs", "", "results of convolutions and contractions; all between is recomputed")
def _store_convs(argument: str) -> Decide:
    return lambda outline: storing(_worked(outline))


@register("every", "k", "every k-th result")
def _every(argument: str) -> Decide:
    k = _positive(argument, "every:k")
    return lambda outline: storing([p.name for p in outline.parts if p.tiled][k - 1 :: k])


@register("sqrt", "", "Chen et al.: about sqrt(n) stretches of equal bytes; one more forward pass")
def _sqrt(argument: str) -> Decide:
    def decide(outline: Outline) -> Choices:
        graph = _tiled_graph(outline)
        return storing(square_root(graph).stored(graph))

    return decide


@register("lower_sets", "BYTES", "Kusumoto et al.: least recomputation within BYTES of activations")
def _lower_sets(argument: str) -> Decide:
    budget = parse_bytes(argument)

    def decide(outline: Outline) -> Choices:
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
def _names(argument: str) -> Decide:
    return lambda outline: storing(_known(outline, argument))


@register("offload", "a,b,...", "the results with these names, kept in host memory meanwhile")
def _offload(argument: str) -> Decide:
    return lambda outline: storing(_known(outline, argument), "host")


@register("budget", "BYTES", "the planner: the fastest schedule whose compiled step fits BYTES")
def _budget(argument: str) -> Decide:
    return Budget(argument).choose


@register("recompute_all", "", "stores nothing and recomputes everything at once")
def _recompute_all(argument: str) -> Decide:
    return lambda outline: storing([])


@register("passing", "HxW", "computes in HxW tiles; results of convolutions are whole on the way")
def _passing(argument: str) -> Decide:
    choice_for = _in_tiles("passing", argument)

    def decide(outline: Outline) -> Choices:
        choice = choice_for(outline)
        return {**dict.fromkeys(_worked(outline), choice._replace(place="passing")), ...: choice}

    return decide


@register("tiled", "HxW", "stores nothing and computes in HxW tiles: the least memory")
def _tiled(argument: str) -> Decide:
    choice_for = _in_tiles("tiled", argument)
    return lambda outline: {...: choice_for(outline)}


def _in_tiles(policy: str, argument: str) -> Callable[[Outline], Choice]:
    grid = tuple(_positive(n, f"{policy}:HxW") for n in argument.lower().split("x"))

    def choice(outline: Outline) -> Choice:
        if len(grid) != outline.rank:
            raise ValueError(
                f"the policy '{policy}:{argument}' has {len(grid)} numbers, but `in_axes` has "
                f"{outline.rank} tiled axes"
            )
        longest = [max(n) for n in zip(*(p.lengths for p in outline.parts if p.tiled), strict=True)]
        if any(n > 1 and tiles > n for tiles, n in zip(grid, longest, strict=False)):
            size = " x ".join(map(str, longest))
            raise ValueError(
                f"the policy '{policy}:{argument}' has more tiles than there are positions, {size}:"
                " its numbers are tiles along each axis, not pixels"
            )
        return Choice(grid)

    return choice


def _worked(outline: Outline) -> list[str]:
    """The results of convolutions and contractions."""
    work = ("convolution", "contraction")
    return [p.name for p in outline.parts if p.tiled and p.operation.kind in work]


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
    """The graph of the tiled results; the others are small. What awaits a reduction reads what that
    reduces: a norm reads all that its statistics are sums of.

    One more value, which reads all that nothing else does, stands for the end of the function. So a
    result that only the end's reductions read belongs to a boundary.
    """
    parts = outline.parts
    tiled = {k: i for i, k in enumerate(k for k, p in enumerate(parts) if p.tiled)}
    inputs = []
    for k in tiled:
        read = {i for j in (k, *parts[k].awaits) for i in parts[j].inputs}
        inputs.append(sum(1 << tiled[i] for i in read if i in tiled))
    last = (1 << len(tiled)) - 1
    for read_by_one in inputs:
        last &= ~read_by_one
    return ForwardGraph(
        (*(parts[k].name for k in tiled), "end"),
        (*inputs, last),
        (*(parts[k].bytes for k in tiled), 0),
        (*(parts[k].operation.flops for k in tiled), 0),
    )
