"""The results of a sweep: lines of JSON that outlive a crash, and merge by lying in one folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

from .cells import Cell
from .problems import REFERENCES


@dataclasses.dataclass(frozen=True)
class Result:
    """A cell and what came of it."""

    cell: Cell
    status: str
    """`ok`, `out of memory`, `does not fit` (a budget), `error`, `crashed` or `too slow`."""
    values: dict[str, Any]
    """What was measured; or `message`."""
    machine: dict[str, str]

    @property
    def message(self) -> str:
        return str(self.values.get("message", "no message"))


def read(folder: pathlib.Path) -> tuple[dict[Cell, Result], list[str]]:
    """All results in `results*.jsonl`, the last one of each cell; and lines that are not results.

    A program that was killed may leave a part of a line at the end of a file, and people may put
    other files beside it.
    """
    found: dict[Cell, Result] = {}
    bad: list[str] = []
    for file in sorted(folder.glob("results*.jsonl")):
        for number, line in enumerate(_lines(file), start=1):
            try:
                result = _parsed(line)
            except (ValueError, RecursionError) as error:
                bad.append(f"{file.name}, line {number}: {line[:60]!r} ({error})")
                continue
            found[result.cell] = result
    return found, bad


def _lines(file: pathlib.Path) -> list[str]:
    try:
        lines = file.read_text(errors="replace").split("\n")
    except OSError as error:
        return [f"cannot be read: {error}"]
    return lines[:-1] if lines[-1] == "" else lines


def _parsed(line: str) -> Result:
    """Raise a `ValueError` that says what is wrong with it."""
    fields = json.loads(line)
    _require(isinstance(fields, dict), "no JSON object")
    wanted = {"cell": dict, "status": str, "values": dict, "machine": dict}
    _require(fields.keys() == wanted.keys(), f"its fields are not {', '.join(wanted)}")
    for name, kind in wanted.items():
        _require(isinstance(fields[name], kind), f"`{name}` is not of type {kind.__name__}")
    types = {f.name: type(f.default) for f in dataclasses.fields(Cell)} | {"model": str}
    for name, value in fields["cell"].items():
        _require(name in types, f"a cell has no {name!r}")
        _require(type(value) is types[name], f"`{name}` (={value!r}) of its cell is no such thing")
        _require(types[name] is str or 0 <= value < 2**31, f"`{name}` is {value}")
    model = fields["cell"].get("model")
    _require(model in REFERENCES, f"there is no model {model!r}")
    if fields["status"] == "ok":
        wrong = mistake(fields["values"])
        _require(wrong is None, wrong)
    return Result(**{**fields, "cell": Cell(**fields["cell"])})


def mistake(values: Any) -> str | None:
    """Why this is not what was measured of a cell; None if it is."""
    if not isinstance(values, dict):
        return "there is no JSON object"
    seconds = number(values, "seconds")
    return None if seconds and seconds > 0 else "there is no positive number `seconds`"


def number(values: dict[str, Any], name: str) -> float | None:
    """A finite number, if there is one of this name."""
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # more digits than any float
        return None


def _require(holds: bool, otherwise: str | None) -> None:
    if not holds:
        raise ValueError(otherwise)


def append(file: pathlib.Path, result: Result) -> None:
    """One line; on the disk when this returns. A line that was cut off before it stays apart."""
    text = json.dumps(dataclasses.asdict(result)) + "\n"
    cut_off = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with open(file, "a") as handle:
        handle.write(("\n" if cut_off else "") + text)
        handle.flush()
        os.fsync(handle.fileno())
