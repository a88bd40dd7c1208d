"""Train a model on large images, as a config file says.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

The same command goes on where a run stopped, however it stopped. The order of the data is a
function of seed and step, so an interrupted run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from ml_collections import ConfigDict

import jaxtile

from . import data
from .devices.hosts import find_devices, join
from .devices.watch import Watch
from .images import ImageError
from .program.command import config_flag, profile_flag, start, workdir_flag
from .program.config import ConfigError, check
from .program.ending import Noted, sentences
from .program.progress import Bar, Now
from .training import summary
from .training.ahead import Ahead
from .training.checkpoints import CheckpointError
from .training.feed import Feed
from .training.instruments import Clock, Profiler, tensorboard
from .training.out_of_memory import OutOfMemory, Replan, Stopped
from .training.run import Run
from .training.setup import algorithms_chosen, make_repeatable
from .training.workdir import ReadOnly, Workdir

_CONFIG = config_flag()
_WORKDIR = workdir_flag()
_PROFILE = profile_flag()
_STOPPED = "the same command goes on from the last checkpoint, if any"
_SENTENCES = (ConfigError, ImageError, CheckpointError, Stopped, jaxtile.TilingError)


def main(argv: list[str]) -> None:
    del argv
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
    with Now(algorithms_chosen) as now:
        now("finding devices")
        devices = find_devices(config.mesh)
        devices.check_alike(config.to_json())
        workdir = Workdir(path) if devices.is_first else ReadOnly(path)
        workdir.check(config)
        make_repeatable(workdir.path, config.deterministic)
        run = Run(config, workdir, devices, now)
        if run.on_disk and profile:
            raise ConfigError("--profile is of one program, and a step from disk is many")
        finished = workdir.path / "summary.txt"
        if run.done == run.total and finished.exists():
            now.close()
            print(f"the run is complete:\n{finished.read_text()}", end="", flush=True)
            return 0
        profiler = Profiler(workdir.path / "profile", profile)
        code = complete(run, now, profiler)
    if told := profiler.report(run.program.step, run.predicted):
        print(f"profile: {told}\n")
    if code == 0 and devices.is_first:
        with Now(algorithms_chosen) as now:
            text = summary.write(run, now)
        print(text)
    return code


def complete(run: Run, now: Now, profiler: Profiler) -> int:
    """Compile, and take all steps; where memory does not suffice, with a smaller budget."""
    size, seed = run.config.train.batch_size, run.config.seed
    while True:
        start, lazy = run.done, run.on_disk
        with data.Batches(run.train_set, size, seed, start, lazy=lazy) as batches:
            try:
                run.compile(now, batches)
                run.take_up(now)
                return take_steps(run, batches, now, profiler)
            except Replan as smaller:
                now.hide()
                print(smaller, flush=True)
        run.restore(now)


def take_steps(run: Run, batches: data.Batches, now: Now, profiler: Profiler) -> int:
    """All steps that are left, or those before a signal. Returns the exit code."""
    config, folder = run.config, run.workdir.path
    clock = Clock(run.workdir, config.train.batch_size, run.train_set.shape)
    boards = tensorboard(config, folder, run.done)
    places = [x.sharding for x in run.step.batch]
    with (
        OutOfMemory(run.step, run.budgets, run.done, run.policy),
        Noted() as signals,
        profiler,
        Feed(batches, run.devices, places, run.program.repeats) as feed,
        Bar("step", run.total, start=run.done, every=config.log.every) as bar,
    ):
        steps = Ahead(run, feed, clock, now)
        while run.done < run.total:
            stopping = run.devices.any(bool(signals.received))
            if stopping and steps.running is None:
                break
            with profiler.step():
                values, batch = steps.next(last=stopping)
            now.close()
            line = run.accept(values, batch)
            boards(line)
            skipped = run.program.skipped(batch)
            done = f"loss {line['loss']:.4g}  {clock.text()}  {run.program.memory_text()}"
            bar.advance(f"{done}  {skipped} tiles skipped" if skipped else done)
            if run.is_due(config.eval.every):
                bar.doing = "the evaluation"
                result = run.evaluate()
                boards(result)
                tell(run, result, bar)
            if run.is_due(config.checkpoint.every):
                bar.doing = "saving"
                run.save()
                clock.write(run.done)
            bar.doing = ""
        if run.done < run.total:
            run.save()
            received = signals.received or signal.SIGTERM  # or another process received it
            bar.say(
                f"stopped by {received.name} after step {run.done}, which is saved; the same "
                "command goes on"
            )
            return 128 + received
    return 0


def tell(run: Run, result: dict[str, Any], bar: Bar) -> None:
    """What an evaluation found, in lines that stay."""
    counted, *warnings = run.learner.task.remarks(result)
    bar.say(f"evaluation after step {run.done}: {run.learner.task.describe(result)}; {counted}")
    for warning in warnings:
        bar.say(warning)


if __name__ == "__main__":
    start(main, _STOPPED)
