"""What JAX offers without jaxtile, to compare with: by name, like a policy.

`plain` stores everything. `jax_blocks` is `jax.checkpoint` with the ends of blocks saved, and
`jax_whole` with nothing saved. `xla_sharding` leaves one image to the compiler, its rows on all
devices; `mesh` is jaxtile on the same devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxtile

from .problems import Problem
from .third_party import BLOCK, NETWORKS, with_named_blocks

PLAIN = "plain"
SHARDED = ("xla_sharding", "mesh")
NAMES = (PLAIN, "jax_blocks", "jax_whole", *SHARDED)

_UNET_ENDS = ("d1a", "d2a", "d3a", "d4a", "u3b", "u2b", "u1b", "u0b")
_RESNET_BLOCKS = [(i, k) for i, n in enumerate((3, 4, 6, 3), start=1) for k in range(n)]
BLOCKS = {
    "vgg16": tuple(f"pool{i}" for i in range(1, 6)),
    "unet": _UNET_ENDS,
    "resnet50": ("maxpool", *(f"layer{i}.{k}.bias_relu" for i, k in _RESNET_BLOCKS)),
    "alexnet": ("pool1", "pool2"),
    "local_cnn": ("L0.filterNL",),
    **dict.fromkeys(NETWORKS, (BLOCK,)),
}
"""Values at the ends of a model's blocks, or at their starts, in networks of other libraries."""
IN_TORCH = ("vgg16", "resnet50", "unet")
"""Models that `torch_models.py` has too."""


def applied(name: str, model: str, problem: Problem) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss under a baseline, and the arguments, placed on the devices."""
    if name == "jax_blocks":
        policy = jax.checkpoint_policies.save_only_these_names(*BLOCKS[model])
        loss = problem.loss
        if model in NETWORKS:
            network = NETWORKS[model](problem.arguments[2].dtype)
            loss = with_named_blocks(network, loss)
        return jax.checkpoint(loss, policy=policy), problem.arguments
    if name == "jax_whole":
        return jax.checkpoint(problem.loss), problem.arguments
    if name not in SHARDED:
        return problem.loss, problem.arguments
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    *others, image = problem.arguments[:3]
    rows = PartitionSpec(None, "rows")
    placed = (
        *(jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in others),
        jax.device_put(image, NamedSharding(mesh, rows)),
        *(
            _like_rows(x, axes, mesh)
            for x, axes in zip(problem.arguments[3:], problem.in_axes[3:], strict=True)
        ),
    )
    if name == "xla_sharding":
        return problem.loss, placed
    on_mesh = tuple("rows" if axis == 1 else None for axis in problem.in_axes[2])
    tiled = jaxtile.checkpoint(
        problem.loss, in_axes=problem.in_axes, mesh=mesh, mesh_axes=on_mesh, tiles="whole"
    )
    return tiled, placed


def _like_rows(x: jax.Array, axes: Any, mesh: Mesh) -> jax.Array:
    """Labels: a map is split as the image is, if it can be."""
    split = axes is not None and x.shape[1] % mesh.size == 0
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*((None, "rows") if split else ()))))
