"""What training computes: metrics by their definition, in tiles or not; how it shows progress."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import tasks
from experiments.program.config import ConfigError, base
from experiments.program.progress import Bar, Now
from experiments.training import page, pictures
from experiments.training.learner import Learner


def by_definition(predicted, labels, classes):
    counted = labels != 255
    iou, dice = [], []
    for c in range(classes):
        a, b = (predicted == c) & counted, (labels == c) & counted
        both, either = (a & b).sum(), (a | b).sum()
        iou.append(both / either if either else None)
        dice.append(2 * both / (a.sum() + b.sum()) if either else None)
    return (predicted == labels)[counted].mean(), iou, dice


@pytest.fixture(scope="module")
def learner():
    config = base("unet", channels=2, depth=1, padding="SAME", norm="batch")
    config.data.classes = 4
    return Learner(config)


@pytest.mark.slow
def test_metrics_by_their_definition_in_tiles_or_not(learner):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 24, 16, 1), np.uint8)
    labels = rng.choice([0, 1, 3, 255], (3, 24, 16), p=[0.5, 0.2, 0.2, 0.1]).astype(np.uint8)
    weights = learner.weights()
    whole, tiled = (
        [
            jax.jit(learner.evaluation((1, 24, 16, 1), n))(weights, i[None], k[None])
            for i, k in zip(images, labels, strict=True)
        ]
        for n in (64, 10)
    )
    found = learner.metrics(whole)
    predicted = jax.jit(learner.prediction((3, 24, 16, 1), 64))(weights, images)
    accuracy, iou, dice = by_definition(np.asarray(predicted), labels, 4)
    assert found["accuracy"] == pytest.approx(accuracy)
    assert found["iou"] == pytest.approx(iou)
    assert found["dice"] == pytest.approx(dice)
    assert found["mean_iou"] == pytest.approx(np.mean([v for v in iou if v is not None]))
    for name, value in learner.metrics(tiled).items():
        wanted = np.asarray(found[name], float)  # None, where there is nothing, is NaN
        np.testing.assert_allclose(np.asarray(value, float), wanted, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("own", [True, False])
def test_evaluation_with_the_statistics_of_the_image_itself(own):
    config = base("unet", channels=2, depth=1, padding="SAME", norm="batch", dropout=0.0)
    config.eval.batch_statistics = own
    learner = Learner(config)
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 1), np.uint8)

    @jax.jit
    def both(weights, image):
        given = learner.normalised(image)
        return learner.scores(weights, image), learner.network.apply(*weights, given, train=True)[0]

    evaluated, trained = both(learner.weights(), image)
    assert np.allclose(evaluated, trained, atol=1e-4) == own


def test_confusion_by_its_definition(tmp_path):
    """A row for each true class; what does not count is in none. It is on the page of a run."""
    rng, task = np.random.default_rng(0), tasks.Segmentation(3)
    scores, labels = rng.standard_normal((2, 9, 7, 3)), rng.integers(0, 3, (2, 9, 7), np.uint8)
    labels[0, :3] = 255
    compared = task.compare(jnp.asarray(scores), jnp.asarray(labels))
    sums = {k: np.asarray(v).sum((0, 1, 2)) for k, v in compared.items()}
    found = task.metrics(sums)
    predicted = scores.argmax(-1)
    want = [[((labels == i) & (predicted == j)).sum() for j in range(3)] for i in range(3)]
    assert found["confusion"] == np.array(want).tolist()
    page.write(tmp_path, [], found, ["sea", "land", "<ice>"], [])
    text = (tmp_path / "report.html").read_text()
    assert text.count("<th>&lt;ice&gt;</th>") == 3
    assert f'title="{want[2][0]}">{want[2][0] / sum(want[2]):.1%}<' in text


def test_more_positions_than_can_be_counted(learner):
    with pytest.raises(ConfigError, match=r"65536 x 65536.*2\*\*32"):
        learner.evaluation((1, 65536, 65536, 1), 1024)


def sums(loss, correct, predicted, true):
    found = {"loss": loss, "correct": correct, "predicted": predicted, "true": true}
    return {name: np.asarray(value) for name, value in found.items()}


def test_batches_count_by_their_positions(learner):
    nothing = np.zeros(4, np.uint32)
    one = sums(10.0, [4, 4, 0, 0], [5, 5, 0, 0], [5, 5, 0, 0])
    empty = sums(0.0, nothing, nothing, nothing)
    found = learner.metrics([one, empty])
    assert (found["loss"], found["accuracy"]) == (1.0, 0.8)
    assert found["iou"] == [pytest.approx(4 / 6), pytest.approx(4 / 6), None, None]
    assert found["counted"] == [5, 5, 0, 0]
    nothing_counted = learner.metrics([empty])
    assert [nothing_counted[k] for k in ("mean_iou", "loss", "accuracy")] == [None] * 3


def test_a_class_without_a_pixel_is_a_warning(learner):
    there, task = [7, 0, 1200, 0], learner.task
    found = learner.metrics([sums(1207.0, there, there, there)])
    assert "per class 1.0000 none 1.0000 none" in task.describe(found)
    counted, warning = task.remarks(found)
    assert counted == "1,207 pixels counted (per class 7 0 1,200 0)"
    assert warning.startswith("warning: none of the 1,207 pixels is of class 1, 3: the mean IoU")
    assert len(task.remarks(learner.metrics([sums(4.0, *[[1] * 4] * 3)]))) == 1


def test_a_bar_on_a_terminal():
    program = (
        "from experiments.program.progress import Bar\n"
        "with Bar('step', 3) as bar:\n"
        "    for i in range(3):\n"
        "        bar.advance(f'loss {i}')\n"
        "    bar.say('a line [that] stays')\n"
    )
    seen = on_a_terminal(program)
    assert "3/3" in seen
    assert "loss 2" in seen
    assert "a line [that] stays" in seen


def test_a_bar_is_never_silent_for_long():
    """Whether there is something to count or not; but somebody else may speak meanwhile."""
    said = io.StringIO()
    with Bar("step", 4, every=10, quiet=0.2, file=said) as bar:
        time.sleep(0.5)  # before the first one others speak
        assert not said.getvalue()
        bar.advance()
        time.sleep(0.5)
        assert re.search(r"step 1/4, \d s ago; the next one goes on", said.getvalue())
        bar.doing = "the evaluation"
        time.sleep(0.3)
        assert re.search(r"step 1/4, \d s ago; the evaluation goes on", said.getvalue())
        bar.hide()
        before = said.getvalue()
        time.sleep(0.5)
        assert said.getvalue() == before
    time.sleep(0.3)
    assert said.getvalue() == before


def test_in_a_notebook_nothing_is_written_over():
    """It gives programs a terminal, and shows all that is written to it."""
    program = (
        "from experiments.program.progress import Bar, Now\n"
        "with Now() as now, Bar('step', 2) as bar:\n"
        "    now('reading')\n"
        "    for i in range(2):\n"
        "        bar.advance(f'loss {i}')\n"
    )
    lines = on_a_terminal(program, JPY_PARENT_PID="1").splitlines()
    assert lines[0] == "  0 s  reading"
    assert [line.split("  ")[:2] for line in lines[1:]] == [
        ["step 1/2", "loss 0"],
        ["step 2/2", "loss 1"],
    ]


def test_what_is_done_now_on_a_terminal():
    """One live line with its time; what is printed meanwhile stays, and a bar takes its place."""
    program = (
        "import time\n"
        "from experiments.program.progress import Bar, Now\n"
        "with Now(lambda: '3 [of] 4') as now, Bar('step', 1) as bar:\n"
        "    now('compiling [a] step')\n"
        "    print('a warning')\n"
        "    time.sleep(2.5)\n"
        "    now('reading')\n"
        "    bar.advance()\n"
        "    assert Now.shown is None\n"
        "    now.close()\n"
        "    now('too late')\n"
    )
    seen = on_a_terminal(program)
    assert "0 s  compiling [a] step (3 [of] 4)" in seen
    assert re.search(r"compiling \[a\] step \(\d+ s; 3 \[of\] 4\)", seen)
    assert "a warning" in seen
    assert "reading (3 [of] 4)" in seen
    assert "1/1" in seen
    assert "too late" not in seen


def on_a_terminal(program: str, **env: str) -> str:
    ours, theirs = pty.openpty()
    rest = {name: x for name, x in os.environ.items() if name != "JPY_PARENT_PID"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=rest | env
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # the other end was closed
        pass
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def test_what_is_done_now_in_a_file():
    """A line when it begins, and more while it lasts."""
    file = io.StringIO()

    def lines(word: str) -> list[str]:
        return [line for line in file.getvalue().splitlines() if word in line]

    def until(word: str, number: int) -> None:
        deadline = time.monotonic() + 60
        while len(lines(word)) < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    counted = itertools.count()
    with Now(lambda: f"{next(counted)} chosen", quiet=0.05, file=file) as now:
        now("compiling")
        assert lines("compiling") == ["  0 s  compiling (0 chosen)"]
        until("compiling", 3)
        now("reading")
        before = len(lines("compiling"))
        until("reading", 3)
        assert len(lines("compiling")) == before
    numbers = [int(line.split("(")[1].split()[0]) for line in lines("chosen")]
    assert numbers == list(range(len(numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("border", [6, 0])
def test_a_large_image_is_drawn_whole_and_where_its_errors_are(tmp_path, border):
    truth, predicted = np.zeros((2, 700, 900), np.uint8)
    predicted[650:690, 300:310] = 1
    predicted[10, 10] = 1
    image = np.pad(predicted[..., None], [(border, border), (border, border), (0, 0)])
    ((name, shown, there, found),) = pictures._crops(image, truth, predicted)
    assert name == f"crop at row {444 + border}, column {256 + border}"
    assert (found != there).sum() == 400
    np.testing.assert_array_equal(shown[..., 0], found)
    task = tasks.create("segmentation", classes=2, dense=True)
    heights = []
    for name, row in (("large", (image, truth, predicted)), ("small", (shown, there, found))):
        pictures.predictions([row], task, tmp_path / f"{name}.png")
        heights.append(plt.imread(tmp_path / f"{name}.png").shape[0])
    assert heights[0] == 2 * heights[1]


def test_a_large_image_with_one_class_is_drawn_whole_and_in_its_middle(tmp_path):
    image = np.arange(700 * 900, dtype=np.float32).reshape(700, 900, 1) / (700 * 900)
    ((name, shown, _, _),) = pictures._middles(image, 0, 1)
    assert name == "crop at row 222, column 322"
    np.testing.assert_array_equal(shown, image[222:478, 322:578])
    task = tasks.create("classification", classes=2, dense=False)
    heights = []
    for name, drawn in (("large", image), ("small", shown)):
        pictures.predictions([(drawn, 0, 1)], task, tmp_path / f"{name}.png")
        heights.append(plt.imread(tmp_path / f"{name}.png").shape[0])
    assert heights[0] == 2 * heights[1]
