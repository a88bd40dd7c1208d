"""Plans of cells with a budget; those of several, each by a process of its own.

Most of what a row with a budget takes is its plan, for which one core works and the device waits.
So plans can be made first, as many at a time as there are cores. A plan for a GPU is made as if it
were not there, by JAX's CUDA plugin, and has not been compiled as it will run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import policies

from ..program.files import write_atomically
from .cells import Cell
from .problems import Problem, problem
from .processes import process

PREFIX = "budget:"


def plan_of(cell: Cell, found: Problem, device: str | None = None) -> policies.Plan:
    """The plan for a cell whose policy is a budget; `device`: a GPU that need not be there."""
    return policies.plan(
        found.loss,
        *found.arguments,
        in_axes=found.in_axes,
        budget=cell.policy.removeprefix(PREFIX),
        step=lambda tiled: jax.value_and_grad(tiled, has_aux=True),
        device=device,
    )


def file_of(cell: Cell, folder: pathlib.Path) -> pathlib.Path:
    """Where its plan lies."""
    return folder / "plans" / (re.sub(r"[^\w.]+", "-", cell.name) + ".json")


def exceeds(cell: Cell, size: float) -> bool:
    """Are so many bytes more than its budget?"""
    return size > policies.parse_bytes(cell.policy.removeprefix(PREFIX))


def make_plans(
    cells: Sequence[Cell],
    folder: pathlib.Path,
    *,
    at_once: int,
    limit: float,
    device: str | None,
    say: Callable[[str], None],
) -> dict[Cell, tuple[str, dict[str, Any]]]:
    """Make those that are not there, and say which are. Returns which cells have none, and why."""

    def make(cell: Cell) -> tuple[str, dict[str, Any]]:
        file = file_of(cell, folder)
        options = {"cell": dataclasses.asdict(cell), "file": str(file), "device": device}
        status, values = process(__name__, options, limit, folder, JAX_PLATFORMS="cpu")
        took = f"planned in {values['seconds']:.0f} s" if status == "ok" else values["message"]
        say(f"{cell.name}: {took}")
        return status, values

    missing = [cell for cell in cells if not file_of(cell, folder).exists()]
    for cell in cells:
        if cell not in missing:
            made_on = datetime.date.fromtimestamp(file_of(cell, folder).stat().st_mtime)
            say(f"{cell.name}: takes the plan of {made_on} in {file_of(cell, folder)}")
    (folder / "plans").mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        made = dict(zip(missing, threads.map(make, missing), strict=True))
    return {cell: found for cell, found in made.items() if found[0] != "ok"}


def main() -> None:
    options = json.loads(sys.argv[1])
    cell, file = Cell(**options["cell"]), pathlib.Path(options["file"])
    began = time.perf_counter()
    found = problem(cell.model, cell.shape, jnp.dtype(cell.dtype), abstract=True)
    plan = plan_of(cell, found, options["device"])
    write_atomically(file, json.dumps(plan.as_json(), indent=1) + "\n")  # whole, or not there
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
