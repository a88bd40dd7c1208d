"""Batches on the devices, beside them, or on disk: the next one is made ready while a step runs.

At most two are there at a time: that of the step that runs, and the next one. With a step begun
ahead, these are the batches of both; another one is sent when the first is used up.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

import policies
from jaxtile._run.ordering import host_of
from policies import format_bytes

from .. import data
from ..devices.hosts import Devices
from ..devices.memory import host_memory
from ..program.config import ConfigError

Shapes = tuple[jax.ShapeDtypeStruct, ...]
_SHARE = 0.25  # of a budget, for two batches; more is better spent on what steps compute
_SHARE_OF_HOST = 0.25  # of the host's memory, for the four batches that are made ahead of time
_MOST = 2  # batches on the devices


class Placement(NamedTuple):
    """Where batches lie while a step runs."""

    where: str
    """device, host or disk"""
    shapes: Shapes
    """Of images and labels, with the memory that they lie in."""
    text: str
    """Where, and why there; empty for the usual place."""


def placed(shapes: Shapes, config: ConfigDict, devices: Devices) -> Placement:
    """As `data.placement` says. Of what is in host memory, or on disk, loops read windows; a class
    per image has none.
    """
    where, text = config.data.placement, ""
    if where in ("host", "disk") and devices.mesh is not None:
        raise ConfigError(
            f"`data.placement` is {where!r}, which a `mesh` does not know: leave one out"
        )
    if where == "auto":
        where, text = ("device", "") if devices.mesh is not None else _fitting(shapes, config)
    if where == "disk":
        text = f"batches stay on disk, and are read from there by window{text}"
    if where != "host":
        return Placement(where, shapes, text)
    place = host_of(jax.devices()[0])
    found = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if x.ndim > 1 else x for x in shapes
    ]
    text = f"batches lie in host memory, and are read from there by window{text}"
    return Placement(where, tuple(found), text)


def _fitting(shapes: Shapes, config: ConfigDict) -> tuple[str, str]:
    """The fastest place that is large enough, and why it is that one."""
    one, host = sum(x.size * x.dtype.itemsize for x in shapes), host_memory()
    if config.data.kind == "folder" and 4 * one > _SHARE_OF_HOST * host:
        return "disk", f", since four of them take {format_bytes(4 * one)} of {format_bytes(host)}"
    if config.policy.startswith("budget:") and jax.default_backend() != "cpu":
        budget = policies.parse_bytes(config.policy.removeprefix("budget:"))
        if 2 * one > _SHARE * budget:
            of_budget = f"{format_bytes(2 * one)} of {format_bytes(budget)}"
            return "host", f", since two of them take {of_budget}"
    return "device", ""


class Sent(NamedTuple):
    images: Any
    labels: Any
    names: tuple[str, ...]
    skipped: int = 0
    """Tiles of its step that read the same as others, as far as that is known beforehand."""
    gone: Callable[[], None] = lambda: None
    """To be told that there is room for another one."""

    def delete(self) -> None:
        """Give back the memory of the devices, or close the files."""
        self.images.delete()
        self.labels.delete()
        self.gone()


class Feed:
    """Gives batches, which a thread makes ready; close it, or use it in `with`. Each one must be
    deleted after use, or no other is sent.
    """

    def __init__(
        self,
        batches: data.Batches,
        devices: Devices,
        places: Sequence[Any] = (None, None),
        repeats: Callable[[Any, Any], int] | None = None,
    ):
        """`places`: shardings of images and labels; None: where `devices` puts them. `repeats`:
        from images and labels to the tiles that will be skipped.
        """
        self.batches, self.devices, self.places, self.repeats = batches, devices, places, repeats
        self._room = threading.Semaphore(_MOST)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "feed")
        self._next = self._pool.submit(self._send)

    def _send(self) -> Sent:
        batch = next(self.batches)
        self._room.acquire()
        if self.batches.lazy:
            labels = batch.labels
            labels = jax.device_put(labels) if isinstance(labels, np.ndarray) else labels
            return Sent(batch.images, labels, batch.names, gone=self._room.release)
        parts = map(self.devices.placed, (batch.images, batch.labels))
        arrays = [
            x if isinstance(x, jax.Array) else jax.device_put(x, place)  # a mesh has placed its own
            for x, place in zip(parts, self.places, strict=True)
        ]
        skipped = self.repeats(batch.images, batch.labels) if self.repeats else 0
        sent = jax.block_until_ready(arrays)
        return Sent(*sent, batch.names, skipped, gone=self._room.release)

    def __next__(self) -> Sent:
        sent = self._next.result()
        self._next = self._pool.submit(self._send)
        return sent

    def close(self) -> None:
        self._room.release()  # for a batch that waits
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
