"""One tile and its halo, from a pool back through two convolutions to the image."""

from __future__ import annotations

import dataclasses

from svg import MIDDLE, box, svg, text


@dataclasses.dataclass(frozen=True)
class Layer:
    """One array: its name, its size along an axis, and how it is computed from the one before."""

    name: str
    size: int
    kernel: int = 1
    stride: int = 1
    before: int = 0


LAYERS = (
    Layer("image", 16),
    Layer("3 x 3 convolution", 16, kernel=3, before=1),
    Layer("3 x 3 convolution", 16, kernel=3, before=1),
    Layer("2 x 2 pool, stride 2", 8, kernel=2, stride=2),
)
TILES = 4


@dataclasses.dataclass(frozen=True)
class Reads:
    """What one tile reads of one array along one axis; intervals are half open."""

    own: tuple[int, int]
    """The tile's own share of the array."""
    needed: tuple[int, int]
    """What is asked for; it may stick out of the array."""
    window: tuple[int, int]
    """What is read: inside the array, and as large as that of every other tile."""


def reads(tile: int) -> list[Reads]:
    """Per array, from the image to the output."""
    last = LAYERS[-1].size
    windows = [[(i * last // TILES, (i + 1) * last // TILES) for i in range(TILES)]]
    needed = [windows[0]]
    for layer, source in zip(LAYERS[:0:-1], LAYERS[-2::-1], strict=True):
        demands = [
            (
                lo * layer.stride - layer.before,
                (hi - 1) * layer.stride - layer.before + layer.kernel,
            )
            for lo, hi in windows[-1]
        ]
        inside = [(max(lo, 0), min(hi, source.size)) for lo, hi in demands]
        size = max(hi - lo for lo, hi in inside)
        starts = [min(lo, source.size - size) for lo, _ in inside]
        windows.append([(start, start + size) for start in starts])
        needed.append(demands)
    return [
        Reads((tile * a.size // TILES, (tile + 1) * a.size // TILES), n[tile], w[tile])
        for a, n, w in zip(LAYERS, needed[::-1], windows[::-1], strict=True)
    ]


SIDE, COLUMN, ROW = 144, 212, 224
"""Pixels: an array's side, the distance of columns, and of rows."""


def halo() -> str:
    width, height = 4 * COLUMN + 24, 2 * ROW + 170
    parts = [text(28, 34, "What one tile reads: from the output back to the image", "title", 17)]
    for column, layer in enumerate(LAYERS):
        x = 34 + column * COLUMN + SIDE / 2
        parts.append(text(x, 68, layer.name, "title", 13, f'{MIDDLE} font-weight="bold"'))
        parts.append(text(x, 84, f"{layer.size} x {layer.size} positions", "text", 11, MIDDLE))
    for row, (tile, words) in enumerate([(1, "A tile inside"), (0, "A tile in the corner")]):
        parts += draw_row(tile, words, 116 + row * ROW)
    return svg(width, height, "A tile and its halo through three layers", parts + legend(height))


def draw_row(tile: int, words: str, y: float) -> list[str]:
    found = reads(tile)
    parts = []
    for column, (layer, read) in enumerate(zip(LAYERS, found, strict=True)):
        x = 34 + column * COLUMN
        parts += draw_array(layer, read, x, y + 26)
        n = read.window[1] - read.window[0]
        verb = "computes" if column else "reads"
        verb = "owns" if column == len(LAYERS) - 1 else verb
        parts.append(text(x + SIDE / 2, y + SIDE + 46, f"{verb} {n} x {n}", "text", 12, MIDDLE))
        if column:
            parts += backwards(x - 14, y + 26 + SIDE / 2)
    parts.append(text(28, y, words, "title", 13, 'font-weight="bold"'))
    return parts


def backwards(x: float, y: float) -> list[str]:
    """An arrow to the left: the layer on the right asks for positions of the one on the left."""
    to = x - 40
    return [
        f'<path d="M{x:g} {y:g} L{to + 8:g} {y:g}" stroke-width="1.4" class="arrow"/>',
        f'<path d="M{to + 8:g} {y - 4:g} L{to + 8:g} {y + 4:g} L{to:g} {y:g} Z" class="head"/>',
        text((x + to) / 2 + 4, y - 9, "needs", "text", 11, MIDDLE),
    ]


def draw_array(layer: Layer, read: Reads, x: float, y: float) -> list[str]:
    cell = SIDE / layer.size
    parts = [box(x, y, SIDE, SIDE, "cell"), *grid_lines(x, y, layer.size, "line")]
    for row in range(-2, layer.size + 2):
        for column in range(-2, layer.size + 2):
            kind = kind_of(layer, read, row, column)
            if kind is not None:
                gap = 1.5 if kind == "padding" else 0
                at = (x + column * cell + gap, y + row * cell + gap)
                parts.append(box(*at, cell - 2 * gap, cell - 2 * gap, kind))
    return [*parts, *grid_lines(x, y, TILES, "grid")]


def grid_lines(x: float, y: float, parts: int, kind: str) -> list[str]:
    steps = [i * SIDE / parts for i in range(parts + 1)]
    path = " ".join(f"M{x + p:g} {y:g}v{SIDE} M{x:g} {y + p:g}h{SIDE}" for p in steps)
    return [f'<path d="{path}" class="{kind}"/>']


def kind_of(layer: Layer, read: Reads, row: int, column: int) -> str | None:
    """Own, halo, extra or padding; None: this tile has nothing to do with it."""

    def inside(interval: tuple[int, int]) -> bool:
        return all(interval[0] <= p < interval[1] for p in (row, column))

    if not inside((0, layer.size)):
        return "padding" if inside(read.needed) else None
    for kind in ("own", "needed", "window"):
        if inside(getattr(read, kind)):
            return {"own": "own", "needed": "halo", "window": "extra"}[kind]
    return None


def legend(height: float) -> list[str]:
    entries = [
        ("own", "the tile's own share", 28, -48),
        ("halo", "halo: positions of neighbours, which this tile reads or computes too", 300, -48),
        ("padding", "outside: the next layer pads here", 28, -24),
        ("extra", "read too, because all tiles share one window size", 300, -24),
    ]
    parts = []
    for kind, words, x, y in entries:
        parts.append(box(x, height + y, 13, 13, kind))
        parts.append(text(x + 21, height + y + 11, words))
    return parts
