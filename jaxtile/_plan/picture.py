"""A plan as a picture: bytes live over the schedule, and stored results as bars."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .._amounts import format_bytes
from .stage import PlannedStage

_COLOURS = {"keep": "#4c78a8", "whole": "#f58518"}
_TILES = "#54a24b"


def draw(
    path: str | os.PathLike[str],
    stages: Sequence[PlannedStage],
    total: int,
    budget: int | None,
    title: str,
) -> None:
    """`total`: estimated bytes of the whole step, arguments and results included."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a plan needs matplotlib: pip install 'jaxtile[plot]'") from error
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    live, bars = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    _live_bytes(live, stages, total, budget)
    live.set_title(title)
    _stored(bars, stages)
    figure.savefig(path)


def _live_bytes(axes: Any, stages: Sequence[PlannedStage], total: int, budget: int | None) -> None:
    """Forward, then backward: what is held before a stage, and what it works in."""
    n = len(stages)
    unit, name = (2**30, "GiB") if total > 2**31 else (2**20, "MiB")
    held = [0.0]
    for stage in stages:
        held.append(held[-1] + stage.held_bytes / unit)
    working = [stage.working_bytes / unit for stage in stages]
    fixed = total / unit - max(h + w for h, w in zip(held, working, strict=False))
    for i, stage in enumerate(stages):
        colour = _COLOURS.get(stage.mode, _TILES)
        bottom = fixed + held[i]
        stays = held[i + 1] - held[i]
        axes.bar(i, stays, 1, bottom, color=colour, alpha=0.6, edgecolor="white")
        axes.bar(2 * n - 1 - i, working[i], 1, bottom, color=colour, edgecolor="white")
        for x in (i, 2 * n - 1 - i):
            axes.bar(x, held[i], 1, fixed, color="#bbbbbb", edgecolor="white")
            axes.bar(x, fixed, 1, 0, color="#888888", edgecolor="white")
    if budget is not None:
        axes.axhline(budget / unit, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"budget {format_bytes(budget)}", (0, budget / unit), va="bottom")
    from matplotlib.patches import Patch

    legend = [
        ("arguments and results", "#888888"),
        ("stored before", "#bbbbbb"),
        ("kept as plain JAX", _COLOURS["keep"]),
        ("recomputed whole", _COLOURS["whole"]),
        ("recomputed in tiles", _TILES),
    ]
    handles = [Patch(color=c, label=text) for text, c in legend]
    axes.figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False)
    axes.set_ylabel(f"{name} live")


def _stored(axes: Any, stages: Sequence[PlannedStage]) -> None:
    n, row = len(stages), 0
    for i, stage in enumerate(stages):
        for name in stage.stored:
            away = name in stage.offloaded
            axes.barh(
                row,
                2 * (n - 1 - i),
                left=i + 0.5,
                height=0.8,
                color="none" if away else _COLOURS.get(stage.mode, _TILES),
                edgecolor="black",
                linestyle=":" if away else "-",
                linewidth=0.5,
            )
            axes.annotate(name + (" (host)" if away else ""), (i + 0.6, row), va="center", size=7)
            row += 1
    axes.set_yticks([])
    axes.set_ylabel("stored results")
    labels = [stage.last for stage in stages]
    axes.set_xticks(
        range(2 * n), labels + [f"grad {name}" for name in reversed(labels)], rotation=90, size=7
    )
