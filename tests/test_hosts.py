"""One run on several processes, which really are: started, killed, interrupted, gone on with."""

import json
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.devices.hosts import find_devices
from experiments.program.config import ConfigError

from . import FLAGS
from .programs import python
from .support import parametrize_few

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 60


def launch(workdir, *arguments, devices=2, cwd=ROOT, **options):
    """A process with so many devices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "experiments.train", f"--config={ROOT}/tests/tiny_config.py"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", f"--config.train.steps={STEPS}", *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def launch_two(workdir, *shared, first=None, second=None, of_second=()):
    """`first` and `second` are options of `launch` that differ."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    shared = [*shared, f"--coordinator={address}", "--processes=2"]
    return [
        launch(workdir, *shared, "--process=0", **(first or {})),
        launch(workdir, *shared, "--process=1", *of_second, **(second or {})),
    ]


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {line["step"]: line["loss"] for line in found if "split" not in line}


def wait_for_step(workdir, step, processes):
    for _ in range(3000):
        if (workdir / "metrics.jsonl").exists() and max(losses(workdir), default=0) >= step:
            return
        assert all(p.poll() is None for p in processes), processes[0].communicate()[0][-3000:]
        time.sleep(0.1)
    pytest.fail(f"step {step} was not reached")


def ended(process, seconds=60):
    try:
        return process.communicate(timeout=seconds)[0]
    finally:
        process.kill()


@pytest.mark.slow
def test_two_processes_one_lost_and_gone_on_with(tmp_path):
    workdir = tmp_path / "many"
    processes = launch_two(workdir)
    wait_for_step(workdir, 26, processes)
    processes[1].kill()
    text = ended(processes[0])
    assert processes[0].returncode not in (0, None)
    assert "process 0 of 2 lost another" in text, text[-3000:]
    assert str(workdir / "checkpoints") in text

    processes = launch_two(workdir)
    wait_for_step(workdir, 30, processes)
    processes[1].send_signal(signal.SIGTERM)  # one is told, both stop
    texts = [ended(p) for p in processes]
    assert [p.returncode for p in processes] == [128 + signal.SIGTERM] * 2, texts
    assert "going on after step 24" in texts[0]
    assert "which is saved" in texts[0]

    one = launch(workdir, devices=1)
    text = ended(one, 300)
    assert one.returncode == 0, text[-3000:]
    assert re.search(r"going on after step \d+", text)
    assert "on each of" not in text

    alone = tmp_path / "one"
    one = launch(alone, devices=1)
    text = ended(one, 300)
    assert one.returncode == 0, text[-3000:]
    found, expected = losses(workdir), losses(alone)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    first = np.array([found[i] for i in range(1, 11)])
    np.testing.assert_allclose(first, [expected[i] for i in range(1, 11)], rtol=1e-4)


def test_an_error_in_one_process_ends_all(tmp_path):
    """The second host has a file that is damaged; the first one is well."""
    for host in ("first", "second"):
        for name in ("images", "masks"):
            folder = tmp_path / host / "data" / name
            folder.mkdir(parents=True)
            for i in range(4):
                np.save(folder / f"{i}.npy", np.zeros((40, 40), np.uint8))
    (tmp_path / "second/data/masks/2.npy").write_bytes(b"no mask")
    places = [{"cwd": tmp_path / host} for host in ("first", "second")]
    arguments = ["--config.data.kind=folder", "--config.data.path=data"]
    processes = launch_two(tmp_path / "run", *arguments, first=places[0], second=places[1])
    for process, text in [(p, ended(p)) for p in processes]:
        assert process.returncode == 1, text
        assert "error: process 1 of 2 ended: data/masks/2.npy" in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_a_full_disk_in_the_first_process_ends_all(tmp_path):
    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    processes = launch_two(tmp_path / "run", first={"preexec_fn": full})
    for process, text in [(p, ended(p)) for p in processes]:
        assert process.returncode == 1, text
        assert "error: process 0 of 2 ended: " in text
        assert "File too large" in text
        assert "Traceback" not in text


@pytest.mark.slow
@parametrize_few(
    "number, reason",
    [
        (signal.SIGKILL, "the connection to process 1 closed"),
        (signal.SIGSTOP, "process 1 gave no sign of life for 10 s"),
    ],
)
def test_a_process_that_is_lost_or_frozen_before_the_steps(tmp_path, number, reason):
    """While programs are traced and compiled, which takes long for this network."""
    large = ["--config.model.depth=4", "--config.data.size=256", "--silence=10"]
    processes = launch_two(tmp_path / "run", *large)
    for line in processes[0].stdout:
        if line.startswith("unet, "):
            break
    processes[1].send_signal(number)
    try:
        text = ended(processes[0])
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert processes[0].returncode == 1, text
    assert f"error: process 0 of 2 lost another: {reason}. The same commands" in text
    assert "compiled in" not in text


@pytest.mark.slow
def test_processes_with_other_settings_are_refused(tmp_path):
    for process in launch_two(tmp_path / "run", of_second=["--config.seed=1"]):
        text = ended(process)
        assert process.returncode == 1
        assert "processes [1] of 2 have other settings" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_process_with_a_mesh(tmp_path):
    run = launch(tmp_path, "--config.mesh=(2,2)", "--config.data.size=30", devices=4)
    text = ended(run, 300)
    assert run.returncode == 0, text[-3000:]
    assert "on each of 4 devices" in text


@pytest.mark.parametrize("shape", [(3,), (0, 2), (1, 1, 1), (16, 2)])
def test_a_wrong_mesh_is_refused(shape):
    with pytest.raises(ConfigError, match="mesh"):
        find_devices(shape)


@parametrize_few(
    "arguments",
    [["--processes=2"], ["--coordinator=127.0.0.1:1", "--processes=2", "--process=2"]],
)
def test_flags_that_do_not_belong_together(tmp_path, arguments):
    given = [f"--config={ROOT}/tests/tiny_config.py", f"--workdir={tmp_path / 'run'}", *arguments]
    done = python("-m", "experiments.train", *given, together=True)
    assert done.returncode == 1
    assert done.stdout.startswith("error: --coordinator")
    assert not (tmp_path / "run").exists()
