"""One page about a run, `report.html`: it needs nothing else, and no network."""

from __future__ import annotations

import base64
import html
import pathlib
from collections.abc import Sequence
from typing import Any

from ..program.files import write_atomically

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .8rem; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
i { display: inline-block; width: .8em; height: .8em }
img { max-width: 100%; height: auto; margin: 1rem 0 }
"""


def write(
    folder: pathlib.Path,
    rows: Sequence[tuple[str, str]],
    quality: dict[str, Any],
    class_names: Sequence[str],
    pictures: Sequence[pathlib.Path],
    colours: Sequence[tuple[int, int, int]] = (),
) -> pathlib.Path:
    """The page of a run: its summary, tables of its classes, and its pictures."""
    parts = [
        f"<h1>{html.escape(folder.resolve().name)}</h1>",
        _table([], rows),
        _classes(quality, class_names, colours),
        _confusion(quality.get("confusion"), class_names),
        *(_picture(p) for p in pictures),
    ]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(folder.resolve().name)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    write_atomically(folder / "report.html", text)
    return folder / "report.html"


def _classes(
    quality: dict[str, Any], names: Sequence[str], colours: Sequence[tuple[int, int, int]]
) -> str:
    """A row for each class, if the task has measures of each; nothing if not."""
    measures = {
        name: values
        for name, values in quality.items()
        if isinstance(values, list) and len(values) == len(names) and name != "confusion"
    }
    if not measures:
        return ""
    rows = [(name, *(v[i] for v in measures.values())) for i, name in enumerate(names)]
    text = _table(["class", *measures], rows)
    for name, colour in zip(names, colours, strict=False):
        shown = f'<th><i style="background: rgb{colour}"></i> '
        text = text.replace(
            f"<th>{html.escape(name)}</th><td", f"{shown}{html.escape(name)}</th><td"
        )
    return "<h2>Classes</h2>" + text


def _confusion(counts: Sequence[Sequence[int]] | None, names: Sequence[str]) -> str:
    """A row for each true class: which share of it was taken for each class."""
    if not counts:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = [f"<tr><th>truth \\ predicted</th>{head}</tr>"]
    for name, row in zip(names, counts, strict=True):
        total = max(1, sum(row))
        cells = "".join(
            f'<td class="number" style="background: rgba(0, 114, 178, {n / total / 2:.3f})" '
            f'title="{n:,}">{n / total:.1%}</td>'
            for n in row
        )
        lines.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return "<h2>Confusion</h2>\n<table>" + "\n".join(lines) + "</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["<table>"]
    if head:
        lines.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>")
    for first, *others in rows:
        cells = "".join(_cell(value) for value in others)
        lines.append(f"<tr><th>{html.escape(str(first))}</th>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    text = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    return f'<td class="number">{text}</td>'


def _picture(path: pathlib.Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem)
    return f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,{content}">'
