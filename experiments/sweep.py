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

import fnmatch
import itertools
import re
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from .measuring import baselines
from .measuring.cells import Cell, check
from .measuring.processes import keep_off_devices, measured, outcome
from .measuring.results import append, read
from .program.command import config_flag, start, workdir_flag
from .program.config import ConfigError
from .program.files import Lock
from .program.progress import Bar, Now

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


def cells(config: ConfigDict) -> list[Cell]:
    """The product; every cell is checked before any is run."""
    if "models" not in config:
        raise ConfigError("this config has no `models`: it is not one of a sweep")
    for name, least in (("warmup", 0), ("repeats", 1), ("limit_seconds", 1)):
        if config[name] < least:
            raise ConfigError(f"`{name}` (={config[name]}) must be at least {least}")
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


def run(
    config: ConfigDict, chosen: Sequence[Cell], path: str, *, shard: str | None, retry: bool
) -> None:
    """Measure what is missing, and say how it went."""
    part = f"-{shard.replace('/', 'of')}" if shard else ""
    lock = Lock(path, f"lock{part}")
    known, bad = read(lock.folder)
    for line in bad:
        print(f"warning: not a result, left alone: {line}", flush=True)
    missing = [c for c in chosen if c not in known or (retry and known[c].status != "ok")]
    print(f"{len(chosen)} cells, {len(chosen) - len(missing)} of them done already", flush=True)
    with Bar("cell", len(missing)) as bar:
        for cell in missing:
            bar.hide()
            with Now() as now:
                now(f"measuring {cell.name}")
                result = measured(cell, config, lock.folder)
            append(lock.folder / f"results{part}.jsonl", result)
            bar.advance(f"{cell.name}: {outcome(result)}")


if __name__ == "__main__":
    start(main, "what was measured is kept, and the same command goes on")
