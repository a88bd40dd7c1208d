"""Zarr stores: here or at an address; and OME-Zarr, groups of an image at several resolutions.

The metadata of a group say where the arrays are and what their axes are, as `tczyx`. Time must have
one point; without `dimensions=3` so must depth. Channels become last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._base import ImageError, describe, named, require

_OLDEST = "tczyx"  # the axes where the metadata do not say
_RETRIES = {"max_retries": 6, "initial_delay": "200ms", "max_delay": "5s"}
_CONTEXT = {f"{kind}_request_retries": _RETRIES for kind in ("http", "gcs", "s3")}
_NOT_REACHED = (
    "ABORTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|"
    "INTERNAL"
)
SCHEMES = ("http://", "https://", "s3://", "gs://")


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder, or what lies at an address; `path` is named in messages."""

    path: Path
    address: str = ""

    def inside(self, name: str) -> Store:
        path = self.path / name
        return Store(path, f"{self.address.rstrip('/')}/{name}" if self.address else "")

    def text(self, name: str) -> str | None:
        """What a file of metadata says; None if it is not there."""
        if not self.address:
            file = self.path / name
            return file.read_text() if file.is_file() else None
        tensorstore = require("tensorstore", self.path)
        context = tensorstore.Context(_CONTEXT)
        with self.reached():
            files = tensorstore.KvStore.open(_place(self.address), context=context)
            found = files.result().read(name).result()
        return None if found.state == "missing" else found.value.decode()

    def open(self, driver: str) -> Any:
        """The array in it."""
        tensorstore = require("tensorstore", self.path)
        here = {"driver": "file", "path": str(self.path.resolve())}
        spec = {"driver": driver, "kvstore": _place(self.address) if self.address else here}
        context = tensorstore.Context(_CONTEXT)
        with self.reached():
            return tensorstore.open(spec, read=True, context=context).result()

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Requests that fail are not an `ImageError`: the file is not to blame, nor to skip."""
        try:
            yield
        except Exception as error:
            if not self.address or not re.match(_NOT_REACHED, str(error)):
                raise
            raise ConnectionError(
                f"{named(self.path)}: cannot be reached ({describe(error)})"
            ) from error


def _place(address: str) -> Any:
    """An address in tensorstore's words, which for S3 has no variables of the environment."""
    if not address.startswith("s3://"):
        return f"{address.rstrip('/')}/"
    bucket, _, path = address.removeprefix("s3://").rstrip("/").partition("/")
    place: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path and f"{path}/"}
    found = os.environ.get
    if endpoint := found("AWS_ENDPOINT_URL_S3") or found("AWS_ENDPOINT_URL"):
        region = found("AWS_REGION") or found("AWS_DEFAULT_REGION") or "us-east-1"
        place |= {"endpoint": endpoint, "aws_region": region}
    if found("AWS_ACCESS_KEY_ID"):  # looking further would print that there are no other keys
        place["aws_credentials"] = {"type": "environment"}
    return place


def address_of(path: str | Path) -> str:
    """Where a store is that is not here: a name as `https://...`, or what a `.url` file says."""
    if str(path).startswith(SCHEMES):
        return str(path).rstrip("/")
    if Path(path).suffix.lower() != ".url" or not Path(path).is_file():
        return ""
    address = Path(path).read_text().strip().rstrip("/")
    if not address.startswith(SCHEMES):
        raise ImageError(path, f"must hold an address, as https://..., not {address[:80]!r}")
    return address


def multiscale(store: Store, level: int, mask: bool) -> tuple[Store, list[str]] | None:
    """An array of a group, and the names of its axes; None if it is no such group.

    Level 0 is the finest. A mask of one resolution has no other.
    """
    for file, inside in ((".zattrs", ()), ("zarr.json", ("attributes", "ome"))):
        text = store.text(file)
        if text is None:
            continue
        try:
            found = json.loads(text)
            for name in inside:
                found = found.get(name, {})
            if "multiscales" not in found:
                continue
            first = found["multiscales"][0]
            axes = [a if isinstance(a, str) else a["name"] for a in first.get("axes", _OLDEST)]
            arrays = [each["path"] for each in first["datasets"]]
            return store.inside(arrays[level_of(store.path, level, len(arrays), mask)]), axes
        except ImageError:
            raise
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ImageError(
                store.path, f"is not a zarr array, or its metadata are damaged ({describe(error)})"
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
