"""The folder of a run: one run at a time, and lines that are never half written or written twice.

`config.json`: the fields of the run. `metrics.jsonl`: what was computed, a function of the config
alone, so that an interrupted run leaves the same file as an uninterrupted one. `timing.jsonl`: how
long it took. `plan.json`, `checkpoints/`, `best/`, `summary.json` and pictures.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from ..program.config import ConfigError, differences, fields, with_defaults
from ..program.files import Lock, naming, write_atomically

_METRICS = {"step", "loss"}
_TIMING = {
    *("step", "steps", "seconds_per_step", "images_per_second", "megapixels_per_second"),
    "share_waiting_for_data",
}


class Workdir:
    """The folder, locked until `close`, or until the process ends, however it ends."""

    def __init__(self, path: str | os.PathLike):
        self._lock = Lock(path)
        self.path = self._lock.folder
        self._metrics: Any = None

    def check(self, config: ConfigDict) -> None:
        """Refuse if a run with other settings, or with unknown ones, has checkpoints here."""
        if not any(self.path.glob("checkpoints/[0-9]*")):
            return
        try:
            old = read_config(self.path)
        except ConfigError as error:
            proposed = self.path / "config.json.proposed"
            write_atomically(proposed, _as_text(config))
            raise ConfigError(
                f"{error}. {self.path} has checkpoints, and without it nobody can tell whether "
                "this is the same run: put it back, or give another --workdir. If the settings "
                f"are the same: mv {proposed} {self.path / 'config.json'}"
            ) from error
        new = _parsed(config.to_json())
        there, here = (dict(fields(with_defaults(ConfigDict(c)))) for c in (old, new))
        found = differences(there, here)
        more = here["train.steps"] - there["train.steps"]
        if more > 0 and [text.split(":")[0] for text in found] == ["train.steps"]:
            raise ConfigError(self._no_longer(there["train.steps"], more, config.train.schedule))
        if found:
            raise ConfigError(
                f"{self.path} holds a run with other settings ({'; '.join(found[:5])}): give "
                "another --workdir, or the settings of that run. To train on from its weights: "
                f"another --workdir, and --config.start_from={self.path}"
            )

    def _no_longer(self, steps: int, more: int, schedule: str) -> str:
        """What to say to who wants only more steps."""
        other = self.path.with_name(f"{self.path.name}-{steps + more}")
        return (
            f"{self.path} holds a run of {steps} steps, and its learning rate (`train.schedule` "
            f"{schedule!r}) falls to 0 there: {steps + more} steps would have had other rates from "
            f"the first on. For {more} more steps from its best weights, whose rate rises and "
            "falls once more, and with a new optimiser, give the same command with "
            f"--workdir={other} --config.start_from={self.path} --config.train.steps={more}. A run "
            "that is begun with --config.train.schedule=constant can be made longer in its folder"
        )

    def adopt(self, config: ConfigDict) -> None:
        """Make it the folder of this config, which was not refused."""
        write_atomically(self.path / "config.json", _as_text(config))

    def rewind(self, step: int, evaluated: Iterable[int]) -> set[int]:
        """Forget the metrics after a step: they will be computed again. Then open for writing.

        Lines up to there, and of the evaluations after these steps, cannot be: if some are missing,
        or cannot be read, that is said, and the run goes on without them. Returns the steps after
        which there are evaluations.
        """
        found = self._kept("metrics.jsonl", _METRICS, step)
        self._kept("timing.jsonl", _TIMING, step)
        evaluations = {n for split, n in found if split}
        gaps = [
            ("steps", {*range(1, step + 1)} - {n for split, n in found if split is None}),
            ("evaluations after steps", {*evaluated} - evaluations),
        ]
        for what, missing in gaps:
            if missing:
                print(
                    f"warning: {self.path / 'metrics.jsonl'} lacks the {what} "
                    f"{_ranges(sorted(missing))}; they are not computed again",
                    flush=True,
                )
        self._metrics = open(self.path / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        return evaluations

    def _kept(self, name: str, names: set[str], step: int) -> list[tuple[str | None, int]]:
        """Write a file anew with its lines up to a step; returns the split and step of each."""
        file = self.path / name
        records, bad = _records(file, names)
        if bad:
            aside = self.path / "damaged" / name
            with naming(aside):
                aside.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, aside)
            print(
                f"warning: {bad} lines of {file} cannot be read and are left out; the file as it "
                f"was is {aside}",
                flush=True,
            )
        kept = [record for record in records if record["step"] <= step]
        write_atomically(file, "".join(f"{json.dumps(record)}\n" for record in kept))
        return [(record.get("split"), record["step"]) for record in kept]

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics; it is in the file when this returns."""
        line = f"{json.dumps(record)}\n".encode()
        with naming(self.path / "metrics.jsonl"):
            while line:  # a disk may have room for a part of it
                line = line[self._metrics.write(line) :]

    def write_timing(self, record: dict[str, Any]) -> None:
        path = self.path / "timing.jsonl"
        with naming(path), open(path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def sync(self) -> None:
        """Wait until the metrics are on the disk: a checkpoint must not be newer than they are."""
        with naming(self.path / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        return _records(self.path / "metrics.jsonl", _METRICS)[0]

    def timings(self) -> list[dict[str, Any]]:
        return _records(self.path / "timing.jsonl", _TIMING)[0]

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()


class ReadOnly(Workdir):
    """The folder for the other processes of a run, which write nothing."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def check(self, config: ConfigDict) -> None: ...

    def adopt(self, config: ConfigDict) -> None: ...

    def rewind(self, step: int, evaluated: Iterable[int]) -> set[int]:
        return set()

    def write(self, record: dict[str, Any]) -> None: ...

    def write_timing(self, record: dict[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """What `config.json` says, or an error if it is not there or not whole."""
    file = folder / "config.json"
    try:
        found = _parsed(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing") from None
    except ValueError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict) or not {"model", "data", "train"} <= found.keys():
        raise ConfigError(f"{file} is damaged: it is not the config of a run")
    return found


def _parsed(text: str) -> Any:
    """JSON, with tuples for its lists, as a config has them."""

    def with_tuples(found: dict[str, Any]) -> dict[str, Any]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}

    return json.loads(text, object_hook=with_tuples)


def _as_text(config: ConfigDict) -> str:
    return json.dumps(json.loads(config.to_json()), indent=1) + "\n"


def _records(file: pathlib.Path, names: set[str]) -> tuple[list[dict[str, Any]], int]:
    """The lines that are records with these names, once each, and how many others there are.

    A killed process may leave a part of a line at the end, which is no line.
    """
    text = file.read_text(errors="replace") if file.exists() else ""
    lines = text.split("\n")[:-1]
    found: dict[Any, dict[str, Any]] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and names <= record.keys():
                found.setdefault((record.get("split"), str(record["step"])), record)
    good = [r for r in found.values() if isinstance(r["step"], int)]
    return good, len(lines) - len(good)


def _ranges(numbers: list[int]) -> str:
    """In short, and not all of many.

    >>> _ranges([1, 2, 3, 7, 9, 10])
    '1 to 3, 7, 9 to 10'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    texts = [" to ".join(map(str, run)) for run in runs]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more stretches" if texts[5:] else "")
