"""The few shapes that the pictures are made of, in colours for light and dark pages."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

LIGHT = {
    "page": "fill: #fbfaf7",
    "panel": "fill: #f1eee6; stroke: #d9d3c4",
    "room": "fill: #ffffff; stroke: #8d99a6",
    "outer": "fill: #e4eef6; stroke: #6f93b3",
    "badge": "fill: #3f6f98",
    "number": "fill: #ffffff",
    "title": "fill: #1f2a35",
    "text": "fill: #4c5966",
    "arrow": "stroke: #7c8894",
    "head": "fill: #7c8894",
    "cell": "fill: #ffffff",
    "line": "stroke: #cfd4d9",
    "own": "fill: #2f7fb8; stroke: #ffffff",
    "halo": "fill: #9fcbe8; stroke: #ffffff",
    "extra": "fill: #f2c879; stroke: #ffffff",
    "padding": "fill: none; stroke: #b4542f",
    "grid": "stroke: #69747f",
}
DARK = {
    "page": "fill: #161b22",
    "panel": "fill: #1d242d; stroke: #38424e",
    "room": "fill: #262f3a; stroke: #65727f",
    "outer": "fill: #22384b; stroke: #5b88ae",
    "badge": "fill: #7fb4de",
    "number": "fill: #10161d",
    "title": "fill: #edf2f7",
    "text": "fill: #b3bfca",
    "arrow": "stroke: #8794a1",
    "head": "fill: #8794a1",
    "cell": "fill: #1d242d",
    "line": "stroke: #414c58",
    "own": "fill: #4aa3df; stroke: #161b22",
    "halo": "fill: #2c5d82; stroke: #161b22",
    "extra": "fill: #a97b2b; stroke: #161b22",
    "padding": "fill: none; stroke: #e08a63",
    "grid": "stroke: #9aa6b2",
}


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A picture with both sets of colours: the reader's preference chooses."""

    def rules(colours: dict[str, str]) -> str:
        return " ".join(f".{name} {{ {style} }}" for name, style in colours.items())

    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{rules(LIGHT)}",
        f"@media (prefers-color-scheme: dark) {{ {rules(DARK)} }}</style>",
        box(0, 0, width, height, "page", 10),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def box(x: float, y: float, w: float, h: float, kind: str, radius: float = 0) -> str:
    corner = f' rx="{radius:g}"' if radius else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"{corner} class="{kind}"/>'


def text(
    x: float, y: float, words: str, kind: str = "text", size: float = 12, style: str = ""
) -> str:
    style = f" {style}" if style else ""
    words = html.escape(words, quote=False)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" class="{kind}"{style}>{words}</text>'


MIDDLE = 'text-anchor="middle"'
MONO = 'font-family="Menlo, Consolas, monospace" font-weight="bold"'


def arrow(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line through points, from top to bottom, with a head at its end."""
    (x, y), *others = points
    path = f"M{x:g} {y:g}"
    for to_x, to_y in others:
        half = (to_y - y) / 2
        path += f" C{x:g} {y + half:g} {to_x:g} {to_y - half:g} {to_x:g} {to_y:g}"
        x, y = to_x, to_y
    head = f'<path d="M{x - 4:g} {y - 8:g} L{x + 4:g} {y - 8:g} L{x:g} {y:g} Z" class="head"/>'
    return f'<path d="{path}" fill="none" stroke-width="1.4" class="arrow"/>{head}'
