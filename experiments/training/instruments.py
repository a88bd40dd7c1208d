"""What is measured while a run goes: speed, a trace, boards."""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from ..measuring import profile
from ..program.config import ConfigError
from ..program.files import naming, write_atomically
from .workdir import Workdir


class Clock:
    """Time of steps and of waiting for data. Compilation, evaluation and saving do not count.

    A step lasts from the end of the one before it, or from the end of a pause. The first step after
    a start does not count: libraries load in it.
    """

    def __init__(self, workdir: Workdir, batch_size: int, shape: tuple[int, ...]):
        self.workdir, self.images = workdir, batch_size
        self.megapixels = batch_size * math.prod(shape[:-1]) / 1e6
        self._first, self._begin = True, 0.0
        self.last = math.inf
        """Seconds of the last step."""
        self.waited = 0.0
        """In the step that goes on, and in those that count."""
        self._reset()

    def _reset(self) -> None:
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0

    def begin(self) -> None:
        """A step begins after a pause."""
        self._begin = time.perf_counter()

    def end(self) -> None:
        now = time.perf_counter()
        self.last = now - self._begin
        if self._first:
            self._first = False
            self._reset()
        else:
            self.steps += 1
            self.seconds += self.last
        self._begin = now

    def rates(self) -> dict[str, float]:
        """Since the last line was written."""
        each = self.seconds / self.steps
        return {
            "seconds_per_step": each,
            "images_per_second": self.images / each,
            "megapixels_per_second": self.megapixels / each,
            "share_waiting_for_data": self.waited / self.seconds,
        }

    def text(self) -> str:
        if not self.steps:
            return "-"
        rates = self.rates()
        text = f"{rates['images_per_second']:.3g} images/s"  # all in 80 columns
        return f"{text}  {rates['share_waiting_for_data']:.0%} waiting"

    def write(self, step: int) -> None:
        if self.steps:
            self.workdir.write_timing({"step": step, "steps": self.steps, **self.rates()})
            self._reset()


class Profiler:
    """Traces five steps, after two that are not traced."""

    def __init__(self, folder: pathlib.Path, wanted: bool):
        self.folder, self.wanted, self.steps = folder, wanted, 0
        self._trace = contextlib.ExitStack()
        self._step: Callable[[], Any] = contextlib.nullcontext

    def step(self) -> Any:
        """The context of a step."""
        self.steps += 1
        if self.wanted and self.steps == 3:
            self._step = self._trace.enter_context(profile.traced(self.folder))
        if self.steps == 8:
            self._stop()
        return self._step()

    def _stop(self) -> None:
        self._step = contextlib.nullcontext
        self._trace.close()

    def report(self, compiled: Any, predicted: Callable[[], dict[str, float]]) -> str:
        """Where the time of the traced steps went; empty if none was."""
        if not self.wanted or self.steps < 3:
            return ""
        text = profile.report(self.folder, compiled, predicted())
        write_atomically(self.folder / "profile.txt", text + "\n")
        return text

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()


def tensorboard(
    config: ConfigDict, folder: pathlib.Path, step: int
) -> Callable[[dict[str, Any]], None]:
    """A function that shows a line of metrics on TensorBoard, if the config wants it."""
    if not config.log.tensorboard:
        return lambda line: None
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "`log.tensorboard` needs tensorboardX: pip install 'jaxtile[tensorboard]'"
        ) from error
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def show(line: dict[str, Any]) -> None:
        split = line.get("split", "train")
        with naming(folder / "tensorboard"):
            for name, value in line.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{split}/{name}", value, line["step"])
            writer.flush()

    return show
