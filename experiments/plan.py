"""Plan a model for a budget of memory; or compare policies on the reference graph.

    python -m experiments.plan --model=vgg16 --size=2048 --budget=1GiB --picture=plan.png
    python -m experiments.plan --model=vgg16 --size=4096 --device="NVIDIA H200" --dtype=bfloat16
    python -m experiments.plan --reference

Nothing is run: plans are compiled, and the compiled bytes are read. `--reference` is the U-Net on a
batch of 8 images of 572 x 572, float32; compile it on the device that is meant, bytes differ.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp
from absl import flags

import models
import policies

from .measuring.problems import problem, shape_of
from .program.command import dtype_flag, start
from .program.files import PICTURES, output
from .program.progress import Now
from .reference.table import reference

_MODEL = flags.DEFINE_enum("model", "vgg16", models.names(), "the model")
_SIZE = flags.DEFINE_integer("size", None, "height and width; by default the reference's", 1)
_BATCH = flags.DEFINE_integer("batch", None, "images; by default the reference's", 1)
_DTYPE = dtype_flag("float32")
_BUDGET = flags.DEFINE_string("budget", "2GiB", "bytes of the compiled step")
_DEVICE = flags.DEFINE_string(
    "device", None, "a GPU that need not be there, as 'NVIDIA H200'; needs JAX's CUDA plugin"
)
_OFFLOAD = flags.DEFINE_bool("offload", False, "may results wait in host memory?")
_SAVE = flags.DEFINE_string("save", None, "write the plan here, as JSON")
_PICTURE = flags.DEFINE_string("picture", None, "draw it here (png, svg, pdf)")
_REFERENCE = flags.DEFINE_bool("reference", False, "the table of policies on the reference graph")


def main(argv: list[str]) -> None:
    del argv
    if _REFERENCE.value:
        with Now(file=sys.stderr) as now:
            text = reference(now=now)
        print(text)
        return
    save, picture = output("save", _SAVE.value), output("picture", _PICTURE.value, PICTURES)
    shape = shape_of(_MODEL.value, _BATCH.value, _SIZE.value)
    try:
        policies.parse_bytes(_BUDGET.value)
        with Now(file=sys.stderr) as now:
            now("tracing the model")
            found = problem(_MODEL.value, shape, jnp.dtype(_DTYPE.value), abstract=True)
            plan = policies.plan(
                found.loss,
                *found.arguments,
                in_axes=found.in_axes,
                budget=_BUDGET.value,
                offload=_OFFLOAD.value,
                device=_DEVICE.value,
                progress=now,
            )
    except (ValueError, policies.BudgetError, policies.NoDeviceError) as error:
        sys.exit(f"error: {error}")
    print(plan)
    if save:
        plan.save(save)
    if picture:
        plan.draw(picture)


if __name__ == "__main__":
    start(main)
