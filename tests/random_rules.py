"""Random derivative rules: functions whose `custom_vjp` or `custom_jvp` rule is linear, affine,
non-linear, rounding, constant or missing, closes over arrays or calls other rules; before and after
halos, in scans, first and second order.

A case is plain data, so that a failing one can be read and pasted. `python -m tests.random_rules`
runs as many as it is told to, and counts what became of them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .interpreter import interpret
from .support import assert_close, conv, normal, scalar

CHANNELS = 2


@jax.custom_jvp
def surrogate(x):
    return jnp.where(x > 0, 1.0, 0.0) + 0.1 * x


surrogate.defjvp(lambda x, dx: (surrogate(*x), steep(x[0]) * dx[0]))


@jax.custom_jvp
def steep(x):
    """Used by `surrogate`'s rule; its own derivative is not that of a logistic function."""
    return jax.nn.sigmoid(x)


steep.defjvp(lambda x, dx: (steep(*x), jnp.cos(x[0]) * dx[0]))


@jax.custom_vjp
def doubled_back(x):
    return jnp.sin(x)


doubled_back.defvjp(lambda x: (doubled_back(x), x), lambda x, c: (2 * c * jnp.cos(x),))


@jax.custom_vjp
def clipped_back(x):
    return x * 1.0


clipped_back.defvjp(lambda x: (clipped_back(x), None), lambda _, c: (jnp.clip(c, -0.2, 0.2),))

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "identity": lambda x, t: x * 1.0,
    "double": lambda x, t: x * 2 + 0 * t,
    "product": lambda x, t: x * t,
    "step": lambda x, t: jnp.where(x > 0, t, 0.3),
    "wave": lambda x, t: jnp.sin(x) + t,
    "two": lambda x, t: (jnp.sin(x), x * t),
    "unused": lambda x, t: jnp.tanh(x),
    "surrogate": lambda x, t: surrogate(x) * t,
    "calls_vjp": lambda x, t: doubled_back(x) + t,
}

FORWARD: dict[str, Callable[[Any], Any]] = {
    "same": lambda y: y,
    "rounded": lambda y: jnp.round(y * 4) / 4,
    "shifted": lambda y: y + 0.5,
}
"""What `fwd` makes of the function's value."""

OF_IMAGE: dict[str, Callable[..., Any]] = {
    "linear": lambda x, t, c, held: c * jnp.cos(x),
    "flipped": lambda x, t, c, held: -c * t,
    "affine": lambda x, t, c, held: c + 0.1 * x,
    "masked_affine": lambda x, t, c, held: jnp.where(x > 0, c, 0.1),
    "masked": lambda x, t, c, held: jnp.where(x > 0, c, 0.0),
    "clipped": lambda x, t, c, held: jnp.clip(c, -0.2, 0.2),
    "sign": lambda x, t, c, held: jnp.sign(c),
    "square": lambda x, t, c, held: c * c,
    "narrow": lambda x, t, c, held: c.astype(jnp.bfloat16).astype(c.dtype),
    "reduced": lambda x, t, c, held: lax.reduce_precision(c, 8, 7),
    "noise": lambda x, t, c, held: c + jax.random.normal(jax.random.key(3), c.shape, c.dtype),
    "dropped": lambda x, t, c, held: (
        c * jax.random.bernoulli(jax.random.key(4), 0.5, c.shape).astype(c.dtype)
    ),
    "zeros": lambda x, t, c, held: jnp.zeros_like(x),
    "none": lambda x, t, c, held: None,
    "constant": lambda x, t, c, held: jnp.full_like(x, 0.2),
    "held_scale": lambda x, t, c, held: c * held,
    "held_only": lambda x, t, c, held: held * jnp.ones_like(x),
    "centred": lambda x, t, c, held: c - c.mean(1, keepdims=True),
    "unit": lambda x, t, c, held: c / jnp.sqrt(1e-3 + (c * c).sum()),
    "shifted": lambda x, t, c, held: jnp.roll(c, 1, 1),
    "smooth": lambda x, t, c, held: c + 0.5 * jnp.roll(c, 1, 1) * x,
    "over_channels": lambda x, t, c, held: c - c.mean(-1, keepdims=True) * jnp.tanh(x),
    "coordinates": lambda x, t, c, held: c * jnp.arange(x.shape[1])[:, None],
    "calls_jvp": lambda x, t, c, held: c * surrogate(x),
    "calls_vjp": lambda x, t, c, held: c * doubled_back(x),
    "calls_clip": lambda x, t, c, held: c * clipped_back(x),
    "clips": lambda x, t, c, held: clipped_back(c),
    "scanned": lambda x, t, c, held: lax.scan(lambda s, k: (s * k, None), c, jnp.arange(1.0, 3))[0],
}
"""Cotangents of the image, from operands, the cotangent, and an array that the rule closes over."""

OF_OTHER: dict[str, Callable[..., Any]] = {
    "linear": lambda x, t, c: _summed_to(c * x, t),
    "ones": lambda x, t, c: jnp.ones_like(t),
    "zeros": lambda x, t, c: jnp.zeros_like(t),
    "none": lambda x, t, c: None,
    "affine": lambda x, t, c: _summed_to(c, t) + 0.3,
    "squared": lambda x, t, c: _summed_to(c, t) ** 2,
    "clipped": lambda x, t, c: jnp.clip(_summed_to(c * x, t), -0.5, 0.5),
    "fixed": lambda x, t, c: t * 0.5,
}
"""Cotangents of the other operand: a number, one per channel, or a second image."""

HELD = ("number", "channels", "map")
OTHER = ("number", "channels", "map")
AROUND = ("nothing", "jit", "remat", "scan", "layers", "twice", "stored", "norm", "mean")


def _summed_to(x, like):
    """The sum of `x` over the dimensions along which `like` is repeated."""
    if like.ndim == 0:
        return x.sum()
    return x.sum(tuple(range(x.ndim - 1))) if like.ndim == 1 else x


@dataclasses.dataclass(frozen=True)
class Case:
    """One function with a rule, between two convolutions, and its schedule."""

    form: str
    function: str
    forward: str
    of_image: str
    of_other: str
    held: str
    other: str
    around: str
    kernels: tuple[int, int]
    shape: tuple[int, ...]
    tiles: Any
    order: int
    seed: int

    @property
    def rank(self) -> int:
        return len(self.shape) - 2

    @property
    def in_axes(self):
        space = tuple(range(1, 1 + self.rank))
        return None, space if self.other == "map" else None, space

    @property
    def args(self):
        weights = [
            normal(self.seed + i, *(k,) * self.rank, CHANNELS, CHANNELS) * 0.5
            for i, k in enumerate(self.kernels)
        ]
        shapes = {"number": (), "channels": (CHANNELS,), "map": self.shape}
        return (
            weights,
            normal(self.seed + 2, *shapes[self.other]),
            normal(self.seed + 3, *self.shape),
        )

    @property
    def policy(self):
        return jax.checkpoint_policies.save_only_these_names("stored")

    def __call__(self, weights, other, image):
        return self._apply(weights, other, image, lax.scan, jax.checkpoint)

    def reference(self, weights, other, image):
        """The same with a Python loop and without `jax.checkpoint`.

        In the second derivative of a `scan`, JAX forgets rules that rules call. With `jax_remat3`,
        `jax.checkpoint` changes the value of a function whose `fwd` has another.
        """
        return self._apply(weights, other, image, _unrolled, lambda fun: fun)

    def _apply(self, weights, other, image, scan, remat):
        rule = self.rule()
        x = conv(image, weights[0])
        match self.around:
            case "jit":
                x = jax.jit(rule)(x, other)
            case "remat":
                x = remat(rule)(x, other)
            case "scan":
                x, _ = scan(lambda x, k: (rule(x, other * k), None), x, jnp.array([1.0, 0.5]))
            case "layers":
                layer = remat(lambda x, k: (rule(x, other * k), None))
                x, _ = scan(layer, x, jnp.array([1.0, 0.5]))
            case "twice":
                x = rule(conv(rule(x, other), weights[1]), other) + x
            case "stored":
                x = checkpoint_name(rule(checkpoint_name(x, "stored"), other), "stored")
            case "norm":
                x = rule(x, other)
                x = (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-2)
            case "mean":
                y = rule(x, other)
                x = y + 0.1 * (y**2).mean()
            case _:
                x = rule(x, other)
        return conv(jnp.tanh(x), weights[1]), (x * x).mean(tuple(range(1, 1 + self.rank)))

    def rule(self):
        """The function of image and other operand, with its derivative rule; one result."""
        function = FUNCTIONS[self.function]
        if self.form == "plain":
            return _joined(function)
        if self.form == "jvp":
            return _joined(self._with_jvp(function))
        return _joined(self._with_vjp(function))

    def _with_jvp(self, function):
        call = jax.custom_jvp(function)

        @call.defjvp
        def jvp(primals, tangents):
            (x, t), (dx, dt) = primals, tangents
            inner = call(x, t) if self.seed % 2 else function(x, t)
            out = jax.tree.map(FORWARD[self.forward], inner)
            slope = {"calls_jvp": surrogate, "calls_vjp": doubled_back}.get(self.of_image, jnp.cos)
            dot = slope(x) * dx + 0.3 * x * dt
            return out, jax.tree.map(lambda y: dot * (1 + 0.1 * y), out)

        return call

    def _with_vjp(self, function):
        shape = {"number": (), "channels": (CHANNELS,), "map": self.shape}[self.held]
        with jax.ensure_compile_time_eval():
            held = normal(self.seed + 4, *shape)
        of_image, of_other = OF_IMAGE[self.of_image], OF_OTHER[self.of_other]

        def forward(x, t):
            inner = call(x, t) if self.seed % 2 else function(x, t)
            return jax.tree.map(FORWARD[self.forward], inner), (x, t)

        def backward(residuals, c):
            x, t = residuals
            c = sum(jax.tree.leaves(c))
            return of_image(x, t, c, held), of_other(x, t, c)

        if self.form == "gradient":
            return jax.custom_gradient(
                lambda x, t: (
                    jax.tree.map(FORWARD[self.forward], function(x, t)),
                    lambda c: tuple(
                        jnp.zeros_like(a) if g is None else g
                        for a, g in zip((x, t), backward((x, t), c), strict=True)
                    ),
                )
            )
        call = jax.custom_vjp(function)
        call.defvjp(forward, backward)
        return call


def _unrolled(body, carry, xs):
    for x in xs:
        carry, _ = body(carry, x)
    return carry, None


def _joined(call):
    def run(x, t):
        return sum(jax.tree.leaves(call(x, t)))

    return run


def draw(chance: random.Random, order: int | None = None) -> Case:
    """A random case."""
    rank = chance.choice((1, 1, 1, 1, 1, 2))
    size = tuple(chance.choice((5, 6, 7)) for _ in range(rank))
    grid = tuple(chance.randint(1, min(n, 4)) for n in size)
    return Case(
        form=chance.choice(("vjp", "vjp", "vjp", "gradient", "jvp", "plain")),
        function=chance.choice(list(FUNCTIONS)),
        forward=chance.choice(("same", "same", *FORWARD)),
        of_image=chance.choice(list(OF_IMAGE)),
        of_other=chance.choice(list(OF_OTHER)),
        held=chance.choice(HELD),
        other=chance.choice(OTHER),
        around=chance.choice(AROUND),
        kernels=(chance.choice((1, 3)), chance.choice((1, 2, 3))),
        shape=(chance.randint(1, 2), *size, CHANNELS),
        tiles=chance.choice((grid, grid, grid, grid, "whole")),
        order=chance.choice((1, 1, 1, 1, 2)) if order is None else order,
        seed=chance.randint(0, 99),
    )


def derivatives(fun, args: Sequence[Any], order: int):
    """The outputs, and all gradients: of a scalar of them, or of those gradients' squares."""

    def first(args):
        def loss(args):
            out = fun(*args)
            return scalar(out), out

        return jax.grad(loss, has_aux=True)(args)

    if order == 1:
        return first(list(args))

    def second(args):
        found = first(args)
        return sum(jnp.vdot(g, jnp.sin(g)) for g in jax.tree.leaves(found[0])), found

    return jax.grad(second, has_aux=True)(list(args))


def check(case: Case, *, compile: bool = False) -> str:
    """Compare with plain JAX. Returns `exact`, `refused`, or `undefined` if plain JAX fails.

    `ill-conditioned`: the difference is not larger than what one rounding of the arguments makes of
    plain JAX's own result, as where the sine of a large gradient is taken.
    """

    def run(fun: Callable[..., Any], args: Sequence[Any] = case.args) -> Any:
        def found(*args):
            return derivatives(fun, args, case.order)

        return (jax.jit(found) if compile else functools.partial(interpret, found))(*args)

    try:
        want = run(case.reference)
    except Exception:  # whatever plain JAX refuses is not ours to give
        return "undefined"
    tiled = jaxtile.checkpoint(case, in_axes=case.in_axes, tiles=case.tiles, policy=case.policy)
    try:
        got = run(tiled)
    except jaxtile.TilingError:
        return "refused"
    try:
        assert_close(got, want, 1e-11)
    except AssertionError:
        rounded = [run(case.reference, nudged(case.args, seed)) for seed in range(3)]
        if not all(map(within, *map(jax.tree.leaves, (got, want, *rounded)))):
            raise
        return "ill-conditioned"
    return "exact"


def nudged(args: Any, seed: int) -> Any:
    """The arguments, with each number that is not exact moved by at most one rounding."""
    chance = np.random.default_rng(seed)

    def nudge(x: Any) -> Any:
        if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
            return x
        step = chance.choice([-1.0, 0.0, 1.0], np.shape(x)) * jnp.finfo(x.dtype).eps
        return x * (1 + step)

    return jax.tree.map(nudge, args)


def within(got: Any, want: Any, *rounded: Any) -> bool:
    """Is the difference one that roundings of the arguments make too, up to a factor of 4?"""
    difference = np.max(np.abs(got - want), initial=0)
    spread = max(np.max(np.abs(r - want), initial=0) for r in rounded)
    return difference <= max(4 * spread, 1e-11 * np.max(np.abs(want), initial=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="do not interpret: compile each")
    parser.add_argument("--new", action="store_true", help="with jax_custom_vjp3 and jax_remat3")
    options = parser.parse_args()
    jax.config.update("jax_custom_vjp3", options.new)
    jax.config.update("jax_remat3", options.new)
    jax.config.update("jax_enable_x64", True)
    chance, counts = random.Random(options.seed), collections.Counter()
    for i in range(options.cases):
        case = draw(chance)
        try:
            counts[check(case, compile=options.compile), f"order {case.order}"] += 1
        except Exception as error:
            kind = "wrong" if isinstance(error, AssertionError) else "crashed"
            counts[kind, f"order {case.order}"] += 1
            print(f"{kind}: {case}\n{''.join(traceback.format_exception(error)[-3:])}", flush=True)
        if i % 500 == 499:
            jax.clear_caches()
            print(f"{i + 1} cases", dict(counts), flush=True)
    print(f"jax {jax.__version__}, seed {options.seed}: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
