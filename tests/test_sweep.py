"""Sweeps, run as their users run them."""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

import pytest

from experiments.measuring.cells import Cell
from experiments.measuring.processes import last_object, process
from experiments.measuring.results import Result, append, read
from experiments.program.config import ConfigError, load, sweep
from experiments.sweep import cells, selected

from . import FLAGS
from .programs import python
from .support import parametrize_few

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = """
from experiments.program.config import sweep

def get_config():
    config = sweep(("alexnet",), sizes=(67,), batches=(1,))
    config.policies = ("plain", "sqrt", "budget:1kB")
    config.repeats = 2
    return config
"""


def command(folder: pathlib.Path, *more: str) -> list[str]:
    (folder / "config.py").write_text(CONFIG)
    places = [f"--config={folder}/config.py", f"--workdir={folder}/sweep"]
    return ["-m", "experiments.sweep", *places, *more]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "XLA_FLAGS": FLAGS, **variables}


def launch(folder: pathlib.Path, *more: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command(folder, *more)],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: pathlib.Path, *more: str, **variables: str) -> tuple[int, str]:
    done = python(*command(folder, *more), env=environment(**variables), together=True)
    return done.returncode, done.stdout


def child_of(process: subprocess.Popen) -> int:
    """The process that it started, as soon as there is one."""
    file = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := file.read_text().split()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return int(children[0])


def wait_for(handle: int) -> None:
    """Until the process of a handle has ended."""
    assert select.select([handle], [], [], 100)[0], "it goes on"
    os.close(handle)


@pytest.mark.slow
def test_a_sweep_and_the_same_again(tmp_path):
    code, text = run(tmp_path)
    assert code == 0, text
    found, bad = read(tmp_path / "sweep")
    assert not bad
    plain, sqrt, budget = found.values()
    assert (plain.status, sqrt.status, budget.status) == ("ok", "ok", "does not fit")
    assert "smallest budget" in budget.values["message"]
    for name in ("seconds", "compile_seconds", "megapixels_per_second", "flops_per_second"):
        assert plain.values[name] > 0
    assert sqrt.values["loss"] == pytest.approx(plain.values["loss"])
    assert sqrt.values["gradient_error"] < 1e-4
    assert sqrt.values["estimated_bytes"] > 0

    # A crash in the middle of a line costs that line only, and no finished cell is run again.
    file = tmp_path / "sweep/results.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:2]) + "\n" + lines[2][:50])
    code, text = run(tmp_path)
    assert code == 0, text
    assert "2 of them done already" in text
    assert "not a result" in text
    assert file.read_text().splitlines()[:2] == lines[:2]
    assert read(tmp_path / "sweep")[0].keys() == found.keys()


@pytest.mark.slow
def test_a_cell_that_is_killed_or_too_slow_costs_itself_only(tmp_path):
    process = launch(tmp_path, "--only", "*,plain", "--config.repeats=100000")
    os.kill(child_of(process), signal.SIGKILL)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    code, _ = run(tmp_path, "--only", "*,sqrt", "--config.limit_seconds=1")
    assert code == 0
    found, _ = read(tmp_path / "sweep")
    assert [r.status for r in found.values()] == ["crashed", "too slow"]
    code, text = run(tmp_path, "--only", "*,sqrt", "--retry")
    assert code == 0
    assert [r.status for r in read(tmp_path / "sweep")[0].values()] == ["crashed", "ok"]


JUNK = """
import os, sys

if "experiments.cell" in sys.orig_argv and '"policy": "plain"' in sys.orig_argv[-1]:
    os.write(1, b"\\xff\\xfe no result\\n[1, 2]\\n")
    os._exit(0)
"""


@pytest.mark.slow
def test_junk_costs_one_cell_or_one_line(tmp_path):
    """A cell whose process prints something else, and results that are none."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/results-by-hand.jsonl").write_bytes(b"\n".join(FOREIGN) + b"\n")
    (tmp_path / "sitecustomize.py").write_text(JUNK)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, text = run(tmp_path, "--only", "*,plain", "--only", "*,budget:*", PYTHONPATH=path)
    assert code == 0, text
    found, bad = read(tmp_path / "sweep")
    assert [(c.policy, r.status) for c, r in found.items()] == [
        ("plain", "error"),
        ("budget:1kB", "does not fit"),
    ]
    (plain, _) = found.values()
    assert "there is no JSON object; it printed" in plain.message
    assert "no result" in plain.message
    assert len(bad) == text.count("warning: not a result") == len(FOREIGN)


FOREIGN = [
    b"a note",
    b"\xff\xfe\x00",
    b"17",
    b"[]",
    b"{}",
    b'{"cell": {"model": "alexnet"}, "status": "ok", "values": {"seconds": 1}}',
    b'{"cell": "alexnet", "status": "ok", "values": {"seconds": 1}, "machine": {}}',
    b'{"cell": {"model": []}, "status": "ok", "values": {"seconds": 1}, "machine": {}}',
    b'{"cell": {"model": "../x"}, "status": "ok", "values": {"seconds": 1}, "machine": {}}',
    b'{"cell": {"model": "unet", "size": "9"}, "status": "error", "values": {}, "machine": {}}',
    b'{"cell": {"model": "unet", "size": -9}, "status": "error", "values": {}, "machine": {}}',
    b'{"cell": {"model": "unet", "what": 9}, "status": "error", "values": {}, "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": 3, "values": {"seconds": 1}, "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": "ok", "values": [], "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": "ok", "values": {}, "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": "ok", "values": {"seconds": "1"}, "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": "ok", "values": {"seconds": NaN}, "machine": {}}',
    b'{"cell": {"model": "unet"}, "status": "ok", "values": {"seconds": 1%s}, "machine": {}}'
    % (b"0" * 400),
]


@pytest.mark.parametrize("line", FOREIGN)
def test_lines_that_are_no_results(tmp_path, line):
    good = Result(Cell("unet"), "ok", {"seconds": 1}, {})
    (tmp_path / "results.jsonl").write_bytes(line + b"\n")
    append(tmp_path / "results.jsonl", good)
    found, bad = read(tmp_path)
    assert found == {good.cell: good}
    assert len(bad) == 1
    assert "results.jsonl, line 1" in bad[0]


def test_what_programs_may_print(tmp_path):
    """Real ones: a poem, nothing, and objects with something after them."""
    poem = process("this", {}, 100, tmp_path)
    assert poem[0] == "error"
    assert "Namespaces are one honking great idea" in poem[1]["message"]
    nothing = process("keyword", {}, 100, tmp_path)
    assert nothing == ("error", {"message": "there is no JSON object; it printed ''"})
    assert last_object('{"seconds": 2}\n{"seconds": 1}\n[1]\ngoodbye\n') == {"seconds": 1}


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_child_ends_with_its_parent(name):
    """Here the child is a server, which would run for ever."""
    code = "import experiments.measuring.child as c; c.run_child('http.server', '0', 1e6, None)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    child = os.pidfd_open(child_of(parent))
    parent.send_signal(signal.Signals[name])
    wait_for(child)
    assert parent.wait(timeout=100) != 0


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGINT", 130)])
def test_a_sweep_that_ends_takes_its_cell_with_it(tmp_path, name, code):
    process = launch(tmp_path, "--only", "*,plain", "--config.repeats=100000")
    cell = os.pidfd_open(child_of(process))
    process.send_signal(signal.Signals[name])
    wait_for(cell)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == code, text
    assert "Traceback" not in text
    assert read(tmp_path / "sweep") == ({}, [])


@parametrize_few(
    ("more", "words"),
    [
        (["--config.policies=('plain','squirt')"], ["squirt", "sqrt"]),
        (["--config.sizes=(3,)"], ["alexnet", "3"]),
        (["--config.polices=('plain',)"], ["polices", "policies"]),
        (["--config.models=('alexnot',)"], ["alexnot"]),
        (["--only", "vgg16,*"], ["matches none of 3"]),
        (["--shard", "9/8"], ["9/8"]),
    ],
    always=2,
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, more, words):
    code, text = run(tmp_path, *more)
    assert code == 1
    assert "Traceback" not in text
    for word in words:
        assert word in text
    assert not (tmp_path / "sweep").exists()


def test_an_unwritable_workdir(tmp_path):
    (tmp_path / "sweep").write_text("a file")
    code, text = run(tmp_path)
    assert code == 1
    assert "cannot write to" in text


@parametrize_few(
    ("name", "number"), [("sweep_quick", 8), ("sweep_reference", 65), ("sweep_gpu", 60)]
)
def test_a_shipped_sweep(name, number):
    file = ROOT / f"configs/{name}.py"
    command = f"python -m experiments.sweep --config=configs/{name}.py --workdir=runs/sweep"
    assert command in file.read_text()
    assert len(cells(load(str(file)))) == number


def test_shards_share_the_cells():
    config = sweep(("alexnet", "unet"), sizes=(188,), policies=("plain", "sqrt", "every:2"))
    found = cells(config)
    shards = [selected(found, [], f"{i}/4") for i in range(1, 5)]
    assert sorted(c.name for shard in shards for c in shard) == sorted(c.name for c in found)
    assert [c.policy for c in selected(found, ["unet,*,every:*"], None)] == ["every:2"]
    with pytest.raises(ConfigError, match="matches none"):
        selected(found, ["unet,64,*"], None)


def test_tiles_go_to_policies_that_recompute():
    config = sweep(("alexnet",), sizes=(67,), policies=("plain", "sqrt"), tiles=("", "1x2x2"))
    names = [(c.policy, c.tiles) for c in cells(config)]
    assert names == [("plain", ""), ("sqrt", ""), ("sqrt", "1x2x2")]


def test_results_of_shards_merge(tmp_path):
    first, second = Cell("unet"), Cell("alexnet")
    append(tmp_path / "results-1of2.jsonl", Result(first, "ok", {"seconds": 1}, {}))
    append(tmp_path / "results-2of2.jsonl", Result(second, "error", {"message": "no"}, {}))
    append(tmp_path / "results-2of2.jsonl", Result(second, "ok", {"seconds": 2}, {}))
    found, bad = read(tmp_path)
    assert {c: r.values["seconds"] for c, r in found.items()} == {first: 1, second: 2}
    assert not bad
    assert json.loads((tmp_path / "results-1of2.jsonl").read_text())["cell"]["model"] == "unet"
