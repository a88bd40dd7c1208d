"""The comparison of a tiled function with the plain one, and pieces to build functions from."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtile

from .interpreter import interpret

TOLERANCE = 1e-12
"""Largest difference allowed, relative to the largest element of the plain result."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def conv(x, w, stride=1, padding="SAME", **kwargs):
    strides = (stride,) * (x.ndim - 2)
    letters = "DHW"[-(x.ndim - 2) :]
    dims = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=dims, **kwargs)


def max_pool(x, size=2, stride=None, padding="VALID"):
    window = (1, *(size,) * (x.ndim - 2), 1)
    strides = (1, *(stride or size,) * (x.ndim - 2), 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def words(case: object) -> str:
    """The name of a case, the same in all processes: functions have no addresses, and sets are in
    order.
    """

    def ordered(members: re.Match) -> str:
        return "{" + ", ".join(sorted(members[1].split(", "))) + "}"

    return re.sub(r"(?<=frozenset\(){(.*?)}", ordered, re.sub(r" at 0x[0-9a-f]+", "", str(case)))


def parametrize_few(names, cases, always: int = 1, **options):
    """`pytest.mark.parametrize`, with all cases but the first few among the long tests."""
    several = not isinstance(names, str) or "," in names

    def long(case):
        values = case if several else (case,)
        return pytest.param(*values, marks=pytest.mark.slow)

    cases = list(cases)
    found = [*cases[:always], *(long(case) for case in cases[always:])]
    return pytest.mark.parametrize(names, found, **options)


def scalar(outputs) -> jax.Array:
    """A number that depends on every element of every float output, each in its own way."""
    total = 0.0
    for out in map(jnp.asarray, jax.tree.leaves(outputs)):
        if jnp.issubdtype(out.dtype, jnp.floating):
            weight = 1 + 0.1 * jnp.arange(out.size).reshape(out.shape) / max(1, out.size)
            total += jnp.sum(jnp.sin(out * weight))
    return total


def results(fun, args, *, jit: bool = True):
    """Gradients of a scalar of the outputs with respect to all float arguments, and the outputs."""
    run, leaves = _derivatives(fun, args)
    return (jax.jit(run) if jit else run)(leaves)


def _derivatives(fun, args):
    flat, tree = jax.tree.flatten(args)
    wanted = [i for i, x in enumerate(flat) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)]

    def loss(leaves):
        full = list(flat)
        for i, leaf in zip(wanted, leaves, strict=True):
            full[i] = leaf
        out = fun(*jax.tree.unflatten(tree, full))
        return scalar(out), out

    return jax.grad(loss, has_aux=True), [flat[i] for i in wanted]


_PLAIN: dict[tuple[int, ...], tuple] = {}


def plain_results(fun, args):
    """The same of the plain function, by NumPy, which compiles nothing; the latest are kept."""
    key = (id(fun), *map(id, jax.tree.leaves(args)))
    if key not in _PLAIN:
        if len(_PLAIN) == 16:
            del _PLAIN[next(iter(_PLAIN))]
        run, leaves = _derivatives(fun, args)
        _PLAIN[key] = fun, args, interpret(run, leaves)  # while these live, so do their numbers
    return _PLAIN[key][2]


def assert_close(got, want, tolerance: float = TOLERANCE) -> None:
    """Every leaf of two pytrees: same shape, same type, and elements that differ by rounding only.

    Differences are relative to the largest element of the leaf, but at least to a hundredth of the
    largest of all: the gradient of a bias before a batch norm is zero but for rounding, and
    rounding has no relative error.
    """
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    floor = 1e-2 * max((_largest(b) for b in want_leaves), default=0.0)
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
            continue
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
        error = _largest(difference) / (max(_largest(b), floor) or 1.0)
        assert error <= tolerance, f"relative error {error:.1e} in an array of shape {b.shape}"


def _largest(x) -> float:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return float(np.nanmax(np.abs(np.asarray(x, np.float64)), initial=0)) if inexact else 0.0


def assert_same(fun, *args, in_axes, tolerance: float = TOLERANCE, **schedule) -> None:
    """The tiled function has the plain function's outputs and gradients.

    The plain function is run by NumPy for speed. Where the two differ, what counts is the plain
    function run by JAX, op by op and not under `jit`: XLA may round one value differently in two
    places of a program, and JAX's gradient of a maximum looks for the elements that *equal* it.
    """
    tiled = jaxtile.checkpoint(fun, in_axes=in_axes, **schedule)
    got = results(tiled, args)
    try:
        assert_close(got, plain_results(fun, args), tolerance)
    except AssertionError:
        assert_close(got, results(fun, args, jit=False), tolerance)
