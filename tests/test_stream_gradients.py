"""A streamed function has the plain function's gradients, and never sees a whole array."""

import errno
import os
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile import TilingError, ops
from jaxtile._run.tile import Tile

from .random_networks import RandomPolicy, networks
from .support import assert_close, conv, max_pool, normal, scalar
from .test_random_networks import _SETTINGS
from .test_stream import Source

W = {"a": normal(1, 3, 3, 3, 4), "b": normal(2, 3, 3, 4, 4), "m": normal(3, 4, 5)}
SAVED = jax.checkpoint_policies.save_only_these_names("one", "two")


def assert_gradients(fun, params, *streamed, tiles=(3, 2), **options):
    """From sources, value and gradients are those of the plain function."""
    want = jax.jit(jax.value_and_grad(fun))(params, *map(jnp.asarray, streamed))
    in_axes = (None, *((1, 2) for _ in streamed))
    run = jaxtile.stream(fun, in_axes=in_axes, tiles=tiles, **options)
    sources = [Source(x) for x in streamed]
    assert_close(run.value_and_grad(params, *sources), want)
    return sources


def normalised(x):
    mean = x.mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5)


def network(p, x, labels):
    """Strides, a batch norm, a skip, dropout, a pool, an upsampling, labels; odd sizes."""
    x = checkpoint_name(conv(x / 255.0, p["a"], 2), "one")
    y = checkpoint_name(jax.nn.relu(normalised(x)), "two")
    y = conv(ops.coordinate_dropout(y, jax.random.key(0), rate=0.3), p["b"])
    y = ops.upsample(max_pool(jnp.concatenate([x, y], -1)))
    scores = jax.nn.log_softmax(y[..., :5])
    return -jnp.take_along_axis(scores, labels[..., None], -1).mean()


def test_what_has_no_cotangent_does_not_run_backwards():
    def fun(w, x):
        x = checkpoint_name(conv(x, w["a"]), "one")
        large = jax.lax.while_loop(lambda y: y.max() < 9, lambda y: y * 1.5, 1 + x**2)
        return (conv(jax.lax.stop_gradient(large) + x, w["b"]) ** 2).mean()

    assert_gradients(fun, W, normal(0, 1, 12, 9, 3), policy=SAVED)


def bytes_and_labels():
    chance = np.random.default_rng(0)
    return chance.integers(0, 256, (2, 19, 15, 3), np.uint8), chance.integers(0, 5, (2, 10, 8))


def test_from_files_with_stored_values_in_files(tmp_path):
    image, labels = bytes_and_labels()
    np.save(tmp_path / "image.npy", image)
    np.save(tmp_path / "labels.npy", labels)
    files = [np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in ("image", "labels")]
    store = tmp_path / "store"
    store.mkdir()
    seen = []

    def progress(done, total):
        seen.append((done, total))
        assert not os.listdir(store)  # files without names: nothing is left of a killed process

    want = jax.jit(jax.value_and_grad(network))(W, image, labels)
    axes, tiles = (None, (1, 2), (1, 2)), (3, 2)
    run = jaxtile.stream(network, in_axes=axes, tiles=tiles, policy=SAVED, store=store)
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        shares, tile = Tile.shares, Tile.pullback
        patch.setattr(Tile, "shares", lambda s, *a: traced.append(("forward", s)) or shares(s, *a))
        patch.setattr(Tile, "pullback", lambda s, *a: traced.append(("backward", s)) or tile(s, *a))
        for _ in range(2):
            assert_close(run.value_and_grad(W, *files, progress=progress), want)
            assert len(traced) == len(set(traced))  # one program per region and direction
    assert seen == 2 * [(i + 1, len(seen) // 2) for i in range(len(seen) // 2)]
    assert_close(run(W, *files), want[0])


def square(p, x):
    return (checkpoint_name(conv(x, p["a"]), "one") ** 2).mean()


def test_a_full_disk_is_an_error_that_says_for_what(tmp_path, monkeypatch):
    def full(*place):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = jaxtile.stream(square, in_axes=(None, (1, 2)), tiles=(2, 2), policy=SAVED, store=tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run.value_and_grad(W, normal(0, 1, 8, 6, 3))
    assert "made room for one, 1536 bytes, in `store`" in caught.value.__notes__[0]


def test_files_where_room_cannot_be_made_beforehand(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    assert_gradients(square, W, normal(0, 1, 8, 6, 3), policy=SAVED, store=tmp_path)


def test_results_of_reductions_and_weights_that_are_read_by_window():
    """On the device: means of rows, maxima (which remember), a weight for each position."""

    def fun(p, x):
        x = jnp.sin(x * p["v"] * p["map"][..., None])
        rows, columns = x.mean(2), x.max(1)
        return scalar((x - rows[:, :, None] * columns[:, None], x.max()))

    params = {"v": normal(1, 3), "map": normal(2, 7, 5)}
    assert_gradients(fun, params, normal(0, 2, 7, 5, 3))


def test_what_is_stored_may_be_mixed():
    """Then it is whole on the device, as the policy says; others read it by window."""

    def fun(p, x):
        y = checkpoint_name(jnp.sin(x * p), "one")
        return (y * jnp.sort(y, 1)).sum() + jnp.cumsum(y, 2).mean()

    assert_gradients(fun, normal(1, 3), normal(0, 1, 7, 6, 3), policy=SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "passing:3x2", "sqrt"])
def test_policies(policy):
    image, labels = bytes_and_labels()
    sources = assert_gradients(network, W, image, labels, policy=policy)
    assert all(s.largest < s._array.size for s in sources)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks())
def test_random_networks(network):
    """Random policies too: what is stored, passes or is restored, and on which grids."""
    hypothesis.note(repr(network))
    fun = jax.value_and_grad(lambda p, x: scalar(network(p, x)))
    params, x = network.args
    hypothesis.assume(all(op != "crop_at_run_time" for op, *_ in network.layers))  # is refused
    tiles = network.tiles[...] if isinstance(network.tiles, dict) else network.tiles
    hypothesis.assume(isinstance(network.policy, RandomPolicy) or tiles not in (None, "whole"))
    run = jaxtile.stream(
        lambda p, x: scalar(network(p, x)),
        in_axes=(None, (1, 2)),
        tiles=tiles,
        policy=network.policy,
    )
    got = run.value_and_grad(params, np.asarray(x))
    try:
        assert_close(got, jax.jit(fun)(params, x))
    except AssertionError:
        assert_close(got, fun(params, x))
    jax.clear_caches()


def test_arguments_and_auxiliary_results():
    def fun(w, image, scale, v):
        y = image * w["w"] + v
        return (y**2).sum() * scale, {"mean": y.mean((0, 1)), "y": y, "name": None}

    args = {"w": normal(1, 3), "unused": jnp.ones(2)}, normal(0, 4, 6, 3), 2.0, normal(2, 3)
    run = jaxtile.stream(fun, in_axes=(None, (0, 1), None, None), tiles=(2, 3))
    for argnums in ((0, 2), -1):
        seen = []
        progress = lambda *numbers: seen.append(numbers)  # noqa: E731
        got = run.value_and_grad(*args, argnums=argnums, has_aux=True, progress=progress)
        assert seen[-1][0] == seen[-1][1] == len(seen)  # tiles without cotangents are not run
        assert_close(got, jax.value_and_grad(fun, argnums, has_aux=True)(*args))
    assert_close(run(*args), fun(*args))


def test_narrow_types_are_added_up_in_wide_ones():
    params, image = jnp.ones(1, jnp.bfloat16), np.ones((64, 64, 1), jnp.bfloat16)
    run = jaxtile.stream(lambda p, x: (x * p).sum(), in_axes=(None, (0, 1)), tiles=(32, 32))
    value, grads = run.value_and_grad(params, image)
    assert grads.dtype == value.dtype == jnp.bfloat16
    assert float(grads[0]) == float(value) == 4096


def test_refused(tmp_path):
    image = np.ones((1, 8, 8, 3))

    def refused(match, fun=lambda p, x: (p * x).sum(), p=1.0, **options):
        run = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(2, 2))
        with pytest.raises(TilingError, match=match):
            run.value_and_grad(p, image, **options)

    refused(r"`x`, .*is streamed, and has no gradient", argnums=1)
    refused(r"`argnums` \(=2\) must be numbers .* of which there are 2", argnums=2)
    refused(r"`p\['n'\]`, int.*has no gradient", lambda p, x: x.sum(), p={"n": np.arange(3)})
    refused("returns one real number .*; this one returns float64", lambda p, x: p * x)
    refused(r"must return a pair, and not PyTreeDef\(\*\)", has_aux=True)
    refused("cannot tile `sort`", lambda p, x: p * jnp.sort(x.sum(-1), 1).sum())
    with pytest.raises(TilingError, match=r"`store` \(=.*must be a folder that exists"):
        jaxtile.stream(network, in_axes=0, tiles=(1,), store=tmp_path / "none")


CEILING = """
import sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.ad_checkpoint import checkpoint_name
import jaxtile

SIZE, CHANNELS, LAYERS = 2048, 8, 5

class Reopened:
    '''A file that is mapped for each window: what is mapped counts as resident.'''
    shape, dtype = (1, 4 * SIZE, 4 * SIZE, 3), np.dtype(np.uint8)
    def __getitem__(self, place):
        return np.array(np.load(sys.argv[1], mmap_mode="r")[place])

def loss(params, x):
    x = x.astype(jnp.float32) / 255
    for i, w in enumerate(params):
        x = jax.lax.conv_general_dilated(
            x, w, (1, 1) if i else (4, 4), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = checkpoint_name(jnp.tanh(x), "layer")
    return (x ** 2).mean()

def resident():
    with open("/proc/self/status") as status:
        lines = dict(line.split(":") for line in status)
    return int(lines["VmRSS"].split()[0]) / 1024

def watch():
    while not done:
        seen.append(resident())
        time.sleep(0.01)

np.lib.format.open_memmap(sys.argv[1], "w+", np.uint8, Reopened.shape)[:, ::3] = 200
params = [jnp.full((3, 3, c, CHANNELS), 0.01) for c in (3, *[CHANNELS] * (LAYERS - 1))]
policy = jax.checkpoint_policies.save_only_these_names("layer")
run = jaxtile.stream(
    loss, in_axes=(None, (1, 2)), tiles=(16, 16), policy=policy, store=sys.argv[2] or None)
run.value_and_grad(params, Reopened())  # compile; a process keeps some of what it has freed
before, seen, done = resident(), [], False
watcher = threading.Thread(target=watch)
watcher.start()
run.value_and_grad(params, Reopened())
done = True
watcher.join()
image, stored = 3 * (4 * SIZE) ** 2, LAYERS * SIZE ** 2 * CHANNELS * 4
print(before, max(seen), image / 2 ** 20, stored / 2 ** 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_files", [True, False])
def test_resident_memory_has_a_ceiling(tmp_path, in_files):
    """An image of 192 MiB, of which 640 MiB are stored, and cotangents beside them. In memory
    instead of files these are seen, so the ceiling is one.
    """
    store = str(tmp_path) if in_files else ""
    command = [sys.executable, "-c", CEILING, str(tmp_path / "image.npy"), store]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, most, image, stored = map(float, said.split())
    assert image > 190
    assert stored > 600
    assert (most - before < 48) == in_files, said
