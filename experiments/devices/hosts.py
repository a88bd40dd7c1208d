"""One run on many devices, and on many hosts.

Every process runs the same program on the same config and reads the same batches; each puts its
part of an image onto its devices, and all hold the weights. The first process alone writes.

    python -m experiments.train ... --coordinator=node0:1234 --processes=2 --process=0   # on node0
    python -m experiments.train ... --coordinator=node0:1234 --processes=2 --process=1   # on node1

Under SLURM and Open MPI the flags are not needed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax._src.distributed import global_state  # it has no public name
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..program.config import ConfigError

_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of the first process")
_PROCESSES = flags.DEFINE_integer("processes", None, "processes of this run")
_PROCESS = flags.DEFINE_integer("process", None, "which of them this is, from 0")

_HEARTBEAT_SECONDS = 120  # JAX aborts then, without a sentence: `Watch` ends a run before
_CLUSTERS = (
    ("SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"),
)


def join() -> Any:
    """Find the other processes of this run, if flags or a cluster's environment say there are.

    Returns what JAX knows of them, without starting a device: `process_id`, `num_processes`,
    `coordinator_address` and `client`, with which they share small texts.
    """
    given = (_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    if any(v is not None for v in given):
        if None in given or not 0 <= _PROCESS.value < _PROCESSES.value:
            raise ConfigError(
                f"--coordinator (={given[0]}), --processes (={given[1]}) and --process "
                f"(={given[2]}) belong together, and the last is less than the one before"
            )
        arguments = {
            "coordinator_address": given[0],
            "num_processes": given[1],
            "process_id": given[2],
        }
    elif any(job in os.environ and int(os.environ.get(n, 1)) > 1 for job, n in _CLUSTERS):
        arguments = {}
    else:
        return global_state
    # It would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS, initialization_timeout=120
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the {given[1] or ''} processes of this run did not find each other at "
            f"{given[0] or 'the address that the cluster gives'}: {str(error).splitlines()[0]}"
        ) from error
    if global_state.process_id > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return global_state


def find_devices(shape: tuple[int, ...]) -> Devices:
    """The devices of a run, so many along rows and columns of the image.

    (): one device or, with several processes, all of them along rows.
    """
    found, processes = jax.devices(), jax.process_count()
    if not shape and processes == 1:
        return Devices()
    shape = tuple(shape) or (len(found), 1)
    if len(shape) != 2 or min(shape) < 1:
        raise ConfigError(f"`mesh` (={shape}) must be devices along rows and columns, as (4, 2)")
    number = shape[0] * shape[1]
    if number > len(found) or (processes > 1 and number != len(found)):
        raise ConfigError(
            f"`mesh` (={shape}) is of {number} devices, and {len(found)} are there"
            + (" in all processes; all must be used" if processes > 1 else "")
        )
    return Devices(Mesh(np.array(found[:number]).reshape(shape), ("rows", "cols")))


class Devices:
    """One device, or a mesh of them, over rows and columns of the image."""

    def __init__(self, mesh: Mesh | None = None):
        self.mesh = mesh
        self.processes, self.is_first = jax.process_count(), jax.process_index() == 0

    def options(self, axes: tuple[Any, ...]) -> dict[str, Any]:
        """For `jaxtile.checkpoint`, with these tiled axes of the images."""
        if self.mesh is None:
            return {}
        on_mesh = tuple({1: "rows", 2: "cols"}.get(axis) for axis in axes)
        return {"mesh": self.mesh, "mesh_axes": on_mesh}

    def tiles(self, grid: list[int]) -> list[int]:
        """A grid over the whole image (the last two of its axes), as one per device."""
        if self.mesh is None:
            return grid
        *first, rows, columns = grid
        each = [-(-n // d) for n, d in zip((rows, columns), self.mesh.devices.shape, strict=True)]
        return [*first, *each]

    @property
    def replicated(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding | None:
        """Of images or masks of this shape: in blocks, if they divide; other arrays everywhere."""
        if self.mesh is None:
            return None
        blocks = len(shape) >= 3 and not any(
            n % d for n, d in zip(shape[1:3], self.mesh.devices.shape, strict=True)
        )
        return (
            NamedSharding(self.mesh, PartitionSpec(None, "rows", "cols"))
            if blocks
            else (self.replicated)
        )

    def placed(self, x: np.ndarray) -> Any:
        """An array that every process has, as one array on all devices."""
        return x if self.mesh is None else _global(x, self.sharding(x.shape))

    def everywhere(self, tree: Any) -> Any:
        """Arrays that every process has, on every device."""
        if self.mesh is None:
            return jax.tree.map(jax.numpy.asarray, tree)
        return jax.tree.map(lambda x: _global(np.asarray(x), self.replicated), tree)

    def typed(self, shapes: Any, *, replicated: bool) -> Any:
        """Shapes with the places that arrays of them have."""

        def place(x: Any) -> Any:
            sharding = self.replicated if replicated else self.sharding(x.shape)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return shapes if self.mesh is None else jax.tree.map(place, shapes)

    def from_first(self, tree: Any) -> Any:
        """The first process's numbers, in all of them."""
        return tree if self.processes == 1 else multihost_utils.broadcast_one_to_all(tree)

    def made_by_first(self, make: Callable[[], str]) -> str:
        """A text that the first process makes, in all of them."""
        if self.processes == 1:
            return make()
        text = make().encode() if self.is_first else b""
        size = int(self.from_first(np.array(len(text), np.int32)))
        letters = np.frombuffer(text, np.uint8) if self.is_first else np.zeros(size, np.uint8)
        return np.asarray(self.from_first(letters)).astype(np.uint8).tobytes().decode()

    def gathered(self, text: str) -> list[str]:
        """The texts of all processes."""
        if self.processes == 1:
            return [text]
        sizes = multihost_utils.process_allgather(np.array(len(text.encode()), np.int32))
        letters = np.zeros(sizes.max(), np.uint8)
        letters[: len(text.encode())] = np.frombuffer(text.encode(), np.uint8)
        found = np.asarray(multihost_utils.process_allgather(letters))
        return [row[:n].tobytes().decode() for row, n in zip(found, sizes, strict=True)]

    def check_alike(self, settings: str) -> None:
        """Refuse in all processes if they were not started with the same settings."""
        if self.processes == 1:
            return
        mine = np.frombuffer(hashlib.sha256(settings.encode()).digest(), np.uint8)
        digests = multihost_utils.process_allgather(mine)
        other = [i for i, digest in enumerate(digests) if not np.array_equal(digest, digests[0])]
        if other:
            raise ConfigError(
                f"processes {other} of {self.processes} have other settings than process 0: start "
                "all with the same --config and the same --config.* flags"
            )

    def any(self, flag: bool) -> bool:
        """Is it so in any process?"""
        if self.processes == 1:
            return flag
        return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def _global(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
