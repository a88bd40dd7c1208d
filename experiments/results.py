"""The results of a sweep: lines of JSON that outlive a crash, and merge by lying in one folder."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from .cell import Cell


@dataclasses.dataclass(frozen=True)
class Result:
    """A cell and what came of it."""

    cell: Cell
    status: str
    """`ok`, `out of memory`, `does not fit` (a budget), `error`, `crashed` or `too slow`."""
    values: dict[str, Any]
    """What was measured; or `message`."""
    machine: dict[str, str]


def read(folder: pathlib.Path) -> tuple[dict[Cell, Result], list[str]]:
    """All results in `results*.jsonl`, the last one of each cell; and lines that are not results.

    A program that was killed may leave a part of a line at the end of a file.
    """
    found: dict[Cell, Result] = {}
    bad: list[str] = []
    for file in sorted(folder.glob("results*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                fields = json.loads(line)
                result = Result(Cell(**fields.pop("cell")), **fields)
            except (ValueError, TypeError, KeyError, AttributeError):
                bad.append(f"{file.name}, line {number}: {line[:60]!r}")
                continue
            found[result.cell] = result
    return found, bad


def append(file: pathlib.Path, result: Result) -> None:
    """One line; on the disk when this returns. A line that was cut off before it stays apart."""
    text = json.dumps(dataclasses.asdict(result)) + "\n"
    cut_off = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with open(file, "a") as handle:
        handle.write(("\n" if cut_off else "") + text)
        handle.flush()
        os.fsync(handle.fileno())
