"""Whether the code being traced is a user's derivative rule, whose result JAX will transpose.

Convolutions and reads of a window have a fast pullback of our own, stated as a `custom_vjp`. Inside
a `custom_jvp` rule they act on tangents, and JAX must be able to transpose them; a `custom_vjp` it
cannot. There, the plain primitives are used.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_transposing = contextvars.ContextVar("transposing", default=False)


def transposing() -> bool:
    return _transposing.get()


@contextlib.contextmanager
def derivative_rule() -> Iterator[None]:
    """Trace a derivative rule."""
    token = _transposing.set(True)
    try:
        yield
    finally:
        _transposing.reset(token)
