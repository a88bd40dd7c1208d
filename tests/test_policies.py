"""The catalogue of policies, by name and by what they store."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import policies
from jaxtile import ops

from .support import assert_close, assert_same, conv, normal, parametrize_few

IMAGE = normal(0, 1, 16, 12, 3)
WEIGHTS = [normal(i, 3, 3, 3, 3) for i in range(1, 5)]
AXES = (None, (1, 2))


def named(weights, x):
    for i, w in enumerate(weights):
        x = checkpoint_name(conv(x, w), f"conv{i}")
        x = checkpoint_name(jnp.tanh(x), f"act{i}")
    return jnp.mean(x**2)


def unnamed(weights, x):
    for w in weights:
        x = jnp.tanh(conv(x, w))
    return jnp.mean(x**2)


def mixing(weights, x):
    """A flatten cannot be tiled: what it reads is stored without being told to."""
    x = jnp.tanh(conv(x, weights[0]))
    return jnp.sum(jnp.sin(jnp.flip(x.reshape(-1)).reshape(x.shape)) * jnp.tanh(x))


EXAMPLES = [
    "store_all",
    "retained",
    "store_convs",
    "every:2",
    "sqrt",
    "lower_sets:1MB",
    "names:act0,conv2",
    "offload:act1",
    "recompute_all",
    "passing:4x3",
    "tiled:4x3",
]


def test_every_policy_has_an_example_here_or_below():
    known = {name.partition(":")[0] for name in policies.names()}
    assert known - {e.partition(":")[0] for e in EXAMPLES} == {"budget"}


@parametrize_few("text", EXAMPLES, always=4)
def test_exact(text):
    assert_same(named, WEIGHTS, IMAGE, in_axes=AXES, tiles="whole", policy=policies.resolve(text))


@parametrize_few("text", ["retained", "store_convs", "every:3", "sqrt", "tiled:4x3"], always=2)
@pytest.mark.parametrize("fun", [unnamed, mixing])
def test_functions_without_names(fun, text):
    assert_same(fun, WEIGHTS, IMAGE, in_axes=AXES, tiles="whole", policy=policies.resolve(text))


def stored(text, fun=named):
    explained = jaxtile.explain(fun, WEIGHTS, IMAGE, in_axes=AXES, policy=policies.resolve(text))
    return [use.name for r in explained.regions for use in r.writes if use.shape]


def test_what_is_stored():
    assert stored("store_convs") == ["conv0", "conv1", "conv2", "conv3"]
    assert stored("every:2") == ["act0", "act1", "act2", "act3"]
    assert stored("names:act0,conv2") == ["act0", "conv2"]
    assert stored("retained") == ["act0", "act1", "act2", "act3"]
    assert stored("recompute_all") == []
    assert len(stored("store_convs", unnamed)) == 4


def test_cuts_of_networks_whose_statistics_are_of_another_type():
    """What a norm sums up in float32 is read by that norm, and by no one after it."""

    def block(w, x):
        y = conv(x, w)
        wide = y.astype(jnp.float32)
        mean, square = jnp.mean(wide, (0, 1, 2)), jnp.mean(wide**2, (0, 1, 2))
        y = ((y - mean) * jax.lax.rsqrt(square - mean**2 + 1e-3)).astype(y.dtype)
        return checkpoint_name(x + jax.nn.relu(y), "block"), (mean, square)

    def network(weights, x):
        statistics = []
        for w in weights:
            x, found = block(w, x)
            statistics.append(found)
        return jnp.mean(x**2), statistics

    arguments = [w.astype(jnp.bfloat16) for w in WEIGHTS], IMAGE.astype(jnp.bfloat16)
    outline = jaxtile.policy.outline(network, *arguments, in_axes=AXES)
    stored = policies.resolve("sqrt").choose(outline)
    assert [name for name in stored if name is not ...] == ["block:2", "block:4"]


@parametrize_few("text", ["sqrt", "every:2", "lower_sets:1MB"])
def test_reductions_along_one_tiled_axis(text):
    """What follows has tiles along the other axis, and reads what has none."""

    def fun(w, x):
        return jnp.sin(conv(jnp.cos(conv(x, w)), w).mean(2))

    args = normal(1, 3, 3, 2, 2), normal(2, 1, 8, 7, 2)
    assert_same(fun, *args, in_axes=(None, (1, 2)), tiles=(2, 2), policy=text)


def test_tiles_given_by_the_caller_win():
    explained = jaxtile.explain(
        named,
        WEIGHTS,
        IMAGE,
        in_axes=AXES,
        tiles=(2, 2),
        policy=policies.resolve("names:act1"),
    )
    assert [r.grid for r in explained.regions] == [(2, 2), (2, 2)]


def test_tiles_do_not_touch_what_the_policy_keeps():
    explained = jaxtile.explain(
        named, WEIGHTS, IMAGE, in_axes=AXES, tiles=(2, 2), policy=policies.resolve("store_all")
    )
    assert {r.grid for r in explained.regions} == {None}
    with pytest.raises(jaxtile.TilingError, match="must be one grid"):
        jaxtile.explain(
            named,
            WEIGHTS,
            IMAGE,
            in_axes=AXES,
            tiles={...: (2, 2)},
            policy=policies.resolve("sqrt"),
        )


def test_tiles_of_a_policy_are_shared_by_devices():
    mesh = dict(mesh=jax.make_mesh((2, 2), ("rows", "columns")), mesh_axes=("rows", "columns"))
    tiled = jaxtile.checkpoint(named, in_axes=AXES, policy="tiled:4x2", **mesh)
    assert {region.grid for region in tiled.explain(WEIGHTS, IMAGE).regions} == {(2, 1)}
    got, want = (jax.jit(jax.grad(fun))(WEIGHTS, IMAGE) for fun in (tiled, named))
    assert_close(got, want)


def test_a_name_that_returns_is_stored_each_time():
    def repeated(weights, x):
        for w in weights:
            x = checkpoint_name(jnp.tanh(conv(x, w)), "act")
        return jnp.mean(x**2)

    assert stored("names:act", repeated) == ["act"] * len(WEIGHTS)


def test_a_policy_may_be_a_name():
    plain, tiled = named, jaxtile.checkpoint(named, in_axes=AXES, policy="sqrt")
    assert_close(tiled(WEIGHTS, IMAGE), plain(WEIGHTS, IMAGE))
    resolved = jaxtile.explain(named, WEIGHTS, IMAGE, in_axes=AXES, policy=policies.resolve("sqrt"))
    assert tiled.explain(WEIGHTS, IMAGE) == resolved
    assert jaxtile.explain(named, WEIGHTS, IMAGE, in_axes=AXES, policy="sqrt") == resolved
    with pytest.raises(ValueError, match="did you mean 'sqrt'"):
        jaxtile.checkpoint(named, in_axes=AXES, policy="sqr")
    with pytest.raises(jaxtile.TilingError, match=r"`policy` \(=3\) must be the name"):
        jaxtile.checkpoint(named, in_axes=AXES, policy=3)


def test_names_are_found_without_importing_the_catalogue():
    code = (
        "import jax, jaxtile; f = jaxtile.checkpoint(jax.numpy.sin, in_axes=(0,), policy='sqrt'); "
        "import sys; assert 'policies' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_wrong_number_of_axes():
    with pytest.raises(ValueError, match="has 1 numbers, but `in_axes` has 2"):
        stored("tiled:4")
    with pytest.raises(ValueError, match=r"more tiles than there are positions, \d+ x \d+: its"):
        stored("tiled:500x3")


def test_effects_are_no_results():
    def shouting(weights, x):
        jax.debug.callback(lambda total: None, weights[0].sum())
        return named(weights, x)

    assert stored("store_convs", shouting) == ["conv0", "conv1", "conv2", "conv3"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("sqr", "did you mean 'sqrt'"),
        ("nonsense", "Known are store_all, retained"),
        ("every", "every:k"),
        ("every:0", "positive"),
        ("sqrt:3", "must be written 'sqrt'"),
        ("budget:lots", "2GiB"),
        ("tiled:4xq", "positive"),
        ("lower_sets:-1", "not an amount"),
        ("budget:1.2.3GB", "not an amount"),
        ("budget:1e400", "not an amount"),
        ("sqrt:", "must be written 'sqrt'"),
        (4, "must be a string"),
    ],
)
def test_bad_strings(text, message):
    with pytest.raises(ValueError, match=message):
        policies.resolve(text)


def test_an_unknown_name_lists_the_nearest():
    tiled = jaxtile.checkpoint(named, in_axes=AXES, policy=policies.resolve("names:conv9"))
    with pytest.raises(ValueError, match="conv3"):
        tiled(WEIGHTS, IMAGE)


def test_no_name_at_all():
    tiled = jaxtile.checkpoint(named, in_axes=AXES, policy="offload:,")
    with pytest.raises(ValueError, match="',' names no result"):
        tiled(WEIGHTS, IMAGE)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="there is a policy 'sqrt' already"):
        jaxtile.policy.register("sqrt", "", "another")(lambda argument: None)


def test_lower_sets_too_small():
    tiled = jaxtile.checkpoint(named, in_axes=AXES, policy=policies.resolve("lower_sets:10kB"))
    with pytest.raises(ValueError, match="the smallest budget is"):
        tiled(WEIGHTS, IMAGE)


@pytest.mark.parametrize(
    "text, expected", [("1KiB", 1024), ("1 kB", 1000), ("2.5GB", 2_500_000_000), ("7", 7)]
)
def test_amounts(text, expected):
    assert policies.parse_bytes(text) == expected


@pytest.mark.parametrize("factor", [2, 12, 32])
def test_an_outline_knows_what_an_enlargement_reads(factor):
    """Also if a small tile needs no more than one position."""

    def fun(image):
        coarse = checkpoint_name(ops.max_pool(image, window=factor, strides=factor), "coarse")
        return checkpoint_name(ops.upsample(coarse, factor=factor), "fine")

    image = jax.ShapeDtypeStruct((1, 1536, 768, 1), jnp.float32)
    *_, fine = jaxtile.policy.outline(fun, image, in_axes=(1, 2)).parts
    for demand in fine.demands[0]:
        assert demand.scale == pytest.approx(1 / factor, rel=0.1)
        assert 0 <= demand.halo <= 2
