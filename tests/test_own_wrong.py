"""What is wrong with a model, data or a task of a user's own is said in a sentence, in time."""

import sys
import textwrap

import numpy as np
import pytest

from experiments import data, tasks
from experiments.program.command import _own_options
from experiments.program.config import ConfigError, base, check, load
from experiments.training import pictures
from experiments.training.learner import Learner
from experiments.training.setup import load_data

MINE = """
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from experiments.tasks import Task

    class Net(nnx.Module):
        def __init__(self, in_channels, classes, *, rngs, strides=1, more=0, padding="SAME"):
            shape = in_channels + more, classes, (3, 3)
            self.conv = nnx.Conv(*shape, strides=strides, padding=padding, rngs=rngs)
        def __call__(self, x):
            return self.conv(x)

    class Pair(Net):
        def __call__(self, x):
            return self.conv(x), x

    class Deep(Net):
        def __init__(self, in_channels, classes, hidden, *, rngs):
            super().__init__(in_channels, classes, rngs=rngs)

    class Misspelt(Net):
        def __init__(self, in_channels, classes, *, rngs):
            self.conv = nnx.Conv(in_channels, classes, (3, 3), rng=rngs)

    class Images:
        shape = (16, 16, 1)
        def __init__(self, split, value=1, shift=0.5):
            self.value = value
        def __len__(self):
            return 2
        def read(self, index, window):
            label = np.zeros((16, 16), np.asarray(self.value).dtype)
            label[:9] = self.value
            return np.zeros(self.shape, np.uint8)[window], label[window]

    class Heights(Images):
        shape = (64, 64, 1)
        def read(self, index, window):
            heights = 30000 + np.random.default_rng(index).normal(size=self.shape)
            return np.zeros(self.shape, np.uint8)[window], heights[window]

    class Whole(Task):
        quality = "closeness"
        def loss(self, scores, labels):
            return jnp.abs(scores[..., 0] - labels).mean()
        def compare(self, scores, labels):
            errors = jnp.abs(scores[..., 0] - labels)
            return {"loss": errors, "counted": jnp.ones_like(errors)}
        def metrics(self, sums):
            return {"closeness": -float(sums["loss"] / sums["counted"]), "counted": 3}

    class Lacking(Task):
        def compare(self, scores, labels):
            return {}

    class Sums(Whole):
        def metrics(self, sums):
            return {"closeness": sums["closenes"]}

    class Quality(Whole):
        quality = "closenes"

    class Map(Whole):
        def loss(self, scores, labels):
            return jnp.abs(scores[..., 0] - labels)

    class Alien:
        pass

    number = 3

    from flax import linen

    class Placed(linen.Module):
        classes: int = 2
        @linen.compact
        def __call__(self, x):
            place = self.param("place", linen.initializers.normal(), x.shape[1:])
            return linen.Conv(self.classes, (3, 3))(x + place)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text(textwrap.dedent(MINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mine_alone", None)


def loaded(model="Net", task="auto", options=None, **of_model):
    config = base(f"mine_alone:{model}", **of_model)
    config.data.kind, config.task, config.data.size = "mine_alone:Images", task, 16
    with config.unlocked():
        config.data.options = options or {}
    check(config)
    return load_data(Learner(config))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        # Scores for each 2 x 2 pixels would be compared with labels of the image's centre.
        ("Net", {"strides": 2}, r"\(16, 16, 1\) give \(1, 8, 8, 2\), .*\(80, 80, 1\).*enlarge"),
        ("Pair", {}, "the model returns a tuple, where one array is wanted"),
        ("Net", {"more": 1}, r"fit the data: .*mine_alone\.py:12, in __call__"),
        ("Misspelt", {}, r"unexpected keyword argument 'rng'.* \(.*mine_alone\.py:24, in __init__"),
        ("Deep", {}, r"needs a value for 'hidden', .*in_channels, classes.*as an option"),
        ("number", {}, "`model.name`: the model 'mine_alone:number' is a int, where a class"),
    ],
)
def test_models(model, options, words):
    with pytest.raises(ConfigError, match=words):
        loaded(model, **options)


def test_a_model_of_one_size():
    """Linen's error at another size is none of Python's."""
    train_set, _ = loaded("Placed")
    assert (train_set.label_shape, train_set.border) == ((16, 16), (0, 0))


def test_scores_without_the_border_are_those_of_the_centre():
    train_set, _ = loaded(padding="VALID")
    assert (train_set.label_shape, train_set.border) == ((14, 14), (1, 1))


@pytest.mark.parametrize("value", [7, 257, -2, 0.7, float("nan"), 1e30])
def test_labels_that_are_no_classes(value):
    train_set, _ = loaded(options={"value": value})
    with pytest.raises(data.DataError, match=r"Images 0: its label has the value .*0 to 1;.* -1"):
        train_set.example(0, None)


@pytest.mark.parametrize(("value", "found"), [(1, 1), (1.0, 1), (True, 1), (-1, 255), (255, 255)])
def test_labels_that_are(value, found):
    _, label = loaded(options={"value": value})[0].example(0, None)
    assert (label.dtype, set(np.unique(label))) == (np.uint8, {0, found})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Lacking", r"has no `loss\(self, scores, labels\)`"),
        ("Sums", "`metrics` asks for 'closenes', but `compare` gives counted, loss"),
        ("Quality", r"`quality` \(='closenes'\) must be one of the metrics: closeness, counted"),
        ("Map", r"`loss` must be one number, but has shape \(1, 16, 16\)"),
        ("Alien", "makes a Alien, which is not derived from experiments.tasks.Task"),
    ],
)
def test_tasks(task, words):
    with pytest.raises(ConfigError, match=words):
        loaded(task=f"mine_alone:{task}")


def test_a_task_that_is_right():
    train_set, _ = loaded(task="mine_alone:Whole")
    assert train_set.label_dtype == np.float32
    task = tasks.create("mine_alone:Whole", classes=1, dense=True)
    assert task.describe({"loss": 0.5, "counted": 3}) == "loss 0.5000"


class Examples(list):
    """As a dataset of somebody's; each is whole."""


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"img": 1, "label": 2}, "this one has 'img', 'label'"),
        (None, "this one is a NoneType"),  # as Grain's, of what is filtered out
    ],
)
def test_examples_without_an_image(example, words):
    with pytest.raises(data.DataError, match=f"mine 0: an example must be .*{words}"):
        data.Own(Examples([example]), data.Geometry((4, 4), 1), classes=2, name="mine")


def test_examples_without_end():
    class Repeated(Examples):
        def __len__(self):
            return 2**63 - 1

    with pytest.raises(data.DataError, match=r"has 9223372036854775807 examples: .*repeat\(\)"):
        data.Own(Repeated(), data.Geometry((4, 4), 1), classes=2, name="mine")


CONFIG = """
from experiments.program.config import base
def get_config():
    config = base("mine_alone:Net")
    config.data.kind = "mine_alone:Images"
    return config
"""


def test_options_of_data_on_the_command_line(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    options = [f"--config={tmp_path / 'config.py'}", "--config.data.options.shift=2"]
    rest, model, found = _own_options([*options, "--config.data.options.value", "3"])
    assert (rest, model, found) == (options[:1], {}, {"shift": 2, "value": 3})
    with pytest.raises(ConfigError, match=r"no option 'shft'; did you mean 'shift'\?"):
        _own_options([*options, "--config.data.options.shft=2"])
    with pytest.raises(ConfigError, match=r"`data.options.value` \(='x'\) must be as its default"):
        _own_options([*options, "--config.data.options.value=x"])
    with pytest.raises(ConfigError, match="'cells' has none"):
        _own_options([*options, "--config.data.kind=cells"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("nodata", (0,)), ("mask_values", (0, 255)), ("ignored", (9,)), ("level", 1)],
)
def test_fields_that_are_for_files(field, value):
    config = base("unet")
    config.data[field] = value
    with pytest.raises(ConfigError, match=rf"`data.{field}` .*is for files .*, not for 'cells'"):
        check(config)


@pytest.mark.parametrize("field", ["mean", "nodata", "range", "class_weights"])
def test_what_is_no_number(field):
    config = base("unet")
    config.data[field] = ("abc",)
    with pytest.raises(ConfigError, match=rf"`data.{field}` \(=\('abc',\)\) must be numbers"):
        check(config)


@pytest.mark.parametrize(
    ("losses", "qualities"),
    [([-3.0, -4.0], [31.5, 33.0]), ([0.5, 0.4], [-41.0, -2.0]), ([0.7, 0.6], [0.4, None])],
    ids=["likelihood and decibels", "a bad r2", "shares"],
)
def test_curves_of_any_measure_are_seen(tmp_path, monkeypatch, losses, qualities):
    lines = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    found = zip(losses, qualities, strict=True)
    lines += [
        {"step": i + 1, "split": "eval", "loss": loss + 0.1, "score": quality}
        for i, (loss, quality) in enumerate(found)
    ]
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))
    pictures.loss_curve(lines, "score", tmp_path / "loss.png")
    for axis in figures[0].axes:
        low, high = axis.get_ylim()
        for line in axis.get_lines():
            values = np.array(line.get_ydata(), float)
            assert np.nanmin(values) > low
            assert np.nanmax(values) < high


def test_a_value_of_another_type_in_a_config(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.replace("return", "config.data.mean = 0.5; return"))
    with pytest.raises(ConfigError, match=r"config\.py: `mean` \(=0\.5\) must be of type tuple$"):
        load(str(tmp_path / "config.py"))


def test_r2_of_labels_that_are_large_beside_how_much_they_vary():
    config = base("mine_alone:Net")
    config.data.kind, config.task, config.data.size = "mine_alone:Heights", "regression", 0
    config.data.classes = 1
    learner = Learner(config)
    _, eval_set = load_data(learner)
    _, label = eval_set.example(0, None)
    scores = label + np.random.default_rng(9).normal(0, 0.5, label.shape).astype(np.float32)
    parts = learner.task.compare(scores[None], label[None])
    sums = {n: np.asarray(v.sum((2,)), np.float64).sum() for n, v in parts.items()}
    errors = np.float64(scores) - label
    want = 1 - np.mean(errors**2) / np.float64(label).var()
    assert learner.task.metrics(sums)["r2"] == pytest.approx(want, abs=1e-5)
