"""A mesh as the user gives it, and how arrays lie on it in blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._errors import TilingError
from .halos import Blocks

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
            d: Blocks(name, n, self.mesh.shape[name])
            for d, (n, a) in enumerate(zip(shape, axes, strict=True))
            if (name := self.name(a)) is not None
        }

    def split(self, x: Array, axes: Sequence[int | None]) -> Array:
        """A whole array, cut into blocks, one per device."""
        if isinstance(self.mesh, AbstractMesh):
            raise TilingError(
                f"`mesh` (={self.mesh}) has no devices: only `jaxtile.explain` takes an abstract "
                "mesh; `jax.make_mesh` makes one that can run"
            )
        blocks = self.blocks(x.shape, axes)
        if any(b.uneven for b in blocks.values()):
            # JAX has no sharding for blocks that overlap: each device needs the whole array.
            x = jax.device_put(x, NamedSharding(self.mesh, P()))
            for d, b in blocks.items():
                x = b.split(x, d)
        return jax.device_put(x, NamedSharding(self.mesh, self.spec(axes)))

    def even(self, shape: Sequence[int], axes: Sequence[int | None]) -> P:
        """How a whole array is distributed, if that is possible."""
        uneven = any(b.uneven for b in self.blocks(shape, axes).values())
        return P() if uneven else self.spec(axes)

    def join(self, x: Array, shape: Sequence[int], axes: Sequence[int | None]) -> Array:
        """The whole array, from its blocks."""
        for d, b in self.blocks(shape, axes).items():
            x = b.join(x, d)
        return x


def without_shardings(
    run: Callable[..., tuple[list[Array], list[P]]],
    flat: Sequence[Any],
    plain: Callable[..., Any] | None,
) -> list[Array]:
    """What `run` returns, called so that no array in it has a sharding as part of its type.

    With JAX's explicit meshes, the default of `jax.make_mesh`, types have shardings, and equations
    must agree on them. Those of a tiled function do not: so its arguments lose their shardings, and
    its results get those that the plain function's have; or, without one, those that `run` returns
    beside them.
    """
    if any(isinstance(x, jax.Ref) or not hasattr(jax.typeof(x), "shape") for x in flat):
        return run(*flat)[0]  # a mutable array, which is refused there
    flat = [jnp.asarray(x) for x in flat]
    contexts = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in flat)]
    explicit = [m for m in contexts if AxisType.Explicit in (m.axis_types or ())]
    if not explicit:
        return run(*flat)[0]
    mesh = explicit[0]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    types = {name: AxisType.Auto for name, kind in kinds if kind is AxisType.Explicit}

    @jax.jit
    def call(*flat: Array) -> list[Array]:
        expected = [] if plain is None else jax.tree.leaves(jax.eval_shape(plain, *flat))
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(types)):
            results, specs = run(*(jax.sharding.reshard(x, P(*(None,) * x.ndim)) for x in flat))
        if plain is not None:
            specs = [x.sharding.spec for x in expected]
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
    names = _checked(mesh_axes, known, rank)
    # Between regions, XLA decides where an array lives: none has a sharding as part of its type.
    automatic = (AxisType.Auto,) * len(known)
    if isinstance(mesh, AbstractMesh):
        return Devices(AbstractMesh(mesh.axis_sizes, known, axis_types=automatic), names)
    return Devices(Mesh(mesh.devices, known, axis_types=automatic), names)


def _checked(mesh_axes: Any, known: tuple[str, ...], rank: int) -> tuple[str | None, ...]:
    """`mesh_axes`, if each of `rank` tiled axes has a mesh axis of its own, or none."""
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
    return names
