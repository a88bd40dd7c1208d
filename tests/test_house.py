"""The house stays one that a person can walk through: small files, short functions, no cycles."""

import ast
import graphlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("jaxtile", "policies")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "_programs" not in path.parts
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
PUBLIC = {  # what users call, with keywords
    "jaxtile._checkpoint.checkpoint",
    "jaxtile._plan.planner.plan",
    "jaxtile._schedule.of",
    "jaxtile._stream.streaming.stream",
    "jaxtile.nn._checkpoint.checkpoint",
    "jaxtile.nn._layers.__init__",
    "jaxtile.ops._conv.conv",
}


def functions():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield f"{name}.{node.name}", node


def test_files_have_one_screenful_of_ideas():
    long = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 370}


def test_functions_fit_on_a_screen():
    long = {}
    for name, node in functions():
        docstring = node.body[0] if ast.get_docstring(node) else None
        about = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
        lines = node.end_lineno - node.lineno + 1 - about
        long |= {name: lines} if lines > 50 else {}
    assert not long


def test_functions_have_few_parameters():
    many = {}
    for name, node in functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in given if a.arg not in ("self", "cls")])
        many |= {name: count} if count > 6 else {}
    assert many.keys() == PUBLIC


def imports(name: str):
    """The files that a file imports when it is imported, and so not inside its functions."""
    package = name.split(".")[:-1]
    for node in TREES[name].body:
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            found = [".".join([*base, alias.name]) for alias in node.names]
            found += [".".join(base)] if node.module else []
            yield from (m for f in found for m in (f, f"{f}.__init__") if m in FILES)


def test_no_file_imports_itself_by_way_of_others():
    inside = {name: {*imports(name)} for name in FILES}
    assert "jaxtile._rules.__init__" in inside["jaxtile._graph.values"]
    try:
        list(graphlib.TopologicalSorter(inside).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_room_names_its_files():
    for room in (name for name in FILES if name.endswith(".__init__") and name.count(".") > 1):
        if room.split(".")[1] in ("ops", "nn", "policy"):  # public: their names are for users
            continue
        said = {*re.findall(r"`(\w+)`", ast.get_docstring(TREES[room]))}
        files = {path.stem for path in FILES[room].parent.glob("*.py")} - {"__init__"}
        assert not files - said, room
