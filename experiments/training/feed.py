"""Batches on the devices, or beside them: the next one is read and sent while a step runs."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

import policies
from policies import format_bytes

from .. import data
from ..devices.hosts import Devices
from ..program.config import ConfigError

Shapes = tuple[jax.ShapeDtypeStruct, ...]
_SHARE = 0.25  # of a budget, for two batches; more is better spent on what steps compute


def placed(shapes: Shapes, config: ConfigDict, devices: Devices) -> tuple[Shapes, str]:
    """The shapes of images and labels, with the memory that they lie in; and why there.

    Loops read windows of what is in host memory. A class per image is not read by window.
    """
    where, text = config.data.placement, ""
    if where == "host" and devices.mesh is not None:
        raise ConfigError("`data.placement` is 'host', which a `mesh` does not know: leave one out")
    budgeted = config.policy.startswith("budget:") and devices.mesh is None
    if where == "auto" and budgeted and jax.default_backend() != "cpu":
        budget = policies.parse_bytes(config.policy.removeprefix("budget:"))
        two = 2 * sum(x.size * x.dtype.itemsize for x in shapes)
        if two > _SHARE * budget:
            where = "host"
            text = f", since two of them take {format_bytes(two)} of {format_bytes(budget)}"
    if where != "host":
        return shapes, ""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    found = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if x.ndim > 1 else x for x in shapes
    ]
    return tuple(found), f"batches lie in host memory, and are read from there by window{text}"


class Sent(NamedTuple):
    images: jax.Array
    labels: jax.Array
    names: tuple[str, ...]

    def delete(self) -> None:
        """Give back the memory of the devices."""
        self.images.delete()
        self.labels.delete()


class Feed:
    """Gives batches, which a thread makes ready; close it, or use it in `with`.

    While a step runs, its batch and the next one are on the devices, if each is deleted after use.
    """

    def __init__(
        self, batches: data.Batches, devices: Devices, places: Sequence[Any] = (None, None)
    ):
        """`places`: shardings of images and labels; None: where `devices` puts them."""
        self.batches, self.devices, self.places = batches, devices, places
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "feed")
        self._next = self._pool.submit(self._send)

    def _send(self) -> Sent:
        batch = next(self.batches)
        parts = zip((batch.images, batch.labels), self.places, strict=True)
        arrays = [jax.device_put(self.devices.placed(x), place) for x, place in parts]
        return Sent(*jax.block_until_ready(arrays), batch.names)

    def __next__(self) -> Sent:
        sent = self._next.result()
        self._next = self._pool.submit(self._send)
        return sent

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
