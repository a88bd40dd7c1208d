"""The end of a run: what it reached, what it saved, and pictures of it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np

import jaxtile
from policies import format_bytes

from ..program.files import write_atomically
from ..program.progress import Now
from ..tasks import Segmentation, class_colours
from . import page
from .run import Run
from .step import Step
from .workdir import Workdir

_EXAMPLES = 3  # in the picture of predictions


def write(run: Run, now: Now) -> str:
    """Write `summary.json`, the pictures, `report.html` and `summary.txt`, which it returns."""
    folder = run.workdir.path
    now("compiling the plain step, to compare its bytes")
    found = facts(run)
    write_atomically(folder / "summary.json", json.dumps(found, indent=1) + "\n")
    now("drawing pictures")
    drawn = draw(run)
    lines = rows(run, found)
    task, names = run.learner.task, run.train_set.class_names
    colours = class_colours(task.classes) if isinstance(task, Segmentation) else ()
    report = page.write(folder, lines, found["quality"], names, drawn, colours)
    lines.append(("pictures", ", ".join(map(str, [*drawn, report]))))
    text = "\n".join(f"{name:10} {text}" for name, text in lines)
    write_atomically(folder / "summary.txt", text + "\n")
    return text


def facts(run: Run) -> dict[str, Any]:
    """What the run reached, and what it took."""
    last = [line for line in run.workdir.metrics() if line.get("split") == "eval"][-1]
    program = run.program
    peak = program.peak.observed()  # before the plain step is compiled
    return {
        "step": last["step"],
        "quality": {k: v for k, v in last.items() if k not in ("step", "split")},
        "evaluated": run.evaluation.text,
        "best": run.record["best"],
        "policy": run.budgets.policy,
        "replanned": run.budgets.shrunk,
        "bytes": {
            "estimated": program.estimated,
            "compiled": program.bytes,
            "observed_peak": peak,
            "peak_while_compiling": program.peak.before,
            "plain_compiled": plain_bytes(run.step),
        },
        "speed": speed(run.workdir),
        "skipped_files": len({**run.train_set.skipped, **run.eval_set.skipped}),
    }


def plain_bytes(step: Step) -> int | None:
    """Compiled bytes of the untiled step: without autotuning, which would run its convolutions.
    None if the compiler gives up.
    """
    try:
        return jaxtile.compiled_bytes(step.traced(None).lower()).total
    except jax.errors.JaxRuntimeError:
        return None


def speed(workdir: Workdir) -> dict[str, float]:
    """Medians over the stretches between checkpoints; of all steps, the share of their time that
    they waited for data.
    """
    lines = workdir.timings()
    if not lines:
        return {}
    names = ("seconds_per_step", "images_per_second", "megapixels_per_second")
    found = {name: float(np.median([line[name] for line in lines])) for name in names}
    seconds = [line["steps"] * line["seconds_per_step"] for line in lines]
    shares = [line["share_waiting_for_data"] for line in lines]
    return {**found, "share_waiting_for_data": float(np.average(shares, weights=seconds))}


def draw(run: Run) -> list[pathlib.Path]:
    """The pictures; returns their files."""
    from . import pictures  # Matplotlib takes a second to import, which no run should wait for

    learner, dataset, folder = run.learner, run.evaluation.dataset, run.workdir.path
    pictures.loss_curve(run.workdir.metrics(), learner.task.quality, folder / "loss.png")
    examples = [dataset.example(i, None) for i in range(min(_EXAMPLES, len(dataset)))]
    predict = jax.jit(learner.prediction((1, *dataset.shape), run.evaluation.tile))
    weights = jax.tree.map(np.asarray, run.state.weights)
    shown = [
        (image, label, np.asarray(predict(weights, image[None]))[0]) for image, label in examples
    ]
    pictures.predictions(shown, learner.task, folder / "predictions.png")
    explained = jaxtile.explain(
        learner.loss,
        run.step.state.params,
        run.step.state.variables,
        *run.step.batch,
        in_axes=learner.in_axes(2),
        policy=run.policy,
    )
    tiled = pictures.tile_grid(examples[0][0], explained, folder / "tiles.png")
    names = ["loss.png", "predictions.png", *(["tiles.png"] if tiled else [])]
    return [folder / name for name in names]


Rows = list[tuple[str, str]]


def rows(run: Run, found: dict[str, Any]) -> Rows:
    """The lines of `summary.txt`: what each is about, and its text."""
    task, best = run.learner.task, found["best"]
    counted, *warnings = task.remarks(found["quality"])
    scale = run.eval_set.scale
    if scale is not None and (cut := scale.beyond()):
        warnings.append(f"warning: {cut}")
    reached = f"{task.quality} {best['quality']:.4f} after step {best['step']}" if best else "-"
    lines = [
        ("quality", task.describe(found["quality"])),
        ("evaluated", f"{found['evaluated']}; {counted}"),
        *(tuple(warning.split(": ", 1)) for warning in warnings),
        ("best", reached),
        *_of_memory(run, found["bytes"]),
    ]
    if rates := found["speed"]:
        text = (
            f"{rates['seconds_per_step']:.3g} s a step, {rates['images_per_second']:.3g} "
            f"images/s, {rates['megapixels_per_second']:.3g} Mpixel/s, "
            f"{rates['share_waiting_for_data']:.1%} of the time waiting for data"
        )
        lines.append(("speed", text))
    for line in found["replanned"]:
        text = (
            f"{line['instead']} after {line['policy']} ran out of memory after step {line['step']}"
        )
        lines.append(("replanned", text))
    if found["skipped_files"]:
        lines.append(("skipped", f"{found['skipped_files']} bad files"))
    return lines


def _of_memory(run: Run, size: dict[str, Any]) -> Rows:
    plain, text = size["plain_compiled"], f"{run.program.bytes_text()} a step"
    if plain:
        text += f", plain JAX {format_bytes(plain)}: {size['compiled'] / plain:.2f} of it"
    if size["observed_peak"] is not None:
        peak = f"{format_bytes(size['observed_peak'])} observed on the device"
    elif size["peak_while_compiling"] is not None:
        trials = format_bytes(size["peak_while_compiling"])
        peak = f"not observed: the compiler's trials had taken more, {trials}"
    else:
        return [("memory", text)]
    return [("memory", text), ("peak", peak)]
