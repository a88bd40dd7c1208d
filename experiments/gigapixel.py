"""Steps on images in host memory, larger than the device: planned, run and timed.

    python -m experiments.gigapixel --model=vgg16 --size=32768 --size=65536 --budget=16GiB
    python -m experiments.gigapixel --dense --size=8192 --size=32768 --budget=16GiB
    python -m experiments.gigapixel --model=resnet50 --frozen --size=65536 --budget=16GiB
    python -m experiments.gigapixel --size=65536 --blank=0.8 --budget=6GiB
    python -m experiments.gigapixel --model=resnet50 --size=32768 --offload=80GiB
    python -m experiments.gigapixel --model=resnet50 --device="NVIDIA H200" --save=plan.json

The image is of 8 bits, and each tile is normalised where it is computed. A step is the loss of a
class for the image, and the gradients of all weights; or, if it is dense, of a class for each
pixel, with a map of labels beside the image, so that the loss is a sum over tiles. With `--blank`
so much of the image is blank, around a square of noise, and tiles that are alike are skipped; the
smaller the tiles (a smaller budget makes them so), the less they hold of the blank. The first step
is not counted: it is when the host finds its pages. XLA gives arrays at most 64 GiB of the host,
unless `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says otherwise. Planning compiles what is run; with a
`JAX_COMPILATION_CACHE_DIR` that is not done twice. It takes minutes, and needs no GPU: with
`--device` a plan is made for one that is not here, and nothing is run.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from flax import nnx

import jaxtile
import models
import policies
from jaxtile._run import host_windows
from jaxtile._run.ordering import host_of, to_host
from policies import format_bytes

from .program.command import dtype_flag, start
from .program.files import output
from .program.progress import Now

_MODEL = flags.DEFINE_enum("model", "vgg16", ["vgg16", "resnet50"], "the model")
_FROZEN = flags.DEFINE_bool("frozen", False, "ResNet-50 with its running statistics")
_DENSE = flags.DEFINE_bool("dense", False, "VGG16 with a class for each pixel")
_BLANK = flags.DEFINE_float(
    "blank", 0, "the share of the image that is blank; if any is, tiles are skipped", 0, 1
)
_SIZE = flags.DEFINE_multi_integer("size", [32768], "height and width", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "channels of the first convolution", 1)
_BUDGET = flags.DEFINE_string("budget", "16GiB", "bytes of the device for the compiled step")
_OFFLOAD = flags.DEFINE_string("offload", None, "bytes of the host for results that wait")
_DTYPE = dtype_flag("bfloat16")
_STEPS = flags.DEFINE_integer("steps", 2, "timed steps", lower_bound=1)
_PLAN = flags.DEFINE_string("plan", None, "take this plan, instead of looking for one")
_SAVE = flags.DEFINE_string("save", None, "write the last plan here, as JSON")
_DEVICE = flags.DEFINE_string(
    "device", None, "plan for this GPU, which need not be here; needs JAX's CUDA plugin"
)
_LIMIT = flags.DEFINE_float("limit", 120, "seconds for a search that goes on though one plan fits")

_CLASSES, _DENSE_CLASSES = 1000, 8

_HEAD = (
    "| image | step, s | ns a pixel | estimated, s | bytes | of the host | planned, s "
    "| compiled, s | first step, s | loss |\n|" + "---|" * 10
)


def main(argv: list[str]) -> None:
    del argv
    if _FROZEN.value and _MODEL.value != "resnet50":
        sys.exit(f"error: --frozen is for resnet50: {_MODEL.value} has no statistics")
    if _DENSE.value and _MODEL.value != "vgg16":
        sys.exit(f"error: --dense is for vgg16: {_MODEL.value} has no classifier of pixels")
    if _DEVICE.value and _PLAN.value:
        sys.exit("error: --device is to make a plan, and --plan gives one")
    try:
        output("save", _SAVE.value)
        policies.parse_bytes(_BUDGET.value)
        offload = policies.parse_bytes(_OFFLOAD.value) if _OFFLOAD.value else False
        run = only_planned if _DEVICE.value else measured
        run(offload)
    except (ValueError, TypeError, OSError, policies.BudgetError, policies.NoDeviceError) as error:
        sys.exit(f"error: {error}")


def only_planned(offload: bool | int) -> None:
    for size in _SIZE.value:
        with Now(file=sys.stderr) as now:
            plan, _ = planned(Problem.of(size, like), offload, now)
        print(plan.explain(), flush=True)


def measured(offload: bool | int) -> None:
    plan = jaxtile.Plan.load(_PLAN.value) if _PLAN.value else None
    print(_HEAD, flush=True)
    for size in _SIZE.value:
        with Now(file=sys.stderr) as now:
            found = row(size, plan, offload, now)
        print(found, flush=True)
    device = jax.devices()[0].device_kind
    kind = ", frozen statistics" if _FROZEN.value else ", dense" if _DENSE.value else ""
    kind += f", {_BLANK.value:.0%} blank, tiles skipped" if skipping() else ""
    print(
        f"\n{_MODEL.value}{kind}, {_DTYPE.value}, within {_BUDGET.value}; {device}, "
        f"jax {jax.__version__}"
    )


class Problem(NamedTuple):
    loss: Callable[..., Any]
    args: tuple[Any, ...]
    """Weights, the rest of the model's state, the image and its labels."""
    axes: tuple[Any, ...]

    @classmethod
    def of(cls, size: int, made: Callable[[tuple[int, ...], int], Any]) -> Problem:
        """`made`: an array in host memory, of a shape, of so many numbers."""
        loss, params, rest = network()
        labels = jnp.zeros(1, jnp.int32)
        if _DENSE.value:
            labels = made((1, size, size), _DENSE_CLASSES)
        args = params, rest, made((1, size, size, 3), 256), labels
        return cls(loss, args, (None, None, (1, 2), (1, 2) if _DENSE.value else None))


def planned(problem: Problem, offload: bool | int, now: Now) -> tuple[jaxtile.Plan, float]:
    """A plan, saved if that is wanted, and the seconds that it took."""
    begin = time.perf_counter()
    plan = jaxtile.plan(
        problem.loss,
        *problem.args,
        in_axes=problem.axes,
        budget=_BUDGET.value,
        step=gradients,
        offload=offload,
        device=_DEVICE.value,
        skip=skipping(),
        time_limit=_LIMIT.value,
        progress=now,
    )
    seconds = time.perf_counter() - begin
    now.hide()
    size = problem.args[2].shape[1]
    say(f"{size} x {size}: planned in {seconds:.0f} s")
    if _SAVE.value:
        plan.save(_SAVE.value)
    return plan, seconds


def row(size: int, plan: jaxtile.Plan | None, offload: bool | int, now: Now) -> str:
    now(f"{size} x {size}: making weights and the image")
    problem, planning = Problem.of(size, on_host), 0.0
    _, _, image, labels = args = problem.args
    if plan is None:
        plan, planning = planned(problem, offload, now)
        say(plan.explain())
    tiled = jaxtile.checkpoint(problem.loss, in_axes=problem.axes, policy=plan, skip=skipping())
    step = jax.jit(gradients(tiled))
    now("compiling")
    begin = time.perf_counter()
    compiled = step.lower(*args).compile()
    compiling = time.perf_counter() - begin
    used = jaxtile.Bytes.of(compiled)
    now.close()  # nothing else is to take time
    say(f"compiled in {compiling:.0f} s: {format_bytes(used.total)}")
    times, values = [], []
    for _ in range(_STEPS.value + 1):
        begin = time.perf_counter()
        (value, _), _ = jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
        values.append(float(value))
        say(f"a step in {times[-1]:.3f} s, loss {values[-1]!r}")
    for array in (image, labels):
        array.delete()
    first, *others = times
    mean = sum(others) / len(others)
    return (
        f"| {size} x {size} | {mean:.3f} | {mean / size**2 * 1e9:.2f} | {plan.seconds:.3f} "
        f"| {format_bytes(used.total)} | {format_bytes(used.host)} | {planning:.0f} "
        f"| {compiling:.0f} | {first:.1f} | {values[-1]:.6g} |"
    )


def skipping() -> bool:
    return _BLANK.value > 0


def network() -> tuple[Callable[..., Any], Any, Any]:
    """The loss of a model on pixels of 8 bits, its weights, and the rest of its state."""
    dtype = jnp.dtype(_DTYPE.value)
    if _MODEL.value == "resnet50":
        own = {"frozen": _FROZEN.value}
    else:
        own = {"dense": True} if _DENSE.value else {"pooled": True}
    model = models.create(
        _MODEL.value,
        num_classes=_DENSE_CLASSES if _DENSE.value else _CLASSES,
        width=_WIDTH.value,
        dtype=dtype,
        param_dtype=dtype,
        rngs=nnx.Rngs(0),
        **own,
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, rest: Any, pixels: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        image = (pixels.astype(dtype) - 128) / 64
        return merged.loss(image, labels), nnx.state(merged, nnx.BatchStat)

    return loss, params, rest


def gradients(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The step: the loss, new statistics beside it, and the gradients of the weights."""
    return jax.value_and_grad(loss, has_aux=True)


def like(shape: tuple[int, ...], numbers: int) -> jax.ShapeDtypeStruct:
    """The shape of what `on_host` makes."""
    del numbers
    return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=host_of(jax.devices()[0]))


def on_host(shape: tuple[int, ...], numbers: int) -> jax.Array:
    """Noise that repeats itself, so that it is made fast: never the same in tiles that touch. It is
    drawn on the device and written in strips, so the host never holds it twice. What is blank is
    zero.
    """
    rows = min(shape[1], 1021)
    last = shape[1] - rows
    margin = round(shape[1] * (1 - (1 - _BLANK.value) ** 0.5) / 2)

    def inside(positions: jax.Array) -> jax.Array:
        return (margin <= positions) & (positions < shape[1] - margin)

    @functools.partial(jax.jit, out_shardings=host_of(jax.devices()[0]))
    def draw(key: jax.Array) -> jax.Array:
        strip = jax.random.randint(key, (1, rows, *shape[2:]), 0, numbers, jnp.uint8)

        def put(k: jax.Array, image: jax.Array) -> jax.Array:
            top = jnp.minimum(k * rows, last)
            starts = [top if d == 1 else 0 for d in range(len(shape))]
            kept = inside(top + jnp.arange(rows))[:, None] & inside(jnp.arange(shape[2]))
            window = jnp.where(
                jnp.reshape(kept, (rows, shape[2]) + (1,) * (len(shape) - 3)), strip, 0
            )
            return host_windows.write(image, to_host(window), starts)

        return jax.lax.fori_loop(0, -(-shape[1] // rows), put, to_host(jnp.zeros(shape, jnp.uint8)))

    return draw(jax.random.key(0))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    start(main)
