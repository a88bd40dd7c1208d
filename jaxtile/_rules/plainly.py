"""Whether a fast pullback of our own can be used by, and is of use to, the code being traced.

Convolutions, pools and reads of a window have one (see `derivative`). Inside a user's `custom_jvp`
rule they act on tangents, and JAX must be able to transpose them, which it cannot. What the
backward pass computes again, and does not differentiate, has no use for it. There the plain
primitives are used; if it is differentiated after all, a second time, JAX's own pullbacks do.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

Reason = Literal["transposed", "undifferentiated"]
_plain: contextvars.ContextVar[Reason | None] = contextvars.ContextVar("plain", default=None)


def plain() -> Reason | None:
    """Why plain primitives are used; None: they are not."""
    return _plain.get()


@contextlib.contextmanager
def plainly(reason: Reason) -> Iterator[None]:
    """Trace a derivative rule, or what is not differentiated."""
    token = _plain.set(_plain.get() or reason)
    try:
        yield
    finally:
        _plain.reset(token)
