"""The folder of a run: one run at a time, and lines that are never half written or written twice.

`config.json`: the fields of the run. `metrics.jsonl`: what was computed, a function of the config
alone, so that an interrupted run leaves the same file as an uninterrupted one. `timing.jsonl`: how
long it took. `plan.json`, `checkpoints/`, `best/`, `summary.json` and pictures.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from .config import ConfigError, differences, fields


class Workdir:
    """The folder, locked until `close`, or until the process ends, however it ends."""

    def __init__(self, path: str | os.PathLike, lock: str = "lock"):
        self.path = pathlib.Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / lock, "a+")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write to the workdir {self.path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            raise ConfigError(
                f"another run (process {owner}) is writing to {self.path}: wait for it, stop it, "
                "or give another --workdir"
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._metrics: Any = None

    def adopt(self, config: ConfigDict) -> None:
        """Make it the folder of this config, or refuse if another has checkpoints here."""
        file = self.path / "config.json"
        new = json.loads(config.to_json())
        if file.exists() and any(self.path.glob("checkpoints/[0-9]*")):
            old = json.loads(file.read_text())
            names = [dict(fields(ConfigDict(c))) for c in (old, new)]
            found = differences(*names)
            if found:
                raise ConfigError(
                    f"{self.path} holds a run with other settings ({'; '.join(found[:5])}): give "
                    "another --workdir, or the settings of that run"
                )
        write_atomically(file, json.dumps(new, indent=1) + "\n")

    def rewind(self, step: int) -> None:
        """Forget the metrics after a step: they will be computed again. Then open for writing."""
        for name in ("metrics.jsonl", "timing.jsonl"):
            file = self.path / name
            kept = [line for line in _lines(file) if json.loads(line)["step"] <= step]
            write_atomically(file, "".join(f"{line}\n" for line in kept))
        self._metrics = open(self.path / "metrics.jsonl", "a")  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics; it is in the file when this returns."""
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()

    def write_timing(self, record: dict[str, Any]) -> None:
        with open(self.path / "timing.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be newer than they are."""
        os.fsync(self._metrics.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _lines(self.path / "metrics.jsonl")]

    def timings(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _lines(self.path / "timing.jsonl")]

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()


class ReadOnly(Workdir):
    """The folder for the other processes of a run, which write nothing."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def adopt(self, config: ConfigDict) -> None: ...

    def rewind(self, step: int) -> None: ...

    def write(self, record: dict[str, Any]) -> None: ...

    def write_timing(self, record: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def _lines(file: pathlib.Path) -> list[str]:
    """The complete lines; a killed process may leave a part of one at the end."""
    text = file.read_text() if file.exists() else ""
    return text.split("\n")[:-1]


def write_atomically(file: pathlib.Path, text: str) -> None:
    """Either the old file or the new one is there, at any moment."""
    temporary = file.with_name(file.name + ".new")
    try:
        with open(temporary, "w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
