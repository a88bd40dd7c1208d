"""A streamed function has the plain function's value, and never sees a whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxtile
import models
from jaxtile import TilingError, ops
from jaxtile._run.tile import Tile

from .support import assert_close, conv, max_pool, normal, parametrize_few

W = {"a": normal(1, 3, 3, 3, 4), "b": normal(2, 3, 3, 4, 4), "m": normal(3, 4, 5)}


class Source:
    """An array that only gives windows, and remembers the largest."""

    def __init__(self, array):
        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, self._array.dtype
        self.largest = self.reads = 0

    def __getitem__(self, place):
        assert all(type(p.start) is int and type(p.stop) is int for p in place)
        found = self._array[place]
        self.largest, self.reads = max(self.largest, found.size), self.reads + 1
        return found


class Sink:
    """An array that only takes windows, and counts how often each position is written."""

    def __init__(self, shape, dtype):
        self.array, self.shape, self.dtype = np.zeros(shape, dtype), shape, np.dtype(dtype)
        self.written = np.zeros(shape, int)

    def __setitem__(self, place, tile):
        assert self.array[place].shape == tile.shape
        self.array[place] = tile
        self.written[place] += 1


def assert_streams(fun, params, *images, tiles=(3, 2), axes=(1, 2), tolerance=1e-12):
    """From sources to sinks, the value is that of the plain function."""
    want = jax.jit(fun)(params, *map(jnp.asarray, images))
    run = jaxtile.stream(fun, in_axes=(None, *(axes for _ in images)), tiles=tiles)
    assert_close(run(params, *map(np.asarray, images)), want, tolerance)
    sources = [Source(x) for x in images]
    returned = run(params, *sources)
    sinks = jax.tree.map(
        lambda x, y: Sink(x.shape, x.dtype) if isinstance(y, np.ndarray) else None, want, returned
    )
    got = run(params, *sources, out=sinks)
    leaves = [(x.array, x.written) if isinstance(x, Sink) else (x, 1) for x in jax.tree.leaves(got)]
    assert_close([x for x, _ in leaves], jax.tree.leaves(want), tolerance)
    assert all(np.all(n == 1) for _, n in leaves)
    return sources


def strided(p, x):
    return conv(jax.nn.relu(conv(x, p["a"], 2)), p["b"], padding="VALID")


def wide_halos(p, x):
    return conv(jnp.tanh(conv(x, p["a"], rhs_dilation=(4, 4))), p["b"], rhs_dilation=(3, 3))


def u_shaped(p, x):
    """Pool, transposed convolution, bilinear upsampling, skips."""
    top = jax.nn.relu(conv(x, p["a"]))
    low = conv(max_pool(top), p["b"])
    up = lax.conv_transpose(low, p["b"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return conv(jnp.concatenate([top, up], -1)[..., ::2] + ops.upsample(low), p["b"])


def group_norms(p, x):
    for w in (p["a"], p["b"]):
        x = conv(x, w)
        b, h, v, c = x.shape
        groups = x.reshape(b, h, v, 2, c // 2)
        mean, var = (f(groups, (1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
        x = jax.nn.relu((groups - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)
    return x


def instance_norm(p, x):
    x = conv(x, p["a"])
    return conv((x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True), p["b"])


def classifier(p, x):
    features = jax.nn.relu(conv(x, p["a"], 2)).mean((1, 2))
    return jax.nn.softmax(features @ p["m"]), features.max()


def from_bytes(p, x):
    """8 bits in, 8 bits out."""
    scores = conv((x / 255.0 - 0.4) / 0.2, p["a"])
    return scores.argmax(-1).astype(jnp.uint8), jax.nn.softmax(scores)


def two_sizes(p, x):
    """An output that the other outputs are computed from; a sum; one output twice."""
    full = conv(x, p["a"])
    half = conv(max_pool(full), p["b"])
    return {"full": full, "half": half, "sum": half.sum(), "again": [half, x]}


def rows_and_columns(p, x):
    """Results of reductions that carry one of the tiled axes, read again and returned."""
    x = conv(x, p["a"])
    rows, columns = x.mean(2), x.max(1)
    return x - rows[:, :, None] * columns[:, None], rows


def one_position(p, x):
    """Tiled dimensions shrink to size 1 and are dropped: what is left is held."""
    y = conv(x, p["a"])
    corner = lax.slice(y, (0, 2, 3, 0), (x.shape[0], 3, 4, 4))
    return y - corner, corner.reshape(-1, 4) @ p["m"]


def positions(p, x):
    """Values that depend on the position only; a global array that is read by window."""
    ramp = jnp.arange(x.shape[1])[:, None] * jnp.linspace(0, 1, x.shape[2])
    return (
        x * ramp[..., None] + jnp.outer(jnp.arange(x.shape[1]), jnp.arange(x.shape[2]))[..., None]
    )


LOCAL = [strided, wide_halos, from_bytes, positions]
REDUCING = [group_norms, instance_norm, classifier, rows_and_columns, one_position]


@parametrize_few(
    "fun, tiles", [(f, (3, 2)) for f in REDUCING + LOCAL] + [(f, (5, 4)) for f in LOCAL], always=7
)
def test_odd_sizes(fun, tiles):
    image = normal(0, 2, 13, 11, 3)
    if fun is from_bytes:
        image = np.random.default_rng(0).integers(0, 256, image.shape, np.uint8)
    assert_streams(fun, W, image, tiles=tiles)


@pytest.mark.parametrize("fun", [u_shaped, two_sizes])
def test_even_sizes(fun):
    assert_streams(fun, W, normal(0, 2, 12, 10, 3), tiles=(3, 2))


def test_tiles_of_one_pixel():
    assert_streams(strided, W, normal(0, 1, 11, 9, 3), tiles=(4, 3))


def test_two_tiled_arguments():
    assert_streams(
        lambda p, x, y: (conv(x, p["a"]) * y, (y**2).sum()),
        W,
        normal(0, 1, 9, 8, 3),
        normal(1, 1, 9, 8, 1),
    )


def together(run):
    """How many tiles were computed at once, per pass."""
    return [sorted(map(len, p.together)) for p in run._last.passes]


@parametrize_few(
    "fun, batched",
    [
        (positions, False),  # each tile computes with its own
        *((f, True) for f in (wide_halos, u_shaped, instance_norm, rows_and_columns, from_bytes)),
        *((f, True) for f in (strided, two_sizes, classifier, group_norms)),
    ],
    always=6,
)
def test_tiles_at_once(fun, batched):
    image = normal(0, 1, 40, 36, 3)
    if fun is from_bytes:
        image = np.random.default_rng(0).integers(0, 256, image.shape, np.uint8)
    one_by_one = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(5, 4))
    run = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(5, 4), batch_bytes="1MB")
    want, ticks = fun(W, jnp.asarray(image)), []
    sinks = jax.tree.map(
        lambda x, y: Sink(x.shape, x.dtype) if isinstance(y, np.ndarray) else None,
        want,
        one_by_one(W, image),
    )
    got = run(W, image, out=sinks, progress=lambda *count: ticks.append(count))
    written = [x for x in jax.tree.leaves(got) if isinstance(x, Sink)]
    assert all((x.written == 1).all() for x in written)
    got = jax.tree.map(lambda x: x.array if isinstance(x, Sink) else x, got)
    assert_close(got, want)
    assert_close(got, one_by_one(W, image))
    assert [*map(sum, together(run))] == [p.region.tiles for p in run._last.passes]
    assert (max(map(max, together(run))) > 1) == batched
    assert [len(b) for p in one_by_one._last.passes for b in p.together] == [1] * len(ticks)
    assert ticks == [(i + 1, len(ticks)) for i in range(len(ticks))]


def test_bytes_say_how_many_tiles_are_computed_at_once():
    def run(batch_bytes):
        run = jaxtile.stream(
            lambda p, x: conv(x, p["a"]),
            in_axes=(None, (1, 2)),
            tiles=(8, 8),
            batch_bytes=batch_bytes,
        )
        run(W, np.ones((1, 64, 64, 3)))
        return run

    # 36 tiles touch no border, and 6 each of four borders.
    assert together(run("1GiB"))[0] == [1] * (4 * 6 + 4 + 4) + [8] * 4
    one = run(1)._last.passes[0]
    windows = [jax.ShapeDtypeStruct((1, 10, 10, 3), np.float64)]
    whole = [None], [jax.ShapeDtypeStruct(W["a"].shape, np.float64)]
    row = jax.ShapeDtypeStruct(one.tile.rows[0].shape, one.tile.rows.dtype)
    found = jaxtile.estimate_memory(jax.jit(one._found).trace(windows, whole, row)).bytes
    each = windows[0].size * 8 + found.outputs + found.temporaries
    assert each > 2 * 8 * 8 * 4 * 8
    assert together(run(3 * each))[0] == [1] * 4 + [3] * (36 // 3 + 4 * 6 // 3)
    assert together(run(3 * each - 1))[0] == [1] * 4 + [2] * (36 // 2 + 4 * 6 // 2)
    assert together(run(2 * each - 1))[0] == [1] * 64
    with pytest.raises(ValueError, match="'much' is not an amount of memory"):
        run("much")


def test_a_batch_is_the_same_when_only_some_of_it_is_missing():
    image = normal(4, 1, 48, 48, 3)

    class Kept(Sink):
        def has(self, place):
            return bool(self.written[place].all())

    run = jaxtile.stream(wide_halos, in_axes=(None, (1, 2)), tiles=(6, 6), batch_bytes="100kB")
    whole, part = (Kept((1, 48, 48, 4), image.dtype) for _ in range(2))
    run(W, image, out=whole)
    assert max(together(run)[0]) > 1
    part.written[:, 8:16, :32] = 1
    ticks = []
    run(W, image, out=part, progress=lambda *count: ticks.append(count))
    assert (part.array[:, 8:16, :32] == 0).all()
    assert (part.written == 1).all()
    part.array[:, 8:16, :32] = whole.array[:, 8:16, :32]
    np.testing.assert_array_equal(part.array, whole.array)
    assert ticks[-1] == (36, 36)


@pytest.mark.parametrize("normed", [False, True])
def test_what_a_sink_has_is_not_computed_again(normed):
    """With a norm, the pass that it needs is made again."""
    image = normal(4, 1, 12, 10, 3)

    def fun(params, x):
        y = conv(x, params["a"])
        return y - y.mean((1, 2)) if normed else y

    class Kept(Sink):
        def has(self, place):
            return bool(self.written[place].all())

    run = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(3, 2))
    source, sink, ticks = Source(image), Kept((1, 12, 10, 4), image.dtype), []
    sink.written[:, :4] = 1
    run(W, source, out=sink, progress=lambda *count: ticks.append(count))
    want = np.asarray(fun(W, image))
    assert_close(sink.array[:, 4:], want[:, 4:])
    assert (sink.array[:, :4] == 0).all()
    assert source.reads == 4 + 6 * normed
    assert ticks[-1] == (6 + 6 * normed,) * 2
    run(W, source, out=sink)  # it has all
    assert source.reads == 4 + 2 * 6 * normed


def test_only_windows_are_read_once_per_pass():
    image = normal(0, 1, 64, 64, 3)
    (source,) = assert_streams(group_norms, W, image, tiles=(8, 8))
    assert source.largest <= (8 + 4) ** 2 * 3
    # Two calls with this source; mean, then variance, of two norms, then the result.
    assert source.reads == 2 * 5 * 64


@pytest.mark.parametrize("fun, regions", [(instance_norm, 3), (rows_and_columns, 3)])
def test_tiles_share_one_program_and_so_do_calls(fun, regions, monkeypatch):
    traced = []
    shares = Tile.shares
    monkeypatch.setattr(Tile, "shares", lambda self, *a: traced.append(self) or shares(self, *a))
    run = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(4, 3))
    for seed in range(2):
        image = normal(seed, 1, 9, 8, 3)
        assert_close(run(W, np.asarray(image)), fun(W, image))
        assert len(traced) == len(set(traced)) == regions


@pytest.mark.slow
@pytest.mark.parametrize(
    "padding, norm, depth",
    [("VALID", None, 1), ("SAME", None, 1), ("SAME", "batch", 1), ("SAME", "group", 1)],
)
def test_u_net(padding, norm, depth):
    model = models.UNet(
        3,
        4,
        channels=2,
        depth=depth,
        padding=padding,
        norm=norm,
        upsampling="bilinear" if norm else "transposed",
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    size = 28 if padding == "VALID" else 18
    assert_streams(evaluated(model), nnx.state(model), normal(0, 1, size, size, 3), tiles=(2, 2))


@pytest.mark.slow
def test_resnet():
    model = models.ResNet50(7, blocks=(1, 1), width=4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert_streams(evaluated(model), nnx.state(model), normal(0, 1, 42, 35, 3), tiles=(3, 2))


def evaluated(model):
    model.eval()
    graphdef = nnx.graphdef(model)
    return lambda state, x: nnx.merge(graphdef, state, copy=True)(x)


def test_from_file_to_file(tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (1, 20, 17, 3), np.uint8)
    np.save(tmp_path / "image.npy", image)
    source = np.load(tmp_path / "image.npy", mmap_mode="r")
    shape = (1, 20, 17)
    out = np.lib.format.open_memmap(tmp_path / "mask.npy", "w+", np.uint8, shape)
    fun = lambda p, x: from_bytes(p, x)[0]  # noqa: E731
    run = jaxtile.stream(fun, in_axes=(None, (1, 2)), tiles=(3, 3))
    assert run(W, source, out=out) is out
    out.flush()
    np.testing.assert_array_equal(np.load(tmp_path / "mask.npy"), fun(W, jnp.asarray(image)))


def test_a_type_in_another_byte_order():
    image = np.arange(60, dtype=">u2").reshape(1, 6, 10, 1)
    run = jaxtile.stream(lambda x: x * jnp.uint16(2), in_axes=((1, 2),), tiles=(2, 2))
    np.testing.assert_array_equal(run(image), 2 * image)
    out = np.zeros(image.shape, ">u2")
    np.testing.assert_array_equal(run(image, out=out), 2 * image)


def test_narrow_types_without_x64():
    with jax.enable_x64(False):
        run = jaxtile.stream(lambda x: (x * 2, x.sum()), in_axes=((1, 2),), tiles=(2, 2))
        doubled, total = run(np.ones((1, 5, 5, 1)))
    assert doubled.dtype == total.dtype == np.float32
    assert float(total) == 25


def test_progress_counts_the_tiles_of_all_passes():
    seen = []
    run = jaxtile.stream(instance_norm, in_axes=(None, (1, 2)), tiles=(3, 2))
    run(W, np.ones((1, 9, 8, 3)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 18) for i in range(18)]


def test_reads_run_ahead_by_one_tile():
    events = []

    class Slow(Source):
        def __getitem__(self, place):
            events.append("read")
            return super().__getitem__(place)

    run = jaxtile.stream(lambda x: x + 1, in_axes=((1, 2),), tiles=(8, 1))
    source = Slow(normal(0, 1, 8, 4, 1))
    run(source, progress=lambda done, total: events.append("done"))
    for i, event in enumerate(events):
        if event == "read":
            assert events[:i].count("read") - events[:i].count("done") <= 2


IMAGE = np.zeros((1, 8, 8, 3))


def refused(match, fun=lambda x: x * 2, source=IMAGE, out=None, tiles=(2, 2)):
    with pytest.raises(TilingError, match=match) as caught:
        jaxtile.stream(fun, in_axes=((1, 2),), tiles=tiles)(source, out=out)
    return caught


def test_refused_sinks():
    refused(
        r"`out` has shape \(1, 8, 9, 3\), the output \(1, 8, 8, 3\)", out=np.zeros((1, 8, 9, 3))
    )
    refused("`out` has dtype float32, the output float64", out=np.zeros(IMAGE.shape, np.float32))
    refused("`out` .*cannot be assigned", out=jnp.zeros(IMAGE.shape))
    refused(r"`out` must be a pytree like .* result", lambda x: (x, x), out=[IMAGE])
    refused(r"`out\['s'\]` must be None.*float64\[\]", lambda x: {"s": x.sum()}, out={"s": IMAGE})


def test_refused_sources():
    refused("'image.tif', which is static, and no array", source="image.tif")
    refused("tiles axis 2 of an argument of shape", source=IMAGE[0, 0])
    lying = Source(IMAGE)
    lying.shape = (1, 8, 12, 3)
    refused(r"x\[0:1, 0:4, 6:12, 0:3\] has shape \(1, 4, 2, 3\), not", source=lying)
    with pytest.raises(TilingError, match="equal sizes"):
        jaxtile.stream(lambda x, y: x + y, in_axes=((1,), (1,)), tiles=(2,))(IMAGE, IMAGE[:, :4])


def test_refused_functions():
    caught = refused("cannot tile `sort`", lambda x: jnp.sort(x, 1))
    assert "stores nothing" in caught.value.__notes__[0]
    refused("must be numbers of tiles", tiles="whole")
    refused("must be numbers of tiles", tiles={...: None})
    with pytest.raises(TilingError, match="cannot be called inside `jit`"):
        jax.jit(jaxtile.stream(lambda x: x, in_axes=((1, 2),), tiles=(2, 2)))(IMAGE)


def test_a_function_whose_backward_rule_needs_whole_cotangents_stores_nothing():
    @jax.custom_vjp
    def clipped(x):
        return x * 1

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
    assert_streams(lambda p, x: conv(clipped(conv(x, p["a"])), p["b"]), W, normal(0, 1, 9, 7, 3))


def test_errors_of_files_say_where():
    class Broken(Source):
        def __getitem__(self, place):
            if place[1].start >= 4:
                raise OSError("bad sector")
            return super().__getitem__(place)

    class Full(Sink):
        def __setitem__(self, place, tile):
            raise OSError("disk full")

    run = jaxtile.stream(lambda image: image * 2, in_axes=((1, 2),), tiles=(2, 2))
    with pytest.raises(OSError, match="bad sector") as caught:
        run(Broken(IMAGE))
    assert caught.value.__notes__ == ["while `jaxtile.stream` read image[0:1, 4:8, 0:4, 0:3]"]
    with pytest.raises(OSError, match="disk full") as caught:
        run(IMAGE, out=Full(IMAGE.shape, IMAGE.dtype))
    assert caught.value.__notes__ == ["while `jaxtile.stream` wrote out[0:1, 0:4, 0:4, 0:3]"]
