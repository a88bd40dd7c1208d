"""What a run is: its fields, their types, and how a command line changes them.

A config is a Python file with `get_config()`, which starts from `base()` and sets fields. The type
of a field is the type of its first value. On the command line, `--config.train.steps=200`.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

import models
import policies

OPTIMISERS = ("sgd", "adam", "adamw", "lamb")
SCHEDULES = ("constant", "cosine", "linear")
DRAWN = ("cells", "mosaics", "textures")
KINDS = (*DRAWN, "folder")
TASKS = ("auto", "segmentation", "classification", "multi_label", "regression")
PIXELS = ("uint8", "uint16", "int16", "float16", "float32")
_PROGRAMS = pathlib.Path(__file__).parents[2]
# Fields that may differ when a run goes on: they change how it runs, not what it computes.
FREE = (
    *("policy", "skip", "mesh", "data.placement", "data.class_names"),
    *("checkpoint.", "log.", "eval.tile"),
)


class ConfigError(ValueError):
    """A field has a value that cannot work."""


_DATA = {
    "kind": "cells",  # cells, mosaics, textures, folder, or your own: package.module:Name
    "options": {},  # more arguments of your own
    "path": "",
    "labels": "masks",  # masks, targets, folders, csv or tags
    "dimensions": 2,  # of images; 3: volumes
    "size": 256,  # of the window that is read; 0: whole images
    "level": 0,  # of pyramids: 0 is the finest resolution
    "resize": 0,  # whole images to so many pixels a side first, to classify them; 0: as they are
    "channels": 1,
    "dtype": "uint8",  # of pixels; what files hold becomes 8 bits
    "classes": 2,  # or numbers that the model gives
    "class_names": (),  # as ("tissue", "tumour"); (): as class folders or a table say, or numbers
    "mask_values": (),  # of each class, as (0, 255); (): 0, 1, 2 and so on
    "ignored": (),  # values of masks that do not count, as (255,)
    "regions": "",  # a folder in `path`: where training windows lie (GeoJSON, CSV or masks)
    "class_weights": (),  # training windows by the class in their centre, as (1, 4); (): anywhere
    "nodata": (),  # values of pixels without data, whose labels do not count, as (0,)
    "range": (),  # of pixels that are not 8 bits, as (0, 4095); (): as found
    "files_outside": False,  # labels.csv may name files outside its folder
    "train_images": 64,
    "eval_images": 8,
    "eval_fraction": 0.2,  # of a folder without train/ and eval/
    "augment": False,
    "on_bad_file": "error",  # or skip
    "placement": "auto",  # of a batch while its step runs: device, host, disk, or what fits
    "mean": (0.5,),  # per channel or for all, of pixels from 0 to 1; (): of the training images
    "std": (0.25,),
}

_TRAIN = {
    "steps": 100,
    "batch_size": 1,
    "optimiser": "adam",
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "momentum": 0.9,
    "clip_norm": 1.0,  # 0: gradients are not clipped
    "ema": 0.0,  # decay of the weights' moving average; 0: none
}


def base(model: str, **options: Any) -> ConfigDict:
    """All fields with their defaults. `options` are those of the model's class."""
    config = ConfigDict(
        {
            # The model's name, or your own: package.module:Name; and arguments of its class.
            "model": {"name": model, **options},
            # What its scores mean: auto, segmentation, classification, multi_label, regression, or
            # your own; auto: segmentation or classification, whichever the scores are for.
            "task": "auto",
            # What is stored and recomputed: see `policies.names()`.
            "policy": "store_all",
            # Whether tiles that read the same as others, as in an empty background, are skipped.
            "skip": False,
            # Whether the images of a batch are tiles too.
            "tile_batch": False,
            # Of activations; weights and optimiser are float32.
            "dtype": "float32",
            "seed": 0,
            # To begin with: the workdir of another run, of which the best weights are taken; or
            # weights of torchvision or Keras, as resnet50.safetensors, .npz, .pth or .h5.
            "start_from": "",
            "mesh": (),  # devices along rows and columns of the image, as (4, 2)
            "deterministic": True,  # on a GPU: sums in a fixed order; going on gives the same bits
            "data": _DATA,
            "train": _TRAIN,
            "eval": {
                "every": 50,  # steps; 0: only at the end
                "size": 0,  # of the central window of each held-out file; 0: whole images
                "batch_size": 1,  # of windows; whole files are evaluated one by one
                "tile": 1024,  # positions along a tile of the evaluation
                "batch_statistics": False,  # norms use the image's own, as in training
            },
            "checkpoint": {"every": 50, "keep": 3},
            "log": {"every": 10, "tensorboard": False},
        }
    )
    return config.lock()


def sweep(models: tuple[str, ...], **options: Any) -> ConfigDict:
    """All fields of a sweep: the cells are the product of the tuples."""
    config = ConfigDict(
        {
            "models": models,
            "sizes": (0,),  # height and width; 0: the reference's
            "batches": (0,),  # images; 0: the reference's
            "dtypes": ("float32",),
            "policies": ("plain",),  # plain JAX, and names of `policies.names()`
            "tiles": ("",),  # as 4x4: the grid of what a policy recomputes whole
            "warmup": 1,  # steps that are not timed
            "repeats": 5,
            "limit_seconds": 600,  # per cell, compilation included
            "compare": True,  # gradients with plain JAX's, where that fits
        }
    )
    config.update(options)
    return config.lock()


def check(config: ConfigDict) -> None:
    """Raise an error if a field's value cannot work, whatever the data."""
    if "model" not in config:
        raise ConfigError("this config has no `model`: it is not one of a training run")
    for name, what, known in (
        ("model.name", "model", models.names()),
        ("data.kind", "kind of data", KINDS),
        ("task", "task", TASKS),
    ):
        try:
            models.find(_value(config, name), dict.fromkeys(known), what)
        except ValueError as error:
            raise ConfigError(f"`{name}`: {error}") from error
    _one_of(config, "dtype", ("float32", "bfloat16"))  # float16 would need its loss scaled
    _one_of(config, "data.labels", ("masks", "targets", "folders", "csv", "tags"))
    _one_of(config, "data.on_bad_file", ("error", "skip"))
    _one_of(config, "data.placement", ("auto", "device", "host", "disk"))
    _one_of(config, "data.dimensions", (1, 2, 3))
    _one_of(config, "data.dtype", PIXELS)
    _one_of(config, "train.optimiser", OPTIMISERS)
    _one_of(config, "train.schedule", SCHEDULES)
    for name in (
        *("train.steps", "train.batch_size", "eval.batch_size", "eval.tile", "log.every"),
        *("checkpoint.every", "checkpoint.keep", "data.classes", "train.learning_rate"),
        *("data.train_images", "data.eval_images", "data.channels"),
    ):
        _require(config, name, lambda n: 0 < n < math.inf, "be positive and finite")
    for name in ("eval.every", "train.warmup_steps", "train.weight_decay", "train.clip_norm"):
        _require(config, name, lambda n: 0 <= n < math.inf, "be finite and not negative")
    for name in ("train.ema", "data.eval_fraction", "train.momentum"):
        _require(config, name, lambda n: 0 <= n < 1, "be at least 0 and less than 1")
    for name in ("data.mean", "data.std"):
        allowed = (0, 1, config.data.channels)
        _require(config, name, lambda t: len(t) in allowed, f"have 1 or {allowed[2]} values, or 0")
        _require(config, name, _are_numbers, "be numbers")
    if config.skip and config.mesh:
        raise ConfigError("`skip` does not go with a `mesh`, whose devices wait for each other")
    _require(config, "data.std", lambda t: all(v > 0 for v in t), "be positive")
    _require(config, "data.classes", lambda n: n <= 255, "be at most 255")
    _require(config, "data.level", lambda n: n >= 0, "not be negative; 0: the finest resolution")
    for name in ("data.size", "eval.size"):
        _require(config, name, lambda n: n >= 0, "not be negative; 0: whole images")
    for name in ("data.mask_values", "data.ignored"):
        _require(config, name, lambda t: all(type(v) is int for v in t), "be integers")
    for name in ("data.nodata", "data.range", "data.class_weights"):
        _require(config, name, _are_numbers, "be numbers")
    _require(
        config,
        "data.range",
        lambda t: not t or (len(t) == 2 and -math.inf < t[0] < t[1] < math.inf),
        "be a smaller and a larger number, as (0, 4095), or () for the range that is found",
    )
    _require(config, "seed", lambda n: 0 <= n < 2**31, "be at least 0 and less than 2**31")
    if config.eval.size and config.data.kind in DRAWN:
        raise ConfigError(
            f"`eval.size` (={config.eval.size}) is for files; images that are drawn have "
            "`data.size` pixels, and are evaluated whole"
        )
    _check_class_names(config.data)
    _check_class_weights(config.data)
    if config.data.resize and (
        config.data.kind != "folder"
        or config.data.labels in ("masks", "targets")
        or config.data.dimensions != 2
        or not 0 < config.data.size <= config.data.resize
    ):
        raise ConfigError(
            f"`data.resize` (={config.data.resize}) is for files of classes (`data.labels` "
            "folders, csv or tags), and must be at least `data.size` "
            f"(={config.data.size}), which must not be 0"
        )
    for name in ("nodata", "regions", "mask_values", "ignored", "range", "level"):
        if config.data[name] and config.data.kind != "folder":
            raise ConfigError(
                f"`data.{name}` (={config.data[name]!r}) is for files (`data.kind` folder), not "
                f"for {config.data.kind!r}"
            )
    if config.data.kind == "folder" and not config.data.path:
        raise ConfigError("`data.kind` is 'folder', so `data.path` must name one")
    try:
        policies.resolve(config.policy)
    except ValueError as error:
        raise ConfigError(f"`policy`: {error}") from error


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) for v in values)


def _check_class_names(data: ConfigDict) -> None:
    names, named = data.class_names, f"`data.class_names` (={data.class_names})"
    if names and (len(names) != data.classes or not all(isinstance(n, str) for n in names)):
        raise ConfigError(f"{named} must be {data.classes} names, one for each class")
    if names and data.kind == "folder" and data.labels not in ("masks", "targets"):
        raise ConfigError(f"{named}: with `data.labels` {data.labels!r} files name the classes")


def _check_class_weights(data: ConfigDict) -> None:
    weights, name = data.class_weights, f"`data.class_weights` (={data.class_weights})"
    if not weights:
        return
    if data.kind != "folder" or data.labels not in ("masks", "folders", "csv"):
        raise ConfigError(
            f"{name} is for files (`data.kind` folder) whose `data.labels` are masks, folders or "
            f"csv; here they are {data.kind!r} and {data.labels!r}"
        )
    finite = all(0 <= w < math.inf for w in weights)
    if len(weights) != data.classes or not finite or not any(weights):
        raise ConfigError(
            f"{name} must be {data.classes} numbers, one for each class, not negative and not all 0"
        )
    if data.regions:
        raise ConfigError(
            f"{name} and `data.regions` (={data.regions!r}) both say where windows lie: use one. "
            "Pixels of masks that are `data.ignored` are of no class, and never in the centre"
        )


def with_defaults(config: ConfigDict) -> ConfigDict:
    """The config of an older run, with the fields that there were not then."""
    full = base(config.model.name).unlock()
    full.model = config.model
    full.update({k: v for k, v in config.items() if k != "model"})
    return full


def fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All fields by their dotted names.

    >>> dict(fields(base("unet")))["train.steps"]
    100
    """
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from fields(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Fields with which a run cannot go on, as text: those that change what it computes."""
    free = FREE
    if new.get("train.schedule") == "constant":  # others end at the last step
        free += ("train.steps",)
    return [
        f"{name}: {old.get(name)!r} there, {new.get(name)!r} here"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
        and repr(old.get(name)) != repr(new.get(name))  # not a number is not itself
        and not any(name == f or (f.endswith(".") and name.startswith(f)) for f in free)
    ]


def config_file(path: str) -> str:
    """The file that `--config` names: here, or else among those that come with the programs."""
    file, colon, rest = path.partition(":")
    if not pathlib.Path(file).is_file() and (_PROGRAMS / file).is_file():
        file = str(_PROGRAMS / file)
    return f"{file}{colon}{rest}"


def load(path: str) -> ConfigDict:
    """The config of a file."""
    file = pathlib.Path(config_file(path).partition(":")[0])
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else _PROGRAMS / file.parent
        names = sorted(f.name for f in folder.glob("*.py") if not f.name.startswith("_"))
        hint = f"; there are {', '.join(str(file.parent / n) for n in names)}" if names else ""
        raise ConfigError(f"there is no config {str(file)!r}{hint}")
    spec = importlib.util.spec_from_file_location("config_file", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config()
    except (AttributeError, KeyError, TypeError, SyntaxError, ImportError) as error:
        text = " ".join(" ".join(str(a) for a in error.args).split())
        raise ConfigError(f"{file}: {plain_words(text)}") from error


def plain_words(text: str) -> str:
    """What Python and ml_collections say of a wrong field or value, in words of the user's.

    >>> plain_words("flag --config.train.steps=abc: invalid literal for int() with base 10: 'abc'")
    "flag --config.train.steps=abc: 'abc' is not an integer"
    """
    text = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not an integer", text)
    text = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", text)
    if found := re.search(r'Did you mean "(\w+)" instead of "(\w+)"', text):
        return f"there is no field {found[2]!r}; did you mean {found[1]!r}?"
    if found := re.match(r'\W*Key "(\w+)" does not exist', text):
        return f"there is no field {found[1]!r}"
    return re.sub(
        r"Could not override field '(\w+)'.*\. (.*) is of original type .*to type <class '(\w+)'>",
        r"`\1` (=\2) must be of type \3",
        text,
    )


def _value(config: ConfigDict, name: str) -> Any:
    for key in name.split("."):
        config = config[key]
    return config


def _one_of(config: ConfigDict, name: str, allowed: Sequence[Any]) -> None:
    value = _value(config, name)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"`{name}` (={value!r}) must be one of {', '.join(map(repr, allowed))}{hint}")


def _require(config: ConfigDict, name: str, holds: Callable[[Any], bool], must: str) -> None:
    value = _value(config, name)
    if not holds(value):
        raise ConfigError(f"`{name}` (={value!r}) must {must}")
