"""The documentation is true: its examples run, its pictures are what the script draws."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxtile._geometry import Stencil, Window, hull, partition
from jaxtile._rules import registry

from . import FLAGS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


def name(page: pathlib.Path) -> str:
    return page.name


@pytest.fixture
def as_a_reader(monkeypatch, tmp_path):
    """In a folder of its own, with JAX's usual types, and rules that are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    for table in [name for name, found in vars(registry).items() if type(found) is dict]:
        if table.isupper():
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.parametrize("page", EXAMPLES, ids=name)
@pytest.mark.usefixtures("as_a_reader")
def test_examples_run(page):
    text, names = page.read_text(), {}
    for block in BLOCK.finditer(text):
        lines_before = text[: block.start(1)].count("\n")
        exec(compile("\n" * lines_before + block.group(1), str(page), "exec"), names)


EXAMPLE_PROGRAMS = ROOT / "docs" / "examples"
LOOPS = sorted(EXAMPLE_PROGRAMS.glob("*_loop.py"))


@pytest.mark.parametrize("program", LOOPS, ids=name)
def test_loops_are_short_and_what_is_new_in_them_is_marked(program):
    text = program.read_text()
    assert len(text.splitlines()) <= 60
    assert 2 <= text.count("  # jaxtile\n") <= 3


@pytest.mark.slow
@pytest.mark.parametrize("program", LOOPS, ids=name)
def test_loops_run_and_learn_within_their_budget(program):
    done = run(program)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"compiled .* is too much for 24 MiB", done.stderr)
    assert done.stderr.splitlines()[-1].endswith("fits 24 MiB")


@pytest.mark.slow
def test_what_skipping_saves_is_printed():
    *_, line = run(EXAMPLE_PROGRAMS / "background.py").stdout.splitlines()
    tiles = float(re.search(r"; ([0-9.]+) of the tiles", line)[1])
    assert 0.2 < tiles < 0.35


@pytest.mark.slow
def test_traces_are_trained_on(tmp_path):
    shutil.copy(EXAMPLE_PROGRAMS / "seismic.py", tmp_path)
    given = ["--config=seismic.py", f"--workdir={tmp_path / 'run'}", "--config.train.steps=2"]
    done = run("-m", "jaxtile", "train", *given, cwd=tmp_path)
    assert "on 64 images of 4096 x 1 and 4 to evaluate" in done.stdout
    assert "16,384 pixels counted" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()


def run(*command, cwd=None):
    """As a user would run it."""
    environment = {**os.environ, "XLA_FLAGS": FLAGS}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_are_short(page):
    long = [i for i, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{page}: lines {long} have more than 120 characters"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page}: there is no {target}"
        assert not anchor or anchor in anchors(linked), f"{page}: no {anchor} in {linked}"


def anchors(page: pathlib.Path) -> list[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.fixture
def draw(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    import draw

    return draw


def test_pictures_are_what_the_script_draws(draw):
    for file, picture in draw.pictures().items():
        drawn = (ROOT / "docs" / "pictures" / file).read_text()
        assert drawn == picture, f"{file} is of an older state: run python docs/pictures/draw.py"


def test_the_picture_of_a_halo_has_the_windows_of_jaxtile(draw):
    import halo

    window = partition(0, halo.LAYERS[-1].size, halo.TILES)
    for i in reversed(range(len(halo.LAYERS) - 1)):
        source, layer = halo.LAYERS[i : i + 2]
        stencil = Stencil(layer.kernel, layer.stride, before=layer.before)
        lo, hi = stencil.demand(window.starts, window.stops)
        window = hull([Window(0, lo, int(np.max(hi - lo)))], source.size)
        for tile in range(halo.TILES):
            found = halo.reads(tile)[i]
            assert found.needed == (lo[tile], hi[tile])
            assert found.window == (window.starts[tile], window.stops[tile])
