"""Train a model on large images, as a config file says.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command goes on where a run stopped, however it stopped. The order of the data is a
function of seed and step, so an interrupted run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import signal
import sys
import zlib
from typing import Any

import jax
import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict

from . import data
from .devices.hosts import find_devices, join
from .devices.watch import Watch
from .images import ImageError
from .program.command import config_flag, start, workdir_flag
from .program.config import ConfigError, check
from .program.ending import Noted, sentences
from .program.progress import Bar
from .training import summary
from .training.checkpoints import CheckpointError
from .training.evaluation import Evaluation
from .training.instruments import Clock, Profiler, tensorboard
from .training.out_of_memory import OutOfMemory, Stopped
from .training.saved import Saved
from .training.step import Program, Step, batch_shapes, choose_policy, make_optimiser
from .training.task import Task
from .training.workdir import ReadOnly, Workdir

_CONFIG = config_flag()
_WORKDIR = workdir_flag()
_PROFILE = flags.DEFINE_bool("profile", False, "trace five steps into WORKDIR/profile")
_STOPPED = "the same command goes on from the last checkpoint, if any"
_SENTENCES = (ConfigError, ImageError, CheckpointError, Stopped)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    with Watch(join(), _WORKDIR.value), sentences(_STOPPED, *_SENTENCES):
        if not isinstance(_CONFIG.value, ConfigDict):
            raise ConfigError("--config must name a file, as configs/quickstart.py")
        if not _WORKDIR.value:
            raise ConfigError("--workdir must name a folder for the run, as runs/quickstart")
        code = train(_CONFIG.value, _WORKDIR.value, profile=_PROFILE.value)
    sys.exit(code)


def train(config: ConfigDict, path: str, *, profile: bool = False) -> int:
    """Run to the end, or to a signal. Returns the exit code."""
    check(config)
    devices = find_devices(config.mesh)
    devices.check_alike(config.to_json())
    workdir = Workdir(path) if devices.is_first else ReadOnly(path)
    workdir.check(config)
    make_repeatable(workdir.path, config.deterministic)
    task = Task(config)
    with Refusal():
        train_set, eval_set = load_data(task)
        found = data.examine(
            train_set,
            eval_set,
            workdir.path,
            limits=config.data.range,
            share=devices.made_by_first,
        )
    print("\n".join([describe(task, train_set, eval_set), *found]), flush=True)

    optimiser, learning_rate = make_optimiser(config)
    step = Step(task, optimiser, batch_shapes(train_set, config.train.batch_size), devices)
    saved = Saved(workdir.path, config.checkpoint.keep, devices)
    done, state, record = saved.restore(step)
    total = config.train.steps
    if done > total:
        raise ConfigError(f"`train.steps` (={total}) is less than the {done} steps done already")
    finished = workdir.path / "summary.txt"
    if done >= total and finished.exists():
        print(f"the run is complete:\n{finished.read_text()}", end="", flush=True)
        return 0

    with Refusal(), OutOfMemory(step):
        policy = choose_policy(step, config.policy, workdir.path / "plan.json")
        program = Program(step, policy)
        evaluation = Evaluation(step, eval_set, program.bytes)
    print(
        f"compiled in {program.compile_seconds + evaluation.compile_seconds:.0f} s: a step needs "
        f"{program.bytes_text()}, policy {config.policy}\nevaluation of {evaluation.text}",
        flush=True,
    )

    state = devices.everywhere(state)
    workdir.adopt(config)
    every = config.eval.every
    evaluated = workdir.rewind(done, range(every, done + 1, every) if every else ())
    saved.forget_best_after(done)

    def save() -> None:
        workdir.sync()
        saved.save(done, state, record)

    def evaluate() -> dict[str, Any]:
        result = {"step": done, "split": "eval", **evaluation(state.weights)}
        workdir.write(result)
        quality = result[task.quality]
        if quality is not None and (record["best"] is None or quality > record["best"]["quality"]):
            record["best"] = {"step": done, "quality": quality}
            saved.save_best(done, state, record)
        return result

    if devices.from_first(np.array(done == total and done not in evaluated)):
        evaluate()  # its line is lost, and the summary is about it
    clock = Clock(workdir, config.train.batch_size, train_set.shape)
    boards = tensorboard(config, workdir.path, done)
    with (
        OutOfMemory(step, policy),
        Noted() as signals,
        Profiler(workdir.path / "profile", profile) as profiler,
        data.Batches(train_set, config.train.batch_size, seed=config.seed, start=done) as batches,
        Bar("step", total, start=done, every=config.log.every) as bar,
    ):
        while done < total and not devices.any(bool(signals.received)):
            profiler.step()
            clock.begin()
            batch = next(batches)
            clock.loaded()
            placed = map(devices.placed, (batch.images, batch.labels))
            state, values = program.step(state, *placed)
            finite = bool(values["finite"])
            values = {name: float(values[name]) for name in ("loss", "gradient_norm")}
            clock.end()
            if not finite:
                save()
                raise Stopped(not_finite(done, values, batch, saved.folder))
            done += 1
            line = {"step": done, **values, "learning_rate": float(learning_rate(done - 1))}
            workdir.write(line)
            boards(line)
            bar.advance(f"loss {values['loss']:.4g}  {clock.text()}  {program.memory_text()}")
            if done == total or (config.eval.every and done % config.eval.every == 0):
                result = evaluate()
                boards(result)
                counted, *warnings = task.describe_counts(result)
                bar.say(f"evaluation after step {done}: {task.describe(result)}; {counted}")
                for warning in warnings:
                    bar.say(warning)
            if done == total or done % config.checkpoint.every == 0:
                save()
                clock.write(done)
        if done < total:
            save()
            received = signals.received or signal.SIGTERM  # or another process received it
            bar.say(
                f"stopped by {received.name} after step {done}, which is saved; the same command "
                "goes on"
            )
            return 128 + received
    if devices.is_first:
        skipped = {**train_set.skipped, **eval_set.skipped}
        weights = jax.tree.map(np.asarray, state.weights)
        print(summary.write(workdir, step, program, policy, record, skipped, evaluation, weights))
    return 0


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
    time. If the run must be deterministic, those whose sums have no fixed order are left out, and
    they are often the fastest. Programs for a CPU are for its kind.
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


def not_finite(done: int, values: dict[str, float], batch: data.Batch, folder: Any) -> str:
    return (
        f"step {done + 1} is not finite: the loss is {values['loss']}, the norm of the gradients "
        f"{values['gradient_norm']}, and the batch was {', '.join(batch.names)}. The weights from "
        f"before are saved in {folder / str(done)}. A lower train.learning_rate, more "
        "train.warmup_steps, a smaller train.clip_norm or dtype float32 may help"
    )


class Refusal:
    """A context in which a wrong value, of the data or the policy, is an error of the config."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, ImageError | ConfigError):
            raise ConfigError(str(error)) from error


if __name__ == "__main__":
    start(main, _STOPPED)
