"""Files of a program: written whole or not at all, and named in what goes wrong."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def naming(file: pathlib.Path) -> Iterator[None]:
    """A context in which errors of the system name the file; those of writing would not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Either the old file or the new one is there, at any moment."""
    temporary = file.with_name(file.name + ".new")
    try:
        with naming(file), open(temporary, "w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
