"""Image sizes that a model's arithmetic does not allow, said so that the user can choose one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_FARTHEST = 1 << 12


def check_size(model: str, shape: Sequence[int], fits: Callable[[int], bool]) -> None:
    """Raise an error that names the nearest sizes if a spatial size of `shape` does not fit."""
    for axis, n in enumerate(shape[1:-1], start=1):
        if fits(n):
            continue
        below = next((m for m in range(n - 1, max(0, n - _FARTHEST), -1) if fits(m)), None)
        above = next((m for m in range(n + 1, n + _FARTHEST) if fits(m)), None)
        nearest = " and ".join(str(m) for m in (below, above) if m is not None)
        raise ValueError(
            f"{model} cannot take an image of {n} pixels along axis {axis} (shape "
            f"{tuple(shape)}); the nearest sizes that fit are {nearest}"
        )


def check_image(model: str, shape: Sequence[int], rank: int, channels: int) -> None:
    """Raise an error if this is not a batch of images of so many axes and channels."""
    letters = {1: "N, W", 2: "N, H, W", 3: "N, D, H, W"}[rank]
    if len(shape) != rank + 2 or shape[-1] != channels:
        raise ValueError(
            f"{model} takes images ({letters}, {channels}), channels last, not shape {tuple(shape)}"
        )
