"""Held-out files are evaluated whole, and exactly, or what is evaluated instead is said."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile

from experiments import data
from experiments.predict import load_network
from experiments.program.config import base
from experiments.training.evaluation import Evaluation, what
from experiments.training.learner import Learner
from experiments.training.setup import load_data
from experiments.training.step import Step, batch_shapes, make_optimiser

from . import FLAGS
from .support import parametrize_few
from .test_task import by_definition

ROOT = pathlib.Path(__file__).parent.parent
SIZES = ((40, 34), (33, 47), (40, 34))


@pytest.fixture
def folder(tmp_path):
    """16-bit images of several sizes with three classes and a value that is ignored."""
    rng = np.random.default_rng(0)
    for split, sizes in {"train": ((36, 36),), "eval": SIZES}.items():
        for name in ("images", "masks"):
            (tmp_path / split / name).mkdir(parents=True)
        for i, size in enumerate(sizes):
            image = rng.integers(0, 4000, size, np.uint16)
            mask = rng.choice([10, 20, 30, 99], size, p=[0.5, 0.3, 0.1, 0.1]).astype(np.uint8)
            tifffile.imwrite(tmp_path / split / f"images/{i}.tif", image, tile=(16, 16))
            tifffile.imwrite(tmp_path / split / f"masks/{i}.tif", mask, rowsperstrip=5)
    return tmp_path


def config_for(folder, model="unet", **options):
    config = base(model, **options)
    config.data.kind, config.data.path, config.data.size = "folder", str(folder), 32
    config.data.classes, config.data.mask_values, config.data.ignored = 3, (10, 20, 30), (99,)
    config.eval.tile = 16
    return config


def evaluation_of(config, run):
    """Untrained, and the weights."""
    learner = Learner(config)
    train_set, eval_set = load_data(learner)
    run.mkdir()
    data.examine(train_set, eval_set, run)
    optimiser, _ = make_optimiser(config)
    step = Step(learner, optimiser, batch_shapes(train_set, 1))
    return Evaluation(step, eval_set, 2**40), learner.weights()


def expected(evaluation, weights):
    """Metrics by their definition, of the plain network on whole images."""
    learner, scale = evaluation.learner, evaluation.dataset.scale
    run = jax.jit(learner.scores)
    predicted, labels, losses = [], [], []
    for item in evaluation.dataset.items:
        image = np.rint(
            np.clip((tifffile.imread(item.image) - scale.low) / scale.high * 255, 0, 255)
        )
        mask = tifffile.imread(item.label)
        fits = [next(m for m in range(n, n + 9) if _fits(learner, m)) for n in image.shape]
        padded = np.pad(image, [(0, m - n) for m, n in zip(fits, image.shape, strict=True)], "edge")
        scores = np.asarray(run(weights, padded.astype(np.uint8)[None, ..., None]))[0]
        size = [learner.output_size(n) for n in image.shape]
        scores = scores[: size[0], : size[1]]
        y, x = [(n - learner.output_size(n)) // 2 for n in fits]
        mask = mask[y : y + size[0], x : x + size[1]]
        label = np.select([mask == v for v in (10, 20, 30)], [0, 1, 2], 255)
        predicted.append(scores.argmax(-1).ravel())
        labels.append(label.ravel())
        of_label = np.take_along_axis(scores, np.minimum(label, 2)[..., None], -1)[..., 0]
        losses.append((np.logaddexp.reduce(scores, -1) - of_label)[label < 255])
    labels = np.concatenate(labels)
    accuracy, iou, dice = by_definition(np.concatenate(predicted), labels, 3)
    counted = [int((labels == c).sum()) for c in range(3)]
    return {
        "loss": float(np.concatenate(losses).mean()),
        "accuracy": accuracy,
        "iou": iou,
        "dice": dice,
        "counted": counted,
    }


def _fits(learner, n):
    try:
        learner.check_size((n, n, 1))
    except ValueError:
        return False
    return True


@parametrize_few("padding", ["SAME", "VALID"])
def test_whole_files_of_several_sizes(folder, padding):
    config = config_for(folder, channels=2, depth=1, padding=padding, dropout=0.0)
    evaluation, weights = evaluation_of(config, folder / "run")
    assert evaluation.text == "3 held-out images, whole, tile by tile"
    found = evaluation(weights)
    for name, value in expected(evaluation, weights).items():
        assert found[name] == pytest.approx(value, rel=1e-5), name
    assert sum(found["counted"]) < sum(h * w for h, w in SIZES)
    traces = []
    evaluation.learner.scores = lambda *arguments: traces.append(arguments)
    assert evaluation(weights) == found
    assert not traces, "the second evaluation compiles nothing"


class Sorts(nn.Module):
    """It cannot be tiled, unless what is sorted is stored."""

    classes: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Conv(self.classes, (3, 3))(jnp.sort(nn.Conv(4, (3, 3))(x), axis=1))


def test_a_model_that_cannot_be_tiled(folder):
    config = config_for(folder, f"{__name__}:Sorts")
    config.eval.tile = 32
    evaluation, weights = evaluation_of(config, folder / "run")
    assert "; the model does not take them whole: cannot tile `sort` at" in evaluation.text
    assert evaluation(weights)["loss"] > 0


def test_a_stated_sample(folder):
    config = config_for(folder, channels=2, depth=1, padding="SAME", dropout=0.0)
    config.eval.size, config.eval.batch_size = 24, 2
    evaluation, weights = evaluation_of(config, folder / "run")
    words = "the central 24 x 24 pixels of each of 3 held-out images, as `eval.size` says"
    assert evaluation.text == words
    ignored = sum(
        (tifffile.imread(item.label)[y : y + 24, x : x + 24] == 99).sum()
        for item in evaluation.dataset.items
        for y, x in [[(n - 24) // 2 for n in tifffile.imread(item.label).shape]]
    )
    assert sum(evaluation(weights)["counted"]) == 3 * 24 * 24 - ignored


def test_a_bad_file_is_named_or_left_out(folder):
    config = config_for(folder, channels=2, depth=1, padding="SAME", dropout=0.0)
    evaluation, weights = evaluation_of(config, folder / "run")
    before = evaluation(weights)["counted"]
    os.truncate(folder / "eval/images/1.tif", 2000)
    with pytest.raises(data.DataError, match=r"1\.tif.*truncated"):
        evaluation(weights)
    evaluation.dataset.on_bad_file = "skip"
    assert sum(evaluation(weights)["counted"]) < sum(before)
    assert list(evaluation.dataset.skipped) == ["eval/images/1.tif"]


def classes_of(folder, sizes):
    rng = np.random.default_rng(0)
    for split in ("train", "eval"):
        for c in range(3):
            (folder / split / str(c)).mkdir(parents=True)
            for i, size in enumerate(sizes if split == "eval" else ((40, 40),)):
                image = rng.integers(0, 256, (*size, 1), np.uint8)
                np.save(folder / split / str(c) / f"{i}.npy", image)


@pytest.mark.slow
def test_classes_of_whole_files(tmp_path):
    classes_of(tmp_path, ((40, 36), (52, 45)))
    config = config_for(tmp_path, "resnet50", blocks=(1, 1), width=4)
    config.data.labels, config.data.mask_values, config.data.ignored = "folders", (), ()
    evaluation, weights = evaluation_of(config, tmp_path / "run")
    assert evaluation.text == "6 held-out images, whole, tile by tile"
    found = evaluation(weights)
    run, correct, losses = jax.jit(evaluation.learner.scores), [], []
    for item in evaluation.dataset.items:
        scores = np.asarray(run(weights, np.load(item.image)[None]))[0]
        correct.append(scores.argmax() == item.label)
        losses.append(np.logaddexp.reduce(scores) - scores[item.label])
    assert found["accuracy"] == pytest.approx(np.mean(correct))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["counted"] == [2, 2, 2]


def test_a_model_of_one_size_sees_central_windows(tmp_path):
    classes_of(tmp_path, ((40, 36), (52, 45)))
    config = config_for(tmp_path, "local_cnn", size=32)
    config.data.labels, config.data.mask_values, config.data.ignored = "folders", (), ()
    learner = Learner(config)
    files, text = what(learner, load_data(learner)[1])
    assert files is None
    assert text.startswith(
        "the central 32 x 32 pixels of each of 6 held-out images; the model does not take them "
        "whole: "
    )


def test_many_sizes_are_said(tmp_path):
    classes_of(tmp_path, tuple((40 + i, 40) for i in range(17)))
    config = config_for(tmp_path, "resnet50", blocks=(1, 1), width=4)
    config.data.labels, config.data.mask_values, config.data.ignored = "folders", (), ()
    learner = Learner(config)
    files, text = what(learner, load_data(learner)[1])
    assert len(files.sizes) == 17
    assert "They have 17 sizes, each of which is compiled once; `eval.size` takes" in text


def launch(workdir, processes, *arguments):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": FLAGS,
    }
    command = [sys.executable, "-m", "experiments.train", "--config=tests/tiny_config.py"]
    command += [f"--workdir={workdir}", "--config.train.steps=2", *arguments]
    shared = [f"--coordinator={address}", f"--processes={processes}"]
    started = [
        subprocess.Popen(
            [*command, *([*shared, f"--process={i}"] if processes > 1 else [])],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]
    texts = [process.communicate(timeout=600)[0] for process in started]
    return [process.returncode for process in started], texts


@pytest.mark.slow
def test_an_error_in_a_mask_ends_all_processes(folder, tmp_path):
    """One looks at the files for both, and both say what it found."""
    more = ["--config.data.kind=folder", f"--config.data.path={folder}"]
    codes, texts = launch(tmp_path / "run", 2, *more)
    assert codes == [1, 1], texts
    for text in texts:
        assert "error: " in text
        assert "0.tif: holds 10 (" in text
        assert "`data.mask_values`" in text
        assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_says_what_it_found_and_evaluated(folder, tmp_path, processes):
    """With two processes, they share the files. Class 3 is in no mask."""
    more = ["--config.data.kind=folder", f"--config.data.path={folder}", "--config.data.classes=4"]
    more += ["--config.data.mask_values=(10,20,30,40)", "--config.data.ignored=99"]
    codes, texts = launch(tmp_path / "run", processes, *more)
    assert codes == [0] * processes, texts
    text, image = texts[0], tifffile.imread(folder / "train/images/0.tif")
    assert f"values from {image.min()} to {image.max()} become 8 bits" in text
    assert "warning: no training pixel is of class 3" in text
    assert "evaluation of 3 held-out images, whole, tile by tile" in text
    masks = [tifffile.imread(folder / f"eval/masks/{i}.tif") for i in range(3)]
    counted = [sum(int((mask == v).sum()) for mask in masks) for v in (10, 20, 30, 40)]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["quality"]["counted"] == counted
    assert "whole, tile by tile" in summary["evaluated"]
    written = (tmp_path / "run/summary.txt").read_text()
    assert f"{sum(counted):,} pixels counted (per class" in written
    assert "warning    none of the" in written
    scale = load_network(tmp_path / "run").scale
    assert (scale.low, scale.high) == (image.min(), image.max())
