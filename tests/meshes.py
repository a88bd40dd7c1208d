"""Meshes of virtual devices, for tests."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .support import normal

AXES = (None, (1, 2))
WEIGHTS = [normal(i, 3, 3, 2, 2) for i in range(3)]


def devices(*shape: int, names=("rows", "cols"), **options):
    """A mesh of some of the devices."""
    some = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names[: len(shape)], devices=some, **options)


def on(*shape: int) -> dict:
    return {"mesh": devices(*shape), "mesh_axes": ("rows", "cols")}


def sharded(mesh, x):
    return jax.device_put(x, NamedSharding(mesh, P(None, "rows", "cols")))
