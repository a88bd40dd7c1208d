"""The rooms of the repository and who imports whom, read from its source files.

Rooms are drawn in layers, so that every arrow points down. An arrow that passes a layer runs to the
right of all rooms there.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from statistics import mean

from svg import MIDDLE, MONO, arrow, box, svg, text

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("jaxtile", "policies", "models", "experiments", "configs")
EVERYWHERE = ("jaxtile._errors", "jaxtile._amounts", "jaxtile._platform", "jaxtile._version")
"""Small files that are not drawn: they import nothing, and anybody may import them."""


def house() -> str:
    rooms = read_rooms()
    layers, arrows = arrange(rooms)
    order = reading_order(rooms)
    place, width, height = positions(layers, arrows, rooms)
    inside = [place[name] for name in rooms if name.startswith("jaxtile")]
    top = min(spot.y for spot in inside) - 34
    left, right = 24, width - 24
    bottom = max(spot.y + spot.h for spot in inside) + 20
    parts = [
        box(left, top, right - left, bottom - top, "panel", 12),
        text(left + 16, top + 23, "jaxtile/", "title", 15, MONO),
    ]
    parts += [arrow(route(place, path)) for path in arrows]
    for name, room in rooms.items():
        parts += draw_room(place[name], room, order.get(name))
    notes = [
        "An arrow leads from a room to one that it imports. Arrows that follow from others are left"
        " out.",
        "Numbers: the order to read in. Not drawn: "
        + ", ".join(name.removeprefix("jaxtile.") for name in EVERYWHERE)
        + ", which import nothing.",
    ]
    parts += [text(24, height + 14 + 18 * i, note) for i, note in enumerate(notes)]
    return svg(width, height + 50, "The rooms of the repository, and who imports whom", parts)


@dataclasses.dataclass
class Room:
    name: str
    lines: list[str]
    imports: set[str] = dataclasses.field(default_factory=set)

    @property
    def label(self) -> str:
        return "__init__" if self.name == "jaxtile" else self.name.removeprefix("jaxtile.")


@dataclasses.dataclass
class Spot:
    x: float
    y: float
    w: float
    h: float


def room_of(module: str) -> str:
    """A file or folder of `jaxtile` is a room; every other package is one."""
    return ".".join(module.split(".")[: 2 if module.startswith("jaxtile") else 1])


def read_rooms() -> dict[str, Room]:
    """All rooms, each with the first sentence of its docstring and the rooms that it imports."""
    rooms: dict[str, Room] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(p for p in parts if p != "__init__")
            name, tree = room_of(module), ast.parse(path.read_text())
            room = rooms.setdefault(name, Room(name, []))
            if module == name:
                room.lines = summary(ast.get_docstring(tree) or "")
            found = {room_of(m) for m in imported(tree, parts[:-1])}
            room.imports |= found - {name, *EVERYWHERE}
    for name in EVERYWHERE:
        if rooms.pop(name).imports:
            raise ValueError(f"{name} imports other rooms: draw it")
    return rooms


def summary(docstring: str) -> list[str]:
    first = " ".join(docstring.split("\n\n")[0].split()).replace("`", "")
    return textwrap.wrap(first.split(": ")[0].rstrip("."), 32)


def imported(tree: ast.AST, package: Sequence[str]) -> Iterator[str]:
    """The modules of this repository that a file imports, at any depth of its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [
                full if is_module(full := f"{base}.{alias.name}") else base for alias in node.names
            ]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def reading_order(rooms: dict[str, Room]) -> dict[str, int]:
    """The order in which the docstring of `jaxtile` mentions its rooms."""
    docstring = ast.get_docstring(ast.parse((ROOT / "jaxtile" / "__init__.py").read_text())) or ""
    mentioned = [f"jaxtile.{name}" for name in re.findall(r"`(?:jaxtile\.)?(\w+)`", docstring)]
    unique = [name for name in dict.fromkeys(mentioned) if name in rooms]
    return {name: number for number, name in enumerate(unique, 1)}


def arrange(rooms: dict[str, Room]) -> tuple[list[list[str]], list[list[str]]]:
    """Layers of names from top to bottom, and arrows as paths through them.

    An arrow that passes a layer gets a place of its own there, with the name `from>to@layer`.
    """
    below = {name: reachable(rooms, name) for name in rooms}
    depth = {name: longest(rooms, name) for name in rooms}
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in rooms:
        layers[depth[name]].append(name)
    arrows = []
    for name, room in rooms.items():
        for to in sorted(room.imports):
            if any(to in below[other] for other in room.imports if other != to):
                continue
            between = range(depth[name] - 1, depth[to], -1)
            path = [name, *(f"{name}>{to}@{layer}" for layer in between), to]
            for layer, passing in zip(between, path[1:-1], strict=True):
                layers[layer].append(passing)
            arrows.append(path)
    layers.reverse()
    for _ in range(12):
        untangle(layers, arrows)
    return layers, arrows


def reachable(rooms: dict[str, Room], name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for to in rooms[waiting.pop()].imports - found:
            found.add(to)
            waiting.append(to)
    if name in found:
        raise ValueError(f"{name} imports itself by way of other rooms")
    return found


def longest(rooms: dict[str, Room], name: str) -> int:
    return max((1 + longest(rooms, to) for to in rooms[name].imports), default=0)


def neighbours(arrows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in arrows:
        for a, b in itertools.pairwise(path):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return found


def untangle(layers: list[list[str]], arrows: Sequence[Sequence[str]]) -> None:
    """Sort every layer by where its neighbours are, so that few arrows cross."""
    near = neighbours(arrows)
    for layer in layers:
        at = {n: i / max(1, len(row) - 1) for row in layers for i, n in enumerate(row)}
        before = {name: i for i, name in enumerate(layer)}
        wish = {n: mean(at[m] for m in near.get(n, [n])) for n in layer}
        layer.sort(key=lambda n: (round(wish[n], 6), before[n]))


ROOM_WIDTH, GAP, PITCH, LANE = 206, 22, 32, 26


def positions(
    layers: Sequence[Sequence[str]], arrows: Sequence[Sequence[str]], rooms: dict[str, Room]
) -> tuple[dict[str, Spot], float, float]:
    """A spot for every room and every passing arrow; the width and height of all."""
    centre = centres(layers, arrows, rooms)
    left = min(centre.values()) - ROOM_WIDTH / 2 - 46
    place, y = {}, 24.0
    for i, layer in enumerate(layers):
        inside = any(n in rooms and n.startswith("jaxtile") for n in layer)
        if inside and not any(n.startswith("jaxtile") for n in layers[i - 1]):
            y += 30
        most = max(len(rooms[n].lines) for n in layer if n in rooms)
        for name in layer:
            x = centre[name] - left - ROOM_WIDTH / 2 if name in rooms else 0
            w, lines = (ROOM_WIDTH, len(rooms[name].lines)) if name in rooms else (0, most)
            place[name] = Spot(round(x), y, w, 30 + 14 * lines)
        y += 30 + 14 * most + PITCH
    lanes(layers, arrows, place)
    return place, max(s.x + s.w for s in place.values()) + 60, y


def lanes(
    layers: Sequence[Sequence[str]], arrows: Sequence[Sequence[str]], place: dict[str, Spot]
) -> None:
    """Arrows that pass layers run straight down beside all rooms of these layers: on the side that
    is nearer. Then everything is moved so that the picture begins at its margin.
    """
    placed = {name for name, spot in place.items() if spot.w}
    for path in sorted((path for path in arrows if len(path) > 2), key=len):
        passing = path[1:-1]
        passed = [layer for layer in layers if set(passing) & set(layer)]
        spots = [place[n] for layer in passed for n in layer if n in placed]
        sides = (min(s.x for s in spots) - LANE, max(s.x + s.w for s in spots) + LANE)
        ends = [place[n].x + place[n].w / 2 for n in (path[0], path[-1])]
        lane = min(reversed(sides), key=lambda side: sum(abs(side - end) for end in ends))
        for name in passing:
            place[name].x = lane
        placed.update(passing)
    left = min(spot.x for spot in place.values()) - 46
    for spot in place.values():
        spot.x -= left


def centres(
    layers: Sequence[Sequence[str]], arrows: Sequence[Sequence[str]], rooms: dict[str, Room]
) -> dict[str, float]:
    """Where each room is along its layer: near the rooms that it is next to in an arrow."""
    near = neighbours([path for path in arrows if len(path) == 2])
    layers = [[name for name in layer if name in rooms] for layer in layers]
    centre = {name: 0.0 for layer in layers for name in layer}
    for _ in range(60):
        for layer in (*layers, *layers[::-1]):
            wish = [mean(centre[m] for m in near.get(n, [n])) for n in layer]
            centre.update(zip(layer, apart(wish), strict=True))
    return centre


def apart(wish: Sequence[float]) -> list[float]:
    """Near the wished centres, in order, without overlap: the mean of packing from both sides."""
    right, left = list(wish), list(wish)
    for i in range(1, len(wish)):
        right[i] = max(right[i], right[i - 1] + ROOM_WIDTH + GAP)
    for i in range(len(wish) - 2, -1, -1):
        left[i] = min(left[i], left[i + 1] - ROOM_WIDTH - GAP)
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]


def route(place: dict[str, Spot], path: Sequence[str]) -> list[tuple[float, float]]:
    """From the lower edge of a room, through its places in other layers, to the next room."""
    first, *passing, last = (place[name] for name in path)
    points = [(first.x + first.w / 2, first.y + first.h)]
    for spot in passing:
        middle = spot.x + spot.w / 2
        points += [(middle, spot.y), (middle, spot.y + spot.h)]
    shift = max(-70.0, min(70.0, (points[-1][0] - last.x - last.w / 2) / 4))
    return [*points, (last.x + last.w / 2 + shift, last.y)]


def draw_room(spot: Spot, room: Room, number: int | None) -> list[str]:
    kind = "room" if room.name.startswith("jaxtile") else "outer"
    middle = spot.x + spot.w / 2
    label = room.label if kind == "room" else f"{room.label}/"
    parts = [
        box(spot.x, spot.y, spot.w, spot.h, kind, 7),
        text(middle, spot.y + 19, label, "title", 13, f"{MIDDLE} {MONO}"),
    ]
    for i, line in enumerate(room.lines):
        parts.append(text(middle, spot.y + 35 + 14 * i, line, "text", 11, MIDDLE))
    if number is not None:
        parts.append(f'<circle cx="{spot.x:g}" cy="{spot.y:g}" r="10" class="badge"/>')
        parts.append(text(spot.x, spot.y + 4, str(number), "number", 11, MIDDLE))
    return parts
