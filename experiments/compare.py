"""Runs side by side: in which settings they differ, what they reached, and what they took.

    python -m experiments.compare runs/a runs/b
    python -m experiments.compare runs/a runs/b runs/c --picture=compare.png

Runs may be under way still. Metrics are those of the last evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from policies import format_bytes

from .program.command import start
from .program.config import ConfigError, fields, with_defaults
from .program.files import PICTURES, output, write_figure
from .training.workdir import ReadOnly, read_config

_PICTURE = flags.DEFINE_string("picture", None, "draw losses and metrics here (png, svg, pdf)")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a folder says of its run."""

    settings: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    summary: dict[str, Any]
    """Empty as long as the run is under way."""


def read(folder: pathlib.Path) -> Found:
    settings = dict(fields(with_defaults(ConfigDict(read_config(folder)))))
    workdir, file = ReadOnly(folder), folder / "summary.json"
    lines = workdir.metrics()
    return Found(
        settings,
        [line for line in lines if "split" not in line],
        [line for line in lines if line.get("split") == "eval"],
        workdir.timings(),
        json.loads(file.read_text()) if file.exists() else {},
    )


def table(runs: dict[str, Found]) -> str:
    """As text: a row for each setting that differs, each metric, time and bytes."""
    found = list(runs.values())
    rows = [("", *runs)]
    for name in sorted({n for run in found for n in run.settings}):
        values = [repr(run.settings.get(name)) for run in found]
        if len(set(values)) > 1:
            rows.append((name, *values))
    rows.append(("steps done", *(str(len(run.steps)) for run in found)))
    last = [run.evaluations[-1] if run.evaluations else {} for run in found]
    names = {n: None for line in last for n, v in line.items() if isinstance(v, float)}
    rows += [(name, *(_number(line.get(name)) for line in last)) for name in names]
    seconds = [[line["seconds_per_step"] for line in run.timings] for run in found]
    rows.append(("seconds a step", *(_number(min(s, default=None)) for s in seconds)))
    for name, text in (("compiled", "bytes a step"), ("plain_compiled", "bytes of plain JAX")):
        sizes = [run.summary.get("bytes", {}).get(name) for run in found]
        rows.append((text, *("-" if n is None else format_bytes(n) for n in sizes)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def draw(runs: dict[str, Found], path: pathlib.Path) -> None:
    """The losses of training, smoothed, and the metric of each evaluation."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, run in runs.items():
        losses = np.array([line["loss"] for line in run.steps])
        width = max(1, len(losses) // 50)
        smooth = np.convolve(losses, np.ones(width) / width, "valid") if len(losses) else losses
        left.plot(np.arange(len(smooth)) + width, smooth, label=name)
        evaluated = [(e["step"], e.get("loss")) for e in run.evaluations]
        right.plot([step for step, _ in evaluated], [loss for _, loss in evaluated], "o-")
    left.set(xlabel="step", ylabel="training loss, smoothed")
    right.set(xlabel="step", ylabel="evaluation loss")
    left.legend()
    write_figure(figure, path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str]) -> None:
    folders = [pathlib.Path(name) for name in argv[1:]]
    if len(folders) < 2:
        raise ConfigError("name the workdirs of two runs or more, as runs/a runs/b")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"a run is named twice: {' '.join(argv[1:])}")
    picture = output("picture", _PICTURE.value, PICTURES)
    runs = {str(folder): read(folder) for folder in folders}
    print(table(runs))
    if picture:
        draw(runs, picture)


if __name__ == "__main__":
    start(main, takes_words=True)
