"""OME-Zarr: a group with an image at several resolutions.

Its metadata say where the arrays are and what their axes are, as `tczyx`. Time must have one point;
without `dimensions=3` so must depth. Channels become last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._base import ImageError, describe

_OLDEST = "tczyx"  # the axes where the metadata do not say


def multiscale(path: Path, level: int, mask: bool) -> tuple[Path, list[str]] | None:
    """An array of a group, and the names of its axes; None if it is no such group.

    Level 0 is the finest. A mask of one resolution has no other.
    """
    for file, inside in ((".zattrs", ()), ("zarr.json", ("attributes", "ome"))):
        if not (path / file).is_file():
            continue
        try:
            found = json.loads((path / file).read_text())
            for name in inside:
                found = found.get(name, {})
            if "multiscales" not in found:
                continue
            first = found["multiscales"][0]
            axes = [a if isinstance(a, str) else a["name"] for a in first.get("axes", _OLDEST)]
            arrays = [each["path"] for each in first["datasets"]]
            return path / arrays[level_of(path, level, len(arrays), mask)], axes
        except ImageError:
            raise
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ImageError(
                path, f"is not a zarr array, or its metadata are damaged ({describe(error)})"
            ) from error
    return None


def level_of(path: Path, level: int, there: int, mask: bool) -> int:
    """The number of the resolution to read."""
    if mask and there == 1:
        return 0
    if level >= there:
        raise ImageError(path, f"has {there} resolutions, and no level {level}: the finest is 0")
    return level


def arranged(path: Path, array: Any, axes: list[str], dimensions: int) -> Any:
    """A tensorstore array with its axes as an image has them: space, then channels."""
    import tensorstore

    space = ["z", "y", "x"][-dimensions:]
    if len(axes) != len(array.shape) or not {*space} <= {*axes}:
        raise ImageError(
            path,
            f"has axes {''.join(axes)} and shape {tuple(array.shape)}, and no {''.join(space)}",
        )
    kept = list(axes)
    for d in reversed(range(len(axes))):
        if axes[d] in (*space, "c"):
            continue
        if array.shape[d] != 1:
            advice = (
                "set `data.dimensions` to 3 for volumes" if axes[d] == "z" else "save one alone"
            )
            raise ImageError(path, f"has {array.shape[d]} positions along {axes[d]!r}: {advice}")
        array = array[(slice(None),) * d + (0,)]
        del kept[d]
    order = [kept.index(name) for name in (*space, "c") if name in kept]
    return array[tensorstore.d[order].transpose[:]]
