"""What comes before the first step: the data of a run, and a compiler that repeats itself."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import zlib
from typing import Any

import jax

from .. import data
from ..devices.hosts import Devices
from ..images import ImageError
from ..program.config import ConfigError
from .task import Task

_ALGORITHMS = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name for it


def examined_data(
    task: Task, folder: pathlib.Path, devices: Devices
) -> tuple[data.Dataset, data.Dataset]:
    """Both splits, after a look at their files; what was found is printed."""
    with Refusal():
        train_set, eval_set = load_data(task)
        found = data.examine(
            train_set,
            eval_set,
            folder,
            limits=task.config.data.range,
            share=devices.made_by_first,
        )
    print("\n".join([describe(task, train_set, eval_set), *found]), flush=True)
    return train_set, eval_set


def load_data(task: Task) -> tuple[data.Dataset, data.Dataset]:
    """Both splits; the labels are as large as the model's output."""
    config = task.config
    masks = config.data.kind == "cells" or (config.data.kind, config.data.labels) == (
        "folder",
        "masks",
    )
    if task.segments != masks:
        raise ConfigError(
            f"the model {config.model.name!r} {'segments' if task.segments else 'classifies'}, but "
            f"the data (kind {config.data.kind!r}) {'are masks' if masks else 'are classes'}"
        )
    window = {"train": None, "eval": config.eval.size or None}  # None: `data.size`
    load = functools.partial(data.load, config.data, seed=config.seed)
    found = [load(split, size=size) for split, size in window.items()]
    for dataset in found:
        task.check_size(dataset.shape)
    if task.segments:
        sizes = [tuple(map(task.output_size, d.shape[:2])) for d in found]
        found = [
            dataset
            if size == dataset.label_shape
            else load(split, size=window[split], label_size=size)
            for dataset, split, size in zip(found, window, sizes, strict=True)
        ]
    return found[0], found[1]


def describe(task: Task, train_set: data.Dataset, eval_set: data.Dataset) -> str:
    height, width, channels = train_set.shape
    weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(task.weights).params))
    device = jax.devices()[0].device_kind
    skipped = len(train_set.skipped) + len(eval_set.skipped)
    bad = f" (bad files skipped: {skipped})" if skipped else ""
    return (
        f"{task.config.model.name}, {weights:,} weights, {task.config.dtype}, on {len(train_set)} "
        f"images of {height} x {width} x {channels} and {len(eval_set)} to evaluate{bad}; "
        f"{device}, jax {jax.__version__}"
    )


def make_repeatable(folder: pathlib.Path, deterministic: bool) -> None:
    """Keep the compiled programs: a run that goes on runs the same ones, at once.

    On a GPU the compiler tries algorithms and takes the fastest, which may differ from time to
    time. If the run must be deterministic, it tries none: it takes the first that cuDNN names among
    those whose sums have a fixed order, which may be far slower. Programs for a CPU are for its
    kind.
    """
    if deterministic:
        flag = "--xla_gpu_exclude_nondeterministic_ops=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    kind = f"{jax.default_backend()}-{platform.machine()}"
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        features = [s for s in lines if s.lower().startswith(("flags", "features"))][:1]
        kind += f"-{zlib.crc32(''.join(features).encode()):08x}"
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "compiled" / kind))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def algorithms_chosen() -> str:
    """How many algorithms a GPU's compiler has chosen; it keeps each in a file as soon as it has
    tried them. It does not say how many are left.
    """
    kept = pathlib.Path(jax.config.jax_compilation_cache_dir or "") / _ALGORITHMS
    with contextlib.suppress(OSError):
        if number := len(os.listdir(kept)):
            return f"{number} algorithms chosen"
    return ""


class Refusal:
    """A context in which a wrong value, of the data or the policy, is an error of the config."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, ImageError | ConfigError):
            raise ConfigError(str(error)) from error
