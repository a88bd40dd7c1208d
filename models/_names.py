"""What a config names: something built in, or anybody's `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


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
    return found


def call(
    make: Callable[..., Any], what: str, options: Mapping[str, Any], offered: Mapping[str, Any]
) -> Any:
    """`make(**options)`, with those of `offered` that it has a parameter for and no option sets.

    >>> call(lambda size, classes: (size, classes), "model", {"size": 3}, {"classes": 2, "key": 0})
    (3, 2)
    """
    check_options(make, what, options)
    named = parameters(make)[0]
    return make(**{n: v for n, v in offered.items() if n in named and n not in options}, **options)


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
    # The metaclasses of modules hide what a class takes.
    is_class = isinstance(fun, type)
    found = list(inspect.signature(fun.__init__ if is_class else fun).parameters.values())
    found = found[1:] if is_class else found
    names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in found)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that says that there is no such name."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else "."
