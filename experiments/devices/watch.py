"""What happens to one process of a run happens to all.

A collective operation, or a compiler that waits for the others, may wait for a lost process for
ever, and so may leaving in order. So every process holds a connection to the first one, from when
they found each other to their end, and threads of its own. Each sends a sign of life every second;
the system closes a connection when a process ends, however it ends; and one that ends with an error
tells it. The first process passes on what it learns, and each then ends itself, whatever its main
thread waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import socket
import threading
import time
import traceback
from typing import Any

import jax
from absl import flags

# Threads share Python's lock with the main thread, and processes share cores: so it is many times
# the second between two signs of life.
_SILENCE = flags.DEFINE_float(
    "silence", 30.0, "seconds without a sign of life after which another process is lost", 2.0
)
_SIGN_OF_LIFE_SECONDS = 1.0
_LEAVING_SECONDS = 5.0  # that others have to leave before the first process does
_KEY = "jaxtile/watch"
_ALIVE, _BYE = b"\n", b"bye\n"


class Watch:
    """A context in which the end of another process, in any way but in order, ends this one."""

    def __init__(self, joined: Any, folder: str | None):
        self.joined, self.folder = joined, pathlib.Path(folder or "")
        self.index, self.processes = joined.process_id, joined.num_processes
        self._name = f"process {self.index} of {self.processes}"
        self._silence = _SILENCE.value
        self._peers: dict[int, socket.socket] = {}
        self._listeners: list[threading.Thread] = []
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        if self.processes > 1:
            try:
                self._peers = self._accepted() if self.index == 0 else self._connected()
            except (OSError, jax.errors.JaxRuntimeError) as error:
                self._end(f"{self._name} did not find the others: {error}")
            for index, peer in self._peers.items():
                peer.settimeout(self._silence)
                listener = threading.Thread(target=self._listen, args=(index, peer), daemon=True)
                self._listeners.append(listener)
                listener.start()
            threading.Thread(target=self._live, daemon=True).start()
        return self

    def _accepted(self) -> dict[int, socket.socket]:
        """The connections of all others. Whoever does not know the secret is not one of them."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        secret = secrets.token_hex()
        self.joined.client.key_value_set(_KEY, f"{server.getsockname()[1]} {secret}")
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + self._silence
        while len(found) < self.processes - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = server.accept()
            given, _, index = _hello(peer).partition(" ")
            if given == secret:
                found[int(index)] = peer
        server.close()
        return found

    def _connected(self) -> dict[int, socket.socket]:
        """The connection to the first process."""
        wait = int(1000 * self._silence)
        port, secret = self.joined.client.blocking_key_value_get(_KEY, wait).split()
        host = self.joined.coordinator_address.rpartition(":")[0].strip("[]")
        peer = socket.create_connection((host, int(port)), self._silence)
        peer.sendall(f"{secret} {self.index}\n".encode())
        return {0: peer}

    def _live(self) -> None:
        while not self._over.wait(_SIGN_OF_LIFE_SECONDS):
            self._tell(_ALIVE)

    def _tell(self, line: bytes) -> None:
        """All peers; of one that is not there any more, its listener knows."""
        with self._sending:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.sendall(line)

    def _listen(self, index: int, peer: socket.socket) -> None:
        reason = f"the connection to process {index} closed"
        try:
            for line in peer.makefile("rb"):
                if line == _BYE:
                    return
                if line != _ALIVE:
                    self._end(json.loads(line))
        except TimeoutError:
            reason = f"process {index} gave no sign of life for {self._silence:g} s"
        except OSError:
            pass
        self._end(
            f"{self._name} lost another: {reason}. The same commands, or fewer processes, go on "
            f"from the last checkpoint in {self.folder / 'checkpoints'}"
        )

    def _end(self, text: str, code: int = 1) -> None:
        """Say it, tell the others, and end this process without waiting for them as JAX would."""
        if not self._ending.acquire(blocking=False):
            return  # it is ending already
        with contextlib.suppress(OSError):
            os.write(2, f"error: {text}\n".encode())
        self._tell(json.dumps(text).encode() + b"\n")
        if self.index == 0:  # JAX aborts the others when the first is gone
            deadline = time.monotonic() + _LEAVING_SECONDS
            for listener in self._listeners:
                if listener is not threading.current_thread():
                    listener.join(max(0.0, deadline - time.monotonic()))
        os._exit(code)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.processes == 1:
            return
        if error is None:
            self._leave()
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_LEAVING_SECONDS)  # if another's end is the cause, its listener ends this
        text, code = _described(error)
        self._end(f"{self._name} ended: {text}", code)
        threading.Event().wait()  # a listener ends this process

    def _leave(self) -> None:
        """All together: what goes wrong in the last one is still told to the others."""
        first = self.index == 0
        if not first:
            self._tell(_BYE)
        for listener in self._listeners:
            listener.join()
        if first:
            self._tell(_BYE)
        self._over.set()


def _described(error: BaseException) -> tuple[str, int]:
    """In one line, and the exit code; printed here what others are not told."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return f"{type(error).__name__}: {error}".splitlines()[0], 1
    if isinstance(error.code, str):
        return error.code.removeprefix("error: "), 1
    return str(error.__context__ or f"exit {error.code}"), error.code or 1  # a signal


def _hello(peer: socket.socket) -> str:
    """The first line. It is read byte by byte: what follows is another's to read."""
    peer.settimeout(_LEAVING_SECONDS)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 1000 and (letter := peer.recv(1)):
            line += letter
    return line.decode("ascii", "replace").rstrip("\n")
