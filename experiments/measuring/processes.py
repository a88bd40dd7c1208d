"""Cells measured in processes of their own: a crash, or memory that ran out, costs one cell."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
from importlib.metadata import version
from typing import Any

import jax
from ml_collections import ConfigDict

from policies import format_bytes

from .cells import Cell
from .child import run_child
from .results import Result, mistake, number


def keep_off_devices() -> None:
    """They are for the processes of the cells: this one would take most of a GPU's memory."""
    jax.config.update("jax_platforms", "cpu")


def measured(
    cell: Cell,
    config: ConfigDict,
    folder: pathlib.Path,
    *,
    profiled: bool = False,
    plan: pathlib.Path | None = None,
) -> Result:
    """The result of a process that measures the cell, with this plan if there is one, and traces
    some steps if that is wanted.
    """
    settings = {"warmup": config.warmup, "repeats": config.repeats, "compare": config.compare}
    if plan is not None:
        settings["plan"] = str(plan.absolute())
    if profiled:
        name = re.sub(r"[^\w.]+", "-", cell.name)
        settings["profile_into"] = str(folder.absolute() / "profile" / name)
    options = {**dataclasses.asdict(cell), "settings": settings}
    found = process("experiments.cell", options, config.limit_seconds, folder)
    return Result(cell, *found, machine())


def process(
    module: str, options: dict[str, Any], limit: float, folder: pathlib.Path, **variables: str
) -> tuple[str, dict[str, Any]]:
    """How a program ended, and the JSON object in the last line of those that it printed.

    A GPU's compiler tries algorithms for each convolution, for a minute or more per program. What
    it chose is kept in the folder, so that it is tried once, and all cells get the same.
    """
    environment = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "autotuned"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",  # programs themselves are not kept
        **os.environ,
        **variables,
    }
    try:
        done = run_child(module, json.dumps(options), limit, environment)
    except subprocess.TimeoutExpired:
        return "too slow", {"message": f"took longer than {limit} s"}
    if done.returncode != 0:
        return failure(done)
    values = last_object(done.stdout)
    if wrong := mistake(values):
        printed = done.stdout.strip()[-200:]
        return "error", {"message": f"{wrong}; it printed {printed!r}"}
    return "ok", values


def last_object(text: str) -> Any:
    """The last line that is a JSON object, or None: libraries may print after the result too."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def failure(done: subprocess.CompletedProcess) -> tuple[str, dict[str, Any]]:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    message = (errors or lines or ["no message"])[-1][:300]
    if "RESOURCE_EXHAUSTED" in done.stderr or "Out of memory" in done.stderr:
        return "out of memory", {"message": message}
    if "BudgetError" in message:
        return "does not fit", {"message": message}
    if done.returncode < 0:
        return "crashed", {"message": f"signal {-done.returncode}; {message}"}
    return "error", {"message": message}


def machine() -> dict[str, str]:
    """Where it was measured, without starting a device here."""
    return {
        "jax": version("jax"),
        "python": platform.python_version(),
        "node": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def outcome(result: Result) -> str:
    if result.status != "ok":
        return f"{result.status} ({result.message[:80]})"
    values = result.values
    held = number(values, "compiled_bytes") or number(values, "temporary_bytes")
    return f"{values['seconds'] * 1e3:.1f} ms, {format_bytes(held) if held else '-'}"
