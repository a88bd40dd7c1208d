"""How a program ends: what it says, and with which code.

A signal ends it with 128 and the signal's number, as a shell counts: 130 after Ctrl-C (SIGINT), 143
after SIGTERM, 129 after SIGHUP, and 141 (SIGPIPE) if nobody reads what it prints any more, as after
`| head -1`. What a user can mend ends it with one line and 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TextIO

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 5.0  # that a program has, after a signal, to leave in order
_ONCE_SECONDS = 1.0  # some send a signal twice, as `timeout` does: to the process and to its group


class Interrupted(KeyboardInterrupt):
    """A signal ends the program."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(f"stopped by {self.signal.name}")


@contextlib.contextmanager
def sentences(stopped: str, *kinds: type[Exception]) -> Iterator[None]:
    """A context in which a signal, an error of the system (a full disk) and errors of these kinds
    end the program with one line. `stopped` is what a user should know who stopped it.
    """
    try:
        yield
    except Interrupted as error:
        if error.signal != signal.SIGPIPE:
            print(_ending(error, stopped), file=sys.stderr, flush=True)
        sys.exit(128 + error.signal)
    except kinds as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {_of_the_system(error)}")


def _ending(error: Interrupted, stopped: str) -> str:
    return f"{error}; {stopped}" if stopped else str(error)


def _of_the_system(error: OSError) -> str:
    if error.strerror is None:
        return " ".join(str(error).split()) or type(error).__name__
    names = [str(n) for n in (error.filename, error.filename2) if n is not None]
    return f"{' to '.join(names)}: {error.strerror}" if names else error.strerror


_to_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def undone(action: Callable[[], None]) -> Iterator[None]:
    """A context in which `action` is done if the program ends while its main thread is stuck."""
    _to_undo.append(action)
    try:
        yield
    finally:
        _to_undo.remove(action)


class Signals:
    """Signals raise `Interrupted`, and end the program if that does not. Of use once, at its start.

    Python runs the handler of a signal in the main thread, and only when that is back from a
    library; compiling may take minutes. A second thread gets the signals too, and ends the program
    if it is still there after some seconds. The first signal within a `Noted` is left to that.
    """

    def __init__(self, stopped: str):
        self.stopped = stopped
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        for number in _not_ignored():
            signal.signal(number, self._receive)
        sys.stdout = _Output(sys.stdout, self._unread)
        sys.stderr = _Output(sys.stderr, lambda: None)

    def _receive(self, number: int, frame: Any) -> None:
        # Another one must not stop what the first one ends in order: a partial file's removal, say.
        for other in _not_ignored():
            signal.signal(other, lambda number, frame: None)
        raise Interrupted(number)

    def _unread(self) -> None:
        """As if there were a signal. The real SIGPIPE comes from sockets too."""
        signal.getsignal(signal.SIGTERM)(signal.SIGPIPE, None)

    def _watch(self, reading: int) -> None:
        first = None
        while letter := os.read(reading, 1):
            number = letter[0]
            if number not in _SIGNALS:
                continue
            first = first or time.monotonic()
            if _is_second(first) or not Noted.active:
                time.sleep(_GRACE_SECONDS)
                for action in list(_to_undo):
                    with contextlib.suppress(OSError):
                        action()
                with contextlib.suppress(OSError):
                    os.write(2, f"{_ending(Interrupted(number), self.stopped)}\n".encode())
                os._exit(128 + number)


def _is_second(first: float) -> bool:
    return time.monotonic() - first > _ONCE_SECONDS


class Noted:
    """A context in which the first signal is only noted; a second one is not."""

    active: ClassVar[bool] = False

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0

    def __enter__(self) -> Noted:
        Noted.active = True
        self._before = {s: signal.signal(s, self._receive) for s in _not_ignored()}
        return self

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is None:
            self.received, self._at = signal.Signals(number), time.monotonic()
        elif _is_second(self._at) and number != signal.SIGPIPE:  # which nobody sends
            raise Interrupted(number)

    def __exit__(self, *_: Any) -> None:
        Noted.active = False
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _not_ignored() -> list[signal.Signals]:
    """`nohup` makes a program ignore SIGHUP, and so it stays."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [s for s in _SIGNALS if s != signal.SIGHUP or hangs_up]


class _Output:
    """A stream that goes on into nothing when nobody reads it; `unread` is then called once."""

    def __init__(self, stream: TextIO, unread: Callable[[], None]):
        self._stream, self._unread = stream, unread

    def write(self, text: str) -> int:
        with self._guarded():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if threading.current_thread() is not threading.main_thread():
                return  # the main thread will meet it as well, and can end the program
            # What is left in the buffer would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if error.errno == errno.EPIPE:
                self._unread()
            elif error.errno != errno.EIO:  # a closed terminal sends SIGHUP, to those who care
                error.filename = self._stream.name
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
