"""While a strip is computed, the next one comes from host memory, and the last one goes there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import SingleDeviceSharding

import jaxtile
from jaxtile._platform import tracing_for
from jaxtile._regions.tile import Column
from jaxtile._run import beside
from jaxtile._run.beside import line

from .support import assert_close, conv, normal

W = {
    "a": normal(1, 3, 3, 2, 3),
    "b": normal(2, 3, 3, 3, 3),
    "c": normal(3, 1, 1, 3, 3),
    "d": normal(4, 3, 3, 3, 1),
}
NAMES = ["one", "two", "three"]


def stored(*names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def normed(x):
    return jax.nn.relu((x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-3) + 0.3)


def loss(p, x, labels):
    """A halo, a position alone, two readers of one array, a skip, and statistics of all."""
    x = checkpoint_name(conv(x / 255.0, p["a"], 2), "one")
    y = checkpoint_name(conv(normed(x), p["b"]), "two")
    y = checkpoint_name(conv(normed(y), p["c"]) + x, "three")
    y = conv(normed(y), p["d"]) * y.mean((0, 1, 2)).sum()
    return jnp.mean((y - labels) ** 2)


def host(x):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def case(height):
    x = np.random.default_rng(0).integers(0, 256, (1, height, 6, 2)).astype(np.uint8)
    return x, normal(5, 1, -(-height // 2), 3, 1)


@pytest.mark.parametrize(
    "height, strips, names",
    [
        (40, 10, ["one", "two", "three"]),
        pytest.param(41, 8, ["one", "three"], marks=pytest.mark.slow),
        pytest.param(39, 20, ["two"], marks=pytest.mark.slow),
        pytest.param(64, 4, ["one", "two"], marks=pytest.mark.slow),
    ],
)
def test_gradients_in_strips(monkeypatch, height, strips, names):
    x, labels = case(height)
    lines = []
    found = beside.run
    monkeypatch.setattr(
        "jaxtile._run.scans.run", lambda work, at, *args: lines.append(at) or found(work, at, *args)
    )
    tiled = jaxtile.checkpoint(
        loss, in_axes=(None, (1, 2), (1, 2)), tiles=(strips, 1), policy=stored(*names)
    )
    got = jax.jit(jax.value_and_grad(tiled))(W, host(x), host(labels))
    assert lines or strips < 5
    assert_close(got, jax.jit(jax.value_and_grad(loss))(W, x, labels))


@pytest.mark.slow
def test_tiles_that_are_not_strips_wait_for_their_windows(monkeypatch):
    monkeypatch.setattr("jaxtile._run.scans.run", None)
    x, labels = case(40)
    tiled = jaxtile.checkpoint(
        loss, in_axes=(None, (1, 2), (1, 2)), tiles=(10, 2), policy=stored("one")
    )
    got = jax.jit(jax.value_and_grad(tiled))(W, host(x), labels)
    assert_close(got, jax.jit(jax.value_and_grad(loss))(W, x, labels))


def test_a_line_leaves_out_what_would_reach_beyond_the_ends():
    """Of eight strips of 5 rows, each read with one row more at both sides."""
    starts = np.clip(5 * np.arange(8) - 1, 0, 40 - 7)
    rows = np.stack([starts, 5 * np.arange(8)], 1)
    read = (1, 40, 6, 3), [(0, 1), (Column(0), 7), (0, 6), (0, 3)]
    written = (1, 40, 6, 3), [(0, 1), (Column(1), 5), (0, 6), (0, 3)]
    found = line(rows, np.arange(8), [read, written])
    assert found.kind.tiles.tolist() == [2, 3, 4, 5]  # the strip of tile 0 begins at 0, not at -1
    assert found.row(0) == {0: 9, 1: 10}
    assert line(rows, np.arange(8), [written]).kind.tiles.tolist() == [1, 2, 3, 4, 5, 6]
    assert line(rows, np.arange(8), []) is None
    in_blocks = (1, 40, 6, 3), [(0, 1), (Column(1), 5), (Column(0), 3), (0, 3)]
    of_a_batch = (2, 40, 6, 3), [(0, 2), (Column(1), 5), (0, 6), (0, 3)]
    assert line(rows, np.arange(8), [written, in_blocks]) is None
    assert line(rows, np.arange(8), [of_a_batch]) is None


def test_positions_of_transfers_are_computed_from_the_counter():
    """XLA leaves a copy to the hardware if it sees that its position is a line in the counter."""
    x, labels = case(40)
    tiled = jaxtile.checkpoint(
        loss, in_axes=(None, (1, 2), (1, 2)), tiles=(10, 1), policy=stored("one", "two")
    )
    with tracing_for("gpu"):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(tiled))(W, host(x), host(labels)).jaxpr
    loops = [found for body in scans(jaxpr) if (found := [*positions(body)])]
    beside = [found for found in loops if all(found)]
    assert len(beside) >= 12
    # Tiles at the ends find theirs in the table.
    assert not any(any(found) for found in loops if found not in beside)


def scans(jaxpr):
    """The bodies of loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["jaxpr"].jaxpr
        for inner in jaxprs_in_params(eqn.params):
            yield from scans(inner)


def positions(body):
    """Per array in host memory that is read or written in part: is the place a counter's? A counter
    is a number; rows of the table are not.
    """
    counters = [v for v in body.invars if v.aval.shape == () and v.aval.dtype == np.int32]
    made = {v: e for e in body.eqns for v in e.outvars}

    def counted(atom):
        if not isinstance(atom, Var):
            return True
        if atom not in made:
            return atom in counters
        return all(map(counted, made[atom].invars))

    for eqn in body.eqns:
        first = {"jaxtile_read_on_host": 1, "jaxtile_write_on_host": 2}.get(eqn.primitive.name)
        on_host = eqn.invars[0].aval.memory_space is jax.memory.Space.Host if first else False
        if on_host:
            yield all(map(counted, eqn.invars[first:]))
