"""The platform that a program is traced for: this machine's, or that of a device that is not there.

A program that is compiled for a GPU elsewhere must not have what XLA on this machine's CPU needs.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_elsewhere: contextvars.ContextVar[str | None] = contextvars.ContextVar("elsewhere", default=None)


def on_early_cpu() -> bool:
    """Is it a CPU before jax 0.12? There XLA drops optimization barriers, and is slow with some
    convolutions.
    """
    platform = _elsewhere.get() or jax.default_backend()
    return platform == "cpu" and jax.__version_info__ < (0, 12)


@contextlib.contextmanager
def tracing_for(platform: str | None) -> Iterator[None]:
    """Trace for a platform, as "gpu"; None: for this machine's."""
    token = _elsewhere.set(platform)
    try:
        yield
    finally:
        _elsewhere.reset(token)
