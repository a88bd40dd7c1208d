"""What jaxtile refuses, said so that the user can act on it."""

from __future__ import annotations

import os
import site
import sysconfig
from typing import Any


class TilingError(ValueError):
    """A function, an argument or a schedule that jaxtile cannot tile exactly.

    Raised while tracing, before anything runs: jaxtile never returns a number it is not sure of,
    and never quietly runs the untiled function instead.
    """


class Mixes(Exception):
    """Raised by a rule.

    This primitive mixes positions along a tiled axis. Becomes a `TilingError` with a location.
    """

    def __init__(self, reason: str, advice: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


_INSTALLED = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
_LIBRARIES = (os.path.dirname(os.path.abspath(__file__)), *map(os.path.realpath, _INSTALLED))
"""Where code is that is not the user's."""


def user_line(*source_infos: Any) -> str:
    """The line of user code that traced an equation: the innermost frame outside jaxtile and
    installed libraries.

    Further arguments are the calls that the equation was inlined from, innermost first. A jitted
    library function is traced once and then taken from a cache, so its own frames may be those of
    another call; they are believed only if they pass through the calling line.
    """
    *inner, outermost = [_user_frames(s) for s in source_infos]
    for frames in inner:
        if frames and (not outermost or outermost[0] in frames):
            return "{}:{} ({})".format(*frames[0])
    return "{}:{} ({})".format(*outermost[0]) if outermost else "an unknown line"


def _user_frames(source_info: Any) -> list[tuple[str, int, str]]:
    traceback = getattr(source_info, "traceback", None)
    found = []
    for frame in getattr(traceback, "frames", ()) or ():
        path = os.path.realpath(frame.file_name)
        if not path.startswith(_LIBRARIES) and not frame.file_name.startswith("<"):
            found.append((frame.file_name, frame.line_num, frame.function_name))
    return found


def check_callable(fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"`fun` (={fun!r}) must be callable")


def describe(aval: Any, axes: tuple[int | None, ...]) -> str:
    """`float32[1, 64*, 64*, 3]`.

    A shape, with a star on every dimension that carries a tiled axis.
    """
    dims = ", ".join(
        f"{n}{'' if a is None else '*'}" for n, a in zip(aval.shape, axes, strict=True)
    )
    return f"{aval.dtype}[{dims}]"
