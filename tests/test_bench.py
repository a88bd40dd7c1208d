"""The benchmark, run as a user runs it, on a small problem."""

import json
import pathlib
import re

import pytest

from experiments.bench import baselines as rows
from experiments.bench import check_rows, chosen, parsed, planned, table
from experiments.measuring import baselines
from experiments.measuring.cells import Cell
from experiments.measuring.planning import exceeds, file_of, make_plans
from experiments.measuring.processes import measured
from experiments.measuring.results import Result
from experiments.program.config import ConfigError, sweep

from .test_experiments import run

PROBLEM = "alexnet,67,float32,8"


@pytest.mark.slow
def test_table_of_one_problem(tmp_path):
    arguments = ["experiments.bench", f"--workdir={tmp_path}", f"--problem={PROBLEM}"]
    done = run(*arguments, "--repeats=1", "--profile")
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "bench.md").read_text()
    assert text.strip() in done.stdout
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines][:5] == [
        "schedule",
        "plain JAX",
        "`jax.checkpoint` per block",
        "`jax.checkpoint` whole",
        "jaxtile, everything stored",
    ]
    assert len(lines) == 8
    measured = [line for line in lines[1:] if "does not fit" not in line]
    assert text.count("\nregion ") == text.count("\nkernel ") == len(measured)
    assert [w in text for w in ("\nforward ", "\nrecomputed ", "\nbackward ")] == [True] * 3
    # The budgets are kept, or it says that they cannot be.
    for line, fraction in zip(lines[5:], (0.5, 0.25, 0.125), strict=True):
        cells = [c.strip() for c in line.strip("|").split("|")]
        assert cells[1] == "does not fit" or float(cells[4]) <= fraction + 0.01, line
    results = pathlib.Path(tmp_path / "results.jsonl").read_text()
    again = run(*arguments, "--repeats=1", "--profile")
    assert again.stdout == done.stdout
    assert pathlib.Path(tmp_path / "results.jsonl").read_text() == results


@pytest.mark.slow
def test_plans_that_are_made_first(tmp_path):
    """One that fits is taken when the row is measured."""
    large, small = (Cell("alexnet", 67, 2, policy=f"budget:{n}") for n in ("1GiB", "1MiB"))
    said = []
    failed = make_plans(
        [large, small], tmp_path, at_once=2, limit=600, device=None, say=said.append
    )
    assert [(cell, status) for cell, (status, _) in failed.items()] == [(small, "does not fit")]
    assert any("planned in" in line for line in said)
    file = file_of(large, tmp_path)
    assert make_plans([large], tmp_path, at_once=1, limit=0, device=None, say=said.append) == {}
    assert re.fullmatch(rf".*: takes the plan of \d{{4}}-\d\d-\d\d in {file}", said[-1])
    settings = sweep(())
    settings.update(repeats=1, limit_seconds=600, compare=False, warmup=0)
    found = measured(large, settings, tmp_path, plan=file)
    assert found.status == "ok", found
    assert found.values["plan"] == json.loads(file.read_text())
    assert not exceeds(large, found.values["compiled_bytes"])


def test_devices_and_peers_add_rows():
    problem = parsed("vgg16,64,float32")
    assert [c.policy for c in rows(problem, 1)] == ["plain", "jax_blocks", "jax_whole"]
    assert [c.policy for c in rows(problem, 8)][3:] == list(baselines.SHARDED)


def test_some_of_the_rows():
    problem = parsed("vgg16,64,float32")
    values = {"temporary_bytes": 2**23, "compiled_bytes": 2**23}
    cells = [*rows(problem, 1), *planned(problem, Result(problem, "ok", values, {}))]
    assert chosen(cells, []) == cells
    assert [c.policy for c in chosen(cells, ["store_*", "budget:*"])] == [
        *("plain", "store_all", "budget:4.0MiB", "budget:2.0MiB", "budget:1.0MiB")
    ]
    check_rows(["jax_*", "budget:2.0MiB"])
    with pytest.raises(ConfigError, match=r"--row \(=store\) is none of plain, jax_blocks"):
        check_rows(["store_all", "store"])


def test_what_did_not_run_is_said():
    problem = parsed("vgg16,64,float32")
    plain = Result(problem, "out of memory", {"message": "-"}, {"jax": "0"})
    assert [cell.policy for cell in planned(problem, plain)] == ["store_all"]
    assert "| plain JAX | out of memory | | | | |" in table(problem, [plain])


def test_rows_from_two_machines_are_told_apart():
    problem = parsed("vgg16,64,float32")
    values = {"seconds": 1.0, "temporary_bytes": 1}
    rows = [
        Result(problem, "ok", values | {"device": device}, {"jax": version})
        for device, version in (("H200", "0.11"), ("A100", "0.12"), ("A100", "0.12"))
    ]
    assert table(problem, rows)[0].endswith("; H200 and A100, jax 0.11 and 0.12")


@pytest.mark.parametrize(
    "text", ["vgg16", "vgg61,64,float32", "vgg16,big,float32", "unet,187,float32"]
)
def test_a_wrong_problem_is_refused(text):
    with pytest.raises(ConfigError, match=re.escape(f"--problem (={text})")):
        parsed(text)
