"""When arrays are made, and in which memory they lie.

A compiler may compute whatever it likes as early as it likes, and hold it; and what it has computed
twice it may compute once. Both undo a recomputation. So values are made to wait for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._platform import on_early_cpu
from . import host_windows
from .arrays import Array, Arrays, Cotangents, there


def after(tree: Any, arrays: Cotangents) -> Any:
    """The same values, but only once these arrays exist; the compiler cannot tell that they are the
    same, so it computes again what was computed from them.
    """
    waited_for = there(arrays)
    if on_early_cpu():
        zero = _zero_of(waited_for, jax.tree.leaves(tree))
        return tree if zero is None else jax.tree.map(lambda x: _minus(x, zero), tree)
    tree, _ = lax.optimization_barrier((tree, waited_for))
    return tree


def settled(arrays: Arrays) -> Arrays:
    """The same arrays; the compiler cannot make what computes them part of what reads them."""
    return arrays if on_early_cpu() else lax.optimization_barrier(list(arrays))


def one_array(x: Array) -> Array:
    """The same array, in which all that read it find the same bits: settled where barriers count.
    Elsewhere the compiler computes no further than to a choice, even one that it makes never.
    """
    if not on_early_cpu() or not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
        return settled([x])[0]
    element = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    never = jnp.isnan(element) & jnp.isfinite(element)
    return lax.cond(never, jnp.zeros_like, lambda x: x, x)


def _minus(x: Array, zero: Array) -> Array:
    moves = jnp.issubdtype(x.dtype, jnp.floating) and not on_host(x)
    return x - zero.astype(x.dtype) if moves else x


def _zero_of(*groups: Sequence[Array]) -> Array | None:
    """A zero that exists only once the first floating-point array of each group does.

    It is a sum of `x - x` for an element `x` of each, which the compiler cannot know to be 0: it is
    NaN for an infinite `x`, and then not used. The array is settled: else XLA computes the element
    once more, and for that holds whatever the array was computed from.
    """
    zeros = []
    for arrays in groups:
        for x in arrays:
            if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
                element = _element(x).reshape(()).astype(jnp.float32)
                zeros.append(jnp.where(jnp.isfinite(element), element - element, 0))
                break
    return sum(zeros[1:], zeros[0]) if zeros else None


def _element(x: Array) -> Array:
    """The first one of an array, on the device."""
    if on_host(x):
        return to_device(host_windows.read(x, (0,) * x.ndim, (1,) * x.ndim))
    (x,) = settled([x])
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)


def zeros_after(*groups: Cotangents) -> Callable[..., Array]:
    """`jnp.zeros`, but made only once the first array of each group exists.

    Zeros depend on nothing, so XLA may allocate the accumulators of all loops before the first one
    runs; and it makes all zeros of a shape one array, which a loop that adds to them must copy. A
    cotangent may be a constant, and its zero too, so a second group must be something that is not.

    Zeros with another `number` are other zeros to XLA: arrays of one shape and one loop, which is
    needed where a copy is slow.
    """
    zero = _zero_of(*map(there, groups))

    def zeros(shape: Sequence[int], dtype: Any, number: int = 1) -> Array:
        if zero is None:
            return jnp.zeros(shape, dtype)
        return lax.broadcast((zero if number == 1 else zero * number).astype(dtype), shape)

    return zeros


def to_host(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device)


def on_host(x: Any) -> bool:
    """Does an array lie in host memory? JAX's types say so."""
    return jax.typeof(x).memory_space is jax.memory.Space.Host


def host_of(device: jax.Device) -> NamedSharding:
    """The host memory of a device, as arrays and shapes of arrays are said to lie there.

    It is a mesh of one device. A `ShapeDtypeStruct` with a `SingleDeviceSharding` would do for a
    compiler, but when JAX traces with it, its type says device memory (JAX 0.10 to 0.12). Windows
    are then not copied, and XLA computes in host memory with whatever reads them.
    """
    return NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec(), memory_kind="pinned_host")


def typed(shapes: Any) -> Any:
    """Arrays and shapes of arrays, with the memory where they lie in their types."""

    def place(x: Any) -> Any:
        found = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        if found is None or found.memory_kind != "pinned_host" or len(found.device_set) != 1:
            return x
        return x.update(sharding=host_of(*found.device_set))

    return jax.tree.map(place, shapes)


def to_device_after(x: Array, cotangents: Cotangents) -> Array:
    """A copy in device memory, made only once the cotangents exist."""
    if on_early_cpu():  # a CPU has one memory: there is nothing to wait for
        return after(to_device(x), cotangents)
    return to_device(after(x, cotangents))
