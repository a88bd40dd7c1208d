"""The training program keeps its promises: run, killed, damaged and misused as by its users."""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tifffile
from ml_collections import ConfigDict
from PIL import Image as pillow

import policies
from experiments.devices.hosts import Devices
from experiments.program.config import ConfigError, base
from experiments.training import feed
from experiments.training.checkpoints import CheckpointError, Checkpoints, unflatten
from experiments.training.feed import placed
from experiments.training.from_disk import choose_tiles
from experiments.training.learner import Learner
from experiments.training.out_of_memory import Budgets
from experiments.training.saved import Saved
from experiments.training.step import Step, make_optimiser
from experiments.training.trained import load_trained
from experiments.training.workdir import Workdir

from . import FLAGS
from .browser import needs_browser, opened
from .programs import python
from .support import parametrize_few
from .tiny_config import get_config

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 120


def command(workdir: pathlib.Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "experiments.train", "--config=tests/tiny_config.py"]
    return [*start, f"--workdir={workdir}", *more]


def environment(optimised: bool = False) -> dict[str, str]:
    flags = "" if optimised else FLAGS
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": flags}


def launch(
    workdir: pathlib.Path,
    *more: str,
    memory: int | None = None,
    optimised: bool = False,
    options: dict | None = None,
) -> subprocess.Popen:
    limit = ["bash", "-c", f'ulimit -v {memory // 1024}; exec "$@"', "bash"] if memory else []
    return subprocess.Popen(
        [*limit, *command(workdir, *more)],
        cwd=ROOT,
        env=environment(optimised),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **(options or {}),
    )


def run(workdir: pathlib.Path, *more: str, **options) -> tuple[int, str]:
    if not options:
        done = python(*command(workdir, *more)[1:], env=environment(), together=True)
        return done.returncode, done.stdout
    process = launch(workdir, *more, **options)
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


def when(process: subprocess.Popen, happens) -> None:
    """Wait, closely, until something happens or the process ends."""
    deadline = time.monotonic() + 200
    while not happens() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def steps_written(workdir: pathlib.Path) -> int:
    file = workdir / "metrics.jsonl"
    return file.read_text().count("gradient_norm") if file.exists() else 0


def final(workdir: pathlib.Path):
    """What must not depend on interruptions: metrics and weights, to the bit."""
    found = Checkpoints(workdir / "checkpoints", keep=3, read_only=True).restore()
    assert found.step == STEPS
    best = Checkpoints(workdir / "best", keep=1, read_only=True).restore()
    arrays = {name: x.tobytes() for name, x in found.arrays.items()}
    kept = {name: x.tobytes() for name, x in best.arrays.items()}
    return (workdir / "metrics.jsonl").read_bytes(), arrays, best.step, kept, found.record


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("run")
    process = launch(workdir)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    (workdir / "printed.txt").write_text(text)
    return workdir


def with_programs(uninterrupted: pathlib.Path, workdir: pathlib.Path) -> None:
    """So that they are not compiled again, which takes most of the time of a run."""
    shutil.copytree(uninterrupted / "compiled", workdir / "compiled")


def test_a_run(uninterrupted):
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").open()]
    train = [line for line in lines if "split" not in line]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    assert all(np.isfinite(line["loss"]) for line in train)
    evaluations = [line for line in lines if line.get("split") == "eval"]
    assert [line["step"] for line in evaluations] == [45, 90, 120]
    assert len(evaluations[0]["iou"]) == 2
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert 0 < summary["bytes"]["compiled"] < summary["bytes"]["plain_compiled"]
    assert summary["best"]["quality"] == max(e["mean_iou"] for e in evaluations)
    for picture in ("loss.png", "predictions.png"):
        assert (uninterrupted / picture).read_bytes().startswith(b"\x89PNG")
    report = (uninterrupted / "report.html").read_text()
    assert report.count("data:image/png;base64,") >= 2
    assert f"{summary['quality']['mean_iou']:.4f}" in report
    assert "://" not in report  # it needs no network
    assert len(list((uninterrupted / "checkpoints").glob("[0-9]*"))) == 3
    trained = load_trained(uninterrupted)
    assert trained.step == summary["best"]["step"]


@needs_browser
@pytest.mark.parametrize("width", [1400, pytest.param(600, marks=pytest.mark.slow)])
def test_its_page_in_a_browser(uninterrupted, width):
    """Pictures are seen, tables have numbers, nothing is wider than the window."""
    with opened(uninterrupted / "report.html", width) as driver:
        pictures = driver.find_elements("css selector", "img")
        assert len(pictures) >= 2
        for picture in pictures:
            assert int(picture.get_attribute("naturalWidth")) > 100
            assert picture.get_attribute("alt")
        tables = driver.find_elements("css selector", "table")
        quality = json.loads((uninterrupted / "summary.json").read_text())["quality"]
        assert f"{quality['mean_iou']:.4f}" in tables[0].text
        assert len(tables) == 3  # the summary, the classes, the confusion matrix
        wide = "return document.documentElement.scrollWidth - window.innerWidth"
        assert driver.execute_script(wide) <= 0


def test_what_is_done_before_the_first_step_is_said(uninterrupted):
    lines = (uninterrupted / "printed.txt").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step "))
    begun = [line.split("  ")[-1] for line in lines[:first] if " s  " in line]
    assert list(dict.fromkeys(what.split(" (")[0] for what in begun)) == [
        "finding devices",
        "tracing the model",
        "looking at the data",
        "making weights, or restoring them",
        "compiling the step",
        "compiling the evaluation",
        "placing the weights",
        "drawing the first batch",
        "the first step",
    ]


def test_a_finished_run_is_left_alone(uninterrupted):
    before = final(uninterrupted)
    code, text = run(uninterrupted)
    assert code == 0
    assert "complete" in text
    assert final(uninterrupted) == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_ends_with_the_same_bits(uninterrupted, tmp_path, seed):
    chance = random.Random(seed)
    moments = [
        # While a checkpoint is being written.
        lambda: any(tmp_path.glob("checkpoints/*tmp*")),
        lambda: any(tmp_path.glob("best/*tmp*")),
        lambda: steps_written(tmp_path) >= goal,
    ]
    for moment in moments:
        goal = chance.randrange(50, 110)
        process = launch(tmp_path)
        when(process, moment)
        process.kill()
        process.communicate()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 111, "lo')  # as if the kill had come in the middle of a line
    code, text = run(tmp_path)
    assert code == 0, text
    assert final(tmp_path) == final(uninterrupted)


@pytest.mark.slow
def test_signals_save_and_the_run_goes_on(uninterrupted, tmp_path):
    with_programs(uninterrupted, tmp_path)
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = launch(tmp_path)
        when(process, lambda: steps_written(tmp_path) >= done + 10)
        process.send_signal(number)
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 128 + number, text
        assert f"stopped by {number.name}" in text
        assert "saved" in text
        assert "Traceback" not in text
        assert not done or f"going on after step {done}" in text
        saved = Checkpoints(tmp_path / "checkpoints", keep=3, read_only=True).restore()
        done = saved.step
        assert done == steps_written(tmp_path)
    code, text = run(tmp_path)
    assert code == 0, text
    assert f"going on after step {done}" in text
    assert final(tmp_path) == final(uninterrupted)


@pytest.mark.slow
def test_a_signal_while_compiling_stops_at_once(tmp_path):
    """A large network, optimised, takes long."""
    number = signal.SIGINT
    process = launch(tmp_path, "--config.model.depth=4", "--config.data.size=256", optimised=True)
    for line in process.stdout:
        if "compiling the step" in line:
            break
    process.send_signal(number)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + number, text
    assert f"stopped by {number.name}; the same command goes on" in text
    assert "compiled in" not in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_nobody_reads_what_it_prints(uninterrupted, tmp_path):
    """As with `| head -1`: it stops as after a signal, without a word."""
    with_programs(uninterrupted, tmp_path)
    process = launch(tmp_path, "--config.log.every=1")
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.stdout.close()
    assert process.wait(100) == 128 + signal.SIGPIPE
    saved = Checkpoints(tmp_path / "checkpoints", keep=3, read_only=True).restore()
    assert saved.step == steps_written(tmp_path) >= 3


@pytest.mark.slow
def test_the_best_weights_stay_until_a_checkpoint_names_better_ones(tmp_path):
    """Killed after a new best and before a checkpoint, a run may not come to that best again."""

    def steps(name: str) -> list[int]:
        return [int(p.name) for p in tmp_path.glob(f"{name}/*") if p.name.isdigit()]

    more = ["train.steps=100000", "eval.every=5", "checkpoint.every=100000", "log.every=1000"]
    more = [f"--config.{m}" for m in more]
    process = launch(tmp_path, *more)
    when(process, lambda: steps("best"))
    process.terminate()
    text, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, text
    [done] = steps("checkpoints")
    process = launch(tmp_path, *more)
    when(process, lambda: max(steps("best")) > done)
    process.kill()
    text, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, text

    saved = Saved(tmp_path, keep=3, devices=Devices())
    named = Checkpoints(tmp_path / "checkpoints", keep=3, read_only=True).restore().record["best"]
    assert load_trained(tmp_path).step > done >= named["step"]
    saved.forget_best_after(done)  # as the run does when it goes on
    assert load_trained(tmp_path).step == named["step"]


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(uninterrupted, tmp_path):
    with_programs(uninterrupted, tmp_path)
    process = launch(tmp_path)
    when(process, lambda: (tmp_path / "checkpoints/48").exists())
    process.kill()
    process.communicate()
    newest = max((tmp_path / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for file in newest.rglob("d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    code, text = run(tmp_path)
    assert code == 0, text
    assert f"checkpoint of step {newest.name} is damaged" in text
    assert f"going on from the checkpoint of step {int(newest.name) - 24}" in text
    assert final(tmp_path) == final(uninterrupted)


@pytest.mark.slow
def test_if_all_checkpoints_are_damaged_nothing_starts_anew(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(24, {"a": np.ones(3)}, {})
    (tmp_path / "config.json").write_text(get_config().to_json())
    (tmp_path / "checkpoints/24/record/metadata").write_text("{")
    code, text = run(tmp_path)
    assert code == 1
    assert "all checkpoints" in text
    assert "remove that folder" in text


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    first = launch(tmp_path)
    lock = tmp_path / "lock"
    when(first, lambda: lock.exists() and lock.read_text())
    code, text = run(tmp_path)
    assert code == 1
    assert f"another run (process {first.pid})" in text
    assert first.poll() is None
    first.kill()
    first.communicate()


@pytest.mark.slow
def test_a_run_without_its_config_does_not_go_on(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted, workdir)
    file = workdir / "config.json"
    before = file.read_text()
    file.write_text(before[:500])
    code, text = run(workdir)
    assert code == 1
    assert f"error: {file} is damaged: " in text
    way_out = text.strip().rpartition("If the settings are the same: ")[2]
    assert "Traceback" not in text
    subprocess.run(way_out, shell=True, check=True)
    assert file.read_text() == before
    code, text = run(workdir)
    assert code == 0, text
    assert "complete" in text

    file.unlink()
    config = ConfigDict(json.loads(before))
    config.seed = 1
    folder = Workdir(workdir)
    with pytest.raises(ConfigError, match=r"config.json is missing.*nobody can tell"):
        folder.check(config)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json is damaged: it is not the config of a run"):
        folder.check(config)
    with pytest.raises(ConfigError, match=r"config.json is damaged"):
        load_trained(workdir)
    file.write_text(before)
    with pytest.raises(ConfigError, match="seed: 0 there, 1 here"):
        folder.check(config)
    folder.close()


@pytest.mark.slow
def test_what_is_lost_of_a_run_is_said(tmp_path):
    """A refused command changes nothing; lines and plans that are damaged are named."""
    more = ["train.schedule=constant", "policy=budget:1MiB", "eval.every=2", "checkpoint.every=1"]
    more = [f"--config.{m}" for m in more]
    code, text = run(tmp_path, *more, "--config.train.steps=6")
    assert code == 0, text
    before = (tmp_path / "config.json").read_bytes()
    code, text = run(tmp_path, *more, "--config.train.steps=5")
    assert code == 1
    assert "less than the 6 steps done already" in text
    assert (tmp_path / "config.json").read_bytes() == before

    metrics, timing = tmp_path / "metrics.jsonl", tmp_path / "timing.jsonl"
    lines = metrics.read_text().splitlines()
    steps = [(json.loads(line)["step"], "split" in line) for line in lines]
    lost = [(3, False), (4, False), (4, True)]
    kept = [line for line, step in zip(lines, steps, strict=True) if step not in lost]
    metrics.write_text("\n".join(["\0 no line", *kept, '{"step": 2}', "[]"]) + "\n")
    timing.write_text(timing.read_text() + '{"step": 3}\n')
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["stages"][0]["stored"] = ["nosuch"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    code, text = run(tmp_path, *more, "--config.train.steps=8")
    assert code == 0, text
    assert f"3 lines of {metrics} cannot be read" in text
    assert f"1 lines of {timing} cannot be read" in text
    assert f"{metrics} lacks the steps 3 to 4;" in text
    assert f"{metrics} lacks the evaluations after steps 4;" in text
    assert "it stores 'nosuch', which the function does not have" in text
    assert "planning anew" in text
    assert metrics.read_text().splitlines()[: len(kept)] == kept
    assert (tmp_path / "damaged/metrics.jsonl").read_text().startswith("\0 no line")


@pytest.mark.slow
def test_a_run_that_lost_its_metrics_has_a_summary(uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted, workdir)
    for name in ("metrics.jsonl", "summary.txt"):
        (workdir / name).unlink()
    code, text = run(workdir)
    assert code == 0, text
    assert f"lacks the steps 1 to {STEPS};" in text
    assert "lacks the evaluations after steps 45, 90;" in text
    [line] = (workdir / "metrics.jsonl").read_text().splitlines()
    assert line == (uninterrupted / "metrics.jsonl").read_text().splitlines()[-1]
    assert (workdir / "summary.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, size, reason",
    [
        ("checkpoints", 2000, r"the checkpoint of step 2 cannot be written to .*: File too large"),
        ("metrics.jsonl", 5000, r"metrics\.jsonl: File too large"),
    ],
)
def test_a_full_disk_is_one_line(uninterrupted, tmp_path, file, size, reason):
    with_programs(uninterrupted, tmp_path)
    every = 2 if file == "checkpoints" else 1000
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
    code, text = run(tmp_path, f"--config.checkpoint.every={every}", options=full)
    assert code == 1
    assert text.splitlines()[-1].startswith("error: "), text
    assert re.search(reason, text.splitlines()[-1])
    assert "Traceback" not in text


def test_a_checkpoint_of_another_model_is_named():
    """As it is after the code of one's own model has changed."""
    saved = pathlib.Path("runs/a/checkpoints/7")
    wanted = {"kernel": np.zeros(5), "bias": np.zeros(5)}
    advice = "A checkpoint goes with the code and the options of the model that it is of"
    with pytest.raises(CheckpointError, match=rf"{saved} has kernel as .*4\], .*5\]\. {advice}"):
        unflatten(wanted, {"kernel": np.zeros(4), "bias": np.zeros(5)}, saved)
    with pytest.raises(CheckpointError, match=rf"{saved} is of .* lacks bias, and has nothing .*"):
        unflatten(wanted, {"kernel": np.zeros(5)}, saved)


def test_other_settings_in_the_same_folder_are_refused(uninterrupted):
    code, text = run(uninterrupted, "--config.train.learning_rate=0.5")
    assert code == 1
    assert "train.learning_rate: 0.001 there, 0.5 here" in text
    assert f"another --workdir, and --config.start_from={uninterrupted}" in text


@pytest.mark.slow
def test_a_run_that_begins_with_the_weights_of_another(uninterrupted, tmp_path):
    """As the refusal advises who wants more steps than the schedule had."""
    code, text = run(uninterrupted, f"--config.train.steps={STEPS + 3}")
    assert code == 1
    folder, *more = re.search("give the same command with (.*?)[.] ", text)[1].split()
    assert folder == f"--workdir={uninterrupted}-{STEPS + 3}"
    code, text = run(tmp_path, *more)
    assert "step 3/3" in text
    assert code == 0, text
    assert f"beginning with the weights of {uninterrupted}" in text
    losses = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for folder in (uninterrupted, tmp_path)
    ]
    assert losses[1] < 0.9 * losses[0]  # of the same first batch


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    """Here the new weights are not: the loss of the step itself is finite."""
    more = ["--config.train.optimiser=sgd", "--config.train.learning_rate=1e38"]
    code, text = run(tmp_path, *more, "--config.train.clip_norm=0.0")
    assert code == 1
    assert "is not finite" in text
    assert "cells" in text
    at = int(text.split("error: step ")[1].split()[0])
    found = Checkpoints(tmp_path / "checkpoints", keep=3, read_only=True).restore()
    assert found.step == at - 1
    assert all(np.isfinite(x.astype(np.float64)).all() for x in found.arrays.values())
    assert f"checkpoints/{at - 1}" in text


@pytest.mark.slow
def test_out_of_memory_says_what_would_fit(tmp_path):
    more = ["--config.data.size=1536", "--config.model.channels=24", "--config.policy=store_all"]
    code, text = run(tmp_path, *more, memory=5 * 2**30)
    assert code == 1, text
    assert "out of memory" in text
    assert "Traceback" not in text
    assert "--config.policy=budget:" in text.splitlines()[-1]


_LIMITED = """
import pathlib, resource, sys
import jax
from experiments import train
from experiments.training.run import Run
from experiments.program.config import base

begin, NONE = Run.begin, resource.RLIM_INFINITY


def limited(self, batch):
    "The first budget's step gets less memory than it needs."
    if self.budgets.shrunk:
        return begin(self, batch)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(0.9 * self.program.bytes)
    resource.setrlimit(resource.RLIMIT_AS, (most, NONE))
    try:
        return jax.block_until_ready(begin(self, batch))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (NONE, NONE))


Run.begin = limited
config = base("unet", channels=8, depth=1, padding="SAME", dropout=0.0)
config.policy, config.data.size, config.data.train_images = "budget:400MiB", 512, 2
config.train.steps, config.eval.every, config.data.eval_images = 2, 0, 1
sys.exit(train.train(config, sys.argv[1]))
"""


@pytest.mark.slow
def test_out_of_memory_with_a_budget_plans_for_less_and_goes_on(tmp_path):
    """The process really gets no more memory while the first step runs."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "out of memory: RESOURCE_EXHAUSTED" in done.stdout
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["step"] == 2
    (line,) = found["replanned"]
    assert (line["policy"], line["instead"], line["step"]) == ("budget:400MiB", found["policy"], 0)
    assert f"planning for {line['instead'][7:-3]} MiB instead of 400 MiB" in done.stdout
    assert f"{line['instead']} after budget:400MiB" in (tmp_path / "summary.txt").read_text()
    # A run that goes on begins with it; one with another budget does not.
    assert Budgets("budget:400MiB", tmp_path, alone=True).policy == line["instead"]
    assert Budgets("budget:390MiB", tmp_path, alone=True).policy == "budget:390MiB"


@pytest.mark.slow
def test_a_budget_that_is_too_small_says_which_one_works(tmp_path):
    code, text = run(tmp_path, "--config.policy=budget:20kB")
    assert code == 1
    wanted = text.splitlines()[-1].split("--config.policy=")[1]
    assert wanted.startswith("budget:")
    assert "Traceback" not in text


@parametrize_few(
    ("override", "words"),
    [
        ("--config.train.stpes=3", ["'train.stpes'", "'train.steps'"]),
        ("--config.train.steps=many", ["error: flag --config.train.steps=many: "]),
        ("--config.train.steps=0", ["`train.steps` (=0)", "positive"]),
        ("--config.policy=squirt", ["'squirt'", "sqrt"]),
        ("--config.train.optimiser=adem", ["'adem'", "'adam'"]),
        ("--config.data.size=33", ["UNet", "33"]),
        ("--config.data.kind=textures", ["segments", "classes"]),
        ("--config.model.depth=-1", ["depth"]),
        ("--config.train.warmup_steps=120", ["warmup_steps", "120"]),
        ("--config.data.size=0", ["`size` must be given"]),
        ("--config.policy=offload:nosuch", ["'nosuch'"]),
    ],
    always=2,
)
def test_bad_settings_end_in_one_line(tmp_path, override, words):
    code, text = run(tmp_path, override)
    assert code == 1
    assert "Traceback" not in text
    for word in words:
        assert word in text


@pytest.mark.slow
def test_a_refused_config_does_not_claim_the_folder(tmp_path):
    code, _ = run(tmp_path, "--config.data.size=33")
    assert code == 1
    code, text = run(tmp_path, "--config.train.steps=1", "--config.policy=store_all")
    assert code == 0, text


@pytest.mark.slow
def test_waiting_for_data_is_said(tmp_path, uninterrupted):
    """A PNG has no windows: 25 megapixels are decoded for the 32 x 32 that a small step takes."""
    folder, rng = tmp_path / "cells", np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(2):
        image = rng.integers(0, 255, (5000, 5000), np.uint8)
        pillow.fromarray(image).save(folder / f"images/{i}.png")
        pillow.fromarray(image // 128).save(folder / f"masks/{i}.png")
    more = [f"data.path={folder}", "data.kind=folder", "train.steps=6", "checkpoint.every=3"]
    more += ["log.every=1", "eval.every=0", "eval.size=32", "data.eval_fraction=0.5"]
    code, text = run(tmp_path / "run", *(f"--config.{m}" for m in more))
    assert code == 0, text
    told = [int(n) for n in re.findall(r"step \d/6 .*?(\d+)% waiting", text)]
    assert len(told) == 5  # the first step does not count
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    share = summary["speed"]["share_waiting_for_data"]
    assert share > 0.4
    assert f"{share:.1%} of the time waiting for data" in text
    lines = [json.loads(line) for line in (tmp_path / "run/timing.jsonl").open()]
    seconds = [line["steps"] * line["seconds_per_step"] for line in lines]
    waited = sum(s * line["share_waiting_for_data"] for s, line in zip(seconds, lines, strict=True))
    assert share == pytest.approx(waited / sum(seconds))
    fast = json.loads((uninterrupted / "summary.json").read_text())
    assert fast["speed"]["share_waiting_for_data"] < share


@pytest.mark.slow
def test_a_folder_of_files_with_a_bad_one(tmp_path):
    """Named, and nothing is trained; or skipped and counted."""
    folder, rng = tmp_path / "cells", np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(6):
        image = rng.integers(0, 255, (70, 50, 3), np.uint8)
        tifffile.imwrite(folder / f"images/{i}.tif", image, tile=(32, 32), compression="zlib")
        tifffile.imwrite(folder / f"masks/{i}.tif", (image[..., 0] > 128).astype(np.uint8))
    bad = folder / "images/3.tif"
    bad.write_bytes(bad.read_bytes()[:100])
    more = ["--config.data.kind=folder", f"--config.data.path={folder}", "--config.train.steps=3"]
    code, text = run(tmp_path / "run", *more)
    assert code == 1
    assert "3.tif" in text
    assert "Traceback" not in text
    code, text = run(tmp_path / "run", *more, "--config.data.on_bad_file=skip")
    assert code == 0, text
    assert "bad files skipped: 1" in text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["step"], summary["skipped_files"]) == (3, 1)


def test_a_missing_config_names_those_that_exist(tmp_path):
    code, text = run(tmp_path, "--config=configs/quickstrat.py")
    assert code == 1
    assert "configs/quickstart.py" in text


@pytest.mark.slow
def test_profile_and_boards(tmp_path):
    code, text = run(tmp_path, "--profile", "--config.log.tensorboard", "--config.train.steps=9")
    assert code == 0, text
    assert list(tmp_path.glob("profile/**/*.pb"))
    told = (tmp_path / "profile/profile.txt").read_text()
    assert f"profile: {told}" in text
    assert "of 5 that were traced" in told
    for region in ("forward", "recomputed", "backward"):
        assert re.search(rf"^{region} +[0-9.]+ +[0-9.]+% +[0-9.e-]+$", told, re.MULTILINE), told
    assert re.search(r"^update +[0-9.]+ +[0-9.]+% +-$", told, re.MULTILINE)
    assert list(tmp_path.glob("tensorboard/events*"))


@pytest.mark.slow
def test_batches_in_host_memory_give_the_same_numbers(tmp_path):
    few = ("--config.policy=passing:2x2", "--config.train.steps=4", "--config.eval.every=0")
    found = []
    for place in ("device", "host"):
        code, text = run(tmp_path / place, *few, f"--config.data.placement={place}")
        assert code == 0, text
        assert ("batches lie in host memory" in text) == (place == "host")
        found.append((tmp_path / place / "metrics.jsonl").read_bytes())
    assert found[0] == found[1]


def test_tiles_of_a_step_from_disk():
    """Halved until they fit a budget; a policy that computes in one piece is refused."""
    config = base("unet", channels=2, depth=1, padding="SAME", dropout=0.0)
    config.data.size = 512
    learner = Learner(config)
    batch = (
        jax.ShapeDtypeStruct((1, 512, 512, 1), np.uint8),
        jax.ShapeDtypeStruct((1, 512, 512), np.uint8),
    )
    step = Step(learner, make_optimiser(config)[0], batch)
    one = choose_tiles(step, "sqrt")
    assert one.grid == (1, 1)
    found = choose_tiles(step, f"budget:{one.bytes // 3}")
    assert (found.policy, found.grid) == ("passing:4x4", (4, 4))
    assert found.bytes <= one.bytes // 3
    with pytest.raises(policies.BudgetError, match="with tiles of 64 pixels"):
        choose_tiles(step, "budget:10kB")
    with pytest.raises(ConfigError, match="computes in one piece"):
        choose_tiles(step, "store_all")


@pytest.mark.slow
def test_from_disk_killed_or_not_it_gives_the_same_numbers(tmp_path):
    """Windows of files are read while a step runs; batch statistics and augmentation included."""
    chance = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for i in range(3):
        mask = (chance.random((12, 11)) > 0.6).repeat(8, 0).repeat(8, 1).astype(np.uint8)
        image = (mask * 120 + chance.integers(0, 60, mask.shape)).astype(np.uint8)
        np.save(tmp_path / "data" / "images" / f"{i}.npy", image)
        np.save(tmp_path / "data" / "masks" / f"{i}.npy", mask)
    options = {
        "data.kind": "folder",
        "data.path": tmp_path / "data",
        "data.size": 64,
        "data.augment": True,
        "policy": "passing:2x2",
        "train.steps": 12,
        "eval.every": 0,
        "eval.tile": 32,
        "checkpoint.every": 2,
    }
    few = [f"--config.{name}={value}" for name, value in options.items()]
    process = launch(tmp_path / "killed", *few, "--config.data.placement=disk")
    when(process, lambda: steps_written(tmp_path / "killed") >= 3)
    process.kill()
    process.communicate()
    lines = {}
    for name, place in (("killed", "disk"), ("disk", "disk"), ("device", "device")):
        code, text = run(tmp_path / name, *few, f"--config.data.placement={place}")
        assert code == 0, text
        assert ("batches stay on disk" in text) == (place == "disk")
        assert ("going on after step" in text) == (name == "killed")
        lines[name] = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    assert lines["killed"] == lines["disk"]
    losses = [[json.loads(line)["loss"] for line in lines[n]] for n in ("disk", "device")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_tiles_that_are_skipped_are_counted(tmp_path):
    """Of a slide that is blank but for a corner; the losses are those without skipping."""
    for name, value in (("images", 255), ("masks", 0)):
        (tmp_path / "data" / name).mkdir(parents=True)
        slide = np.full((96, 96), value, np.uint8)
        slide[:24, :24] = np.random.default_rng(0).integers(0, 2, (24, 24))
        for i in range(3):
            np.save(tmp_path / "data" / name / f"{i}.npy", slide)
    options = {
        "data.kind": "folder",
        "data.path": tmp_path / "data",
        "data.size": 96,
        "data.augment": False,
        "policy": "tiled:4x4",
        "train.batch_size": 1,
        "train.steps": 2,
        "train.warmup_steps": 0,
        "log.every": 1,
    }
    few = [f"--config.{name}={value}" for name, value in options.items()]
    losses = {}
    for skip in (False, True):
        code, text = run(tmp_path / str(skip), *few, f"--config.skip={skip}")
        assert code == 0, text
        counted = [int(n) for n in re.findall(r"(\d+) tiles skipped", text)]
        assert len(counted) == 2 * skip, text
        assert all(n >= 4 for n in counted)
        lines = (tmp_path / str(skip) / "metrics.jsonl").read_text().splitlines()
        losses[skip] = [json.loads(line)["loss"] for line in lines]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_where_batches_lie(monkeypatch):
    shapes = (
        jax.ShapeDtypeStruct((1, 1024, 1024, 3), np.uint8),
        jax.ShapeDtypeStruct((1,), np.int32),
    )

    def memory(**fields) -> tuple[list[bool], str]:
        config = get_config()
        with config.unlocked():
            config.update_from_flattened_dict(fields)
        where, found, text = placed(shapes, config, Devices())
        assert where == ("host" if found[0].sharding else "device")
        return [x.sharding is not None for x in found], text

    assert memory() == memory(policy="budget:20MiB") == ([False, False], "")  # of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert memory(policy="budget:25MiB") == ([False, False], "")
    assert memory(policy="budget:20MiB", **{"data.placement": "device"}) == ([False, False], "")
    hosted, text = memory(policy="budget:20MiB")
    assert hosted == [True, False]
    assert "two of them take 6 MiB of 20 MiB" in text
    monkeypatch.setattr(feed, "host_memory", lambda: 40 * 2**20)
    assert memory(policy="budget:20MiB")[0] == [True, False]  # what is drawn is not on disk
    config = get_config()
    config.data.kind = "folder"
    where, found, text = placed(shapes, config, Devices())
    assert (where, found) == ("disk", shapes)
    assert "four of them take 12 MiB of 40 MiB" in text
