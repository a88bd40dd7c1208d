"""Options of a model, or of anybody's own data, that a command line gives and no config lists."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import models

from .config import KINDS, ConfigError


def model_options(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Options of a model, as a command line has them, in the types of the model's own defaults.

    >>> model_options("vgg16", {"width": "4", "pooled": "true", "dtype": "bfloat16"})
    {'width': 4, 'pooled': True, 'dtype': 'bfloat16'}
    """
    return _options(lambda: models.maker(name), "model", f"the model {name!r}", given)


def data_options(kind: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The same for anybody's own data."""
    if kind in KINDS:
        raise ConfigError(f"`data.options` are for data of your own; {kind!r} has none")
    what = f"the kind of data {kind!r}"
    return _options(lambda: models.find(kind, {}, "kind of data"), "data.options", what, given)


def _options(
    find: Callable[[], Any], field: str, what: str, given: Mapping[str, str]
) -> dict[str, Any]:
    try:
        make = find()
        models.check_options(make, what, given)
    except ValueError as error:
        raise ConfigError(f"`{field}`: {error}") from error
    called: Any = make.__init__ if isinstance(make, type) else make
    defaults = {k: p.default for k, p in inspect.signature(called).parameters.items()}
    return {k: _as_option(f"{field}.{k}", text, defaults.get(k)) for k, text in given.items()}


def _as_option(name: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, bool | int | float) and isinstance(value, str):
        raise ConfigError(f"`{name}` (={text!r}) must be as its default, {default!r}")
    return value
