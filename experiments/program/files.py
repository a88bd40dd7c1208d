"""Files of a program: one writer to a folder; written whole or not at all; named in errors."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from .config import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def output(flag: str, path: str | None, suffixes: Sequence[str] = ()) -> pathlib.Path | None:
    """Where a program is to write, which is looked at before the work that would be lost."""
    if not path:
        return None
    file = pathlib.Path(path)
    if suffixes and file.suffix.lower() not in suffixes:
        raise ConfigError(f"--{flag}={path} must end in {', '.join(suffixes)}")
    if not file.parent.is_dir() or file.is_dir():
        reason = "is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise ConfigError(f"--{flag}={path}: {reason}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--{flag}={path} cannot be written to")
    return file


class Lock:
    """A folder that one process writes to, until `close`, or until that process ends."""

    def __init__(self, path: str | os.PathLike, name: str = "lock", flag: str = "--workdir"):
        self.folder = pathlib.Path(path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.folder / name, "a+")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{flag}: cannot write to {self.folder}: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            raise ConfigError(
                f"another run (process {owner}) is writing to {self.folder}: wait for it, stop it, "
                f"or give another {flag}"
            ) from error
        self._file.truncate(0)
        with naming(self.folder / name):
            os.write(self._file.fileno(), str(os.getpid()).encode())

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def naming(file: pathlib.Path) -> Iterator[None]:
    """A context in which errors of the system name the file; those of writing would not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def write_atomically(file: pathlib.Path, content: str | bytes) -> None:
    """Either the old file or the new one is there, at any moment."""
    temporary = file.with_name(file.name + ".new")
    try:
        with naming(file), open(temporary, "wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_figure(figure: Any, file: pathlib.Path, **options: Any) -> None:
    """As `figure.savefig` of matplotlib, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix.removeprefix("."), **options)
    write_atomically(file, content.getvalue())
