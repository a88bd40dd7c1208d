"""Batches on the devices: the next one is read and sent while a step runs."""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

import jax

from .. import data
from ..devices.hosts import Devices


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

    def __init__(self, batches: data.Batches, devices: Devices):
        self.batches, self.devices = batches, devices
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "feed")
        self._next = self._pool.submit(self._send)

    def _send(self) -> Sent:
        batch = next(self.batches)
        arrays = [jax.device_put(self.devices.placed(x)) for x in (batch.images, batch.labels)]
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
