"""Compile a step, run it, and say what it took."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One compiled function: what it returned, and what it cost."""

    outputs: Any
    seconds: float
    """Median over the repeats, after a first run that is not counted."""
    temporary_bytes: int
    """Of the compiled program, beyond its arguments and outputs."""
    compile_seconds: float


def measure(step: Callable[..., Any], *arguments: Any, repeats: int) -> Measurement:
    begin = time.perf_counter()
    compiled = jax.jit(step).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - begin
    outputs = jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - begin)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Measurement(outputs, statistics.median(times), temporary, compile_seconds)
