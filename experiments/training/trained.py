"""A trained model, read back from the folder of its run."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

import models

from .. import data
from ..program.config import ConfigError, with_defaults
from .checkpoints import CheckpointError, Checkpoints, Restored, unflatten
from .learner import Learner, Weights
from .workdir import read_config


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model, as it was at its best."""

    learner: Learner
    weights: Weights
    step: int

    @property
    def config(self) -> ConfigDict:
        return self.learner.config


def load_trained(workdir: str | pathlib.Path) -> Trained:
    """The best weights of a run, or its last ones if it never was evaluated."""
    folder = pathlib.Path(workdir)
    if not folder.is_dir():
        reason = "is a file, and not" if folder.exists() else "is not there: name"
        raise ConfigError(f"{folder} {reason} the folder of a training run")
    try:
        settings = with_defaults(ConfigDict(read_config(folder)))
        noted = data.noted(folder)
        learner = Learner(settings, noted.get("shape"))
        learner.mean = learner.mean or tuple(noted["mean"])
        learner.std = learner.std or tuple(noted["std"])
    except (AttributeError, KeyError) as error:
        raise ConfigError(f"{folder / 'config.json'} is damaged: {error}") from error
    for name in ("best", "checkpoints"):
        try:
            found = Checkpoints(folder / name, keep=1, read_only=True).restore()
        except CheckpointError as error:
            print(f"warning: {error}", flush=True)
            continue
        if found is None:
            continue
        if name == "checkpoints" and found.record.get("best"):
            print(
                f"warning: {folder / 'best'} lacks the best weights, of step "
                f"{found.record['best']['step']}: these are the last, of step {found.step}",
                flush=True,
            )
        where = folder / name / str(found.step)
        return Trained(learner, _weights(learner, found, where), found.step)
    raise ConfigError(f"{folder} has no checkpoint that can be read")


def first_weights(learner: Learner, source: str) -> tuple[Weights, str]:
    """Those of another run, or of a file in torchvision's or Keras' layout; and remarks on it."""
    path = pathlib.Path(source)
    if path.suffix not in models.SUFFIXES:
        if path.is_file():
            raise ConfigError(
                f"`start_from`: {source} is neither the folder of a run nor a file of weights "
                f"({', '.join(models.SUFFIXES)})"
            )
        return load_trained(source).weights, ""
    if learner.network.pretrained is None:
        raise ConfigError(f"`start_from`: {source} is for models of this repository")
    try:
        params, variables, remarks = learner.network.pretrained(source)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(f"`start_from`: {error}") from error
    return Weights(params, variables), "".join(f"; {remark}" for remark in remarks)


def _weights(learner: Learner, found: Restored, source: pathlib.Path) -> Weights:
    """Those to evaluate: the moving average, if there is one."""

    def within(name: str) -> dict[str, np.ndarray]:
        return {k.removeprefix(name): v for k, v in found.arrays.items() if k.startswith(name)}

    shapes = jax.eval_shape(learner.weights)
    params = within("ema.") or within("params.")
    variables = within("variables.")
    return Weights(
        unflatten(shapes.params, params, source), unflatten(shapes.variables, variables, source)
    )
