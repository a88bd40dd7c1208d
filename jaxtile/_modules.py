"""Functions of NNX modules as functions of their states.

jaxtile traces functions of pytrees. A Flax NNX module is not one: it is a graph of Python objects
that the function may change while it runs. So modules are split into pytrees of arrays, their
states, before the call, and put together again inside it; what the function changed is returned,
and written into the caller's modules afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from flax import nnx
from flax.nnx.graphlib import is_graph_node

from ._graph.trace import call_unchanged


class Pure:
    """A function of modules as a function of their states.

    `Pure(fun, args, kwargs)` has the states in its `args` and `kwargs`, at the places of the
    modules, so `in_axes` stays what it was. A module or variable that occurs a second time has an
    empty state there. Calling it with states gives what `fun` returns, and the arrays that it
    changed. To write these into the caller's modules, pass the tag of an `nnx.update_context`,
    which matches the modules inside the call with those outside, and call `update`::

        with nnx.update_context(tag):
            pure = Pure(fun, args, kwargs, tag)
            return pure.update(*pure(*pure.args, **pure.kwargs))
    """

    states: Any
    """The structure of the states after the call."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tag: Hashable | None = None,
    ):
        functools.update_wrapper(self, fun, updated=())
        self.fun, self.tag = fun, tag
        self.given, (self.args, self.kwargs) = _split((args, kwargs), tag)
        self.modules = self.given.nodes((args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, list[jax.Array]]:
        position = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((args, kwargs)))}
        inner_args, inner_kwargs = self.given.merge((args, kwargs), self.tag, inner=True)
        modules = self.given.nodes((inner_args, inner_kwargs))
        before = nnx.graphdef(modules, graph=True)
        out = call_unchanged(self.fun, inner_args, inner_kwargs, is_leaf=is_graph_node)
        restructured = nnx.graphdef(modules, graph=True) != before
        self.returned, (states, pure_out) = _split((modules, out), self.tag)
        leaves, self.states = jax.tree.flatten(states)
        given, given_states = jax.tree.flatten(self.given.nodes((args, kwargs)))
        self.as_they_were = (
            not restructured
            and self.states == given_states
            and all(a is b for a, b in zip(given, leaves, strict=True))
            and len(self.returned.graphdefs) == len(modules)
        )
        # A leaf that is an argument, as nearly all are, need not be a result.
        self.kept = [position.get(id(leaf)) for leaf in leaves]
        changed = [leaf for leaf, i in zip(leaves, self.kept, strict=True) if i is None]
        return pure_out, changed

    def outputs(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)[0]

    def update(self, out: Any, changed: list[jax.Array]) -> Any:
        """Write the changes into the caller's modules. Returns the result, with modules in it."""
        if self.as_they_were:
            return out
        given, new = jax.tree.leaves((self.args, self.kwargs)), iter(changed)
        leaves = [next(new) if i is None else given[i] for i in self.kept]
        states = jax.tree.unflatten(self.states, leaves)
        # NNX refuses to change a variable of an outer trace. Writing each as it is raises that
        # error now, before `merge` has changed some of them.
        for _, x in nnx.iter_graph(self.modules, graph=True):
            if isinstance(x, nnx.Variable):
                x.set_raw_value(x.get_raw_value())
        return self.returned.merge((states, out), self.tag, inner=False)[1]


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a pytree with modules and variables in it was split into a pytree of their states."""

    tree: Any
    graphdefs: dict[int, nnx.GraphDef]
    """By position in the tree, of which modules and variables are leaves."""

    def nodes(self, pytree: Any) -> list[Any]:
        flat = self.tree.flatten_up_to(pytree)
        return [flat[i] for i in self.graphdefs]

    def merge(self, pytree: Any, tag: Hashable | None, inner: bool) -> Any:
        flat = self.tree.flatten_up_to(pytree)
        with nnx.merge_context(tag, inner) as context:
            for i, graphdef in self.graphdefs.items():
                flat[i] = context.merge(graphdef, flat[i])
        return jax.tree.unflatten(self.tree, flat)


def _split(pytree: Any, tag: Hashable | None) -> tuple[_Split, Any]:
    flat, tree = jax.tree.flatten(pytree, is_leaf=is_graph_node)
    graphdefs = {}
    with nnx.split_context(tag) as context:
        for i, x in enumerate(flat):
            if is_graph_node(x):
                graphdefs[i], flat[i] = context.split(x)
    return _Split(tree, graphdefs), jax.tree.unflatten(tree, flat)
