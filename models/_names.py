"""What a config names: something built in, or anybody's `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jaxtile

_MODELS = pathlib.Path(__file__).resolve().parent
_NOBODYS_OWN = (  # folders of code that is not the user's
    pathlib.Path(sysconfig.get_path("stdlib")).resolve(),
    *(_MODELS, _MODELS.parent / "experiments"),
    pathlib.Path(jaxtile.__file__).resolve().parent,
)


def find(name: str, known: Mapping[str, Any], what: str) -> Any:
    """What `name` stands for: one of `known`, or an attribute of a module that can be imported.

    >>> find("math:hypot", {}, "function")(3, 4)
    5.0
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"there is no {what} {name!r}{nearest(name, known)} There are {', '.join(known)}; your "
            "own is named as 'package.module:Name'"
        )
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the {what} {name!r} cannot be imported: {error}. Is the package installed, or its "
            "folder in PYTHONPATH?"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"the {what} {name!r} cannot be found: {module} has no "
                f"{attribute!r}{nearest(attribute, vars(importlib.import_module(module)))}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"the {what} {name!r} is a {type(found).__name__}, where a class, or a function that "
            "makes one, is wanted"
        )
    return found


def line_of(error: BaseException) -> str:
    """Where in anybody's own code an error comes from, as the end of a sentence, if it does."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = pathlib.Path(frame.filename).resolve()
        installed = {"site-packages", "dist-packages"}.intersection(file.parts)
        others = installed or any(file.is_relative_to(f) for f in _NOBODYS_OWN)
        if file.is_file() and not others:
            return f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return ""


def call(
    make: Callable[..., Any], what: str, options: Mapping[str, Any], offered: Mapping[str, Any]
) -> Any:
    """`make(**options)`, with those of `offered` that it has a parameter for and no option sets.

    >>> call(lambda size, classes: (size, classes), "model", {"size": 3}, {"classes": 2, "key": 0})
    (3, 2)
    """
    check_options(make, what, options)
    named = parameters(make)[0]
    given = {**{n: v for n, v in offered.items() if n in named}, **options}
    if missing := [n for n in named if n not in given and _is_needed(make, n)]:
        raise ValueError(
            f"{what} needs a value for {' and '.join(map(repr, missing))}, which is none of what "
            f"the program gives by itself ({', '.join(offered)}): give it as an option"
        )
    return make(**given)


def _is_needed(fun: Callable[..., Any], name: str) -> bool:
    return _signature(fun).parameters[name].default is inspect.Parameter.empty


def check_options(make: Callable[..., Any], what: str, options: Iterable[str]) -> None:
    """Raise an error that lists the options that there are, if one of these is not."""
    named, takes_any = parameters(make)
    for name in options:
        if name not in named and not takes_any:
            mine = [n for n in named if n not in ("rngs", "parent", "name")]
            raise ValueError(
                f"{what} has no option {name!r}{nearest(name, mine)} Its options are "
                f"{', '.join(mine)}"
            )


def parameters(fun: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names that a call may set, and whether it may set any other."""
    found = list(_signature(fun).parameters.values())
    found = found[1:] if isinstance(fun, type) else found
    names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in found)


def _signature(fun: Callable[..., Any]) -> inspect.Signature:
    """The metaclasses of modules hide what a class takes."""
    return inspect.signature(fun.__init__ if isinstance(fun, type) else fun)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that says that there is no such name."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else "."
