"""Random schedules: a place and a grid for each pass, for every result of a random network, under
the transformations of JAX: derivatives of any order and mode, batches of them, loops, branches.

A case is plain data, so that a failing one can be read and pasted. `python -m
tests.random_schedules` runs as many as it is told to, and counts what became of them.
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
from jaxtile.policy import Choice, Outline

from .interpreter import interpret
from .random_networks import ACTIVATIONS, CHANNELS, _apply
from .random_rules import doubled_back, nudged, surrogate, within
from .support import assert_close, normal, scalar

SAME = (
    ("conv", 3, 3, 1, "SAME", 1, 0.5),
    ("conv", 3, 1, 1, "SAME", 2, -0.5),
    ("batch_norm",),
    ("act", "shifted"),
    ("dropout", 3),
    ("flip", 1),
)
"""Layers whose results have the shape of the operand."""

OTHERS = (
    ("transposed", 3, 2),
    ("max_pool", 2, 2, "VALID"),
    ("max_pool", 3, 1, "SAME"),
    ("average_pool",),
    ("one_pass_norm",),
    ("gram",),
    ("dense",),
    ("instance_norm",),
    ("row_norm",),
    ("squeeze_excite",),
    ("resize", "bilinear", 7, 5),
    ("resize", "nearest", 6, 8),
    ("repeat",),
    ("pad", 1, 2),
    ("crop",),
    ("every_second",),
    ("join",),
    ("coordinates",),
    ("per_position",),
    ("per_sample",),
    ("update", 2, 1),
    ("crop_at_run_time", 1),
    ("depthwise",),
    ("rule", "jvp"),
    ("rule", "vjp"),
)
LOSSES = ("", "", "map", "sum", "mean", "labels", "ratio", "maximum", "two", "beside")
AROUND = ("nothing", "nothing", "nothing", "jit", "scan", "cond", "remat", "aux")
WITH_RESPECT_TO = ((0,), (1,), (2,), (0, 1), (0, 1, 2))


@dataclasses.dataclass(frozen=True)
class Network:
    """Layers, and what is returned; of weights, an image, and a map of labels."""

    layers: tuple[tuple, ...]
    named: tuple[int, ...]
    shape: tuple[int, ...]
    loss: str
    seed: int

    @property
    def args(self) -> tuple[Any, Any, Any]:
        kernels = normal(self.seed, len(self.layers) + 1, 5, 5, CHANNELS, CHANNELS) * 0.4
        return kernels, normal(self.seed + 1, *self.shape), normal(self.seed + 2, *self.shape[:3])

    def __call__(self, kernels, x, labels):
        tensors = [x]
        for index, layer in enumerate(self.layers):
            new = _layer(layer, tensors, kernels[index])
            if min(new.shape[1:3]) >= 3:
                name = index in self.named
                tensors.append(checkpoint_name(new, f"layer{index}") if name else new)
        last = tensors[-1]
        height, width = (min(last.shape[d], labels.shape[d]) for d in (1, 2))
        near = last[:, :height, :width, 0], jnp.sin(labels[:, :height, :width])
        match self.loss:
            case "map":
                return last
            case "sum":
                return ((near[0] - near[1]) ** 2).sum()
            case "mean":
                return jnp.tanh(near[0] * near[1]).mean() + (kernels**2).mean()
            case "labels":
                there = labels > 0
                wrong = (jnp.sin(last).mean((1, 2, 3))[:, None, None] - labels) ** 2
                return jnp.where(there, wrong, 0).sum() / jnp.maximum(there.sum(), 1)
            case "ratio":
                return (near[0] * near[1]).sum() / (1 + (near[0] ** 2).sum() + (near[1] ** 2).sum())
            case "maximum":
                return jax.nn.logsumexp(near[0] + near[1]) + near[0].max()
            case "two":
                return ((near[0] - near[1]) ** 2).mean(), jnp.cos(last).sum((1, 2))
            case "beside":
                return ((near[0] - near[1]) ** 2).mean(), last
        middle = (tensors[len(tensors) // 2] ** 2).mean((1, 2))
        return last, middle, (kernels**2).sum() + x.sum() + near[1].sum()


def _layer(layer, tensors, kernel):
    match layer:
        case ("rule", "jvp"):
            return surrogate(tensors[-1])
        case ("rule", "vjp"):
            return doubled_back(tensors[-1])
    return _apply(layer, tensors, kernel)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A policy that decides about every result by chance: where it waits, and on which grids it is
    computed."""

    seed: int
    places: tuple[str, ...] = ("device", "passing", "restored", "host")

    @property
    def options(self) -> dict[str, Any]:
        return {"policy": self}

    def choose(self, outline: Outline) -> dict:
        chance = random.Random(self.seed)
        share, same = chance.choice((0.3, 0.7, 1.0)), chance.random() < 0.5
        tiled = [part for part in outline.parts if part.tiled]
        lengths = [min(n) for n in zip(*(p.lengths for p in tiled), strict=True)]
        common = _choice(chance, lengths or [1] * outline.rank)

        def choice(part):
            place = chance.choice(self.places)
            found = common if same else _choice(chance, part.lengths)
            return found._replace(place=place)

        return {p.name: choice(p) for p in tiled if chance.random() < share} | {...: common}


@dataclasses.dataclass(frozen=True)
class Named:
    """Names that are saved, others that are offloaded, and one grid: scans over layers stay."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    tiles: Any

    @property
    def options(self) -> dict[str, Any]:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=self.saved,
            names_which_can_be_offloaded=self.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
        return {"policy": policy, "tiles": self.tiles}


def _choice(chance: random.Random, lengths: Sequence[int]) -> Choice:
    grid = tuple(chance.randint(1, max(1, min(3, n))) for n in lengths)
    other = tuple(chance.randint(1, max(1, min(3, n))) for n in lengths)
    strips = (grid[0], *(1 for _ in grid[1:]))
    return Choice(
        chance.choice((None, "whole", grid, grid, grid, strips)),
        forward=chance.choice((None, None, other, (1,) * len(grid))),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    network: Network
    policy: Schedule | Named
    transformation: str
    around: str
    argnums: tuple[int, ...]
    batch: bool
    """Is the first dimension of images tiled too?"""
    skip: bool
    mesh: tuple[int, ...]
    """Devices per tiled axis; (): no mesh."""

    @property
    def options(self) -> dict[str, Any]:
        axes = (0, 1, 2) if self.batch else (1, 2)
        found = {"in_axes": (None, axes, axes), "skip": self.skip} | self.policy.options
        if self.mesh:
            names = ("rows", "cols", "more")[: len(self.mesh)]
            some = jax.devices()[: int(np.prod(self.mesh))]
            mesh = jax.make_mesh(self.mesh, names, devices=some)
            found |= {"mesh": mesh, "mesh_axes": names}
        return found

    @property
    def args(self) -> tuple[Any, ...]:
        """If tiles may be skipped, most of the image is constant."""
        kernels, x, labels = self.network.args
        if self.skip:
            x, labels = (a.at[:, 2:].set(fill) for a, fill in ((x, 0.5), (labels, 0.0)))
        return kernels, x, labels

    def run(self, fun: Callable[..., Any], *args: Any) -> Any:
        """The transformed function."""
        some = [args[i] for i in self.argnums]

        def of(*some):
            full = list(args)
            for i, x in zip(self.argnums, some, strict=True):
                full[i] = x
            return fun(*full)

        inner = {
            "jit": jax.jit,
            "remat": jax.checkpoint,
            "cond": lambda f: lambda *a: lax.cond(a[0].sum() < 1e9, f, f, *a),
            "scan": _scanned,
        }.get(self.around, lambda f: f)
        return TRANSFORMATIONS[self.transformation](inner(of), some)


def _scanned(fun):
    def run(*args):
        def body(total, k):
            return jax.tree.map(jnp.add, total, fun(*(x * k for x in args))), None

        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(fun, *args))
        return lax.scan(body, start, jnp.array([1.0, 0.8]))[0]

    return run


def _direction(x, k=0):
    return jnp.cos(jnp.arange(x.size, dtype=x.dtype) + 0.3 + k).reshape(x.shape)


def _directions(some, k=0):
    return [_direction(x, k) for x in some]


def _loss(fun):
    return lambda some: scalar(fun(*some))


def _gradient(fun, some):
    def loss(some):
        out = fun(*some)
        return scalar(out), out

    return jax.grad(loss, has_aux=True)(some)


def _pulled(fun, some, cotangents):
    return jax.vjp(fun, *some)[1](cotangents)


def _jacobian(fun, some):
    """Of a few sums of the outputs, each a different one."""

    def sums(some):
        leaves = [jnp.asarray(x).ravel() for x in jax.tree.leaves(fun(*some))]
        return [jnp.stack([x[::2].sum(), (x[1::2] ** 2).sum()]) for x in leaves]

    return jax.jacrev(sums)(some)


def _one_output(fun, some):
    """The cotangents of the other outputs are zero, or those of one element."""
    out, pull = jax.vjp(fun, *some)
    leaves, tree = jax.tree.flatten(out)
    zeros = [jnp.zeros_like(x) for x in leaves]
    last = [*zeros[:-1], zeros[-1].ravel().at[-1].set(2.0).reshape(zeros[-1].shape)]
    return pull(jax.tree.unflatten(tree, zeros)), pull(jax.tree.unflatten(tree, last))


def _batch_of_cotangents(fun, some):
    out, pull = jax.vjp(fun, *some)
    return jax.vmap(pull)(jax.tree.map(lambda x: jnp.stack([_direction(x), 0.5 * x]), out))


def _two_steps(fun, some):
    """Of descent, in a scan."""

    def step(some, _):
        value, found = jax.value_and_grad(_loss(fun))(some)
        return jax.tree.map(lambda x, g: x - 1e-3 * jnp.tanh(g), some, found), value

    return lax.scan(step, some, length=2)


def _stacked(some, which):
    return [jnp.stack([x, 0.5 * x]) if i in which else x for i, x in enumerate(some)]


def _over(fun, some, which):
    axes = [0 if i in which else None for i in range(len(some))]
    return jax.vmap(lambda *some: _gradient(fun, list(some)), axes)(*_stacked(some, which))


def _second(fun, some):
    """The gradient of a function of the gradient."""

    def squares(some):
        return sum(jnp.vdot(g, jnp.sin(g)) for g in jax.grad(_loss(fun))(some))

    return jax.grad(squares)(some)


def _product(fun, some):
    return jax.jvp(jax.grad(_loss(fun)), (some,), (_directions(some),))


def _pushed(fun, some, k=0):
    return jax.jvp(fun, list(some), _directions(some, k))


TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "value": lambda fun, some: fun(*some),
    "gradient": _gradient,
    "jvp": _pushed,
    "product": _product,
    "second": _second,
    "twice forwards": lambda fun, some: jax.jvp(
        lambda *some: _pushed(fun, some), list(some), _directions(some, 1)
    ),
    "gradient of jvp": lambda fun, some: jax.grad(lambda some: scalar(_pushed(fun, some)))(some),
    "product of vjp": lambda fun, some: jax.jvp(
        lambda *some: _pulled(fun, some, fun(*some)), list(some), _directions(some)
    ),
    "derivative of cotangents": lambda fun, some: jax.jvp(
        lambda c: _pulled(fun, some, c), *[[fun(*some)]] * 2
    ),
    "jacobian": _jacobian,
    "one output": _one_output,
    "cotangents": _batch_of_cotangents,
    "linearize": lambda fun, some: jax.linearize(fun, *some)[1](*_directions(some)),
    "steps": _two_steps,
    "over first": lambda fun, some: _over(fun, some, {0}),
    "over all": lambda fun, some: _over(fun, some, {*range(len(some))}),
    "over directions": lambda fun, some: jax.vmap(lambda d: jax.jvp(fun, list(some), d)[1])(
        [jnp.stack([_direction(x), _direction(x, 2)]) for x in some]
    ),
    "products": lambda fun, some: jax.vmap(
        lambda d: jax.jvp(jax.grad(_loss(fun)), (some,), (d,))[1]
    )([jnp.stack([_direction(x), _direction(x, 2)]) for x in some]),
}
REVERSED_TWICE = ("second", "gradient of jvp")


def _drawn(chance: random.Random, index: int) -> tuple:
    """A layer: the more important ones more often."""
    size, stride = chance.choice((1, 2, 3)), chance.choice((1, 1, 1, 2))
    padding = chance.choice(("SAME", "SAME", ((2, 0), (1, 1))))
    some = (
        (0.3, ("conv", size, 3, stride, padding, 1, 0.3)),
        (0.1, (chance.choice(("skip", "concatenate")), chance.randint(0, index))),
        (0.1, ("act", chance.choice(sorted(ACTIVATIONS)))),
        (0.1, chance.choice(SAME)),
        (0.05, ("layers", chance.choice(SAME), chance.choice(SAME))),
        (0.05, ("branch", chance.random() < 0.5, chance.choice(SAME), chance.choice(SAME))),
        (0.3, chance.choice(OTHERS)),
    )
    shares, layers = zip(*some, strict=True)
    return chance.choices(layers, shares)[0]


def draw(
    chance: random.Random, *, mesh: bool = False, only: str | None = None, skip: bool = False
) -> Case:
    """A random case."""
    layers = [_drawn(chance, index) for index in range(chance.randint(1, 6))]
    some = tuple(i for i in range(len(layers)) if chance.random() < 0.7)
    shape = chance.randint(1, 2), chance.randint(5, 7), chance.randint(5, 7), CHANNELS
    network = Network(tuple(layers), some, shape, chance.choice(LOSSES), chance.randint(0, 99))
    often = "gradient", "product", "second"
    transformation = chance.choice([only] if only else [*TRANSFORMATIONS, *often])
    around = chance.choice(AROUND)
    places = ["device", "passing", "restored"]
    # Of a `cond` `vmap` makes a choice between arrays, and JAX has none in host memory.
    if transformation not in REVERSED_TWICE and around != "cond":
        places.append("host")
    batch = chance.random() < 0.2
    policy: Schedule | Named = Schedule(chance.randint(0, 9999), tuple(places))
    if chance.random() < 0.25:
        fates = [(i, chance.random()) for i in some]
        stored = tuple(f"layer{i}" for i, fate in fates if fate < 0.4)
        moved = tuple(f"layer{i}" for i, fate in fates if "host" in places and 0.4 < fate < 0.7)
        grid = tuple(chance.randint(1, 3) for _ in range(3 if batch else 2))
        policy = Named(stored, moved, chance.choice((grid, grid, "whole", None)))
    sizes = [(2, 1), (1, 2), (2, 2), (4, 1)] if not batch else [(2, 1, 1), (1, 2, 2)]
    return Case(
        network,
        policy,
        transformation,
        around,
        chance.choice(WITH_RESPECT_TO),
        batch,
        skip=skip or (not mesh and chance.random() < 0.15),
        mesh=chance.choice(sizes) if mesh else (),
    )


def check(case: Case, *, compile: bool = False) -> str:
    """Compare with plain JAX: `exact`, `refused`, `undefined` if plain JAX fails, or
    `ill-conditioned` (see `random_rules`)."""

    def run(fun, args=case.args):
        found = functools.partial(case.run, fun)
        return (jax.jit(found) if compile else functools.partial(interpret, found))(*args)

    try:
        want = run(case.network)
    except Exception as error:
        return f"undefined {type(error).__name__} {str(error)[:200]}"
    try:
        got = run(jaxtile.checkpoint(case.network, **case.options))
    except jaxtile.TilingError as error:
        return f"refused {str(error)[:300]}"
    try:
        assert_close(got, want, 1e-9)
    except AssertionError:
        rounded = [run(case.network, nudged(case.args, seed)) for seed in range(3)]
        if not all(map(within, *map(jax.tree.leaves, (got, want, *rounded)))):
            raise
        return "ill-conditioned"
    return "exact"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TRANSFORMATIONS, help="this transformation")
    parser.add_argument("--compile", action="store_true", help="do not interpret: compile each")
    parser.add_argument("--skip", action="store_true", help="tiles that are alike")
    parser.add_argument("--mesh", action="store_true", help="on four devices")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chance, counts = random.Random(options.seed), collections.Counter()
    for i in range(options.cases):
        case = draw(chance, mesh=options.mesh, only=options.only, skip=options.skip)
        try:
            found = check(case, compile=options.compile or options.mesh)
        except Exception as error:
            found = "wrong" if isinstance(error, AssertionError) else "crashed"
            print(f"{found}: {case}\n{''.join(traceback.format_exception(error)[-3:])}", flush=True)
        counts[found, case.transformation] += 1
        if i % 20 == 19:
            jax.clear_caches()
            print(
                f"{i + 1} cases",
                dict(collections.Counter(k for k, _ in counts.elements())),
                flush=True,
            )
    print(f"jax {jax.__version__}, seed {options.seed}: {dict(sorted(counts.items()))}")


if __name__ == "__main__":
    main()
