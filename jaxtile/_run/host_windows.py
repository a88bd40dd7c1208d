"""Windows of arrays in host memory, read and written.

They are slices. But to JAX a slice under `vmap` is a gather, and its update a scatter, of which
there are none in host memory, and the transpose of a slice makes zeros in the other memory. Here
what `vmap` adds is one more dimension of the same window, if it is the same for all examples; else
they are taken one by one. A transpose is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._errors import TilingError
from .._rules.manual import alike

Array = jax.Array


def read(x: Array, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
    """A window; it is in host memory too."""
    return _read_p.bind(*alike([x, *map(jnp.int32, starts)], ()), slice_sizes=tuple(sizes))


def write(x: Array, tile: Array, starts: Sequence[Any]) -> Array:
    """The array with another window; all is in host memory."""
    return _write_p.bind(*alike([x, tile, *map(jnp.int32, starts)], ()))


def _read(x: Array, *starts: Any, slice_sizes: Sequence[int]) -> Array:
    return lax.dynamic_slice(x, starts, slice_sizes, allow_negative_indices=False)


def _write(x: Array, tile: Array, *starts: Any) -> Array:
    return lax.dynamic_update_slice(x, tile, starts, allow_negative_indices=False)


def _read_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    (x, *starts), (d, *of_starts), sizes = operands, dims, params["slice_sizes"]
    if all(of is None for of in of_starts):
        return read(x, _with(starts, d, 0), _with(sizes, d, x.shape[d])), d

    def one(example: Any) -> Array:
        k, starts = example
        if d is None:
            found = read(x, starts, sizes)
        else:
            found = lax.squeeze(read(x, _with(starts, d, k), _with(sizes, d, 1)), [d])
        return jax.device_put(found, jax.memory.Space.Device)

    found = lax.map(one, _examples(starts, of_starts))
    return jax.device_put(found, jax.memory.Space.Host), 0


def _write_batch(operands: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    (_, _, *starts), (_, _, *of_starts) = operands, dims
    size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
    x, tiles = (
        batching.bdim_at_front(a, d, size) for a, d in zip(operands[:2], dims[:2], strict=True)
    )
    if all(of is None for of in of_starts):
        return write(x, tiles, [0, *starts]), 0

    def one(x: Array, example: Any) -> tuple[Array, None]:
        k, starts = example
        tile = read(tiles, [k, *[0] * len(starts)], [1, *tiles.shape[1:]])
        return write(x, tile, [k, *starts]), None

    return lax.scan(one, x, _examples(starts, of_starts))[0], 0


def _with(numbers: Sequence[Any], d: int, number: Any) -> list[Any]:
    """One more, of the dimension that `vmap` adds."""
    return [*numbers[:d], number, *numbers[d:]]


def _examples(starts: Sequence[Any], dims: Sequence[Any]) -> tuple[Array, list[Array]]:
    """The number of each example, and where its window begins."""
    size = next(x.shape[d] for x, d in zip(starts, dims, strict=True) if d is not None)
    each = [batching.bdim_at_front(x, d, size) for x, d in zip(starts, dims, strict=True)]
    return jnp.arange(size), each


def _read_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *starts), moved = primals, tangents[0]
    found = _read_p.bind(x, *starts, **params)
    if type(moved) is ad.Zero:
        return found, ad.Zero(jax.typeof(found).to_tangent_aval())
    return found, _read_p.bind(moved, *starts, **params)


def _write_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x, tile, *starts), (of_x, of_tile, *_) = primals, tangents
    found = write(x, tile, starts)
    if type(of_x) is ad.Zero and type(of_tile) is ad.Zero:
        return found, ad.Zero(jax.typeof(found).to_tangent_aval())
    return found, write(_there(of_x), _there(of_tile), starts)


def _there(tangent: Any) -> Array:
    return jax.device_put(ad.instantiate_zeros(tangent), jax.memory.Space.Host)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TilingError(
        "the gradient of a gradient is not defined where values are offloaded to host memory. What "
        "to do: keep them on the device; or use forward mode over the gradient (`jax.hessian`, "
        "`jax.jvp` of `jax.grad`), which is defined"
    )


_read_p, _write_p = Primitive("jaxtile_read_on_host"), Primitive("jaxtile_write_on_host")
for _primitive, _function, _of_lax in (
    (_read_p, _read, lax.dynamic_slice_p),
    (_write_p, _write, lax.dynamic_update_slice_p),
):
    _primitive.def_impl(_function)
    _primitive.def_abstract_eval(
        lambda *avals, p=_of_lax, **params: p.abstract_eval(*avals, **params)[0]
    )
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=False))
    ad.primitive_transposes[_primitive] = _refuse
ad.primitive_jvps[_read_p], ad.primitive_jvps[_write_p] = _read_jvp, _write_jvp
batching.primitive_batchers[_read_p] = _read_batch
batching.primitive_batchers[_write_p] = _write_batch
