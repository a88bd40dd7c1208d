"""What devices send each other: halos and nothing else, as many bytes as `explain` says."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtile
from jaxtile._geometry import Window
from jaxtile._mesh.halos import Blocks, Halo

from .meshes import AXES, WEIGHTS, devices, on, sharded
from .support import assert_close, conv, max_pool, normal, parametrize_few
from .test_models import NAMES
from .test_random_networks import _SETTINGS

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.mark.slow
@hypothesis.settings(max_examples=6, **_SETTINGS)
@hypothesis.given(
    st.integers(1, 30), st.integers(1, 8), st.integers(1, 3), st.integers(0, 9), st.integers(0, 99)
)
def test_a_halo_is_what_others_own_and_returns_to_them(length, count, tiles, reach, seed):
    mesh = devices(count, axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(seed)
    size = rng.integers(1, length + 1)
    own = np.arange(count * tiles) * length // (count * tiles)
    starts = np.clip(own + rng.integers(-reach, reach + 1, len(own)), 0, length - size)
    blocks = Blocks("rows", length, count)
    halo = Halo.of(0, blocks, Window(0, starts, size))
    x, c = jnp.arange(1.0, length + 1), jnp.asarray(rng.standard_normal(count * halo.size))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    def fill(x):
        return halo.fill(x)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    def fold(x):
        return halo.fold(x)

    filled = np.asarray(jax.jit(lambda x: fill(blocks.split(x, 0)))(x)).reshape(count, -1)
    starts = starts.reshape(count, tiles)
    used = np.zeros(filled.shape, bool)
    for i in range(count):
        for start in starts[i]:
            at = start - halo.origins(count)[i]
            np.testing.assert_array_equal(filled[i, at : at + size], x[start : start + size])
            used[i, at : at + size] = True
    back = jax.jit(lambda c: blocks.join(fold(c), 0))(jnp.where(used.reshape(-1), c, 0))
    np.testing.assert_allclose(back @ x, np.sum(np.where(used, filled * c.reshape(count, -1), 0)))


SIZES = {"f64": 8, "f32": 4, "s32": 4, "s64": 8, "pred": 1}


def sent(fun, *args) -> dict[str, int]:
    """Bytes per kind of collective in the compiled program, as one device sees them."""
    found: dict[str, int] = {}
    kinds = (
        "collective-permute|all-gather|all-to-all|all-reduce|reduce-scatter|collective-broadcast"
    )
    pattern = rf" = (\S+|\(.*?\)) ({kinds})(?:-start)?\("
    for shapes, kind in re.findall(pattern, jax.jit(fun).lower(*args).compile().as_text()):
        for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes):
            n = np.prod([int(d) for d in dims.split(",") if d], dtype=int)
            found[kind] = found.get(kind, 0) + int(n) * SIZES[dtype]
    return found


def messages(compiled) -> dict[str, list[int]]:
    """Per device, the bytes of each of the messages that it sends."""
    pattern = r" = ([a-z]+\d*)\[([\d,]*)\]\S* collective-permute\(.*source_target_pairs=\{(.*?)\}\}"
    found: dict[str, list[int]] = {}
    for dtype, dims, pairs in re.findall(pattern, compiled.as_text()):
        n = np.prod([int(d) for d in dims.split(",") if d], dtype=int) * SIZES[dtype]
        for source in re.findall(r"\{(\d+),", pairs):
            found.setdefault(source, []).append(int(n))
    return found


def halos(fun, *args) -> tuple[int, int]:
    """Bytes of messages in the compiled program: of the device that sends most, and of all."""
    sends = [sum(m) for m in messages(jax.jit(fun).lower(*args).compile()).values()]
    return max(sends), sum(sends)


def loop(w, x):
    return jaxtile.checkpoint(lambda w, x: jnp.sin(conv(x, w)), in_axes=AXES, tiles=(2, 2))(w, x)


GATHERED = {
    "transposed convolution": lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME"),
    "resize": lambda w, x: jax.image.resize(x * w.sum(), (1, 64, 32, 4), "bilinear"),
    "grouped convolution": lambda w, x: conv(x, w[:, :, :2], feature_group_count=2),
    "max pool": lambda w, x: max_pool(x * w.sum(), 3, 2),
    "tile loop": loop,
}


@parametrize_few("name", GATHERED)
def test_no_activation_is_gathered(name):
    """XLA's own partitioning gathers these, or adds up whole activations; a tiled function sends
    halos, as many bytes as `explain` says, and adds up the gradients of weights.
    """

    def loss(w, x):
        return jnp.sum(jnp.sin(GATHERED[name](w, x)))

    mesh = devices(4, 2, axis_types=(AxisType.Auto,) * 2)
    w, x = normal(0, 3, 3, 4, 4), sharded(mesh, normal(1, 1, 32, 16, 4))
    w = jax.device_put(w, NamedSharding(mesh, P()))
    automatic = sent(jax.value_and_grad(loss), w, x)
    whole = {k: n for k, n in automatic.items() if k != "collective-permute" and n >= x.nbytes}
    assert whole
    schedule = {"in_axes": AXES, "tiles": (2, 2), "mesh": mesh, "mesh_axes": ("rows", "cols")}
    step = jax.value_and_grad(jaxtile.checkpoint(loss, **schedule))
    ours = sent(step, w, x)
    assert ours.keys() == {"collective-permute", "all-reduce"}
    assert ours["all-reduce"] <= w.nbytes + 2 * 8
    sends = [r.exchanged for r in jaxtile.explain(loss, w, x, **schedule).regions]
    assert halos(step, w, x) == (
        sum(s.forward + s.backward for s in sends),
        sum(s.forward_in_all + s.backward_in_all for s in sends),
    )
    assert_close(step(w, x), jax.value_and_grad(loss)(w, x))


@parametrize_few("tiles", [(2, 2), {...: None}, "whole"])
def test_bytes_are_those_of_the_halos(tiles):
    size, channels = (32, 16), 2
    mesh = devices(4, 2, axis_types=(AxisType.Auto,) * 2)
    x = sharded(mesh, normal(1, 1, *size, channels))

    def loss(w, x):
        for i in range(3):
            x = checkpoint_name(jnp.sin(conv(x, w)), f"layer{i}")
        return x.sum()

    policy = NAMES("layer0", "layer1", "layer2")
    schedule = {"in_axes": AXES, "tiles": tiles, "policy": policy, **on(4, 2)}
    tiled = jaxtile.checkpoint(loss, **schedule)
    explained = jaxtile.explain(loss, WEIGHTS[0], x, **schedule)
    # A row of 8 up and down, and a column of 8 and the new rows to the one side that has a device.
    # A device at the border has nothing outside; if it has one tile only, that reads two rows from
    # the inside instead, and its neighbour sends them. Three pairs each way in 2 columns, one in 4
    # rows, where every device is at the border.
    if tiles == (2, 2):
        one, in_all = 2 * 8 + (8 + 2), 2 * 3 * 2 * 8 + 2 * 1 * 4 * (8 + 2)
    else:
        one, in_all = 3 * 8 + (8 + 2), 2 * (3 + 1) * 2 * 8 + 2 * 1 * 4 * (8 + 2)
    layer = np.array([one, in_all]) * channels * 8
    again = tiles != {...: None}
    sends = [r.exchanged for r in explained.regions]
    forward = np.array([(s.forward, s.forward_in_all) for s in sends])
    backward = np.array([(s.backward, s.backward_in_all) for s in sends])
    np.testing.assert_array_equal(forward[:3], [layer] * 3)
    # Cotangents go the other way, and no device sends more than two rows of them.
    back = layer - np.array([8 * channels * 8, 0]) * (tiles != (2, 2))
    np.testing.assert_array_equal(backward[:3], [again * layer, *[again * layer + back] * 2])
    assert not forward[3:].any()
    assert not backward[3:].any()
    assert "each device sends at most" in str(explained)
    assert halos(tiled, WEIGHTS[0], x) == tuple(forward.sum(0))
    one, in_all = halos(jax.value_and_grad(tiled), WEIGHTS[0], x)
    assert in_all == (forward + backward).sum(0)[1]
    assert one <= (forward + backward).sum(0)[0]  # not always the same device
