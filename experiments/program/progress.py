"""Progress of a long run: a live line on a terminal, plain lines in files and notebooks.

`Now` says what is being done before there is anything to count; `Bar` counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

_WIDE = 100  # columns of a terminal; in fewer, the text is what matters
_QUIET_SECONDS = 8.0  # after which a line says that the same is still going on


class Now:
    """What a program is doing, and for how long.

    Without a terminal it is a line when something begins, and one every few seconds while it lasts:
    so silence means that the program hangs.

    Args:
      detail: asked for more whenever a line is shown; it may return an empty text.
      quiet: seconds between two lines about the same.
    """

    shown: ClassVar[Now | None] = None
    """The one whose line is live: there is one such line on a terminal."""

    def __init__(
        self,
        detail: Callable[[], str] = lambda: "",
        *,
        quiet: float = _QUIET_SECONDS,
        file: TextIO | None = None,
    ):
        self.detail, self.quiet, self.file = detail, quiet, file or sys.stdout
        self.began = self._since = self._said = time.perf_counter()
        self._what = ""
        self._status: Status | None = None
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __call__(self, what: str) -> None:
        """What is being done from now on; after `close` nothing is said."""
        if self._over.is_set():
            return
        with self._lock:
            self.hide()
            self._what, self._since = what, time.perf_counter()
            if _is_live(self.file):
                console = Console(file=self.file, soft_wrap=True)
                self._status, Now.shown = Status(escape(self._line()), console=console), self
                self._status.start()
            else:
                self._say()

    def hide(self) -> None:
        """What was done stays as a line, and the live line ends; nothing else was live."""
        with self._lock:
            if self._status is not None:
                self._status.stop()
                self._status, Now.shown = None, None
                self._say()

    def _line(self) -> str:
        now = time.perf_counter()
        lasted = [duration(now - self._since)] if now - self._since >= 1 else []
        more = "; ".join([*lasted, *filter(None, [self.detail()])])
        return f"{duration(now - self.began):>5}  {self._what}" + (f" ({more})" if more else "")

    def _say(self) -> None:
        self._said = time.perf_counter()
        print(self._line(), file=self.file, flush=True)

    def _beat(self) -> None:
        while not self._over.wait(1 if _is_live(self.file) else self._left()):
            with self._lock:
                if self._status is not None:
                    self._status.update(escape(self._line()))
                elif self._what and not _is_live(self.file) and self._left() <= 0.05:
                    self._say()

    def _left(self) -> float:
        """Seconds until it has been quiet for too long."""
        return max(0.05, self._said + self.quiet - time.perf_counter())

    def close(self) -> None:
        self._over.set()
        self.hide()

    def __enter__(self) -> Now:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Bar:
    """Counts from `start` to `total`; without a terminal it prints a line every so many counts, and
    every few seconds at the latest, whether there was something to count or not.

    `doing` is what is done beside what is counted.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        start: int = 0,
        every: int = 1,
        quiet: float = _QUIET_SECONDS,
        file: TextIO | None = None,
    ):
        self.what, self.total, self.done, self.every = what, total, start, every
        self.file, self.quiet, self.doing = file or sys.stdout, quiet, ""
        self.began, self.start = time.perf_counter(), start
        self._said = self._counted = self.began
        self._hidden = False
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._bar = None
        if _is_live(self.file):
            console = Console(file=self.file)
            self._bar = Progress(
                TextColumn("{task.description}"),
                *([BarColumn(bar_width=12)] if console.width >= _WIDE else []),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(what, total=total, completed=start, text="")

    def advance(self, text: str = "", count: int = 1) -> None:
        with self._lock:
            self._advance(text, count)

    def _advance(self, text: str, count: int) -> None:
        self.done += count
        self._counted, self._hidden = time.perf_counter(), False
        if self._bar is not None:
            if Now.shown is not None:
                Now.shown.hide()
            self._bar.start()
            self._bar.update(self._task, completed=self.done, text=text)
        elif self.done % self.every < count or self.done >= self.total or self._left() <= 0:
            self.say(f"{self.what} {self.done}/{self.total}  {text}{self._remaining()}")

    def say(self, line: str) -> None:
        """A line that stays."""
        with self._lock:
            self._said = time.perf_counter()
            if self._bar is not None:
                self._bar.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=self.file, flush=True)

    def hide(self) -> None:
        """The live line ends, and stays as it is, and nothing more is said, until `advance`."""
        with self._lock:
            self._hidden = True
            if self._bar is not None:
                self._bar.stop()

    def _left(self) -> float:
        """Seconds until it has been quiet for too long."""
        return self._said + self.quiet - time.perf_counter()

    def _beat(self) -> None:
        while not self._over.wait(max(0.05, self._left())):
            with self._lock:
                counts = self.doing or self.start < self.done < self.total
                if counts and not self._hidden and self._left() <= 0:
                    lasted = duration(time.perf_counter() - self._counted)
                    what = self.doing or "the next one"
                    self.say(f"{self.what} {self.done}/{self.total}, {lasted} ago; {what} goes on")

    def _remaining(self) -> str:
        each = (time.perf_counter() - self.began) / max(1, self.done - self.start)
        left = each * (self.total - self.done)
        return f"  {duration(left)} left" if left > 0 else ""

    def __enter__(self) -> Bar:
        if self._bar is None:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.hide()


def _is_live(file: TextIO) -> bool:
    """Can a line be written over? A notebook gives programs a terminal, but shows all that is
    written to it; its kernel says that it is one.
    """
    return file.isatty() and "JPY_PARENT_PID" not in os.environ


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
