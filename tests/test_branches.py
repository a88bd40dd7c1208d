"""`cond` and `switch` on a number that all tiles share: exact, and only one branch runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .support import assert_same, conv, max_pool, normal, parametrize_few

W = {"a": normal(0, 3, 3, 2, 2), "b": normal(1, 5, 5, 2, 2), "s": jnp.asarray(0.7)}
X = normal(2, 2, 11, 9, 2)
KEY = jax.random.key(3)
TILED = {"in_axes": (None, (1, 2)), "tiles": (3, 2)}


def norm(x):
    mean = x.mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-3)


def narrow(w, x):
    return jax.nn.relu(conv(x, w["a"]))


def wide(w, x):
    return x + jnp.tanh(conv(conv(x, w["b"]), w["a"]) + 1)


def residual(w, x):
    return x + jax.nn.relu(norm(conv(jax.nn.relu(norm(conv(x, w["a"]))), w["b"])))


def skip(w, x):
    return x


def both(then, otherwise, flag=lambda w, x: w["s"] > 0.5):
    """Each of the branches is taken once."""

    def fun(w, x):
        y, taken = conv(x, w["a"]), flag(w, x)
        return lax.cond(taken, then, otherwise, w, y), lax.cond(taken, otherwise, then, w, y)

    return fun


def with_state(w, x):
    """Batch statistics are results as well, and have no tiled axis."""

    def train(w, x):
        mean = conv(x, w["a"]).mean((0, 1, 2))
        return x - mean, {"mean": 0.9 * mean, "seen": w["s"] * 2}

    def frozen(w, x):
        return x, {"mean": jnp.ones(2), "seen": w["s"]}

    return both(train, frozen)(w, x)


def stochastic_depth(w, x):
    def layer(x, given):
        key, kernel = given
        return lax.cond(
            jax.random.bernoulli(key), lambda x: x + norm(conv(x, kernel)) / 0.5, lambda x: x, x
        ), None

    return lax.scan(layer, x, (jax.random.split(KEY, 3), jnp.stack([w["a"]] * 3)))[0]


def switch(w, x):
    index = jnp.argmax(jnp.stack([w["s"], conv(x, w["b"]).max(), w["s"] - 1]))
    return lax.switch(index, [narrow, wide, residual], w, conv(x, w["a"]))


def infinite(w, x):
    """What is not taken would be infinite, and its gradient not a number."""
    zero = 0 * w["s"]
    return both(narrow, lambda w, x: x / jnp.sqrt(zero * x.mean()) / jnp.sqrt(zero))(w, x)[0]


def pools(w, x):
    return both(lambda w, x: conv(x, w["a"], 2), lambda w, x: max_pool(x, 3, 2, "SAME"))(w, x)


def merged(w, x):
    def attention(w, x):
        positions = x.reshape(2, -1, 2)
        weights = jax.nn.softmax(positions[..., 0], 1)
        return x + jnp.einsum("bp,bpc->bc", weights, positions)[:, None, None]

    return both(attention, skip)(w, x)


CASES = {
    "halos": both(narrow, wide),
    "with state": with_state,
    "infinite": infinite,
    "predicate from a reduction": both(wide, skip, lambda w, x: conv(x, w["b"]).mean() > 0),
    "stochastic depth": stochastic_depth,
    "switch": switch,
    "residual": both(residual, skip),
    "zeros": both(lambda w, x: jnp.zeros_like(x), narrow),
    "dropout": both(lambda w, x: x * jax.random.bernoulli(KEY, 0.5, x.shape), skip),
    "pools": pools,
    "merged": merged,
    "nested": both(lambda w, x: lax.cond(w["s"] < 9, residual, wide, w, x), narrow),
    "no tiled result": both(lambda w, x: (x**2).mean(), lambda w, x: 3 * w["s"]),
    "integers": both(lambda w, x: jnp.argmax(x, -1), lambda w, x: jnp.argmin(x, -1)),
}


@parametrize_few("name", CASES, always=3)
def test_tiles_are_exact(name):
    assert_same(CASES[name], W, X, **TILED)


@parametrize_few("tiles", ["whole", None, {"inner": (2, 2), ...: "whole"}], always=0)
def test_other_schedules(tiles):
    def block(w, x):
        return conv(checkpoint_name(jnp.tanh(norm(conv(x, w["a"]))), "inner"), w["b"])

    policy = jax.checkpoint_policies.save_only_these_names("inner")
    assert_same(both(block, skip), W, X, in_axes=(None, (1, 2)), tiles=tiles, policy=policy)


def test_a_name_in_a_branch_can_be_saved():
    def block(w, x):
        return conv(checkpoint_name(jnp.tanh(conv(x, w["a"])), "inner"), w["b"])

    policy = jax.checkpoint_policies.save_only_these_names("inner")
    assert_same(both(block, skip), W, X, **TILED, policy=policy)
    explained = jaxtile.explain(both(block, skip), W, X, **TILED, policy=policy)
    written = [use.name for region in explained.regions for use in region.writes]
    assert written.count("inner") == 2


def test_a_known_branch_is_the_only_one():
    def fun(w, x):
        y = lax.cond(True, narrow, lambda w, x: jnp.cumsum(x, 1), w, x)
        return lax.switch(jnp.int32(1), [residual, wide], w, y)

    assert_same(fun, W, X, **TILED)
    text = str(jax.make_jaxpr(jaxtile.checkpoint(fun, **TILED))(W, X))
    assert "cond[" not in text


def test_one_branch_runs_in_a_tile():
    """Convolutions are inside a `cond` inside the loop, and not computed and thrown away."""
    tiled = jaxtile.checkpoint(lambda w, x: lax.cond(w["s"] > 0, wide, skip, w, x), **TILED)
    closed = jax.make_jaxpr(tiled)(W, X)

    def places(jaxpr, inside=()):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "conv_general_dilated":
                yield inside
            for part in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from places(part, (*inside, eqn.primitive.name))

    found = list(places(closed.jaxpr))
    assert len(found) == 2
    for inside in found:
        assert inside.index("scan") < inside.index("cond")


def test_platforms():
    def fun(w, x):
        here = lax.platform_dependent(w, conv(x, w["b"]), cpu=narrow, default=wide)
        return lax.platform_dependent(w, here, cuda=narrow, default=wide)

    assert_same(fun, W, X, **TILED)


def test_what_cannot_run_in_a_tile_runs_whole():
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, c: (jnp.clip(c, -0.1, 0.1),))
    fun = both(lambda w, x: clip(conv(x, w["a"])), skip)
    assert_same(fun, W, X, **TILED)
    whole = jaxtile.explain(fun, W, X, **TILED).whole
    assert [report.op for report in whole] == ["cond", "cond"]
    assert "a branch calls `custom_vjp_call`: its backward rule is not linear" in whole[0].reason


def test_effects_happen_once(capfd):
    def loud(w, x):
        jax.debug.print("loud")
        return conv(x, w["a"])

    tiled = jaxtile.checkpoint(lambda w, x: lax.cond(w["s"] > 0, loud, skip, w, x), **TILED)
    jax.block_until_ready(tiled(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out == "loud\n"


def test_a_refusal_says_what_in_which_branch():
    def fun(w, x):
        stored = checkpoint_name(conv(x, w["a"]), "stored")
        return both(lambda w, x: jnp.sort(x, 1), skip)(w, stored)

    with pytest.raises(jaxtile.TilingError, match=r"cannot tile `cond` at .*inside it, `sort` at"):
        jaxtile.checkpoint(fun, **TILED)(W, X)
