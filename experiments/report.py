"""A page about a sweep: time against memory, the largest images, a table, the plans.

    python -m experiments.report --workdir=runs/sweep

Writes `report.html`, which needs nothing else and no network, and its pictures as PNG files. Lines
that are no results are left out with a warning; names in the others are text, never part of the
page or of a formula.
"""

from __future__ import annotations

import base64
import html
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

from policies import Plan

from .measuring.results import Result, number, read
from .program.command import start, workdir_flag
from .program.files import write_atomically, write_figure

_WORKDIR = workdir_flag()
_PAGE = pathlib.Path(__file__).with_name("measuring") / "report.html"

Results = Sequence[Result]


def main(argv: list[str]) -> None:
    del argv
    if not _WORKDIR.value or not pathlib.Path(_WORKDIR.value).is_dir():
        sys.exit(f"error: --workdir (={_WORKDIR.value!r}) must name the folder of a sweep")
    folder = pathlib.Path(_WORKDIR.value)
    found, bad = read(folder)
    for line in bad:
        print(f"warning: not a result, left out: {line}", flush=True)
    if not found:
        sys.exit(f"error: {folder} has no results: run experiments.sweep first")
    print(write(folder, list(found.values())))


def write(folder: pathlib.Path, results: Results) -> pathlib.Path:
    """The page and its pictures; returns the path of the page."""
    pictures = draw(folder, results)
    plain = {_problem(r): r for r in results if r.cell.policy == "plain" and r.status == "ok"}
    rows = [
        {**row(result, folder, position), **ratios(result, plain.get(_problem(result)))}
        for position, result in enumerate(results)
    ]
    page = _PAGE.read_text()
    for name, text in {
        "conclusions": "\n".join(f"<li>{html.escape(c)}</li>" for c in conclusions(results)),
        "machines": html.escape("; ".join(sorted({_machine(r) for r in results}))),
        "pictures": "\n".join(_image(p) for p in pictures),
        # In a script, `</script` and `<!--` have a meaning even within a string.
        "rows": json.dumps(rows).replace("<", "\\u003c"),
    }.items():
        page = page.replace(f"<!--{name}-->", text)
    file = folder / "report.html"
    write_atomically(file, page)
    return file


def row(result: Result, folder: pathlib.Path, position: int) -> dict[str, Any]:
    """A row of the table; what is not a number is text."""
    cell, values = result.cell, result.values
    fields = {
        "model": cell.model,
        "size": cell.shape[1],
        "batch": cell.shape[0],
        "dtype": cell.dtype,
        "policy": cell.policy,
        "tiles": cell.tiles,
        "status": result.status,
    }
    if result.status != "ok":
        return {**fields, "message": result.message}

    def scaled(name: str, unit: float = 1) -> float | None:
        value = number(values, name)
        return None if value is None else value / unit

    compiled = number(values, "compiled_bytes")
    fields |= {
        "ms": values["seconds"] * 1e3,
        "spread": scaled("spread"),
        "MiB": scaled("compiled_bytes", 2**20),
        "estimated": scaled("estimated_bytes", compiled) if compiled else None,
        "peak MiB": scaled("observed_peak", 2**20),
        "Mpixel/s": scaled("megapixels_per_second"),
        "GFLOP/s": scaled("flops_per_second", 1e9),
        "compile s": scaled("compile_seconds"),
        "error": scaled("gradient_error"),
    }
    if values.get("plan"):
        fields |= _plan(values["plan"], folder / f"plan-{position}.png", cell.name)
    return fields


def _problem(result: Result) -> tuple[Any, ...]:
    """What policies are compared on."""
    return result.cell.model, tuple(result.cell.shape), result.cell.dtype


def ratios(result: Result, plain: Result | None) -> dict[str, float]:
    """Time and memory in those of plain JAX on the same problem."""
    if plain is None or result.status != "ok":
        return {}
    found = {"time / plain": result.values["seconds"] / plain.values["seconds"]}
    bytes_of = [number(r.values, "compiled_bytes") for r in (result, plain)]
    if all(bytes_of):
        found["memory / plain"] = bytes_of[0] / bytes_of[1]
    return found


def conclusions(results: Results) -> list[str]:
    """A sentence for each problem: what the least memory costs, and what was fastest."""
    problems: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.status == "ok" and number(result.values, "compiled_bytes"):
            problems[_problem(result)].append(result)
    return [_conclusion(group) for group in problems.values()]


def _conclusion(group: Results) -> str:
    batch, height, width, *_ = group[0].cell.shape
    name = f"{group[0].cell.model}, {batch} x {height} x {width}, {group[0].cell.dtype}"
    plain = next((r for r in group if r.cell.policy == "plain"), None)
    least = min(group, key=_gibibytes)
    fastest, known = _fastest(group)
    if plain is None:
        return (
            f"{name}: plain JAX was not measured, or does not fit; {least.cell.policy} needs the "
            f"least, {_gibibytes(least):.3g} GiB, and {fastest.cell.policy} is {known}, "
            f"{fastest.values['seconds'] * 1e3:.3g} ms."
        )
    if least is plain:
        return f"{name}: no policy that was measured needs less memory than plain JAX."
    found = ratios(least, plain)
    text = f"{name}: {least.cell.policy} needs {found['memory / plain']:.2f} of plain JAX's memory"
    text += f" and takes {found['time / plain']:.2f} times as long"
    if not _told_apart(least, plain):
        text += f", but their times cannot be told apart ({_noise(least, plain)})"
    if fastest not in (plain, least):
        best = ratios(fastest, plain)
        text += (
            f"; {fastest.cell.policy} is {known}, {best['time / plain']:.2f} times at "
            f"{best['memory / plain']:.2f} of the memory"
        )
    return f"{text}."


def _fastest(group: Results) -> tuple[Result, str]:
    """Of those that may be the fastest, the one with the least memory; and what can be said."""
    first = min(group, key=lambda r: r.values["seconds"])
    as_fast = [r for r in group if r is first or not _told_apart(r, first)]
    found = min(as_fast, key=_gibibytes)
    others = [r.cell.policy for r in as_fast if r is not found]
    if not others:
        return found, "the fastest"
    return found, f"among the fastest (the spread does not tell it from {', '.join(others)})"


def _told_apart(a: Result, b: Result) -> bool:
    """Is the difference of two medians more than the steps of either differ among themselves?"""
    times = [r.values["seconds"] for r in (a, b)]
    spreads = [number(r.values, "spread") for r in (a, b)]
    if None in spreads:
        return False
    noise = max(t * s for t, s in zip(times, spreads, strict=True))
    return abs(times[0] - times[1]) > noise


def _noise(*results: Result) -> str:
    spreads = [number(r.values, "spread") for r in results]
    if None in spreads:
        return "one step each was timed"
    return f"steps of one policy spread by up to {max(spreads):.0%}"


def _plan(found: Any, picture: pathlib.Path, name: str) -> dict[str, str]:
    try:
        plan = Plan.from_json(found)
        plan.draw(picture)
        return {"plan": str(plan), "picture": _source(picture)}
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        print(f"warning: the plan of {name} cannot be shown: {error!r}", flush=True)
        return {}


def draw(folder: pathlib.Path, results: Results) -> list[pathlib.Path]:
    measured: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.status == "ok" and (number(result.values, "compiled_bytes") or 0) > 0:
            measured[result.cell.model].append(result)
    files = []
    for model, group in measured.items():
        files.append(_time_against_memory(folder / f"pareto-{model}.png", model, group))
        if len({r.cell.shape[1] for r in group}) > 1:
            files.append(_time_against_size(folder / f"sizes-{model}.png", model, group))
    if measured:
        files.append(_largest(folder / "largest.png", measured))
    return files


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both coordinates, by the first one.

    >>> pareto([(1, 5), (2, 3), (3, 4), (4, 1)])
    [(1, 5), (2, 3), (4, 1)]
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _time_against_memory(path: pathlib.Path, model: str, group: Results) -> pathlib.Path:
    """Per size and type, the policies; those that no other beats are joined."""
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    series: dict[str, list[Result]] = defaultdict(list)
    for result in group:
        b, n, *_ = result.cell.shape
        series[_text(f"{b} x {n} x {n}, {result.cell.dtype}")].append(result)
    for color, (label, members) in enumerate(series.items()):
        points = [(_gibibytes(r), r.values["seconds"] * 1e3) for r in members]
        axis.plot(*zip(*points, strict=True), "o", color=f"C{color}", label=label)
        axis.plot(*zip(*pareto(points), strict=True), "-", color=f"C{color}", lw=1)
        for result, point in zip(members, points, strict=True):
            text = result.cell.policy + (f" {result.cell.tiles}" if result.cell.tiles else "")
            axis.annotate(_text(text), point, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axis.set(xlabel="GiB of the compiled step", ylabel="ms per step", title=model)
    axis.set(xscale="log", yscale="log")
    axis.legend(fontsize=8)
    return _save(figure, path)


def _time_against_size(path: pathlib.Path, model: str, group: Results) -> pathlib.Path:
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for result in group:
        b, n, *_ = result.cell.shape
        label = ", ".join(filter(None, (result.cell.policy, result.cell.tiles, result.cell.dtype)))
        series[_text(label)].append((n, result.values["seconds"] / (b * n * n) * 1e9))
    for label, points in series.items():
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    axis.set(xlabel="pixels along a side", ylabel="ns per pixel", title=model, xscale="log")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return _save(figure, path)


def _largest(path: pathlib.Path, measured: dict[str, list[Result]]) -> pathlib.Path:
    """Which image fits into how many bytes, under the best policy that was measured."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for model, group in measured.items():
        points = [(_gibibytes(r), r.cell.shape[1]) for r in group]
        front = [(x, -y) for x, y in pareto([(x, -y) for x, y in points])]
        axis.plot(*zip(*front, strict=True), "o-", drawstyle="steps-post", label=model)
    axis.set(xlabel="GiB of the compiled step", ylabel="pixels along a side", xscale="log")
    axis.set(title="largest image that was measured within a budget")
    axis.legend(fontsize=8)
    return _save(figure, path)


def _text(name: str) -> str:
    """For a picture, where text between two dollars would be a formula."""
    return "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")


def _gibibytes(result: Result) -> float:
    return result.values["compiled_bytes"] / 2**30


def _machine(result: Result) -> str:
    device = {"device": result.values["device"]} if "device" in result.values else {}
    return ", ".join(f"{k} {v}" for k, v in {**device, **result.machine}.items())


def _image(path: pathlib.Path) -> str:
    return f'<img src="{_source(path)}" alt="{html.escape(path.stem)}">'


def _source(path: pathlib.Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    for axis in (a for axes in figure.axes for a in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log":  # 2, not 2 x 10^0
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
    write_figure(figure, path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    start(main)
