"""The keyword `tiles=` of an operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from .._checkpoint import checkpoint


def tileable(**first_axis: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: gives an operation the keyword `tiles=`.

    Args:
      **first_axis: for each argument that is tiled, its first spatial axis (1 for `NHWC`). The
        first of them is the image: its rank says how many spatial axes there are. Arguments that
        are not named here are not tiled.
    """
    image = next(iter(first_axis))

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(op)
        operands = [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]

        @functools.wraps(op)
        def with_tiles(*args: Any, tiles: tuple[int, ...] | None = None, **kwargs: Any) -> Any:
            if tiles is None:
                return op(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            arrays = {k: arguments.pop(k) for k in operands if k in arguments}
            rank = arrays[image].ndim - 2
            if np.ndim(tiles) != 1 or len(tiles) != rank:
                raise ValueError(
                    f"`tiles` (={tiles}) must have one number per spatial axis of `{image}`, which "
                    f"has {max(rank, 0)}: its shape is {arrays[image].shape}, batch first, "
                    "channels last"
                )
            in_axes = {
                k: tuple(range(first_axis[k], first_axis[k] + rank)) if k in first_axis else None
                for k in arrays
            }
            run = checkpoint(lambda a: op(**a, **arguments), in_axes=(in_axes,), tiles=tiles)
            return run(arrays)

        option = inspect.Parameter("tiles", inspect.Parameter.KEYWORD_ONLY, default=None)
        # `inspect.signature` reads this attribute, which the type of a function does not have.
        with_tiles.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), option]
        )
        return with_tiles

    return decorate
