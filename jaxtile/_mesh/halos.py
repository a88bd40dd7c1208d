"""Blocks and halos: which device owns which positions of an array, and what devices send.

Along one axis of a mesh with D devices, device `i` owns the positions `[i*n // D, (i+1)*n // D)` of
an array of length `n`. Arrays must have the same size on all devices, so what a device holds, its
*block*, begins there and has `ceil(n / D)` positions. Where D does not divide `n`, the last
position of a block may belong to the next device; it is never read.

A region reads, on each device, an interval that may go beyond what the device owns: the *halo*. It
is received from the owners, be they neighbours or further away. Per distance there is one
`ppermute` with what all receivers read, and more for those that read more, so that no position is
sent to a device that does not read it. The axes are exchanged one after the other; the second
exchange sends what was received in the first one too, and so the corners arrive. Cotangents go
the same way back, and are added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._geometry import Window

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of `length` positions on the devices along a mesh axis.

    >>> blocks = Blocks("rows", 10, 4)
    >>> blocks.size, [blocks.start(i) for i in range(4)], blocks.owned
    (3, [0, 2, 5, 7], (2, 3, 2, 3))
    """

    name: str
    length: int
    devices: int

    @property
    def size(self) -> int:
        return -(-self.length // self.devices)

    @property
    def uneven(self) -> bool:
        return self.length % self.devices != 0

    def start(self, device: int) -> int:
        """Where a device's block begins; also for imaginary devices beyond the first and last."""
        return device * self.length // self.devices

    @property
    def owned(self) -> tuple[int, ...]:
        """How many of its leading positions each device owns."""
        return tuple(self.start(i + 1) - self.start(i) for i in range(self.devices))

    def split(self, x: Array, dim: int) -> Array:
        if not self.uneven:
            return x
        starts = [self.start(i) for i in range(self.devices)]
        return lax.concatenate(
            [lax.slice_in_dim(x, s, s + self.size, axis=dim) for s in starts], dim
        )

    def join(self, x: Array, dim: int) -> Array:
        if not self.uneven:
            return x
        parts = [
            lax.slice_in_dim(x, i * self.size, i * self.size + n, axis=dim)
            for i, n in enumerate(self.owned)
        ]
        return lax.concatenate(parts, dim)


@dataclasses.dataclass(frozen=True)
class Hop:
    """One message: `size` positions of a block, from device `i + distance` to device `i`."""

    distance: int
    """0: a device keeps positions of its own."""
    size: int
    starts: tuple[int | None, ...]
    """Per source, where in its block they begin; None: it sends nothing."""
    places: tuple[int | None, ...]
    """Per receiver, where in its array they go; None: it receives nothing."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Sources and receivers."""
        return [(j, j - self.distance) for j, s in enumerate(self.starts) if s is not None]


@dataclasses.dataclass(frozen=True)
class Halo:
    """What each device reads along one dimension: of its own block, and of others'."""

    dim: int
    blocks: Blocks
    reads: tuple[int, ...]
    """Per device, the first position."""
    size: int
    """How many positions the device reads that reads most; all hold as many."""
    hops: tuple[Hop, ...]

    @classmethod
    def of(cls, dim: int, blocks: Blocks, window: Window) -> Halo:
        """The halo for windows that are given for the tiles of one device after the other.

        >>> window = Window(0, np.array([0, 3, 7, 10]), 6)  # those at the border moved inwards
        >>> halo = Halo.of(0, Blocks("rows", 16, 4), window)
        >>> [(hop.pairs, hop.size) for hop in halo.hops if hop.distance == -1]
        [([(0, 1), (1, 2), (2, 3)], 1), ([(2, 3)], 1)]
        """
        starts = _per_device(window.starts, blocks.devices)
        reads = [(int(s.min()), int(s.max()) + window.size) for s in starts]
        hops = [
            hop
            for distance in range(1 - blocks.devices, blocks.devices)
            for hop in _hops(distance, blocks, reads)
        ]
        size = max(hi - lo for lo, hi in reads)
        return cls(dim, blocks, tuple(lo for lo, _ in reads), size, tuple(hops))

    def origins(self, tiles: int) -> np.ndarray:
        """For each tile of each device, the position at which the array of its device begins."""
        return np.repeat(np.array(self.reads, np.int64), tiles // self.blocks.devices)

    def fill(self, x: Array) -> Array:
        """What this device reads, from its own block and those of others."""
        name, dim = self.blocks.name, self.dim
        shape = list(x.shape)
        shape[dim] = self.size
        out = jnp.zeros(shape, x.dtype)
        for hop in self.hops:
            piece = lax.dynamic_slice_in_dim(x, _of_device(hop.starts, name), hop.size, dim)
            if hop.distance:
                piece = lax.ppermute(piece, name, hop.pairs)
            place = _of_device(hop.places, name)
            if None in hop.places:
                before = lax.dynamic_slice_in_dim(out, place, hop.size, dim)
                piece = jnp.where(_has(hop.places, name), piece, before)
            out = lax.dynamic_update_slice_in_dim(out, piece, place, dim)
        return out

    def fold(self, x: Array) -> Array:
        """The transpose of `fill`: every device's copy of a position is added to its owner's."""
        name, dim = self.blocks.name, self.dim
        shape = list(x.shape)
        shape[dim] = self.blocks.size
        out = jnp.zeros(shape, x.dtype)
        for hop in self.hops:
            piece = lax.dynamic_slice_in_dim(x, _of_device(hop.places, name), hop.size, dim)
            if hop.distance:  # who is sent nothing has zeros
                piece = lax.ppermute(piece, name, [(j, i) for i, j in hop.pairs])
            elif None in hop.places:
                piece = jnp.where(_has(hop.places, name), piece, jnp.zeros((), x.dtype))
            start = _of_device(hop.starts, name)
            sums = lax.dynamic_slice_in_dim(out, start, hop.size, dim) + piece
            out = lax.dynamic_update_slice_in_dim(out, sums, start, dim)
        return out


def _hops(distance: int, blocks: Blocks, reads: Sequence[tuple[int, int]]) -> Iterator[Hop]:
    """The messages between devices at one distance: first the positions that all receivers read,
    then those next to them that only some do.
    """
    count = blocks.devices
    parts = {}
    for i, j in ((i, i + distance) for i in range(count) if 0 <= i + distance < count):
        lo = max(0, reads[i][0] - blocks.start(j))
        hi = min(blocks.owned[j], reads[i][1] - blocks.start(j))
        if lo < hi:
            parts[i, j] = lo, hi
    sent = 0
    for size in sorted({hi - lo for lo, hi in parts.values()}):
        starts: list[int | None] = [None] * count
        places: list[int | None] = [None] * count
        for (i, j), (lo, hi) in parts.items():
            if hi - lo >= size:
                start = hi - size if distance < 0 else lo + sent
                starts[j], places[i] = start, blocks.start(j) + start - reads[i][0]
        yield Hop(distance, size - sent, tuple(starts), tuple(places))
        sent = size


def _per_device(values: np.ndarray, devices: int) -> np.ndarray:
    """One row of values per device; a single value is the same on all."""
    if len(values) == 1:
        return np.broadcast_to(values, (devices, 1))
    return values.reshape(devices, -1)


def _of_device(values: Sequence[int | None], name: str) -> Array | int:
    """The value of this device; a plain number if all are the same. Any number stands for None."""
    some = next(v for v in values if v is not None)
    if all(v in (some, None) for v in values):
        return some
    numbers = [some if v is None else v for v in values]
    return jnp.asarray(numbers, np.int32)[lax.axis_index(name)]


def _has(values: Sequence[int | None], name: str) -> Array:
    """Has this device a value?"""
    return jnp.asarray([v is not None for v in values])[lax.axis_index(name)]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The halos of one array, along each of its dimensions in turn."""

    shape: tuple[int, ...]
    """Of the block."""
    halos: tuple[Halo, ...]

    def fill(self, x: Array) -> Array:
        for halo in self.halos:
            x = halo.fill(x)
        return x

    def fold(self, x: Array) -> Array:
        for halo in reversed(self.halos):
            x = halo.fold(x)
        return x

    def sent(self, fills: int, folds: int) -> tuple[int, int]:
        """Elements and messages that one device sends in all, the one that sends most."""
        most = [
            (fills * sent + folds * received).max(1) for sent, received in self._per_dimension()
        ]
        elements, messages = sum(most, np.zeros(2, np.int64))
        return int(elements), int(messages)

    def sent_by_all(self, devices: int) -> int:
        """Elements that all devices of the mesh send in one `fill`, or in one `fold`."""
        sent = (s[0] for s, _ in self._per_dimension())
        return sum(int(elements.sum()) * devices // len(elements) for elements in sent)

    def _per_dimension(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What each device along the mesh axis sends and receives: elements and messages."""
        shape = list(self.shape)
        for halo in self.halos:
            sent, received = np.zeros((2, 2, halo.blocks.devices), np.int64)
            for hop in halo.hops:
                shape[halo.dim] = hop.size
                for source, receiver in hop.pairs if hop.distance else ():
                    sent[:, source] += math.prod(shape), 1
                    received[:, receiver] += math.prod(shape), 1
            yield sent, received
            shape[halo.dim] = halo.size
