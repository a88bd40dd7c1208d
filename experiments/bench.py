"""jaxtile beside plain JAX: one command, ratios from one run.

    python -m experiments.bench --workdir=runs/bench
    python -m experiments.bench --workdir=runs/bench --peers     # PyTorch too, if it is installed
    python -m experiments.bench --workdir=runs/bench --problem=vgg16,4096,bfloat16
    python -m experiments.bench --workdir=runs/bench --row='budget:*'   # and plain JAX
    python -m experiments.bench --workdir=runs/bench --planners=8   # plans first, 8 at a time
    python -m experiments.bench --workdir=runs/bench --profile   # and where the time of a step goes

The problems are VGG16, ResNet-50 and the U-Net on jaxtile's layers, and two networks that know
nothing of it: `haiku_resnet50`, if Haiku is installed, and `convnext`, in Linen.

Rows per problem: plain JAX, `jax.checkpoint` per block and whole, jaxtile with everything stored
and with the planner at a half, a quarter and an eighth of plain's temporary bytes; with several
devices, if their number divides the image's rows, also XLA's own sharding of the image, and
jaxtile's. Each row is measured in a process of its own, results append to `results.jsonl`, and the
same command goes on where it stopped. The table goes to `bench.md` in the workdir.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from .measuring.baselines import IN_TORCH, PLAIN, SHARDED
from .measuring.cells import Cell, check
from .measuring.planning import PREFIX, exceeds, file_of, make_plans
from .measuring.processes import keep_off_devices, machine, measured, outcome, process
from .measuring.results import Result, append, read
from .program.command import profile_flag, start, workdir_flag
from .program.config import ConfigError, sweep
from .program.files import Lock, write_atomically
from .program.progress import Now

_WORKDIR = workdir_flag()
_PEERS = flags.DEFINE_bool("peers", False, "PyTorch, plain and with checkpoints per block")
_PROBLEM = flags.DEFINE_multi_string("problem", [], "as vgg16,4096,bfloat16 or unet,188,float32,1")
_ROW = flags.DEFINE_multi_string(
    "row", [], "some of the rows, beside plain JAX's: patterns, as store_all or 'budget:*'"
)
_PROFILE = profile_flag()
_PLANNERS = flags.DEFINE_integer(
    "planners", 0, "make all plans first, so many at a time; 0: each when its row is measured", 0
)
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed steps", 1)
_LIMIT = flags.DEFINE_integer("limit", 600, "seconds allowed per row", 1)

_ON_GPU = (
    *("vgg16,4096,bfloat16", "resnet50,4096,bfloat16", "unet,572,float32,8"),
    *("haiku_resnet50,2048,bfloat16", "convnext,2048,bfloat16"),
)
# No ConvNeXt: XLA takes seconds and 231 MB on a CPU for the kernel's gradient of one depthwise
# convolution of 768 channels, at 8 x 8 pixels.
_ON_CPU = (
    *("vgg16,128,float32", "resnet50,128,float32", "unet,188,float32,1"),
    "haiku_resnet50,128,float32",
)
_FRACTIONS = (0.5, 0.25, 0.125)


def main(argv: list[str]) -> None:
    del argv
    keep_off_devices()
    try:
        if not _WORKDIR.value:
            raise ConfigError("--workdir must name a folder, as runs/bench")
        here = machine_has()
        default = _ON_GPU if here.gpu else _ON_CPU
        given = _PROBLEM.value or installed(default)
        problems = [*dict.fromkeys(map(parsed, given))]
        check_rows(_ROW.value)
        print(bench(problems, _WORKDIR.value, here, with_peers=_PEERS.value))
    except ConfigError as error:
        sys.exit(f"error: {error}")


class Machine(NamedTuple):
    devices: int
    gpu: str | None
    """What kind of GPU these are; None: they are none."""


def machine_has() -> Machine:
    """Asked in a process that ends."""
    code = """if True:
        import jax
        print(jax.device_count(), jax.default_backend(), jax.devices()[0].device_kind)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, backend, kind = done.stdout.splitlines()[-1].split(maxsplit=2)
    return Machine(int(number), None if backend == "cpu" else kind)


def installed(problems: Sequence[str]) -> list[str]:
    """Those whose libraries are there. One that was asked for by name is an error instead."""
    if importlib.util.find_spec("haiku") is not None:
        return list(problems)
    print("haiku_resnet50: dm-haiku is not installed, so it is left out", file=sys.stderr)
    return [text for text in problems if not text.startswith("haiku")]


def parsed(text: str) -> Cell:
    """A problem: model, size, dtype, and the batch if it is not the reference's."""
    try:
        model, size, dtype, *batch = text.split(",")
        cell = Cell(model, int(size), int(batch[0]) if batch else 0, dtype)
        check(cell)
    except ValueError as error:
        raise ConfigError(f"--problem (={text}) must be as vgg16,4096,bfloat16: {error}") from error
    return cell


def check_rows(patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not pattern.startswith("budget:") and not fnmatch.filter(_TITLES, pattern):
            raise ConfigError(f"--row (={pattern}) is none of {', '.join(_TITLES)}, budget:*")


def chosen(cells: Iterable[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The rows that match; all of them without a pattern. Ratios are to plain JAX's."""
    patterns = [PLAIN, *patterns] if patterns else ["*"]
    return [cell for cell in cells if any(fnmatch.fnmatch(cell.policy, p) for p in patterns)]


def bench(problems: Sequence[Cell], path: str, here: Machine, *, with_peers: bool) -> str:
    """Measure what is missing; the table."""
    lock = Lock(path)
    folder = lock.folder
    known, _ = read(folder)
    settings = sweep(())
    settings.update(repeats=_REPEATS.value, limit_seconds=_LIMIT.value, compare=False, warmup=2)

    def found(cell: Cell) -> Result:
        in_torch = cell.policy in _PEER_ROWS
        if cell not in known or (_PROFILE.value and not in_torch and lacks_profile(known[cell])):
            with Now(file=sys.stderr) as now:
                now(f"measuring {cell.name}")
                known[cell] = (
                    peer(cell, settings, folder) if in_torch else row(cell, settings, folder)
                )
            append(folder / "results.jsonl", known[cell])
            print(f"{cell.name}: {outcome(known[cell])}", file=sys.stderr, flush=True)
        return known[cell]

    cells = {p: chosen(baselines(p, here.devices), _ROW.value) for p in problems}
    rows = {problem: [*map(found, some)] for problem, some in cells.items()}
    cells = {p: chosen(planned(p, rows[p][0]), _ROW.value) for p in problems}
    if _PLANNERS.value:
        missing = [c for some in cells.values() for c in some if c not in known]
        for result in plan_first(missing, folder, here.gpu):
            known[result.cell] = result
            append(folder / "results.jsonl", result)
    lines = []
    for problem in problems:
        rows[problem] += map(found, cells[problem])
        if with_peers and problem.model in IN_TORCH:
            if importlib.util.find_spec("torch") is None:
                print("--peers: PyTorch is not installed, so it is left out", file=sys.stderr)
            else:
                peers = [dataclasses.replace(problem, policy=name) for name in _PEER_ROWS]
                rows[problem] += map(found, chosen(peers, _ROW.value))
        lines += section(problem, rows[problem])
    text = "\n".join(lines)
    write_atomically(folder / "bench.md", text + "\n")
    return text


def plan_first(cells: Sequence[Cell], folder: pathlib.Path, gpu: str | None) -> list[Result]:
    """Make the plans of these cells; the results of those whose budgets are too small."""
    cells = [cell for cell in cells if cell.policy.startswith(PREFIX)]
    limits = {"at_once": _PLANNERS.value, "limit": _LIMIT.value}
    with Now(file=sys.stderr) as now:
        now(f"making {len(cells)} plans")
        failed = make_plans(cells, folder, **limits, device=gpu, say=now)
    # What failed otherwise, because nothing can be compiled for a GPU here, is planned on it.
    too_small = {cell: found for cell, found in failed.items() if found[0] == "does not fit"}
    return [Result(cell, *found, machine()) for cell, found in too_small.items()]


def row(cell: Cell, settings: ConfigDict, folder: pathlib.Path) -> Result:
    """As measured. A plan that was made before, and takes more than its budget as it runs, is made
    anew.
    """
    file, profiled = file_of(cell, folder), _PROFILE.value
    if not (cell.policy.startswith(PREFIX) and file.exists()):
        return measured(cell, settings, folder, profiled=profiled)
    found = measured(cell, settings, folder, profiled=profiled, plan=file)
    if found.status == "ok" and exceeds(cell, found.values["compiled_bytes"]):
        print(f"{cell.name}: its plan does not fit as it runs", file=sys.stderr, flush=True)
        found = measured(cell, settings, folder, profiled=profiled)
    return found


def section(problem: Cell, rows: Sequence[Result]) -> list[str]:
    """The table of a problem, and where the time of its rows went, if that is known."""
    lines = [*table(problem, rows), ""]
    for result in rows if _PROFILE.value else ():
        if "profile" in result.values:
            title = _TITLES.get(result.cell.policy) or f"jaxtile, {result.cell.policy}"
            lines += [f"{title}:", "", "```", result.values["profile"], "```", ""]
    return lines


def lacks_profile(result: Result) -> bool:
    return result.status == "ok" and "profile" not in result.values


def baselines(problem: Cell, devices: int) -> Iterator[Cell]:
    split = devices > 1 and problem.shape[1] % devices == 0
    for name in (PLAIN, "jax_blocks", "jax_whole", *(SHARDED if split else ())):
        yield dataclasses.replace(problem, policy=name)


def planned(problem: Cell, plain: Result) -> Iterator[Cell]:
    """jaxtile: all stored, and the planner with fractions of plain's bytes, if plain did run."""
    yield dataclasses.replace(problem, policy="store_all")
    if plain.status != "ok":
        return
    held = plain.values["temporary_bytes"]
    rest = plain.values["compiled_bytes"] - held
    for fraction in _FRACTIONS:
        budget = f"budget:{(rest + fraction * held) / 2**20:.1f}MiB"
        yield dataclasses.replace(problem, policy=budget)


_PEER_ROWS = ("torch", "torch_blocks")


def peer(cell: Cell, settings: ConfigDict, folder: pathlib.Path) -> Result:
    options = {
        "model": cell.model,
        "size": cell.size,
        "batch": cell.batch,
        "dtype": cell.dtype,
        "checkpoint": cell.policy == "torch_blocks",
        "repeats": settings.repeats,
    }
    done = process("experiments.peers", options, settings.limit_seconds, folder)
    return Result(cell, *done, machine())


_TITLES = {
    PLAIN: "plain JAX",
    "jax_blocks": "`jax.checkpoint` per block",
    "jax_whole": "`jax.checkpoint` whole",
    "xla_sharding": "XLA's sharding, all devices",
    "mesh": "jaxtile, all devices",
    "store_all": "jaxtile, everything stored",
    "torch": "PyTorch",
    "torch_blocks": "PyTorch, checkpoint per block",
}


def table(problem: Cell, rows: Sequence[Result]) -> list[str]:
    """Markdown: times and bytes beyond arguments and outputs, and both as ratios to plain JAX."""
    plain = rows[0].values
    # Rows that were measured elsewhere, or with another JAX, do not pass unseen.
    devices = dict.fromkeys(r.values["device"] for r in rows if "device" in r.values)
    versions = dict.fromkeys(r.machine["jax"] for r in rows)
    batch, height, width, _ = problem.shape
    lines = [
        f"{problem.model}, {batch} x {height} x {width}, {problem.dtype}; "
        f"{' and '.join(devices) or '-'}, jax {' and '.join(versions)}",
        "",
        "| schedule | ms | ratio | GiB | ratio | Mpixel/s |",
        "|---|---|---|---|---|---|",
    ]
    pixels = batch * height * width
    for row in rows:
        name = row.cell.policy
        title = _TITLES.get(name) or f"jaxtile, {name}"
        if row.status != "ok":
            lines.append(f"| {title} | {row.status} | | | | |")
            continue
        seconds, held = row.values["seconds"], row.values["temporary_bytes"]
        lines.append(
            f"| {title} | {seconds * 1e3:.1f} | {_ratio(seconds, plain.get('seconds'))} | "
            f"{'-' if held is None else f'{held / 2**30:.3g}'} | "
            f"{_ratio(held, plain.get('temporary_bytes'))} | {pixels / seconds / 1e6:.3g} |"
        )
    return lines


def _ratio(value: float | None, plain: float | None) -> str:
    return f"{value / plain:.2f}" if value is not None and plain else "-"


if __name__ == "__main__":
    start(main)
