"""The command line of a program: its flags, fields of a config that it changes, and its start."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from .config import ConfigError, config_file, fields, load
from .ending import Signals, sentences


@functools.cache
def config_flag() -> flags.FlagHolder:
    """One for all programs, so that they can be imported together."""
    return config_flags.DEFINE_config_file("config", None, "a file of configs/", lock_config=True)


@functools.cache
def workdir_flag() -> flags.FlagHolder:
    return flags.DEFINE_string("workdir", None, "folder of the run")


@functools.cache
def profile_flag() -> flags.FlagHolder:
    return flags.DEFINE_bool("profile", False, "trace some steps: where does their time go?")


def start(main: Callable[[Sequence[str]], Any], stopped: str = "") -> None:
    """`app.run` for all programs: bad flags, signals and a full disk end in one line.

    `stopped` is what a user should know who stopped it.
    """
    Signals(stopped)

    def parse(argv: Sequence[str]) -> Sequence[str]:
        argv = _with_config(argv)
        _check_overrides(argv)
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:  # absl would add its usage, and FATAL
            raise ConfigError(" ".join(str(error).split())) from error

    with sentences(stopped, ConfigError):
        app.run(main, flags_parser=parse)


def _with_config(argv: Sequence[str]) -> list[str]:
    """The command line with `--config=FILE` in one word; `config_file` says where the file is."""
    found: list[str] = []
    for word in argv:
        if found and found[-1].lstrip("-") == "config":
            word = f"{found.pop()}={word}"
        name, equals, path = word.partition("=")
        is_file = equals and name.startswith("-") and name.lstrip("-") == "config"
        found.append(f"{name}={config_file(path)}" if is_file else word)
    return found


def _check_overrides(argv: Sequence[str]) -> None:
    """Each `--config.NAME` must be a field of the file that `--config` names."""
    given = [a.lstrip("-").partition("=") for a in argv if a.lstrip("-").startswith("config.")]
    for path in [a.partition("=")[2] for a in argv if a.lstrip("-").startswith("config=")]:
        known = dict(fields(load(path)))
        for name, _, _ in given:
            name = name.removeprefix("config.")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
                last = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
                hint = f"; did you mean {(last or near)[0]!r}?" if last or near else ""
                raise ConfigError(f"{path} has no field {name!r}{hint}")
