"""Progress of a long run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Counts from `start` to `total`; without a terminal it prints a line every so many counts."""

    def __init__(
        self, what: str, total: int, *, start: int = 0, every: int = 1, file: TextIO | None = None
    ):
        self.what, self.total, self.done, self.every = what, total, start, every
        self.file = file or sys.stdout
        self.began, self.start, self.paused = time.perf_counter(), start, 0.0
        self._bar = None
        if self.file.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(file=self.file),
            )
            self._task = self._bar.add_task(what, total=total, completed=start, text="")
            self._bar.start()

    def advance(self, text: str = "", count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, text=text)
        elif self.done % self.every < count or self.done >= self.total:
            self.say(f"{self.what} {self.done}/{self.total}  {text}{self._remaining()}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self.file, flush=True)

    def _remaining(self) -> str:
        each = (time.perf_counter() - self.began) / max(1, self.done - self.start)
        left = each * (self.total - self.done)
        return f"  {duration(left)} left" if left > 0 else ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """As people say it.

    >>> duration(42.4), duration(200), duration(7300)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
