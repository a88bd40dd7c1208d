"""Measure models x sizes x policies x grids x dtypes, each cell in a process of its own.

    python -m experiments.sweep --config=configs/sweep_quick.py --workdir=runs/sweep
    python -m experiments.sweep ... --only 'unet,*,budget:*'    # some of the cells
    python -m experiments.sweep ... --shard 2/8                 # the second eighth of them

Results append to `results.jsonl` in the workdir (a shard's to a file of its own; put the files of
all shards into one folder to merge them). The same command does only what is missing. A cell that
crashes, runs out of memory, takes too long or prints no result costs that cell, and is recorded as
such; `--retry` measures those again. A sweep that is stopped or killed takes its cell with it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from . import baselines
from .cell import Cell, check
from .child import run_child
from .config import ConfigError, config_flag, start, workdir_flag
from .progress import Bar
from .results import Result, append, mistake, number, read
from .workdir import Workdir

_CONFIG = config_flag()
_WORKDIR = workdir_flag()
_ONLY = flags.DEFINE_multi_string("only", [], "cells: patterns of MODEL,SIZE,POLICY,TILES,DTYPE")
_SHARD = flags.DEFINE_string("shard", None, "as 2/8: the second eighth of the cells")
_RETRY = flags.DEFINE_bool("retry", False, "measure cells again that failed")
_LIST = flags.DEFINE_bool("list", False, "print the cells and stop")


def main(argv: list[str]) -> None:
    del argv
    keep_off_devices()
    try:
        if not isinstance(_CONFIG.value, ConfigDict) or not _WORKDIR.value:
            raise ConfigError("--config must name a file, and --workdir a folder")
        chosen = selected(cells(_CONFIG.value), _ONLY.value, _SHARD.value)
        if _LIST.value:
            print("\n".join(cell.name for cell in chosen))
            return
        run(_CONFIG.value, chosen, _WORKDIR.value, shard=_SHARD.value, retry=_RETRY.value)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


def keep_off_devices() -> None:
    """They are for the processes of the cells: this one would take most of a GPU's memory."""
    jax.config.update("jax_platforms", "cpu")


def cells(config: ConfigDict) -> list[Cell]:
    """The product; every cell is checked before any is run."""
    product = itertools.product(
        config.models, config.sizes, config.batches, config.dtypes, config.policies, config.tiles
    )
    found = []
    for model, size, batch, dtype, policy, tiles in product:
        if tiles and policy in (*baselines.NAMES, "store_all"):
            continue  # nothing is recomputed
        found.append(Cell(model, size, batch, dtype, policy, tiles))
    wrong = []
    for cell in found:
        try:
            check(cell)
        except ValueError as error:
            wrong.append(f"{cell.name}: {error}")
    if wrong:
        more = f"\n... and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError("these cells cannot run:\n" + "\n".join(wrong[:5]) + more)
    return found


def selected(found: Sequence[Cell], only: Sequence[str], shard: str | None) -> list[Cell]:
    def matches(cell: Cell) -> bool:
        # A pattern may leave out the fields at the end.
        return any(
            fnmatch.fnmatch(cell.name, p) or fnmatch.fnmatch(cell.name, p + ",*") for p in only
        )

    chosen = [cell for cell in found if not only or matches(cell)]
    if not chosen:
        example = found[0].name if found else "-"
        raise ConfigError(f"--only {only} matches none of {len(found)} cells, as {example!r}")
    if shard is None:
        return chosen
    parts = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise ConfigError(f"--shard (={shard!r}) must be written as 2/8")
    return chosen[int(parts[1]) - 1 :: int(parts[2])]


def run(config: ConfigDict, chosen: Sequence[Cell], path: str, *, shard: str | None, retry: bool):
    """Measure what is missing, and say how it went."""
    workdir = Workdir(path, lock=f"lock-{shard.replace('/', 'of')}" if shard else "lock")
    known, bad = read(workdir.path)
    for line in bad:
        print(f"warning: not a result, left alone: {line}", flush=True)
    missing = [c for c in chosen if c not in known or (retry and known[c].status != "ok")]
    name = f"results-{shard.replace('/', 'of')}.jsonl" if shard else "results.jsonl"
    print(f"{len(chosen)} cells, {len(chosen) - len(missing)} of them done already", flush=True)
    with Bar("cell", len(missing)) as bar:
        for cell in missing:
            result = measured(cell, config, workdir.path)
            append(workdir.path / name, result)
            bar.advance(f"{cell.name}: {outcome(result)}")


def measured(cell: Cell, config: ConfigDict, folder: pathlib.Path) -> Result:
    """The result of a process that measures the cell."""
    settings = {"warmup": config.warmup, "repeats": config.repeats, "compare": config.compare}
    options = {**dataclasses.asdict(cell), "settings": settings}
    found = process("experiments.cell", options, config.limit_seconds, folder)
    return Result(cell, *found, machine())


def process(
    module: str, options: dict[str, Any], limit: float, folder: pathlib.Path
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
    from importlib.metadata import version

    return {
        "jax": version("jax"),
        "python": platform.python_version(),
        "node": platform.machine(),
    }


def outcome(result: Result) -> str:
    if result.status != "ok":
        return f"{result.status} ({result.message[:80]})"
    from policies import format_bytes

    values = result.values
    held = number(values, "compiled_bytes") or number(values, "temporary_bytes")
    return f"{values['seconds'] * 1e3:.1f} ms, {format_bytes(held) if held else '-'}"


if __name__ == "__main__":
    start(main, "what was measured is kept, and the same command goes on")
