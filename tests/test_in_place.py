"""Cotangents of an input in the place of the result's: exact, and one array less."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var

import jaxtile
from jaxtile._platform import on_early_cpu
from jaxtile._regions.tile import Column
from jaxtile._run import backwards, loop, ordering
from jaxtile._run.backwards import Into, put_in
from jaxtile.policy import Choice

from .support import assert_close, conv, normal, parametrize_few


def network(params, x):
    """Blocks with a skip connection around a wide kernel; their ends have names."""
    first, *blocks, last = params
    x = checkpoint_name(conv(x, first), "begin")
    for k, kernel in enumerate(blocks):
        y = jax.nn.softplus(checkpoint_name(conv(x, kernel), f"inner{k}"))
        y = y - y.mean((1, 2), keepdims=True)
        x = checkpoint_name(x + y, f"block{k}")
    return jnp.mean(jnp.sin(conv(x, last)) ** 2)


def arguments(height=8, width=12, channels=3):
    params = [normal(0, 1, 1, 2, channels)]
    params += [normal(k, 3, 3, channels, channels) for k in (1, 2)]
    params += [normal(3, 3, 3, channels, 2)]
    return params, normal(4, 2, height, width, 2)


class Blocks:
    """The ends of all blocks in one state, what they read kept, all on one grid."""

    def __init__(self, grid, state):
        self.base = Choice(grid)
        self.ends = self.base._replace(place=state or "device")

    def choose(self, outline):
        names = [p.name for p in outline.parts]
        ends = {name: self.ends for name in names if name.startswith("block")}
        others = [name for name in names if name.startswith("inner")]
        return {**ends, **dict.fromkeys(["begin", *others, ...], self.base)}


@functools.cache
def expected():
    return jax.jit(jax.value_and_grad(network, argnums=(0, 1)))(*arguments())


@parametrize_few(
    ("state", "grid", "shared"),
    [
        (None, (2, 4), True),
        ("restored", (2, 4), True),
        ("passing", (3, 4), False),
        ("passing", (2, 4), True),
        ("passing", (8, 12), True),
        (None, (1, 1), True),
    ],
    always=3,
)
def test_gradients_and_where_they_lie(state, grid, shared, monkeypatch):
    """Where all tiles are of one size, the cotangents of a skip connection share an array."""
    monkeypatch.setattr(loop, "on_early_cpu", lambda: False)
    found = []

    def chosen(places, *args):
        found.append(real(places, *args))
        return found[-1]

    real = loop.chosen
    monkeypatch.setattr(loop, "chosen", chosen)
    args = arguments()
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), policy=Blocks(grid, state))
    assert_close(jax.jit(jax.value_and_grad(tiled, argnums=(0, 1)))(*args), expected())
    assert any(found) == shared


@pytest.mark.slow
@pytest.mark.skipif(on_early_cpu(), reason="XLA drops barriers on a CPU before jax 0.12")
def test_one_array_less():
    """The ends of blocks are never kept, so at the peak there are their cotangents only."""
    args = jax.eval_shape(functools.partial(arguments, 64, 64, 16))
    policy = Blocks((8, 8), "passing")

    def temporaries():
        tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), policy=policy)
        lowered = jax.jit(jax.grad(tiled)).lower(*args)
        return jaxtile.compiled_bytes(lowered).temporaries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "on_early_cpu", lambda: True)
        apart = temporaries()
    wide = 2 * 64 * 64 * 16 * 8
    assert temporaries() <= apart - 0.9 * wide


class Passing:
    """Everything that has a name is a whole array in the forward pass only."""

    def __init__(self, grid):
        self.choice = Choice(grid, "passing")

    def choose(self, outline):
        names = [p.name for p in outline.parts if p.tiled]
        return {**dict.fromkeys(names, self.choice), ...: Choice(self.choice.grid)}


@parametrize_few("grid", [(3, 4), (2, 4)])
def test_results_take_the_place_of_inputs_that_pass(grid, monkeypatch):
    monkeypatch.setattr(loop, "on_early_cpu", lambda: False)
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), policy=Passing(grid))
    assert_close(jax.jit(jax.value_and_grad(tiled, argnums=(0, 1)))(*arguments()), expected())


@pytest.mark.skipif(on_early_cpu(), reason="XLA drops barriers on a CPU before jax 0.12")
def test_one_array_less_forwards():
    """Of a block there are what its kernel made, and one array for its input and its result."""
    args = jax.eval_shape(functools.partial(arguments, 64, 64, 16))

    def temporaries():
        tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), policy=Passing((4, 4)))
        return jaxtile.compiled_bytes(jax.jit(tiled).lower(*args)).temporaries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "on_early_cpu", lambda: True)
        apart = temporaries()
    wide = 2 * 64 * 64 * 16 * 8
    assert temporaries() <= apart - 0.9 * wide


def test_windows_of_sums_are_read_when_the_tile_is_done(monkeypatch):
    """Where they are depends on the gradients of the weights; if a tile has none, on nothing."""
    for module in (backwards, ordering):
        monkeypatch.setattr(module, "on_early_cpu", lambda: False)
    slots = [(Column(0), 2), (0, 3)]

    def put(total, share, of_weights, start):
        sums = [jnp.zeros(w.shape) for w in of_weights]
        (found, weights), _ = put_in(([total], sums), ([share], of_weights), [Into(slots)], [start])
        return found[0], weights

    total, share, weight = normal(0, 6, 3), normal(1, 2, 3), normal(2, 4)
    got, (summed,) = jax.jit(put)(total, share, [weight], 3)
    assert (got == jnp.asarray(total).at[3:5].add(share)).all()
    assert (summed == weight).all()

    def barriers(*of_weights):
        jaxpr = jax.make_jaxpr(put)(total, share, list(of_weights), np.int32(3)).jaxpr
        found = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
        # XLA drops of a barrier what nobody reads.
        used = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, Var)}
        assert all(used >= {*e.outvars} for e in found)
        (read,) = (e for e in jaxpr.eqns if e.primitive.name == "dynamic_slice")
        return [any(v in read.invars for v in e.outvars) and len(e.invars) for e in found]

    assert barriers(weight) == [2]
    assert barriers() == []
