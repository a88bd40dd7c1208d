"""How many bytes are live when a list of operations is replayed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Peak(NamedTuple):
    bytes: int
    at: str | None
    """The first step that reaches the peak; None if it is what was there before the first."""


def replay(
    steps: Sequence[tuple[str, Collection[str], Collection[str]]],
    sizes: Mapping[str, int],
    *,
    resident: Collection[str] = (),
    keep: Collection[str] = (),
) -> Peak:
    """The largest number of bytes live at once.

    While a step runs, what it reads and what it writes are both live. A tensor is allocated by the
    first step that writes it (a later writer adds to the same buffer) and freed after the last step
    that reads or writes it, unless it is kept. What is read but never written takes nothing, unless
    it is resident.

    Args:
      steps: (name, reads, writes), in order of execution.
      sizes: bytes of each tensor.
      resident: tensors that are there from the start to the end.
      keep: tensors that, once written, stay to the end.

    >>> steps = [("conv", ["x"], ["y"]), ("relu", ["y"], ["z"]), ("pool", ["z"], ["p"])]
    >>> replay(steps, {"x": 4, "y": 4, "z": 4, "p": 1}, resident=["x"])
    Peak(bytes=12, at='relu')
    """
    unknown = {t for _, _, writes in steps for t in writes}.union(resident) - sizes.keys()
    if unknown:
        raise ValueError(f"`sizes` has no bytes for {', '.join(sorted(unknown)[:5])}")
    last = {t: i for i, (_, reads, writes) in enumerate(steps) for t in (*reads, *writes)}
    live = set(resident)
    stay = live | set(keep)
    now = sum(sizes[t] for t in live)
    peak = Peak(now, None)
    for i, (name, reads, writes) in enumerate(steps):
        new = set(writes) - live
        live |= new
        now += sum(sizes[t] for t in new)
        if now > peak.bytes:
            peak = Peak(now, name)
        dead = {t for t in (*reads, *writes) if last[t] == i and t in live and t not in stay}
        live -= dead
        now -= sum(sizes[t] for t in dead)
    return peak
