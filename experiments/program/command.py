"""The command line of a program: its flags, fields of a config that it changes, and its start."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

import jaxtile

from .config import ConfigError, config_file, fields, load, plain_words
from .ending import Signals, sentences
from .options import data_options, model_options


@functools.cache
def config_flag() -> flags.FlagHolder:
    """One for all programs, so that they can be imported together."""
    return config_flags.DEFINE_config_file(
        "config",
        None,
        "a file of configs/; --config.train.steps=200 sets a field",
        lock_config=True,
    )


@functools.cache
def workdir_flag() -> flags.FlagHolder:
    return flags.DEFINE_string("workdir", None, "folder of the run")


@functools.cache
def profile_flag() -> flags.FlagHolder:
    return flags.DEFINE_bool("profile", False, "trace some steps: where does their time go?")


def dtype_flag(default: str) -> flags.FlagHolder:
    known = ["float32", "bfloat16", "float16"]
    return flags.DEFINE_enum("dtype", default, known, "type of weights and activations")


def start(
    main: Callable[[Sequence[str]], Any], stopped: str = "", *, takes_words: bool = False
) -> None:
    """`app.run` for all programs: bad flags, signals and a full disk end in one line.

    `stopped` is what a user should know who stopped it; `takes_words`: there may be words that
    belong to no option.
    """
    Signals(stopped)
    for name in {"config", "workdir", "profile"}.intersection(flags.FLAGS):  # for --help
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    def parse(argv: Sequence[str]) -> Sequence[str]:
        argv, options, data = _own_options(_with_config(argv))
        whole, sys.argv = sys.argv, argv  # where ml_collections looks for fields
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:  # absl would add its usage, and FATAL
            raise ConfigError(plain_words(" ".join(str(error).split()))) from error
        finally:
            sys.argv = whole
        if rest[1:] and not takes_words:
            raise ConfigError(
                f"{rest[1]!r} is no option: options begin with --, and a value with spaces needs "
                "quotes, as --NAME='A B'"
            )
        if options or data:
            with config_flag().value.unlocked() as config:
                config.model.update(options)
                config.data.options.update(data)
        return rest

    def quietly(argv: Sequence[str]) -> Any:
        logging.set_verbosity(logging.WARNING)  # JAX tells which devices it did not find
        return main(argv)

    with sentences(stopped, ConfigError, jaxtile.TilingError):
        app.run(quietly, flags_parser=parse)


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


def _own_options(argv: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The command line without options that its config does not list; those of the model; and
    those of anybody's own data.

    Each other `--config.NAME` must be a field of the file that `--config` names.
    """
    paths = [a.partition("=")[2] for a in argv if a.lstrip("-").startswith("config=")]
    if not paths:
        return list(argv), {}, {}
    known = dict(fields(load(paths[-1])))
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {"model": {}, "data.options": {}}
    chosen = {"model.name": known.get("model.name"), "data.kind": known.get("data.kind")}
    words = iter(argv)
    for word in words:
        name, equals, text = word.lstrip("-").partition("=")
        field = name.removeprefix("config.")
        of = field.rpartition(".")[0]
        if not name.startswith("config.") or field in known:
            rest.append(word)
            chosen.update({field: text} if field in chosen and equals else {})
        elif of in found and "model.name" in known:
            text = text if equals else next(words, "-")
            if not equals and text.startswith("-"):
                raise ConfigError(f"{word} needs a value, as {word}=VALUE")
            found[of][field.removeprefix(f"{of}.")] = text
        else:
            raise ConfigError(f"{paths[-1]} has no field {field!r}{_nearest(field, known)}")
    model, data = found.values()
    return (
        rest,
        model_options(str(chosen["model.name"]), model) if model else {},
        data_options(str(chosen["data.kind"]), data) if data else {},
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    last = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    return f"; did you mean {(last or near)[0]!r}?" if last or near else ""
