"""Measure what operations cost on this device, for the budget planner.

    python -m experiments.calibrate            # a few minutes; writes where the planner looks

The table (`policies.Costs`) has the times of the kinds of operations that some models have, by
number of positions. For all others it has: the rate of convolutions by type, the bandwidth of
memory and to the host, the time to start an operation and an iteration of a loop, how much slower
an operation is in a tile, and how much longer gradients take than operations.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import jaxtile
from jaxtile._plan.costs import has_host_memory, measured_path
from jaxtile._plan.measuring import timings, unknown
from policies import Costs

from .measuring.measure import measure
from .measuring.problems import REFERENCES, problem, shape_of
from .program.command import start
from .program.config import ConfigError
from .program.files import output
from .program.progress import Now

_OUTPUT = flags.DEFINE_string("output", None, "where to write; default: where the planner looks")
_SIZE = flags.DEFINE_integer("size", None, "pixels of the images; default 2048, on a CPU 64", 4)
_MODELS = flags.DEFINE_list(
    "models", None, "models whose operations are timed; default vgg16,unet,resnet50, on a CPU none"
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "runs of each measurement; the median counts", 1)

Layer = Callable[[jax.Array, jax.Array], jax.Array]
"""Of an image and weights."""

_CHANNELS = 128
"""Networks have most of their arithmetic where there are at least as many."""


def main(argv: list[str]) -> None:
    del argv
    output("output", _OUTPUT.value)
    if unknown_models := {*(_MODELS.value or ())} - {*REFERENCES}:
        raise ConfigError(
            f"--models: there is no model {', '.join(sorted(unknown_models))}; known are "
            f"{', '.join(REFERENCES)}"
        )
    path = pathlib.Path(_OUTPUT.value or measured_path())
    with Now(file=sys.stderr) as now:
        found = calibrate(_SIZE.value or (64 if jax.default_backend() == "cpu" else 2048), now)
        if path.exists():
            found = dataclasses.replace(found, classes=Costs.load(path).classes)
        found = with_operations(found, _MODELS.value, now)
    found.save(path)
    print(f"| {found.device} | |\n|---|---|")
    for dtype, rate in found.flops.items():
        print(f"| convolution, {dtype} | {rate / 1e12:.3g} Tflop/s |")
    print(f"| memory | {found.bandwidth / 1e9:.3g} GB/s |")
    if found.host_bandwidth:
        print(f"| to and from the host | {found.host_bandwidth / 1e9:.3g} GB/s |")
    print(f"| start of an operation | {found.start * 1e6:.3g} us |")
    print(f"| iteration of a loop | {found.loop * 1e6:.3g} us |")
    print(f"| operation in a tile | {found.tile:.3g}x |")
    for kind, factor in found.backward.items():
        print(f"| gradient of {kind} | {factor:.3g}x |")
    print(f"| kinds of operations | {len(found.classes)} |")
    print(f"\nwritten to {path}")


def with_operations(costs: Costs, names: Sequence[str] | None, now: Now) -> Costs:
    """The table, and the times of these models' operations that it does not have."""
    if names is None:
        names = () if jax.default_backend() == "cpu" else ("vgg16", "unet", "resnet50")
    classes = dict(costs.classes)
    for name in names:
        now(f"timing the operations of {name}")
        dtype = jnp.float32 if name == "unet" else jnp.bfloat16
        found = problem(name, shape_of(name), dtype, abstract=True)
        view = jaxtile.policy.outline(found.loss, *found.arguments, in_axes=found.in_axes)
        known = dataclasses.replace(costs, classes=classes)
        classes.update(timings(unknown(view, known)))
    return dataclasses.replace(costs, classes=classes)


def calibrate(size: int, now: Callable[[str], None] = lambda what: None) -> Costs:
    def timed(what: str, measured: Callable[..., float], *args: Any) -> float:
        now(f"timing {what}")
        return measured(*args)

    pools = _with_our_gradient(_pools)
    return Costs(
        device=jax.devices()[0].device_kind,
        flops={d: timed(f"convolutions, {d}", _convolution_rate, size, d) for d in _types()},
        bandwidth=timed("memory", _bandwidth, size),
        host_bandwidth=timed("the host's memory", _host_bandwidth, size)
        if has_host_memory()
        else None,
        start=timed("the start of an operation", _start),
        loop=timed("loops", _loop),
        tile=timed("tiles", _tile, size),
        backward={
            "convolution": timed("gradients of convolutions", _gradient, _stack, size, "bfloat16"),
            "contraction": 2.0,
            "max_pool": timed("gradients of pools", _gradient, pools, size),
            "other": timed("gradients of the rest", _gradient, _activations, size),
        },
    )


def seconds(fun: Callable[..., Any], *args: jax.Array) -> float:
    return measure(fun, *args, repeats=_REPEATS.value).seconds


def _types() -> list[str]:
    return ["float32", "bfloat16"] + (["float64"] if jax.config.jax_enable_x64 else [])


def _image(size: int, dtype: str = "float32", channels: int = _CHANNELS) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (1, size, size, channels), jnp.dtype(dtype))


def _conv(x: jax.Array, w: jax.Array) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions)


def _stack(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jax.nn.relu(_conv(x, w))
    return x


def _pools(x: jax.Array, w: jax.Array) -> jax.Array:
    x = x * w[0, 0, 0]
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _with_our_gradient(fun: Layer) -> Layer:
    """As plain JAX, but for the gradients that jaxtile states anew."""
    return jaxtile.checkpoint(fun, in_axes=((1, 2), None), tiles=None)


def _activations(x: jax.Array, w: jax.Array) -> jax.Array:
    for i in range(4):
        x = jax.lax.optimization_barrier(jnp.tanh(x * w[0, 0, i]))
    return x


def _weights(channels: int = _CHANNELS, dtype: str = "float32") -> jax.Array:
    w = jax.random.normal(jax.random.key(1), (3, 3, channels, channels), jnp.dtype(dtype))
    return w / (3 * channels**0.5)


def _convolution_rate(size: int, dtype: str) -> float:
    x, w = _image(size, dtype), _weights(dtype=dtype)
    return 4 * 2 * x.size * 9 * x.shape[-1] / seconds(_stack, x, w)


def _bandwidth(size: int) -> float:
    x = _image(size)
    return 2 * x.nbytes / seconds(lambda x: x * 1.5 + 1, x)


def _host_bandwidth(size: int) -> float:
    def there_and_back(x: jax.Array) -> jax.Array:
        host = jax.device_put(x * 1.5, jax.memory.Space.Host)
        return jax.device_put(jax.lax.optimization_barrier(host), jax.memory.Space.Device) + 1

    x = _image(size)
    return 2 * x.nbytes / seconds(there_and_back, x)


def _start() -> float:
    def chain(n: int, x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(n):
            x = _conv(x, w)
        return x

    x, w = _image(8, channels=8), _weights(8)
    short, long = (seconds(functools.partial(chain, n), x, w) for n in (4, 36))
    return max(1e-7, (long - short) / 32)


def _loop() -> float:
    def loop(n: int, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (_conv(x, w), None), x, length=n)[0]

    x, w = _image(8, channels=8), _weights(8)
    short, long = (seconds(functools.partial(loop, n), x, w) for n in (4, 132))
    return max(1e-7, (long - short) / 128 - _start())


def _tile(size: int) -> float:
    """A tiled step against the same step recomputed whole, by what each of them computes."""
    x, w = _image(size), _weights()

    def step(tiles: tuple[int, int] | str) -> float:
        tiled = jaxtile.checkpoint(_stack, in_axes=((1, 2), None), tiles=tiles)
        work = jaxtile.explain(_stack, x, w, in_axes=((1, 2), None), tiles=tiles).step_flops
        return seconds(jax.grad(lambda w, x: tiled(x, w).sum()), w, x) / work

    return max(1.0, step((4, 4)) / step("whole"))


def _gradient(fun: Layer, size: int, dtype: str = "float32") -> float:
    x, w = _image(size, dtype), _weights(dtype=dtype)
    forward = seconds(fun, x, w)
    both = seconds(lambda x, w: jax.vjp(fun, x, w)[1](fun(x, w)), x, w)
    return max(1.0, (both - forward) / forward)


if __name__ == "__main__":
    start(main)
