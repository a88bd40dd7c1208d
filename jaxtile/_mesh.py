"""Blocks and halos: who owns which positions of an array, and who sends which to whom.

Along one axis of a mesh with D devices, device `i` owns the positions `[i*n // D, (i+1)*n // D)` of
an array of length `n`. Its *block* begins there and has `ceil(n / D)` positions on every device:
where `n` does not divide, the last one may belong to the next device, and is never read.

A region reads, on each device, an interval that may go beyond its own positions: the *halo*. It is
received from the devices that own it, be they neighbours or further away, in one `ppermute` per
distance: the sender cuts the same part out of its block everywhere, and the receiver puts it where
it belongs, which differs by at most one position between devices. One axis after the other, so the
corners come along. Cotangents go the same way back, and are added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._errors import TilingError
from ._geometry import Window

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh, and per tiled axis the name of the mesh axis that it is distributed over."""

    mesh: Mesh | AbstractMesh
    names: tuple[str | None, ...]

    def name(self, axis: int | None) -> str | None:
        return None if axis is None else self.names[axis]

    def count(self, axis: int) -> int:
        name = self.names[axis]
        return 1 if name is None else self.mesh.shape[name]

    def spec(self, axes: Sequence[int | None]) -> P:
        """How an array whose dimensions carry these axes is distributed."""
        return P(*map(self.name, axes))

    def blocks(self, shape: Sequence[int], axes: Sequence[int | None]) -> dict[int, Blocks]:
        """Per dimension that is distributed, its blocks."""
        return {
            d: Blocks(self.names[a], n, self.count(a))
            for d, (n, a) in enumerate(zip(shape, axes, strict=True))
            if self.name(a) is not None
        }

    def split(self, x: Array, axes: Sequence[int | None]) -> Array:
        """A whole array as one of blocks, distributed."""
        if isinstance(self.mesh, AbstractMesh):
            raise TilingError(
                f"`mesh` (={self.mesh}) has no devices: only `jaxtile.explain` takes an abstract "
                "mesh; `jax.make_mesh` makes one that can run"
            )
        blocks = self.blocks(x.shape, axes)
        if any(b.uneven for b in blocks.values()):
            # No sharding of JAX's describes such an array, so it comes from everywhere.
            x = jax.device_put(x, NamedSharding(self.mesh, P()))
            for d, b in blocks.items():
                x = b.split(x, d)
        return jax.device_put(x, NamedSharding(self.mesh, self.spec(axes)))

    def even(self, shape: Sequence[int], axes: Sequence[int | None]) -> P:
        """How a whole array is distributed, if that is possible."""
        uneven = any(b.uneven for b in self.blocks(shape, axes).values())
        return P() if uneven else self.spec(axes)

    def join(self, x: Array, shape: Sequence[int], axes: Sequence[int | None]) -> Array:
        """The whole array that these blocks are of."""
        for d, b in self.blocks(shape, axes).items():
            x = b.join(x, d)
        return x


def automatic(run: Callable[..., tuple[list[Array], list[P]]], flat: Sequence[Any]) -> list[Array]:
    """The arrays that `run` returns with their shardings; inside, no array's type has one.

    JAX's explicit meshes, the default of `jax.make_mesh`, make shardings part of types. They end
    where the tiled function begins, and begin again behind it.
    """
    flat = [jnp.asarray(x) for x in flat]
    contexts = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in flat)]
    explicit = [m for m in contexts if AxisType.Explicit in (m.axis_types or ())]
    if not explicit:
        return run(*flat)[0]
    mesh = explicit[0]
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto)

    @jax.jit
    def call(*flat):
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(types)):
            results, specs = run(*(jax.sharding.reshard(x, P(*(None,) * x.ndim)) for x in flat))
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        return list(map(jax.sharding.reshard, results, shardings))

    return call(*flat)


def devices_of(mesh: Any, mesh_axes: Any, rank: int) -> Devices | None:
    """The devices that the user means, or None; complains if that makes no sense."""
    if mesh is None:
        if mesh_axes is not None:
            raise TilingError(
                f"`mesh_axes` (={mesh_axes!r}) needs `mesh`: pass the mesh whose axes these are"
            )
        return None
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TilingError(
            f"`mesh` (a {type(mesh).__name__}) must be a `jax.sharding.Mesh`, as `jax.make_mesh` "
            "makes it"
        )
    known = tuple(mesh.axis_names)
    if mesh_axes is None or isinstance(mesh_axes, str) or not isinstance(mesh_axes, Sequence):
        raise TilingError(
            f"`mesh_axes` (={mesh_axes!r}) must be a tuple with one entry per tiled axis: the name "
            f"of an axis of `mesh`, which has {known}, or None for an axis that stays on each "
            "device"
        )
    names = tuple(mesh_axes)
    if len(names) != rank:
        raise TilingError(
            f"`mesh_axes` (={names}) must have one entry per tiled axis, and `in_axes` has {rank}: "
            "use None for an axis that stays on each device"
        )
    for name in names:
        if name is not None and name not in known:
            raise TilingError(f"`mesh_axes` (={names}) names {name!r}, but `mesh` has {known}")
        if name is not None and names.count(name) > 1:
            raise TilingError(
                f"`mesh_axes` (={names}) names {name!r} twice: one mesh axis can hold one tiled "
                "axis"
            )
    if all(name is None for name in names):
        raise TilingError(
            f"`mesh_axes` (={names}) names no axis of `mesh`, which has {known}: name one, or "
            "leave out `mesh`"
        )
    # Between regions, XLA decides where an array lives: none has a sharding as part of its type.
    automatic = (AxisType.Auto,) * len(known)
    if isinstance(mesh, AbstractMesh):
        return Devices(AbstractMesh(mesh.axis_sizes, known, axis_types=automatic), names)
    return Devices(Mesh(mesh.devices, known, axis_types=automatic), names)


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
    """Part `[lo, hi)` of its block, from each source to the device `-distance` away from it."""

    distance: int
    pairs: tuple[tuple[int, int], ...]
    lo: int
    hi: int


@dataclasses.dataclass(frozen=True)
class Halo:
    """What devices read of each other along one dimension.

    Each holds its block with `before` and `after` more positions around it.
    """

    dim: int
    blocks: Blocks
    hops: tuple[Hop, ...]
    before: int
    after: int

    @classmethod
    def of(cls, dim: int, blocks: Blocks, window: Window) -> Halo:
        """The halo for windows that are given for the tiles of one device after the other.

        >>> window = Window(0, np.array([0, 3, 7, 10]), 6)  # those at the border moved inwards
        >>> Halo.of(0, Blocks("rows", 16, 4), window).hops[0]
        Hop(distance=-1, pairs=((0, 1), (1, 2), (2, 3)), lo=2, hi=4)
        """
        count = blocks.devices
        starts = _per_device(window.starts, count)
        reads = [(int(s.min()), int(s.max()) + window.size) for s in starts]
        hops = []
        for distance in range(1 - count, count):
            parts = {}
            for i in range(count):
                if distance and 0 <= (j := i + distance) < count:
                    lo = max(0, reads[i][0] - blocks.start(j))
                    hi = min(blocks.owned[j], reads[i][1] - blocks.start(j))
                    if lo < hi:
                        parts[j, i] = lo, hi
            if parts:
                lo, hi = min(p[0] for p in parts.values()), max(p[1] for p in parts.values())
                hops.append(Hop(distance, tuple(parts), lo, hi))
        halo = cls(dim, blocks, tuple(hops), 0, 0)
        before = max((-p for h in hops for p in halo._places(h)), default=0)
        ends = (p + h.hi - h.lo for h in hops for p in halo._places(h))
        after = max(ends, default=0) - blocks.size
        return dataclasses.replace(halo, before=max(0, before), after=max(0, after))

    @property
    def size(self) -> int:
        """Positions that each device holds."""
        return self.before + self.blocks.size + self.after

    def origins(self, tiles: int) -> np.ndarray:
        """For each tile of each device, the position at which the array of its device begins."""
        starts = [self.blocks.start(i) - self.before for i in range(self.blocks.devices)]
        return np.repeat(np.array(starts, np.int64), tiles // self.blocks.devices)

    def fill(self, x: Array) -> Array:
        """A device's block with its halo."""
        if not self.hops:
            return x
        shape = list(x.shape)
        shape[self.dim] = self.size
        own = Hop(0, (), 0, self.blocks.size)
        out = jnp.zeros(shape, x.dtype)
        # From the first to the last: a position that a block shares with the next is the next's.
        for hop in sorted([*self.hops, own], key=lambda h: h.distance):
            piece = lax.slice_in_dim(x, hop.lo, hop.hi, axis=self.dim)
            if hop.distance:
                piece = lax.ppermute(piece, self.blocks.name, hop.pairs)
            out = lax.dynamic_update_slice_in_dim(out, piece, self._place(hop), self.dim)
        return out

    def fold(self, x: Array) -> Array:
        """The transpose: what was added up in the halo is added to the blocks of its owners."""
        if not self.hops:
            return x
        out = lax.slice_in_dim(x, self.before, self.before + self.blocks.size, axis=self.dim)
        for hop in self.hops:
            piece = lax.dynamic_slice_in_dim(x, self._place(hop), hop.hi - hop.lo, self.dim)
            back = tuple((j, i) for i, j in hop.pairs)
            piece = lax.ppermute(piece, self.blocks.name, back)
            padding = [(0, 0, 0)] * x.ndim
            padding[self.dim] = (hop.lo, self.blocks.size - hop.hi, 0)
            out = out + lax.pad(piece, jnp.zeros((), x.dtype), padding)
        if self.blocks.uneven:
            own = _of_device(self.blocks.owned, self.blocks.name)
            mine = lax.broadcasted_iota(np.int32, out.shape, self.dim) < own
            out = jnp.where(mine, out, jnp.zeros((), out.dtype))
        return out

    def _places(self, hop: Hop) -> list[int]:
        start = self.blocks.start
        return [
            self.before + start(i + hop.distance) - start(i) + hop.lo
            for i in range(self.blocks.devices)
        ]

    def _place(self, hop: Hop):
        return _of_device(self._places(hop), self.blocks.name)


def _per_device(values: np.ndarray, devices: int) -> np.ndarray:
    """One row of values per device; a single value is the same on all."""
    if len(values) == 1:
        return np.broadcast_to(values, (devices, 1))
    return values.reshape(devices, -1)


def _of_device(values: Sequence[int], name: str):
    """The value of this device, a plain number where they are all the same."""
    if len(set(values)) == 1:
        return int(values[0])
    return jnp.asarray(values, np.int32)[lax.axis_index(name)]


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

    @property
    def elements(self) -> int:
        """Elements that one device sends, if none of its neighbours is missing."""
        return sum(n for n, _, _ in self._messages())

    @property
    def messages(self) -> int:
        """Messages that one device sends, if none of its neighbours is missing."""
        return sum(1 for _ in self._messages())

    def elements_in_all(self, devices: int) -> int:
        """Elements that all devices of the mesh send."""
        return sum(n * senders * devices // row for n, senders, row in self._messages())

    def _messages(self):
        """Elements of a message, how many devices along the axis send one, and how many it has."""
        shape = list(self.shape)
        for halo in self.halos:
            for hop in halo.hops:
                shape[halo.dim] = hop.hi - hop.lo
                yield math.prod(shape), len(hop.pairs), halo.blocks.devices
            shape[halo.dim] = halo.size
