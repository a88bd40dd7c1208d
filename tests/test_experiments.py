"""The programs run as a user runs them, on small sizes."""

import os
import subprocess

import pytest

import policies

from .programs import python


def run(*arguments: str) -> subprocess.CompletedProcess:
    return python("-m", *arguments, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["experiments.grids", "--size=32", "--channels=2", "--grid=2", "--repeats=1"],
            ["| 2 x 2 |", "operations"],
        ),
        (
            ["experiments.largest", "--model=alexnet", "--budget=40MB", "--policy=plain"],
            ["| plain | 2", "alexnet, batch 1, float32, within 38.1 MiB"],
        ),
        (
            ["experiments.gigapixel", "--size=32", "--width=2", "--budget=40MB", "--steps=1"],
            ["| 32 x 32 |", "vgg16, bfloat16, within 40MB"],
        ),
        (
            [
                "experiments.gigapixel",
                "--size=64",
                "--width=2",
                "--budget=40MB",
                "--dense",
                "--blank=0.8",
            ],
            ["| 64 x 64 |", "vgg16, dense, 80% blank, tiles skipped, bfloat16, within 40MB"],
        ),
    ],
    ids=["grids", "largest", "gigapixel", "dense gigapixel"],
)
def test_program(arguments, words):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    for word in words:
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan --model=alexnet --size=0", "0 is not a positive integer"),
        ("plan --model=alexnet --size=20 --batch=1", "AlexNet cannot take an image of 20 pixels"),
        ("plan --model=alexnet --dtype=foo", "<float32|bfloat16|float16>"),
        ("plan --picture=plan.gif", "--picture=plan.gif must end in .png, .svg, .pdf"),
        ("plan --save=nowhere/plan.json", "--save=nowhere/plan.json: there is no folder nowhere"),
        ("plan --save=tests", "--save=tests: is a folder"),
        ("gigapixel --model=resnet50 --dense", "--dense is for vgg16: resnet50 has no classifier"),
        ("gigapixel --size=64 --save=nowhere/plan.json", "there is no folder nowhere"),
        pytest.param(
            "gigapixel --size=64 --width=2 --device=X1",
            "`device` (='X1') must be one of NVIDIA H200",
            marks=pytest.mark.slow,
        ),
        (
            "gigapixel --plan=plan.json --device=X1",
            "--device is to make a plan, and --plan gives one",
        ),
        ("calibrate --models=unet,unett", "--models: there is no model unett"),
        ("calibrate --output=nowhere/costs.json", "there is no folder nowhere"),
        ("grids --channels=0", "0 is not a positive integer"),
        ("grids --size=16 --channels=1 --layers=1 --grid=17", "17"),
        ("largest --dtype=foo", "<float32|bfloat16|float16>"),
        ("bench --workdir=nowhere --repeats=0", "0 is not a positive integer"),
    ],
)
def test_what_cannot_be_meant_is_one_line_at_once(arguments, words):
    """Before minutes of work whose result could not be written, say."""
    program, *others = arguments.split()
    done = run(f"experiments.{program}", *others)
    assert done.returncode == 1
    *_, line = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_calibrate_writes_a_table_that_the_planner_reads(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    done = run("experiments.calibrate", "--size=16", "--repeats=1", f"--output={path}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| convolution, bfloat16 |" in done.stdout
    assert "gradient of max_pool" in done.stdout
    assert "timing gradients of pools" in done.stderr
    monkeypatch.setenv("JAXTILE_COSTS", str(path))
    found = policies.costs()
    rates = (*found.flops.values(), found.bandwidth, found.start, found.loop)
    assert all(rate > 0 for rate in rates)
    assert min(found.tile, *found.backward.values()) >= 1
