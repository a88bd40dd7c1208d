"""A GPU that is not there, to compile for: `jaxtile.plan(..., device="NVIDIA H200")`.

JAX's CUDA plugin can compile for a GPU from a description of it, on a machine that has none. So
the bytes that a step needs on a large GPU can be had on a laptop. It cannot time algorithms there,
so the program is compiled without autotuning; on the GPU itself the bytes may differ a little.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from .._memory.compiled import Bytes
from .._run.ordering import on_host, to_host

# The chip, as XLA's `GpuTargetConfigProto` wants it.
_HOPPER = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: %(bandwidth)d
  device_memory_size: %(memory)d
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "%(name)s"
"""
_KNOWN = {
    "NVIDIA H200": {"bandwidth": 4_800_000_000_000, "memory": 150_000_000_000},
    "NVIDIA H100": {"bandwidth": 3_350_000_000_000, "memory": 85_000_000_000},
}


class NoDeviceError(RuntimeError):
    """JAX cannot compile for a device that is not there."""


def absent_device(device: str) -> Any:
    """A device to compile for: one that is known, or of a file with a target configuration."""
    if device in _KNOWN:
        text = _HOPPER % {"name": device, **_KNOWN[device]}
    elif pathlib.Path(device).is_file():
        text = pathlib.Path(device).read_text()
    else:
        raise NoDeviceError(
            f"`device` (={device!r}) must be one of {', '.join(_KNOWN)}, or a file with XLA's "
            "description of a GPU (a `GpuTargetConfigProto` as text)"
        )
    try:
        found = topologies.get_topology_desc(
            "", platform="cuda", target_config=text, topology="1x1x1"
        )
    except (NotImplementedError, RuntimeError) as error:
        raise NoDeviceError(
            f"planning for {device} without one needs JAX's CUDA plugin, which could not be used "
            f"({str(error).splitlines()[0]}): install it with `pip install 'jax[cuda12]'`, and set "
            "JAX_PLATFORMS=cpu on a machine without a GPU"
        ) from error
    return found.devices[0]


def placed(tree: Any, device: Any) -> Any:
    """The shapes of arrays, as if they were in a device's memory."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=sharding
        )

    return jax.tree.map(place, tree)


def moving(step: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The step of arguments that are all on the device: it moves to host memory what is to lie
    there. JAX (0.10 to 0.12) has no arguments in the host memory of a GPU that is not there.
    """
    hosted = jax.tree.map(on_host, tuple(args))
    if not any(jax.tree.leaves(hosted)):
        return step

    def moved(*args: Any) -> Any:
        return step(*jax.tree.map(lambda x, host: to_host(x) if host else x, args, hosted))

    return moved


def bytes_moved(args: Sequence[Any]) -> int:
    """How many bytes such a step is to move: the compiled program has them in both places."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tuple(args)) if on_host(x))


def as_moved(found: Bytes, moved: int) -> Bytes:
    """The bytes of a step whose arguments lie in host memory, from those of one that is to move so
    many there. What it did not move it reads whole, so that is on the device in any case.

    Limit: results that wait in host memory cannot be told from arguments that were moved.
    """
    there = min(moved, found.host)
    return dataclasses.replace(found, arguments=found.arguments - there, host=found.host - there)
