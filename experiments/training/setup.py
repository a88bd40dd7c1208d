"""What comes before the first step: the data of a run, and a compiler that repeats itself."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import re
import zlib
from typing import Any

import jax
import numpy as np

from .. import data, tasks
from ..devices.cudnn import CudnnError, exclude_unordered
from ..devices.hosts import Devices
from ..images import ImageError
from ..program.config import ConfigError
from .learner import Learner

_FEW = 64  # positions along each axis
_ALGORITHMS = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name for it


def examined_data(
    learner: Learner, folder: pathlib.Path, devices: Devices
) -> tuple[data.Dataset, data.Dataset]:
    """Both splits, after a look at their files; what was found is printed."""
    with Refusal():
        train_set, eval_set = load_data(learner)
        found = data.examine(
            train_set,
            eval_set,
            folder,
            limits=learner.config.data.range,
            weights=learner.config.data.class_weights,
            share=devices.made_by_first,
        )
    found += _normalise(learner, train_set, folder, devices)
    if devices.is_first:
        data.note(
            folder,
            shape=train_set.shape,
            class_names=train_set.class_names,
            mean=learner.mean,
            std=learner.std,
        )
    print("\n".join([describe(learner, train_set, eval_set), *found]), flush=True)
    return train_set, eval_set


def _normalise(
    learner: Learner, train_set: data.Dataset, folder: pathlib.Path, devices: Devices
) -> list[str]:
    """Find out mean and deviation of each channel, if the config leaves them to the data."""
    if learner.mean and learner.std:
        return []

    def found() -> str:
        begun = any(folder.glob("checkpoints/[0-9]*"))
        kept = data.noted(folder) if begun else {}
        if "mean" in kept:
            return json.dumps([kept["mean"], kept["std"]])
        return json.dumps(data.statistics(train_set, learner.config.seed))

    mean, std = json.loads(devices.made_by_first(found))
    learner.mean, learner.std = learner.mean or tuple(mean), learner.std or tuple(std)
    shown = [" ".join(f"{v:.4g}" for v in values) for values in (learner.mean, learner.std)]
    return [f"pixels have mean {shown[0]} and deviation {shown[1]}"]


def load_data(learner: Learner) -> tuple[data.Dataset, data.Dataset]:
    """Both splits; the labels are as large as the model's output."""
    config = learner.config
    window = {"train": None, "eval": config.eval.size or None}  # None: `data.size`
    train_set, eval_set = (
        data.load(config.data, split, seed=config.seed, size=size) for split, size in window.items()
    )
    learner.image_shape = train_set.shape
    for dataset in (train_set, eval_set):
        if dataset.dtype != learner.pixels:
            raise ConfigError(
                f"`data.dtype` (={config.data.dtype!r}) is not that of the data, {dataset.dtype}"
            )
        learner.check_size(dataset.shape)
        _check_labels(learner, dataset)
        dataset.label_dtype = np.dtype(learner.task.label_dtype)
        dataset.unlabelled = learner.task.unlabelled
        dataset.label_values = learner.task.label_values
        size = [learner.output_size(n) for n in dataset.shape[:-1]] if learner.task.dense else ()
        dataset.take_labels(learner.label(size), dense=learner.task.dense)
    if isinstance(learner.task, tasks.Regression):
        learner.task.centre = _centre(eval_set)
    if ":" in config.task:
        learner.check_task(eval_set.shape, eval_set.label_shape)
    return train_set, eval_set


def _centre(dataset: data.Dataset) -> float:
    """The mean of some labels of the first example; 0 if none of them counts."""
    image, label, _ = dataset.good_example(0, None, lazy=True)
    values = np.asarray(label[tuple(slice(0, min(n, _FEW)) for n in label.shape)], np.float64)
    for opened in (image, label):
        if hasattr(opened, "delete"):
            opened.delete()
    counted = values[np.isfinite(values)]
    return float(np.float32(counted.mean())) if counted.size else 0.0


def _check_labels(learner: Learner, dataset: data.Dataset) -> None:
    """What anybody's own data have is seen when they are read."""
    task = learner.task
    if isinstance(dataset, data.Own):
        return
    if task.dense != dataset.dense:
        raise ConfigError(
            f"the model {learner.config.model.name!r} "
            f"{'segments' if task.dense else 'classifies'}, but the data (kind "
            f"{learner.config.data.kind!r}) {'are masks' if dataset.dense else 'are classes'}"
        )
    channels = len(dataset.label_shape) > (learner.spatial if dataset.dense else 0)
    if (task.label_dtype, task.label_channels is not None) != (dataset.label_dtype, channels):
        raise ConfigError(
            f"`task` (={learner.config.task!r}) and `data.labels` "
            f"(={learner.config.data.labels!r}) do not go together: regression takes targets, "
            "multi_label tags, segmentation masks, classification folders or csv"
        )


def describe(learner: Learner, train_set: data.Dataset, eval_set: data.Dataset) -> str:
    shape = " x ".join(map(str, train_set.shape))
    weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(learner.weights).params))
    device = jax.devices()[0].device_kind
    skipped = len(train_set.skipped) + len(eval_set.skipped)
    bad = f" (bad files skipped: {skipped})" if skipped else ""
    return (
        f"{learner.config.model.name}, {weights:,} weights, {learner.config.dtype}, on "
        f"{len(train_set)} images of {shape} and {len(eval_set)} to evaluate{bad}; "
        f"{device}, jax {jax.__version__}"
    )


def make_repeatable(folder: pathlib.Path, deterministic: bool) -> None:
    """Keep the compiled programs: a run that goes on runs the same ones, at once.

    On a GPU the compiler tries algorithms and takes the fastest, which may differ from time to
    time. If the run must be deterministic, those whose sums have no fixed order are kept out of
    what it tries. Programs for a CPU are for its kind.
    """
    if deterministic and jax.default_backend() == "gpu":
        _fix_order(folder.absolute() / "compiled" / "unordered.json")
    kind = f"{jax.default_backend()}-{platform.machine()}"
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        features = [s for s in lines if s.lower().startswith(("flags", "features"))][:1]
        kind += f"-{zlib.crc32(''.join(features).encode()):08x}"
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "compiled" / kind))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Its other file, of kernels, led to CUDA errors.
    jax.config.update("jax_persistent_cache_enable_xla_caches", _ALGORITHMS)


def _fix_order(file: pathlib.Path) -> None:
    """Only algorithms with a fixed order of additions from here on.

    If cuDNN cannot be asked for its list, XLA's flag is used. It tries no algorithms at all and
    takes the first that cuDNN names, which can be far slower.
    """
    try:
        exclude_unordered(file)
    except CudnnError as error:
        print(f"warning: {error}; algorithms are not tuned, so steps may be slower", flush=True)
        flag = "--xla_gpu_exclude_nondeterministic_ops=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def without_order(program: Any) -> str:
    """Which operations of a compiled program add in no fixed order on a GPU; empty if none do."""
    found = re.finditer(r" (select-and-scatter|scatter)\(.*", program.as_text())
    names = {line[1] for line in found if "unique_indices=true" not in line[0]}
    return " and ".join(sorted(names))


def algorithms_chosen() -> str:
    """How many algorithms a GPU's compiler has chosen; it keeps each in a file as soon as it has
    tried them. It does not say how many are left.
    """
    kept = pathlib.Path(jax.config.jax_compilation_cache_dir or "") / _ALGORITHMS
    with contextlib.suppress(OSError):
        if number := sum(len(files) for _, _, files in os.walk(kept)):
            return f"{number} algorithms chosen"
    return ""


class Refusal:
    """A context in which a wrong value, of the data or the policy, is an error of the config."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, ImageError | ConfigError):
            raise ConfigError(str(error)) from error
