"""The configs that are shipped, and the rules for fields."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from experiments import data
from experiments.program.config import ConfigError, base, check, differences, fields, load
from experiments.training.learner import Learner
from experiments.training.step import Step, make_optimiser

from .programs import python
from .support import parametrize_few

FILES = sorted(pathlib.Path(__file__).parent.parent.glob("configs/[!_s]*.py"))


def test_all_are_there():
    names = "alexnet local_cnn quickstart resnet50_large unet_572 unet_cells unet_volume"
    assert [file.stem for file in FILES] == [*names.split(), "vgg16_gigapixel"]


@parametrize_few("file", FILES, always=3, ids=lambda file: file.stem)
def test_a_shipped_config(file):
    """It opens with its command, its fields are valid, and its step can be planned at its size."""
    name = f"configs/{file.name}"
    command = f"python -m experiments.train --config={name} --workdir=runs/{file.stem}"
    assert command in file.read_text()
    config = load(str(file))
    check(config)
    learner = Learner(config)
    rank, batch = config.data.dimensions, config.train.batch_size
    shape = (*(config.data.size,) * rank, config.data.channels)
    learner.check_size(shape)
    sizes = (learner.output_size(config.data.size),) * rank
    label = (batch, *sizes) if learner.task.dense else (batch,)
    images = jax.ShapeDtypeStruct((batch, *shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct(label, jnp.uint8 if learner.task.dense else jnp.int32)
    step = Step(learner, make_optimiser(config)[0], (images, labels))
    assert step.outline().fingerprint
    state, values = jax.eval_shape(
        lambda *a: step._of(learner.loss)(*a), step.state, True, images, labels
    )
    assert jax.tree.structure(state) == jax.tree.structure(step.state)
    assert values["loss"].shape == ()


PRINT = """
from experiments.program.command import config_flag, start
config_flag()
start(lambda argv: print(dict(sorted(config_flag().value.model.items())), argv[1:]))
"""


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (
            "--config.model.encoder=resnet50 --config.model.frozen=true --config.train.steps=7 "
            "--config.model.blocks (1,1) --config.model.padding=VALID",
            "{'blocks': (1, 1), 'channels': 8, 'depth': 2, 'dropout': 0.0, 'encoder': 'resnet50', "
            "'frozen': True, 'name': 'unet', 'padding': 'VALID'} []",
        ),
        ("--config.model.norm=batch", "'norm': 'batch', 'padding': 'SAME'} []"),
        ("--config.model.dept=4", "error: `model`: the model 'unet' has no option 'dept'; did "),
        ("--config.model.with=4", "Its options are in_channels, classes, channels, depth, "),
        ("--config.model.spatial=two", "error: `model.spatial` (='two') must be as its default, 2"),
        ("--config.model.norm --config.train.steps=7", "error: --config.model.norm needs a value"),
        ("--config.modle.norm=batch", "has no field 'modle.norm'"),
        ("--config.policy=budget:2 GB", "error: 'GB' is no option"),
        ("--config.model.name=vgg16 --config.model.width=4", "'name': 'vgg16'"),
        (
            "--config.model.name=vgg16 --config.model.depth=4 --config.model.norm=batch",
            "'vgg16' has no option 'norm'",
        ),
    ],
)
def test_options_of_a_model_that_its_config_does_not_list(flags, printed):
    found = python("-c", PRINT, "--config=configs/quickstart.py", *flags.split())
    assert printed in found.stdout + found.stderr
    assert (found.returncode == 0) == ("error" not in found.stderr)


@pytest.mark.parametrize(
    "line, message",
    [
        ("config.train.stpes = 3", "there is no field 'stpes'; did you mean 'steps'?"),
        ("config.seed = config.train.stpes", "there is no field 'stpes'; did you mean 'steps'?"),
        ("config.train.qwertyz = 3", "there is no field 'qwertyz'"),
        ("config.train.steps = 'x'", "`steps` (=x) must be of type int"),
    ],
)
def test_a_wrong_field_in_a_file(line, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from experiments.program.config import base\n"
        f"def get_config():\n    config = base('unet')\n    {line}\n    return config\n"
    )
    with pytest.raises(ConfigError) as found:
        load(str(file))
    assert str(found.value) == f"{file}: {message}"


def test_names_of_classes():
    config = base("unet")
    config.data.class_names = ("tissue", "tumour")
    check(config)
    assert data.load(config.data, "eval", seed=0).class_names == ["tissue", "tumour"]
    config.data.labels, config.data.kind, config.data.path = "folders", "folder", "x"
    with pytest.raises(ConfigError, match=r"`data\.class_names` .*'folders' files name the"):
        check(config)
    config.data.labels, config.data.class_names = "masks", ("tumour",)
    with pytest.raises(ConfigError, match=r"`data\.class_names` .* must be 2 names"):
        check(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.learning_rate", -1.0),
        ("train.ema", 1.0),
        ("data.std", (0.0,)),
        ("data.mean", (0.1, 0.2)),
        ("data.std", (0.1, 0.2, 0.3)),
        ("data.channels", 0),
        ("dtype", "int8"),
        ("dtype", "float16"),
        ("policy", "budget:lots"),
        ("seed", -1),
        ("data.kind", "folder"),
        ("data.range", (5, 5)),
        ("data.range", (5,)),
        ("data.ignored", ("x",)),
        ("eval.size", -1),
        ("eval.size", 64),
    ],
)
def test_a_value_that_cannot_work_is_named(name, value):
    config = base("unet")
    config.update_from_flattened_dict({name: value})
    with pytest.raises(ConfigError, match=name):
        check(config)


def test_what_may_change_when_a_run_goes_on():
    old = dict(fields(base("unet")))
    assert not differences(old, {**old, "policy": "sqrt", "log.every": 3})
    assert differences(old, {**old, "train.steps": 7})  # the rate falls until the last step
    assert not differences({"data.nodata": (float("nan"),)}, {"data.nodata": (float("nan"),)})
    constant = {**old, "train.schedule": "constant"}
    assert not differences(constant, {**constant, "train.steps": 7})
    changed = differences(old, {**old, "seed": 3, "data.size": 64})
    assert changed == ["data.size: 256 there, 64 here", "seed: 0 there, 3 here"]
