"""Anybody's model, data and task, in the training program: run as by a user, and exact."""

import json
import os
import pathlib
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image as pillow

import jaxtile
import models
from experiments import data, predict, tasks
from experiments.devices.hosts import Devices
from experiments.program.config import ConfigError, base, check
from experiments.training.checkpoints import Checkpoints
from experiments.training.evaluation import Evaluation
from experiments.training.learner import Learner
from experiments.training.setup import examined_data, load_data
from experiments.training.step import Step, batch_shapes, make_optimiser
from experiments.training.trained import load_trained

from . import FLAGS
from .programs import python
from .support import assert_close, parametrize_few

ROOT = pathlib.Path(__file__).parent.parent

NETS = {
    "nnx": """
        from flax import nnx
        class Net(nnx.Module):
            def __init__(self, in_channels, classes, width=3, *, rngs):
                self.conv = nnx.Conv(in_channels, width, (3, 3), rngs=rngs)
                self.norm = nnx.BatchNorm(width, rngs=rngs)
                self.dropout = nnx.Dropout(0.3, rngs=rngs)
                self.last = nnx.Conv(width, classes, (1, 1), rngs=rngs)
            def __call__(self, x):
                return self.last(self.dropout(nnx.relu(self.norm(self.conv(x)))))
    """,
    "linen": """
        from flax import linen as nn
        class Net(nn.Module):
            classes: int
            width: int = 3
            @nn.compact
            def __call__(self, x, train):
                x = nn.Conv(self.width, (3, 3))(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
                x = nn.Dropout(0.3, deterministic=not train)(x)
                return nn.Conv(self.classes, (1, 1))(x)
    """,
    "haiku": """
        import haiku as hk
        import jax
        def Net(classes, width=3):
            def forward(x, is_training):
                x = hk.Conv2D(width, 3)(x)
                x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
                if is_training:
                    x = hk.dropout(hk.next_rng_key(), 0.3, x)
                return hk.Conv2D(classes, 1)(x)
            return hk.transform_with_state(forward)
    """,
    "haiku_class": """
        import haiku as hk
        class Net(hk.Module):
            def __init__(self, classes, width=3):
                super().__init__()
                self.classes, self.width = classes, width
            def __call__(self, x):
                return hk.Conv2D(self.classes, 1)(hk.Conv2D(self.width, 3)(x))
    """,
    "equinox": """
        import equinox as eqx
        import jax
        class Net(eqx.Module):
            conv: eqx.nn.Conv2d
            norm: eqx.nn.BatchNorm
            dropout: eqx.nn.Dropout
            last: eqx.nn.Conv2d
            def __init__(self, in_channels, classes, width=3, *, key):
                one, two = jax.random.split(key)
                self.conv = eqx.nn.Conv2d(in_channels, width, 3, padding=1, key=one)
                self.norm = eqx.nn.BatchNorm(width, axis_name="batch", mode="batch")
                self.dropout = eqx.nn.Dropout(0.3)
                self.last = eqx.nn.Conv2d(width, classes, 1, key=two)
            def __call__(self, x, state, key):
                x, state = self.norm(self.conv(x), state)
                return self.last(self.dropout(jax.nn.relu(x), key=key)), state
    """,
    "functions": """
        import jax
        import jax.numpy as jnp
        class Net:
            layout = "NC..."
            def __init__(self, classes, width=3):
                self.classes = classes
            def init(self, key, images):
                shape = (self.classes, images.shape[1], 3, 3)
                kernel = jax.random.normal(key, shape, images.dtype)
                return {"kernel": kernel}, {"calls": jnp.zeros(())}
            def apply(self, weights, state, images, *, train, key):
                scores = jax.lax.conv(images, weights["kernel"], (1, 1), "SAME")
                return scores, {"calls": state["calls"] + train}
    """,
}

DATA = """
    import numpy as np
    class Waves:
        '''Five channels of 16 bits; the label is a mask, a number per pixel, or a vector.'''
        shape, dtype, class_names = (24, 20, 5), np.uint16, ["calm", "wave"]
        def __init__(self, split, path, label="mask", number=4):
            self.first, self.label, self.number = (0 if split == "train" else 100), label, number
        def __len__(self):
            return self.number
        def name(self, index):
            return f"wave {self.first + index}"
        def read(self, index, window):
            rng = np.random.default_rng(self.first + index)
            phase = rng.uniform(0, 6)
            rows, columns = np.mgrid[window]
            height = np.sin(rows / 3 + phase) + np.cos(columns / 4)
            noise = rng.normal(0, 100, (*self.shape,))[window]
            image = (1000 * (height[..., None] + 2) + noise + 200).clip(0, 65535).astype(np.uint16)
            mask = (height > 0).astype(np.uint8)
            return image, {"mask": mask, "number": height[..., None], "class": mask[0, 0],
                           "vector": mask[0, :2]}[self.label]
"""

TASK = """
    import jax.numpy as jnp
    import numpy as np
    from experiments.tasks import Task
    class Depth(Task):
        quality = "closeness"
        def __init__(self, classes, dense):
            super().__init__(classes, dense)
            self.label_channels = classes
        def loss(self, scores, labels):
            return jnp.abs(scores - labels).mean()
        def compare(self, scores, labels):
            errors = jnp.abs(scores - labels).sum(-1)
            return {"loss": errors, "counted": jnp.ones_like(errors, jnp.int32)}
        def metrics(self, sums):
            error = float(sums["loss"] / sums["counted"])
            return {"loss": error, "closeness": -error, "counted": int(sums["counted"])}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of a user, in a folder of its own."""
    folder = tmp_path / "lab_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in {**NETS, "data": DATA, "tasks": TASK}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("lab_of_mine")]:
        del sys.modules[name]


def config_for(net="nnx", label="mask", **options):
    config = base(f"lab_of_mine.{net}:Net", **options)
    config.data.kind = "lab_of_mine.data:Waves"
    with config.unlocked():
        config.data.options = {"label": label}
    config.data.dtype, config.data.channels, config.data.size = "uint16", 5, 12
    config.data.mean, config.data.std = (2000.0,), (1000.0,)
    config.data.augment = True
    return config


@parametrize_few("net", NETS)
def test_a_step_of_any_model_is_exact_in_tiles(package, net):
    """Loss, new state and gradients, dropout and batch statistics included."""
    learner = Learner(config_for(net))
    learner.dtype = jnp.dtype(jnp.float64)
    images = np.random.default_rng(0).integers(0, 4000, (2, 12, 10, 5), np.uint16)
    labels = np.random.default_rng(1).integers(0, 2, (2, 12, 10), np.uint8)
    params, variables = jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tuple(learner.weights()),
    )

    def step(loss):
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, variables, images, labels)

    tiled = jaxtile.checkpoint(learner.loss, in_axes=learner.in_axes(2), tiles=(2, 2))
    got, want = step(tiled), step(learner.loss)
    assert_close(got, want)
    (_, changed), gradients = got
    pairs = zip(jax.tree.leaves(changed), jax.tree.leaves(variables), strict=True)
    assert any(jnp.any(a != b) for a, b in pairs)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(gradients) if g.size > 3)
    scores = jax.eval_shape(learner.scores, (params, variables), images)
    assert (scores.shape, scores.dtype) == ((2, 12, 10, 2), jnp.float32)


@pytest.fixture
def usual_types():
    """A model may have float64 weights where that is allowed, as it is in other tests."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.usefixtures("usual_types")
@pytest.mark.parametrize("name", ["Net", "plain", "paired"])
def test_equinox_models_of_a_class_or_a_function(package, name):
    """With or without their state beside them."""
    with open(package / "lab_of_mine" / "equinox.py", "a") as file:
        file.write(
            "def plain(in_channels, classes, key):\n"
            "    return Net(in_channels, classes, key=key)\n"
            "def paired(in_channels, classes, key):\n"
            "    return eqx.nn.make_with_state(Net)(in_channels, classes, key=key)\n"
        )
    config = base(f"lab_of_mine.equinox:{name}")
    config.data.size = 12
    learner = Learner(config)
    weights = jax.eval_shape(learner.weights)
    images = jax.ShapeDtypeStruct((2, 12, 12, 1), jnp.uint8)
    labels = jax.ShapeDtypeStruct((2, 12, 12), jnp.uint8)
    _, changed = jax.eval_shape(learner.loss, *weights, images, labels)
    assert jax.tree.structure(changed) == jax.tree.structure(weights.variables)


def run(program, *arguments, path):
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": FLAGS,
        "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = python("-m", f"experiments.{program}", *arguments, env=environment)
    return done.returncode, done.stdout + done.stderr


CONFIG = """
    from experiments.program.config import base
    def get_config():
        config = base("lab_of_mine.NET:Net", width=4)
        config.data.kind = "lab_of_mine.data:Waves"
        config.data.dtype, config.data.channels, config.data.size = "uint16", 5, 12
        config.data.mean, config.data.std = (2000.0,), (1000.0,)
        config.policy = "tiled:2x2"
        config.train.batch_size, config.train.steps, config.train.schedule = 2, 6, "constant"
        config.eval.size, config.eval.every, config.checkpoint.every = 12, 3, 3
        return config
"""


def train(package, net, workdir, *more):
    (package / "mine.py").write_text(textwrap.dedent(CONFIG).replace("NET", net))
    given = [f"--config={package / 'mine.py'}", f"--workdir={workdir}", *more]
    code, text = run("train", *given, path=package)
    assert code == 0, text
    return text


@pytest.mark.usefixtures("usual_types")
def test_train_and_predict_with_them(package):
    text = train(package, "linen", package / "run", "--config.train.steps=3")
    assert "lab_of_mine" in text
    assert "4 images of 12 x 12 x 5" in text
    assert (package / "run" / "predictions.png").exists()

    image = np.random.default_rng(0).integers(0, 4000, (20, 17, 5), np.uint16)
    np.save(package / "image.npy", image)
    options = {"tile": 8, "level": None, "range": None, "probabilities": False, "dtype": "float32"}
    files = {"image": str(package / "image.npy"), "out": str(package / "mask.npy")}
    predict.run(types.SimpleNamespace(workdir=package / "run", **files, **options))
    trained = load_trained(package / "run")
    want = trained.learner.scores(trained.weights, image[None])[0].argmax(-1)
    np.testing.assert_array_equal(np.load(package / "mask.npy")[..., 0], want)


@pytest.mark.slow
@pytest.mark.usefixtures("usual_types")
@pytest.mark.parametrize("net", ["nnx", "linen", "haiku", "equinox", "functions"])
def test_a_run_in_two_parts_has_the_same_bits(package, net):
    whole, parts = package / "whole", package / "run"
    train(package, net, whole)
    train(package, net, parts, "--config.train.steps=3")
    assert "going on after step 3" in train(package, net, parts)
    lines = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("split") == "eval"] == [3, 6]
    final = [
        Checkpoints(folder / "checkpoints", keep=3, read_only=True).restore()
        for folder in (whole, parts)
    ]
    assert final[0].step == final[1].step == 6
    for name, array in final[0].arrays.items():
        np.testing.assert_array_equal(final[1].arrays[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("task", "label", "classes"),
    [("regression", "number", 1), ("lab_of_mine.tasks:Depth", "number", 1)],
)
def test_another_task(package, task, label, classes):
    config = config_for(label=label)
    config.task, config.data.classes = task, classes
    check(config)
    learner = Learner(config)
    train_set, eval_set = load_data(learner)
    assert train_set.label_shape == (12, 12, 1)
    batch = next(data.evaluation(eval_set, 4))
    found = learner.metrics([jax.jit(learner.sums)(learner.weights(), batch.images, batch.labels)])
    scores = np.asarray(learner.scores(learner.weights(), batch.images))
    if task == "regression":
        error = scores - batch.labels
        assert found["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
        assert found["r2"] == pytest.approx(1 - np.mean(error**2) / batch.labels.var(), rel=1e-4)
    else:
        assert found["closeness"] == pytest.approx(-np.abs(scores - batch.labels).mean(), rel=1e-5)


def test_numbers_that_are_missing_do_not_count():
    task = tasks.create("regression", classes=1, dense=True)
    scores = jnp.arange(4.0).reshape(1, 4, 1)
    labels = jnp.array([0.0, jnp.nan, 4.0, 3.0]).reshape(1, 4, 1)
    value, gradient = jax.value_and_grad(task.loss)(scores, labels)
    assert value == pytest.approx(4 / 3)
    np.testing.assert_allclose(gradient[0, :, 0], [0, 0, -4 / 3, 0], rtol=1e-6)
    sums = {k: np.asarray(v).sum() for k, v in task.compare(scores, labels).items()}
    assert task.metrics(sums)["counted"] == 3


def test_several_classes_at_once():
    task = tasks.create("multi_label", classes=2, dense=False)
    scores = jnp.array([[2.0, -1.0], [-3.0, 1.0], [1.0, 1.0]])
    labels = jnp.array([[1, 1], [0, 1], [1, 255]], jnp.uint8)
    want = np.log1p(np.exp([-2.0, 1.0, -3.0, -1.0, -1.0])).mean()
    assert task.loss(scores, labels) == pytest.approx(want, rel=1e-6)
    sums = {k: np.asarray(v).sum(0) for k, v in task.compare(scores, labels).items()}
    found = task.metrics(sums)
    assert (found["loss"], found["accuracy"]) == (pytest.approx(want, rel=1e-6), 0.8)
    assert (found["precision"], found["recall"]) == ([1.0, 1.0], [1.0, 0.5])
    np.testing.assert_array_equal(task.predict(scores), [[1, 0], [0, 1], [1, 1]])


class Pairs:
    """As Grain's `MapDataset`: a length, and examples by their number."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        image = np.full((9, 8, 1), index, np.uint8)
        return {"image": image, "label": np.arange(72).reshape(9, 8) % 2}


def test_a_dataset_of_whole_examples_is_cut():
    own = data.Own(Pairs(), data.Geometry((4, 6), 1), classes=2, name="pairs")
    image, label = own.example(2, np.random.default_rng(0))
    assert (image.shape, label.shape, image[0, 0, 0]) == ((4, 6, 1), (4, 6), 2)
    _, centre = own.example(0, None)
    np.testing.assert_array_equal(centre, (np.arange(72).reshape(9, 8) % 2)[2:6, 1:7])
    with pytest.raises(data.DataError, match=r"cannot go on where a run stopped.*MapDataset"):
        data.Own(iter([1]), data.Geometry((4, 6), 1), classes=2, name="loader")
    with pytest.raises(data.DataError, match=r"pairs 0: has shape \(9, 8, 1\).*\(10, 6, 1\)"):
        data.Own(Pairs(), data.Geometry((10, 6), 1), classes=2, name="pairs")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.name", "unett", "no model 'unett'; did you mean 'unet'"),
        ("model.name", "nowhere.nets:Net", "No module named 'nowhere'. Is the package installed"),
        ("model.name", "lab_of_mine.nnx:Nett", "has no 'Nett'; did you mean 'Net'"),
        ("data.kind", "lab_of_mine.data:Wave", "did you mean 'Waves'"),
        ("task", "segmention", "did you mean 'segmentation'"),
    ],
)
def test_names_that_lead_nowhere(package, name, value, words):
    config = base("unet")
    config.update_from_flattened_dict({name: value})
    with pytest.raises(ConfigError, match=f"`{name}`: .*{words}"):
        check(config)


def test_an_option_that_a_model_does_not_have():
    words = r"no option 'chanels'; did you mean 'channels'\? Its options are in_channels, classes,"
    with pytest.raises(ConfigError, match=words):
        Learner(base("unet", chanels=4))
    with pytest.raises(ValueError, match="'vgg16' has no option 'depth'; did you mean 'width'"):
        models.create("vgg16", depth=0)


def test_scores_that_do_not_fit(package):
    config = config_for("functions")
    with config.unlocked():
        config.model.classes = 2
    config.data.classes = 3
    learner = Learner(config)
    with pytest.raises(ConfigError, match=r"\(1, 12, 12, 2\), where `data.classes` \(=3\)"):
        learner.check_size((12, 12, 5))
    config.task = "classification"
    with pytest.raises(ConfigError, match="the task 'classification' needs scores for each image"):
        assert learner.task


def test_mean_and_deviation_of_the_data(package, tmp_path):
    """Found once, and kept: a run that goes on, and prediction, use the same."""
    config = config_for()
    config.data.mean, config.data.std, config.data.augment = (), (), False
    learner = Learner(config)
    workdir = tmp_path / "run"
    workdir.mkdir()
    examined_data(learner, workdir, Devices())
    train_set = data.load(config.data, "train", seed=0)
    train_set.take_labels((12, 12))
    images = [train_set.example(i, np.random.default_rng([0, i]))[0] for i in range(4)]
    np.testing.assert_allclose(learner.mean, np.mean(images, (0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(learner.std, np.std(images, (0, 1, 2)), rtol=1e-9)
    assert data.noted(workdir)["mean"] == list(learner.mean)
    assert data.noted(workdir)["class_names"] == ["calm", "wave"]
    (workdir / "checkpoints" / "3").mkdir(parents=True)
    data.note(workdir, mean=[1.0] * 5)
    again = Learner(config)
    examined_data(again, workdir, Devices())
    assert again.mean == (1.0,) * 5


def evaluated(config, workdir):
    """Metrics of untrained weights on the held-out files, whole and in tiles; and the rest."""
    check(config)
    learner = Learner(config)
    workdir.mkdir()
    train_set, eval_set = examined_data(learner, workdir, Devices())
    step = Step(learner, make_optimiser(config)[0], batch_shapes(train_set, 1))
    jax.eval_shape(lambda *a: step._of(learner.loss)(*a), step.state, *step.batch)
    found = Evaluation(step, eval_set, 2**40)
    return found(learner.weights()), learner, eval_set


@pytest.mark.slow
def test_files_of_numbers(tmp_path):
    """Images of float32 that keep their values, holes in images and targets, files of two sizes."""
    rng = np.random.default_rng(0)
    for split in ("train", "eval"):
        for kind in ("images", "targets"):
            (tmp_path / split / kind).mkdir(parents=True)
        for i, size in enumerate(((20, 24), (26, 18))):
            image = rng.normal(size=(*size, 2)).astype("f4")
            image[9, 2:6], image[10, 3] = np.nan, 77
            np.save(tmp_path / split / f"images/{i}.npy", image)
            target = rng.normal(size=size).astype("f4")
            target[3:5], target[7] = np.nan, -9999
            np.save(tmp_path / split / f"targets/{i}.npy", target)
    config = base("unet", channels=2, depth=1, padding="SAME", dropout=0.0)
    config.task, config.data.kind, config.data.path = "regression", "folder", str(tmp_path)
    config.data.labels, config.data.ignored, config.data.dtype = "targets", (-9999,), "float32"
    config.data.nodata = (float("nan"), 77.0)
    config.data.channels, config.data.classes, config.data.size = 2, 1, 12
    config.data.mean, config.data.std, config.eval.tile = (0.0,), (1.0,), 8
    found, learner, eval_set = evaluated(config, tmp_path / "run")
    errors = []
    for item in eval_set.items:
        image, target = np.load(item.image), np.load(item.label)
        lacking = np.isnan(image[..., 0]) | (image[..., 0] == 77)
        image[lacking] = 0
        scores = learner.scores(learner.weights(), image[None])[0, ..., 0]
        errors.append((scores - target)[np.isfinite(target) & (target != -9999) & ~lacking])
    errors = np.concatenate(errors)
    assert found["counted"] == errors.size
    assert found["loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)


@pytest.mark.slow
def test_files_with_several_labels_each(tmp_path):
    rng = np.random.default_rng(0)
    tags = ["crack", "crack;rust", "", "rust; moss"]
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", rng.integers(0, 256, (40, 40, 3), np.uint8))
    rows = "".join(f"{i}.npy,{tag}\n" for i, tag in enumerate(tags))
    (tmp_path / "labels.csv").write_text(f"file,label\n{rows}")
    config = base("resnet50", blocks=(1,), width=2)
    config.task, config.data.kind, config.data.path = "multi_label", "folder", str(tmp_path)
    config.data.labels, config.data.channels, config.data.classes = "tags", 3, 3
    config.data.size, config.data.eval_fraction = 32, 0.5
    found, learner, eval_set = evaluated(config, tmp_path / "run")
    assert eval_set.class_names == ["crack", "moss", "rust"]
    wanted, losses = [], []
    for item in eval_set.items:
        wanted.append([name in tags[int(item.image.stem)] for name in eval_set.class_names])
        scores = np.asarray(learner.scores(learner.weights(), np.load(item.image)[None])[0])
        losses.append(np.log1p(np.exp(scores)) - scores * wanted[-1])
    assert found["there"] == np.sum(wanted, 0).tolist()
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    config.task = "classification"
    with pytest.raises(ConfigError, match="do not go together: regression takes targets"):
        load_data(Learner(config))


@pytest.mark.slow
def test_images_of_classes_in_all_sizes(tmp_path):
    """Resized in training, evaluation and prediction, which names the class."""
    rng = np.random.default_rng(0)
    for kind in ("larch", "spruce"):
        (tmp_path / "files" / kind).mkdir(parents=True)
        for i, size in enumerate(((20, 90), (41, 33), (70, 64))):
            image = rng.integers(0, 256, (*size, 3), np.uint8)
            pillow.fromarray(image).save(tmp_path / "files" / kind / f"{i}.png")
    config = base("resnet50", blocks=(1,), width=2)
    config.data.kind, config.data.path = "folder", str(tmp_path / "files")
    config.data.labels, config.data.channels, config.data.size = "folders", 3, 40
    config.data.resize, config.data.eval_fraction = 40, 0.5
    check(config)
    learner, workdir = Learner(config), tmp_path / "run"
    workdir.mkdir()
    _, eval_set = examined_data(learner, workdir, Devices())
    assert eval_set.is_whole
    assert len(eval_set) == 3
    (workdir / "config.json").write_text(config.to_json())
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    checkpoints.save(0, learner.weights()._asdict(), {})
    checkpoints.close()
    options = {"tile": 64, "range": None, "level": None, "probabilities": False, "dtype": "float32"}
    file, out = tmp_path / "files" / "larch" / "0.png", tmp_path / "class.json"
    predict.run(
        types.SimpleNamespace(workdir=tmp_path / "run", image=str(file), out=str(out), **options)
    )
    found, trained = json.loads(out.read_text()), load_trained(tmp_path / "run")
    image = np.asarray(pillow.open(file).resize((40, 40), pillow.BILINEAR))
    scores = trained.learner.scores(trained.weights, image[None])[0]
    want = dict(zip(("larch", "spruce"), jax.nn.softmax(scores).tolist(), strict=True))
    assert found["probabilities"] == pytest.approx(want, rel=1e-3)
    assert found["class"] == max(want, key=want.get)
    config.data.size = 64
    with pytest.raises(ConfigError, match=r"`data.resize` \(=40\) .* at least `data.size` \(=64\)"):
        check(config)
