"""The programs run as a user runs them, on small sizes."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["experiments.grids", "--size=32", "--channels=2", "--grid=2", "--repeats=1"],
            ["| 2 x 2 |", "operations"],
        ),
        (
            [
                "experiments.schedules",
                "--model=alexnet",
                "--size=67",
                "--batch=16",
                "--repeats=1",
                "--only=plain JAX",
                "--only=pool1 saved",
            ],
            ["| plain JAX |", "| 8 images at a time, pool1 saved |"],
        ),
        (
            ["experiments.largest", "--model=alexnet", "--budget=40MB", "--policy=plain"],
            ["| plain | 2", "alexnet, batch 1, float32, within 38.1 MiB"],
        ),
    ],
    ids=["grids", "schedules", "largest"],
)
def test_program(arguments, words):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    for word in words:
        assert word in done.stdout
    assert "Error" not in done.stdout
    difference = [line for line in done.stdout.splitlines() if "largest difference" in line]
    for line in difference:
        assert float(line.split(":")[1].split()[0]) < 1e-4


def test_an_unknown_schedule_is_refused():
    done = run("experiments.schedules", "--only=everything")
    assert done.returncode != 0
    assert "plain JAX" in done.stderr + done.stdout
