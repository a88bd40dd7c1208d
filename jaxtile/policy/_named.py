"""Policies by name: one registry.

A name may take an argument after a colon: `sqrt`, `names:pool1,pool2`, `budget:2GiB`. Packages
enter their policies when they are imported; those that declare the entry point `jaxtile.policies`
are imported when a name is first looked up.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
from collections.abc import Callable

from ._outline import Choices, Outline

Decide = Callable[[Outline], Choices]


@dataclasses.dataclass(frozen=True)
class Named:
    """A policy with a name; what `jaxtile.checkpoint(policy=...)` takes."""

    name: str
    decide: Decide

    def choose(self, outline: Outline) -> Choices:
        return self.decide(outline)

    def __repr__(self) -> str:
        return f"policies.resolve({self.name!r})"


@dataclasses.dataclass(frozen=True)
class _Entry:
    argument: str
    trade: str
    make: Callable[[str], Decide]


_entries: dict[str, _Entry] = {}


def register(
    name: str, argument: str, trade: str
) -> Callable[[Callable[[str], Decide]], Callable[[str], Decide]]:
    """Enter a policy: the decorated function makes, from its argument, what decides.

    Args:
      name: what comes before the colon.
      argument: what comes after it, as a user should read it (`BYTES`); empty if nothing does.
      trade: what is gained and what is paid, in one line.
    """

    def decorate(make: Callable[[str], Decide]) -> Callable[[str], Decide]:
        if name in _entries:
            raise ValueError(f"there is a policy {name!r} already")
        _entries[name] = _Entry(argument, trade, make)
        return make

    return decorate


def names() -> dict[str, str]:
    """All policies, each with its trade-off; those of `policies` from the fastest to the smallest.

    >>> import policies
    >>> list(policies.names())[0], list(policies.names())[-1]
    ('store_all', 'tiled:HxW')
    """
    _load_packages()
    return {n + (f":{e.argument}" if e.argument else ""): e.trade for n, e in _entries.items()}


def resolve(text: str) -> Named:
    """The policy that a string names.

    >>> import policies
    >>> policies.resolve("names:pool1,pool2")
    policies.resolve('names:pool1,pool2')
    """
    if not isinstance(text, str):
        raise ValueError(f"a policy (={text!r}) must be a string, as 'sqrt' or 'budget:2GiB'")
    _load_packages()
    name, colon, argument = text.strip().partition(":")
    if name not in _entries:
        near = difflib.get_close_matches(name, _entries, n=1)
        raise ValueError(
            f"there is no policy {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Known are {', '.join(names()) or 'none: import `policies`'}."
        )
    entry = _entries[name]
    if bool(argument) != bool(entry.argument) or bool(colon) != bool(entry.argument):
        wanted = f"{name}:{entry.argument}" if entry.argument else name
        raise ValueError(f"the policy {text!r} must be written {wanted!r}")
    return Named(text.strip(), entry.make(argument))


@functools.cache
def _load_packages() -> None:
    for package in importlib.metadata.entry_points(group="jaxtile.policies"):
        package.load()
