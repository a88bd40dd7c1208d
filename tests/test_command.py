"""The command `jaxtile`, from a checkout and from what a wheel installs."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import jaxtile
from jaxtile.__main__ import PROGRAMS, main

ROOT = pathlib.Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_it_lists_the_programs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxtile"])
    main()
    told = capsys.readouterr().out
    own = {file.stem for file in ROOT.glob("experiments/[!_]*.py")} - {"cell", "peers"}
    assert own == set(PROGRAMS)
    assert all(f"\n  {name} " in told for name in own)


def test_nobody_reads_the_list():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "jaxtile"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_while_a_program_is_imported():
    code = """if True:
        import os, signal, sys
        from jaxtile import __main__ as command
        command.runpy.run_module = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
        sys.argv = ["jaxtile", "train"]
        command.main()"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_it_knows_its_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxtile", "--version"])
    main()
    assert capsys.readouterr().out == f"jaxtile {jaxtile.__version__}\n"


@pytest.mark.parametrize(
    "argument, words", [("trian", "did you mean 'train'"), ("train", "needs absl-py: pip install")]
)
def test_what_it_refuses(argument, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxtile", argument])
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "absl" else "found"
    )
    with pytest.raises(SystemExit, match=words):
        main()


def test_help_lists_the_flags_of_a_program():
    command = [sys.executable, "-m", "jaxtile", "train", "--help"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert all(f"\n  --{name}: " in told for name in ("config", "workdir", "[no]profile"))


def test_no_program_tells_which_devices_there_are_not():
    code = """if True:
        import jax
        from experiments.program.command import start
        start(lambda argv: print(len(jax.devices())))"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert int(done.stdout) > 0
    assert "backend" not in done.stderr


def test_a_wheel_has_all_packages():
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for folder in ("jaxtile", "policies", "models", "experiments", "configs")
        for file in ROOT.glob(f"{folder}/**/__init__.py")
    }
    assert {name.removeprefix("jaxtile._programs.") for name in SETUP["packages"]} == found


def install(site: pathlib.Path) -> None:
    """As a wheel: the files of each package, where `pyproject.toml` puts them."""
    for package in SETUP["packages"]:
        source = ROOT / package.removeprefix("jaxtile._programs.").replace(".", "/")
        target = site / package.replace(".", "/")
        target.mkdir(parents=True)
        for pattern in ("*.py", *SETUP["package-data"].get(package, ())):
            for file in source.glob(pattern):
                shutil.copy(file, target)


@pytest.mark.slow
def test_what_is_installed_trains_predicts_and_sweeps(tmp_path):
    """From a folder that has a package called `models` of its own."""
    install(site := tmp_path / "site")
    (tmp_path / "work" / "models").mkdir(parents=True)
    (tmp_path / "work" / "models" / "__init__.py").write_text("raise ImportError('not this one')")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(site), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "jaxtile", *arguments],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    small = ["--config.data.size=32", "--config.train.steps=1", "--config.policy=store_all"]
    small += ["--config.train.warmup_steps=0"]
    few = ["--config.data.train_images=1", "--config.data.eval_images=1"]
    run("train", "--config", "configs/quickstart.py", "--workdir=run", *small, *few)
    np.save(tmp_path / "x.npy", np.zeros((40, 44), np.uint8))
    assert "40 x 44 pixels" in run(
        "predict", "--workdir=run", f"--image={tmp_path}/x.npy", "--out=mask.tif"
    )
    cells = ["--config.sizes=(64,)", "--config.policies=('plain',)", "--config.repeats=1"]
    few = ["--config.models=('alexnet',)", "--config.batches=(1,)", "--config.compare=False"]
    told = run("sweep", "--config=configs/sweep_quick.py", "--workdir=sweep", *cells, *few)
    assert (tmp_path / "work" / "sweep").is_dir()
    assert " ms" in told


@pytest.mark.slow
def test_a_notebook_starts_programs():
    """Its kernel tells matplotlib, in all that it starts, to draw into the notebook."""
    code = "from experiments.training import pictures; print(pictures.plt.get_backend())"
    env = {**os.environ, "MPLBACKEND": "module://a_package_that_is_missing"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip().lower() == "agg"
