"""Random scans over layers: norms, skips, dropout, branches and rules in the layers; carries that
are no images, arrays for every layer, results of every layer; forwards and backwards, scans of
scans, rematerialised in part, in whole or not at all, first and second order.

A case is plain data, so that a failing one can be read and pasted. `python -m tests.random_layers`
runs as many as it is told to, and counts what became of them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import random
import traceback
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .interpreter import interpret
from .random_rules import derivatives, doubled_back, nudged, surrogate, within
from .support import assert_close, conv, normal

CHANNELS = 2

PARTS = {
    "tanh": lambda x, w, more: jnp.tanh(x),
    "relu": lambda x, w, more: jax.nn.relu(x) * 0.7,
    "jvp": lambda x, w, more: surrogate(x),
    "vjp": lambda x, w, more: doubled_back(x),
    "conv": lambda x, w, more: conv(x, w) * 0.5,
    "dilated": lambda x, w, more: conv(x, w, rhs_dilation=(3,)) * 0.5,
    "norm": lambda x, w, more: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 0.1),
    "instance": lambda x, w, more: x - x.mean(1, keepdims=True),
    "down_and_up": lambda x, w, more: jnp.repeat(conv(x, w, stride=2), 2, 1)[:, : x.shape[1]],
    "dropout": lambda x, w, more: jnp.where(jax.random.bernoulli(more["key"], 0.8, x.shape), x, 0),
    "cond": lambda x, w, more: lax.cond(
        more["index"] % 2 == 0, lambda x: conv(x, w) * 0.3, jnp.sin, x
    ),
    "named": lambda x, w, more: checkpoint_name(x, "named"),
    "flip": lambda x, w, more: x[:, ::-1],
    "constant": lambda x, w, more: x + more["image"],
    "own": lambda x, w, more: x * more["own"],
    "dense": lambda x, w, more: x @ w[0],
}
REMAT = ("none", "none", "all", "some", "saves")
CARRY = ("image", "number", "count", "second")
RESULT = ("nothing", "mean", "image", "count")


@dataclasses.dataclass(frozen=True)
class Case:
    """A scan over layers between two convolutions, and its schedule."""

    parts: tuple[str, ...]
    skip: bool
    carry: str
    result: str
    remat: str
    length: int
    nested: bool
    reverse: bool
    unroll: int | bool
    stride: int
    shape: tuple[int, int, int]
    tiles: Any
    saves: bool
    order: int
    seed: int

    @property
    def args(self) -> tuple[Any, Any]:
        size = self.length * (2 if self.nested else 1)
        return (
            [normal(self.seed, 3, CHANNELS, CHANNELS), normal(self.seed + 1, size, 3, 2, 2) * 0.5],
            normal(self.seed + 2, *self.shape),
        )

    @property
    def options(self) -> dict[str, Any]:
        policy = jax.checkpoint_policies.save_only_these_names("named") if self.saves else None
        return dict(in_axes=(None, (1,)), tiles=self.tiles, policy=policy)

    def __call__(self, weights, image):
        return self._apply(weights, image, lax.scan, jax.checkpoint)

    def reference(self, weights, image):
        """With a Python loop: of a `scan`'s second derivative, JAX before 0.12 forgets rules."""
        return self._apply(weights, image, _loop, lambda fun, **_: fun)

    def _apply(self, weights, image, scan, remat):
        x = conv(image, weights[0], stride=self.stride)
        size = len(weights[1])
        xs = dict(
            w=weights[1],
            key=jax.random.split(jax.random.key(self.seed), size),
            index=jnp.arange(size),
            own=jnp.sin(x) * jnp.arange(1.0, size + 1)[:, None, None, None] / size,
        )
        layer = self._rematerialised(functools.partial(self._layer, image=jnp.cos(x)), remat)
        carry = dict(
            image=x,
            number=(x, jnp.asarray(0.0)),
            count=(x, jnp.asarray(0)),
            second=(x, jnp.zeros(x.shape)),
        )[self.carry]
        options = dict(reverse=self.reverse, unroll=self.unroll)
        if self.nested:
            xs = jax.tree.map(lambda x: x.reshape(2, self.length, *x.shape[1:]), xs)
            inner = layer

            def layer(carry, xs):
                return scan(inner, carry, xs, **options)

            layer = remat(layer) if self.remat == "all" else layer
        carry, results = scan(layer, carry, xs, **options)
        return conv(jax.tree.leaves(carry)[0], weights[0]), carry, results

    def _rematerialised(self, layer, remat):
        saves = jax.checkpoint_policies.save_only_these_names("named")
        match self.remat:
            case "all":
                return remat(layer)
            case "saves":
                return remat(layer, policy=saves)
        return layer

    def _layer(self, carry, xs, image):
        x, *others = carry if isinstance(carry, tuple) else (carry,)
        y = x
        more = {**xs, "image": image}
        for i, name in enumerate(self.parts):
            part = lambda y, w, name=name: PARTS[name](y, w, more)  # noqa: E731
            y = (jax.checkpoint(part) if self.remat == "some" and i == 0 else part)(y, xs["w"])
        y = 0.5 * (x + y) if self.skip else y
        result = dict(nothing=None, mean=y.mean((0, 1)), image=y[..., 0], count=xs["index"] * 2)
        found = {
            "image": lambda: y,
            "number": lambda: (y + others[0], others[0] + 0.1 * y.mean()),
            "count": lambda: (y, others[0] + 1),
            "second": lambda: (y + 0.1 * jnp.tanh(others[0]), x),
        }[self.carry]()
        return found, result[self.result]


def _loop(layer, carry, xs, reverse, unroll):
    size, results = len(jax.tree.leaves(xs)[0]), []
    for i in reversed(range(size)) if reverse else range(size):
        carry, result = layer(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        results.append(result)
    if reverse:
        results.reverse()
    return carry, jax.tree.map(lambda *each: jnp.stack(each), *results)


def draw(chance: random.Random, order: int | None = None) -> Case:
    """A random case."""
    size = chance.choice((7, 9, 12))
    grid = (chance.randint(1, 4),)
    return Case(
        parts=(
            *chance.choices(("conv", "dilated", "down_and_up", "dense", "tanh")),
            *chance.choices(list(PARTS), k=chance.randint(0, 3)),
        ),
        skip=chance.random() < 0.5,
        carry=chance.choice(CARRY),
        result=chance.choice(RESULT),
        remat=chance.choice(REMAT),
        length=chance.choice((2, 3, 3)),
        nested=chance.random() < 0.2,
        reverse=chance.random() < 0.3,
        unroll=chance.choice((1, 1, 1, 1, 1, 2, True)),
        stride=chance.choice((1, 1, 2)),
        shape=(chance.randint(1, 2), size, CHANNELS),
        tiles=chance.choice((grid, grid, grid, "whole", None)),
        saves=chance.random() < 0.3,
        order=chance.choice((1, 1, 1, 2)) if order is None else order,
        seed=chance.randint(0, 99),
    )


def check(case: Case, *, compile: bool = False) -> str:
    """Compare with a Python loop over the layers: `exact`, and `scan` or `unrolled`; or
    `ill-conditioned` (see `random_rules`)."""

    def run(fun, args=case.args):
        def found(*args):
            return derivatives(fun, args, case.order)

        return (jax.jit(found) if compile else functools.partial(interpret, found))(*args)

    tiled = jaxtile.checkpoint(case, **case.options)
    kind = "scan" if tiled.explain(*case.args).scans else "unrolled"
    got, want = run(tiled), run(case.reference)
    try:
        assert_close(got, want, 1e-12 if case.order == 1 else 1e-11)
    except AssertionError:
        rounded = [run(case.reference, nudged(case.args, seed)) for seed in range(3)]
        if not all(map(within, *map(jax.tree.leaves, (got, want, *rounded)))):
            raise
        return "ill-conditioned"
    return f"exact, {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chance, counts = random.Random(options.seed), collections.Counter()
    for i in range(options.cases):
        case = draw(chance)
        try:
            found = check(case, compile=options.compile)
        except Exception as error:
            found = "wrong" if isinstance(error, AssertionError) else "crashed"
            print(f"{found}: {case}\n{''.join(traceback.format_exception(error)[-3:])}", flush=True)
        counts[found, f"order {case.order}"] += 1
        if i % 50 == 49:
            jax.clear_caches()
            print(f"{i + 1} cases", dict(counts), flush=True)
    print(f"jax {jax.__version__}, seed {options.seed}: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
