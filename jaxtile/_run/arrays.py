"""Lists of arrays, of some of which derivatives are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.values import Value

T = TypeVar("T")
Array = jax.Array
Arrays = Sequence[Array]
Cotangents = Sequence[Array | None]
Wanted = tuple[Sequence[bool], Sequence[bool]]
"""Of which inputs and of which globals cotangents are wanted."""
Tangents = tuple[Cotangents, Cotangents]
"""Of inputs and of globals; None where there is none."""
Pullback = Callable[[Any], tuple[list[Array], list[Array]]]


def there(arrays: Iterable[Array | None]) -> list[Array]:
    return [x for x in arrays if x is not None]


def select(items: Iterable[T], wanted: Sequence[bool]) -> list[T]:
    return [x for x, w in zip(items, wanted, strict=True) if w]


def like(
    values: Sequence[Value], wanted: Sequence[bool], cotangents: Iterable[Array]
) -> list[Array | None]:
    """Cotangents in the types of the values, None where none is wanted."""
    found = iter(cotangents)
    return [
        next(found).astype(v.aval.dtype) if w else None for v, w in zip(values, wanted, strict=True)
    ]


def added(
    cotangents: Cotangents,
    begun: Cotangents,
    add: Callable[[Array, Array], Array] = jnp.add,
) -> list[Array | None]:
    """Cotangents, and what was begun of their sums."""
    return [
        b if a is None else a if b is None else add(b, a)
        for a, b in zip(cotangents, begun, strict=True)
    ]


def fill_in(items: Arrays, wanted: Sequence[bool], replacements: Iterable[Array]) -> list[Array]:
    found = iter(replacements)
    return [next(found) if w else x for x, w in zip(items, wanted, strict=True)]


def partly(
    function: Callable[..., Any], arguments: Sequence[Arrays], wanted: Sequence[Sequence[bool]]
) -> tuple[Callable[..., Any], list[list[Array]]]:
    """A function of lists of arrays as a function of the wanted ones, and these."""

    def of_some(*some: Arrays) -> Any:
        return function(*map(fill_in, arguments, wanted, some))

    return of_some, list(map(select, arguments, wanted))


def pulled(
    function: Callable[..., Any], arguments: Sequence[Arrays], wanted: Sequence[Sequence[bool]]
) -> tuple[Any, Callable[[Any], Any]]:
    """What a function of lists of arrays returns, and the pullback to the wanted ones."""
    of_some, primals = partly(function, arguments, wanted)
    return jax.vjp(of_some, *primals)


def pushed(
    function: Callable[..., Any], arguments: Sequence[Arrays], tangents: Sequence[Cotangents]
) -> tuple[Any, Any]:
    """What a function of lists of arrays returns, and its tangents."""
    wanted = [[t is not None for t in each] for each in tangents]
    of_some, primals = partly(function, arguments, wanted)
    return jax.jvp(of_some, tuple(primals), tuple(map(select, tangents, wanted)))


def cotangent_of(x: Any, cotangent: Array | None) -> Any:
    """The cotangent of a result, as a pullback wants it: zeros if there is none."""
    return zero_cotangent(x) if cotangent is None else cotangent.astype(x.dtype)


def zero_cotangent(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
