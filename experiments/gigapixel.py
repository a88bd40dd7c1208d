"""Steps on images in host memory, larger than the device: planned, run and timed.

    python -m experiments.gigapixel --model=vgg16 --size=32768 --size=65536 --budget=16GiB
    python -m experiments.gigapixel --model=resnet50 --frozen --size=65536 --budget=16GiB
    python -m experiments.gigapixel --model=resnet50 --size=32768 --offload=80GiB

The image is of 8 bits, and each tile is normalised where it is computed. A step is the loss of a
class for the image, and the gradients of all weights. The first one is not counted: it is when the
host finds its pages. XLA gives arrays at most 64 GiB of the host, unless
`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says otherwise. Planning compiles what is run; with a
`JAX_COMPILATION_CACHE_DIR` that is not done twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

import jaxtile
import models
import policies
from jaxtile._run.ordering import host_of
from policies import format_bytes

from .program.command import dtype_flag, start
from .program.files import output
from .program.progress import Now

_MODEL = flags.DEFINE_enum("model", "vgg16", ["vgg16", "resnet50"], "the model")
_FROZEN = flags.DEFINE_bool("frozen", False, "ResNet-50 with its running statistics")
_SIZE = flags.DEFINE_multi_integer("size", [32768], "height and width", 1)
_WIDTH = flags.DEFINE_integer("width", 64, "channels of the first convolution", 1)
_BUDGET = flags.DEFINE_string("budget", "16GiB", "bytes of the device for the compiled step")
_OFFLOAD = flags.DEFINE_string("offload", None, "bytes of the host for results that wait")
_DTYPE = dtype_flag("bfloat16")
_STEPS = flags.DEFINE_integer("steps", 2, "timed steps", lower_bound=1)
_PLAN = flags.DEFINE_string("plan", None, "take this plan, instead of looking for one")
_SAVE = flags.DEFINE_string("save", None, "write the last plan here, as JSON")
_LIMIT = flags.DEFINE_float("limit", 120, "seconds for a search that goes on though one plan fits")

_CLASSES = 1000
_AXES = (None, None, (1, 2), None)

_HEAD = (
    "| image | step, s | ns a pixel | estimated, s | bytes | of the host | planned, s "
    "| compiled, s | first step, s | loss |\n|" + "---|" * 10
)


def main(argv: list[str]) -> None:
    del argv
    if _FROZEN.value and _MODEL.value != "resnet50":
        sys.exit(f"error: --frozen is for resnet50: {_MODEL.value} has no statistics")
    try:
        output("save", _SAVE.value)
        policies.parse_bytes(_BUDGET.value)
        offload = policies.parse_bytes(_OFFLOAD.value) if _OFFLOAD.value else False
        plan = jaxtile.Plan.load(_PLAN.value) if _PLAN.value else None
        print(_HEAD, flush=True)
        for size in _SIZE.value:
            with Now(file=sys.stderr) as now:
                found = row(size, plan, offload, now)
            print(found, flush=True)
    except (ValueError, TypeError, OSError, policies.BudgetError) as error:
        sys.exit(f"error: {error}")
    device = jax.devices()[0].device_kind
    frozen = ", frozen statistics" if _FROZEN.value else ""
    print(
        f"\n{_MODEL.value}{frozen}, {_DTYPE.value}, within {_BUDGET.value}; {device}, "
        f"jax {jax.__version__}"
    )


def row(size: int, plan: jaxtile.Plan | None, offload: bool | int, now: Now) -> str:
    now(f"{size} x {size}: making weights and the image")
    loss, params, rest = network()
    image, labels = image_on_host(size), jnp.zeros((1,), jnp.int32)
    args = params, rest, image, labels
    begin = time.perf_counter()
    if plan is None:
        plan = jaxtile.plan(
            loss,
            *args,
            in_axes=_AXES,
            budget=_BUDGET.value,
            step=gradients,
            offload=offload,
            time_limit=_LIMIT.value,
            progress=now,
        )
    planned = time.perf_counter() - begin
    now.hide()
    say(f"{size} x {size}: planned in {planned:.0f} s\n{plan.explain()}")
    if _SAVE.value:
        plan.save(_SAVE.value)
    step = jax.jit(gradients(jaxtile.checkpoint(loss, in_axes=_AXES, policy=plan)))
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
    image.delete()
    first, *others = times
    mean = sum(others) / len(others)
    return (
        f"| {size} x {size} | {mean:.3f} | {mean / size**2 * 1e9:.2f} | {plan.seconds:.3f} "
        f"| {format_bytes(used.total)} | {format_bytes(used.host)} | {planned:.0f} "
        f"| {compiling:.0f} | {first:.1f} | {values[-1]:.6g} |"
    )


def network() -> tuple[Callable[..., Any], Any, Any]:
    """The loss of a model on pixels of 8 bits, its weights, and the rest of its state."""
    dtype = jnp.dtype(_DTYPE.value)
    own = {"frozen": _FROZEN.value} if _MODEL.value == "resnet50" else {"pooled": True}
    model = models.create(
        _MODEL.value,
        num_classes=_CLASSES,
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


def image_on_host(size: int) -> jax.Array:
    """Noise that repeats itself, so that it is made fast: never the same in tiles that touch."""
    block = np.random.default_rng(0).integers(0, 256, (1, min(size, 1021), size, 3), np.uint8)
    pixels = np.empty((1, size, size, 3), np.uint8)
    for top in range(0, size, block.shape[1]):
        rows = pixels[:, top : top + block.shape[1]]
        rows[...] = block[:, : rows.shape[1]]
    return jax.device_put(pixels, host_of(jax.devices()[0]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    start(main)
