"""The end of a run: what it reached, what it saved, and pictures of it."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

import jaxtile
from policies import format_bytes

from ..program.files import write_atomically
from . import pictures
from .evaluation import Evaluation
from .step import Program, Step
from .task import Weights
from .workdir import Workdir

_EXAMPLES = 3  # in the picture of predictions
_QUALITY = ("loss", "accuracy", "mean_iou", "mean_dice", "iou", "counted")


def write(
    workdir: Workdir,
    step: Step,
    program: Program,
    policy: Any,
    record: dict[str, Any],
    skipped: dict[str, str],
    evaluation: Evaluation,
    weights: Weights,
) -> str:
    """Write `summary.json`, the pictures and `summary.txt`, which it returns."""
    lines = workdir.metrics()
    last = [line for line in lines if line.get("split") == "eval"][-1]
    peak = program.peak.observed()  # before the plain step is compiled
    plain_compiled = plain_bytes(step)
    found = {
        "step": last["step"],
        "quality": {k: last[k] for k in _QUALITY},
        "evaluated": evaluation.text,
        "best": record["best"],
        "policy": step.task.config.policy,
        "bytes": {
            "estimated": program.estimated,
            "compiled": program.bytes,
            "observed_peak": peak,
            "peak_while_compiling": program.peak.before,
            "plain_compiled": plain_compiled,
        },
        "speed": speed(workdir),
        "skipped_files": len(skipped),
    }
    write_atomically(workdir.path / "summary.json", json.dumps(found, indent=1) + "\n")
    drawn = draw(workdir, step, policy, lines, evaluation, weights)
    scale = evaluation.dataset.scale
    cut = scale.beyond() if scale is not None else None
    text = as_text(found, step, program, drawn, workdir, [f"warning: {cut}"] if cut else [])
    write_atomically(workdir.path / "summary.txt", text + "\n")
    return text


def plain_bytes(step: Step) -> int | None:
    """Compiled bytes of the untiled step: without autotuning, which would run its convolutions.
    None if the compiler gives up.
    """
    try:
        return jaxtile.compiled_bytes(step.traced(None).lower()).total
    except jax.errors.JaxRuntimeError:
        return None


def speed(workdir: Workdir) -> dict[str, float]:
    """Medians over the stretches between checkpoints."""
    lines = workdir.timings()
    names = ("seconds_per_step", "images_per_second", "megapixels_per_second")
    return {name: float(np.median([line[name] for line in lines])) for name in names if lines}


def draw(workdir, step: Step, policy, lines, evaluation, weights: Weights) -> list[str]:
    """The pictures; returns their names."""
    task, dataset = step.task, evaluation.dataset
    pictures.loss_curve(lines, task.quality, workdir.path / "loss.png")
    count = min(_EXAMPLES, len(dataset))
    examples = [dataset.example(i, None) for i in range(count)]
    predict = jax.jit(task.prediction((1, *dataset.shape), evaluation.tile))
    rows = [
        (image, label, np.asarray(predict(weights, image[None]))[0]) for image, label in examples
    ]
    classes = task.config.data.classes
    pictures.predictions(rows, classes, workdir.path / "predictions.png")
    state = step.state
    explained = jaxtile.explain(
        task.loss,
        state.params,
        state.variables,
        *step.batch,
        in_axes=task.in_axes(2),
        policy=policy,
    )
    tiled = pictures.tile_grid(examples[0][0], explained, workdir.path / "tiles.png")
    return ["loss.png", "predictions.png", *(["tiles.png"] if tiled else [])]


def as_text(found: dict[str, Any], step, program, drawn, workdir, warnings: list[str]) -> str:
    size, best = found["bytes"], found["best"]
    plain = size["plain_compiled"]
    compared = plain and f", plain JAX {format_bytes(plain)}: {size['compiled'] / plain:.2f} of it"
    counted, *more = step.task.describe_counts(found["quality"])
    rows = [
        (
            "quality",
            step.task.describe(found["quality"]),
        ),
        (
            "evaluated",
            f"{found['evaluated']}; {counted}",
        ),
        *(tuple(warning.split(": ", 1)) for warning in (*more, *warnings)),
        (
            "best",
            f"{step.task.quality} {best['quality']:.4f} after step {best['step']}" if best else "-",
        ),
        (
            "memory",
            f"{program.bytes_text()} a step{compared or ''}",
        ),
    ]
    if size["observed_peak"] is not None:
        rows.append(("peak", f"{format_bytes(size['observed_peak'])} observed on the device"))
    elif size["peak_while_compiling"] is not None:
        trials = format_bytes(size["peak_while_compiling"])
        rows.append(("peak", f"not observed: the compiler's trials had taken more, {trials}"))
    if found["speed"]:
        rates = found["speed"]
        rows.append(
            (
                "speed",
                f"{rates['seconds_per_step']:.3g} s a step, {rates['images_per_second']:.3g} "
                f"images/s, {rates['megapixels_per_second']:.3g} Mpixel/s",
            )
        )
    if found["skipped_files"]:
        rows.append(("skipped", f"{found['skipped_files']} bad files"))
    rows.append(("pictures", ", ".join(str(workdir.path / name) for name in drawn)))
    return "\n".join(f"{name:10} {text}" for name, text in rows)
