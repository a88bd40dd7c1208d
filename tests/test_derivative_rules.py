"""`custom_jvp` and `custom_vjp` rules of every kind: in tiles where that is proved to be right,
once on whole arrays where it is not, and the same numbers either way.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtile

from .interpreter import interpret
from .random_rules import check, clipped_back, derivatives, doubled_back, draw, surrogate
from .support import TOLERANCE, assert_close, assert_same, conv, normal, parametrize_few

W, X = normal(0, 3, 2, 2), normal(1, 1, 7, 2)
AXES = (None, (1,))
SCALE = normal(2, 1, 7, 2)


def with_backward(backward, fun=lambda x: x * 2, forward=None):
    """`fun` with a `custom_vjp` rule whose residual is its operand."""
    call = jax.custom_vjp(fun)
    call.defvjp(lambda x: ((forward or call)(x), x), backward)
    return call


def between(rule):
    """A rule between two convolutions, so that its cotangents overlap."""
    return lambda w, x: conv(jnp.tanh(rule(conv(x, w))), w)


def whole(fun, *args, in_axes=AXES, tiles=(3,)):
    return jaxtile.explain(fun, *args, in_axes=in_axes, tiles=tiles).whole


NOT_PROVED = {
    "affine": lambda x, c: (c + 0.1 * x,),
    "masked": lambda x, c: (jnp.where(x > 0, c, 0.1),),
    "clipped": lambda x, c: (jnp.clip(c, -0.1, 0.1),),
    "noise": lambda x, c: (c + jax.random.normal(jax.random.key(0), c.shape),),
    "constant": lambda x, c: (jnp.full_like(x, 0.3),),
    "rounded": lambda x, c: (c.astype(jnp.bfloat16).astype(c.dtype),),
    "reduced": lambda x, c: (lax.reduce_precision(c, 8, 7),),
    "normalised": lambda x, c: (c / jnp.sqrt((c**2).sum()),),
    "centred": lambda x, c: (c - c.mean(1, keepdims=True),),
    "smoothed": lambda x, c: ((c + jnp.roll(c, 1, 1)) / 2,),
    "mirrored": lambda x, c: (jnp.flip(c, 1),),
}
PROVED = {
    "scaled": lambda x, c: (c * jnp.cos(x),),
    "negated": lambda x, c: (-c,),
    "masked": lambda x, c: (jnp.where(x > 0, c, 0.0),),
    "closed over": lambda x, c: (c * SCALE,),
    "zeros": lambda x, c: (jnp.zeros_like(x),),
    "none": lambda x, c: (None,),
    "dropped": lambda x, c: (c * jax.random.bernoulli(jax.random.key(0), 0.5, c.shape),),
    "calls a rule": lambda x, c: (c * surrogate(x) + doubled_back(x) * c,),
    "over channels": lambda x, c: (c - c.mean(-1, keepdims=True),),
}


@parametrize_few("tiles", [(3,), (7,)])
@pytest.mark.parametrize("backward", NOT_PROVED.values(), ids=NOT_PROVED.keys())
def test_what_is_not_proved_runs_whole(backward, tiles):
    fun = between(with_backward(backward))
    interpreted(fun, W, X, tiles=tiles)
    (found,) = whole(fun, W, X)
    assert "test_derivative_rules.py" in found.where
    assert found.bytes == X.nbytes


@pytest.mark.parametrize("backward", PROVED.values(), ids=PROVED.keys())
def test_what_is_proved_runs_in_tiles(backward):
    fun = between(with_backward(backward))
    interpreted(fun, W, X, tiles=(3,))
    assert not whole(fun, W, X)


def interpreted(fun, *args, tiles, in_axes=AXES, order=1):
    tiled = jaxtile.checkpoint(fun, in_axes=in_axes, tiles=tiles)
    got, want = (interpret(lambda *a, f=f: derivatives(f, a, order), *args) for f in (tiled, fun))
    assert_close(got, want, TOLERANCE if order == 1 else 1e-11)


def test_rounding_to_the_type_that_a_cotangent_has_anyway_is_no_rounding():
    """Mixed precision: bfloat16 in, float32 inside, bfloat16 out."""
    backward = lambda x, c: ((c.astype(jnp.float32) * 0.5).astype(x.dtype),)  # noqa: E731
    narrow = [a.astype(jnp.bfloat16) for a in (W, X)]
    assert not whole(between(with_backward(backward)), *narrow)


@pytest.mark.slow
def test_compiled_rules_that_run_whole():
    """Fed by a reduction and feeding one, and twice in a row."""
    clip = with_backward(NOT_PROVED["clipped"])

    def fun(w, x):
        y = clip(clip(conv(x, w)) - conv(x, w).mean((0, 1)))
        return conv(y, w) + (y**2).mean()

    for tiles in ((3,), "whole", {...: None}):
        assert_same(fun, W, X, in_axes=AXES, tiles=tiles)


def test_an_auxiliary_loss():
    """Its operand's cotangent is a constant, whatever the cotangent of the result is."""

    @jax.custom_vjp
    def with_loss(y, auxiliary):
        return y

    with_loss.defvjp(lambda y, a: (y, a), lambda a, c: (c, jnp.ones_like(a)))
    fun = lambda w, x: conv(with_loss(conv(x, w), (w**2).sum()), w)  # noqa: E731
    interpreted(fun, W, X, tiles=(3,))
    assert len(whole(fun, W, X)) == 1


def test_a_value_that_only_the_forward_rule_has():
    """Quantisation in `fwd` alone counts when the function is differentiated, and only then."""
    backward, quantised = lambda x, c: (c,), lambda x: jnp.round(x * 4) / 4
    fun = between(with_backward(backward, fun=lambda x: x * 1, forward=quantised))
    assert not whole(fun, W, X)
    for tiles in ((3,), "whole", {...: None}):
        interpreted(fun, W, X, tiles=tiles)
        tiled = jaxtile.checkpoint(fun, in_axes=AXES, tiles=tiles)
        np.testing.assert_allclose(tiled(W, X), fun(W, X), rtol=1e-12)
    assert_same(fun, W, X, in_axes=AXES, tiles=(3,))


def derivative(fun, order):
    """Of squares of derivatives."""

    def power(w, n=0):
        if n == order - 1:
            return jnp.sin(fun(w, X)).sum()
        return jnp.sum(jax.grad(lambda w: power(w, n + 1))(w) ** 2)

    return interpret(jax.grad(power), W)


@pytest.mark.parametrize("rule", [jnp.tanh, surrogate, doubled_back], ids=["none", "jvp", "vjp"])
def test_second_derivatives(rule):
    fun = between(rule)
    tiled = jaxtile.checkpoint(fun, in_axes=AXES, tiles=(3,))
    assert_close(derivative(tiled, 2), derivative(fun, 2), 1e-11)


def test_third_derivatives():
    """Before jax 0.12, rules that rules call are forgotten in the third derivative of a loop."""
    for rule in (jnp.tanh, surrogate):
        tiled = jaxtile.checkpoint(between(rule), in_axes=AXES, tiles=(3,))
        if rule is surrogate and jax.__version_info__ < (0, 12):
            with pytest.raises(jaxtile.TilingError, match="called by the rule of another"):
                derivative(tiled, 3)
        else:
            assert_close(derivative(tiled, 3), derivative(between(rule), 3), 1e-11)


@pytest.mark.parametrize("tiles", [(3,), "whole"])
def test_a_rule_that_calls_one_that_is_not_proved(tiles):
    """The inner one matters to second derivatives, where it must see whole cotangents."""
    rule = with_backward(lambda x, c: (c * clipped_back(x),))

    def fun(w, x):
        y = rule(conv(x, w))
        return conv(y, w) + (y**2).mean()

    assert len(whole(fun, W, X)) == 1
    interpreted(fun, W, X, tiles=tiles)
    interpreted(fun, W, X, tiles=tiles, order=2)


def test_a_rule_that_calls_a_function_of_neighbours():
    """Its forward pass, too, may read neither more nor less than the tile has."""
    shift = with_backward(lambda x, c: (c,), fun=lambda x: x + jnp.roll(x, 1, 1))
    for backward in (lambda x, c: (c * shift(x),), lambda x, c: (shift(c),)):
        fun = between(with_backward(backward))
        interpreted(fun, W, X, tiles=(3,))
        assert len(whole(fun, W, X)) == 1


def test_a_rule_that_closes_over_a_traced_array():
    def fun(w, x):
        inner = conv(x, w)
        return conv(with_backward(lambda x, c: (c * inner,))(inner), w)

    tiled = jaxtile.checkpoint(fun, in_axes=AXES, tiles=(3,))
    with pytest.raises(jaxtile.TilingError, match=r"closes over an array.*pass it to the function"):
        jax.grad(lambda w: tiled(w, X).sum())(W)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_arrays_without_elements(policy):
    def fun(w, x):
        y = conv(x, w)
        joined = jnp.concatenate([y[:, :0] * 2, jnp.roll(y, 0, 1), y[:, 7:]], 1)
        return joined, y[:, :0], y[:, :0].sum() + y[..., :0].sum(), jnp.split(y, [0], 1)

    assert_same(fun, W, X, in_axes=AXES, tiles=np.array([4]), policy=policy)
    with pytest.raises(jaxtile.TilingError, match="no elements"):
        jaxtile.checkpoint(fun, in_axes=AXES, tiles=(1,))(W, X[:, :0])


def test_bits_as_other_types():
    def fun(w, x):
        y = conv(x, w).astype(jnp.float32)
        narrow = lax.bitcast_convert_type(y, jnp.int8)
        return (
            narrow,
            lax.bitcast_convert_type(narrow, jnp.int32),
            lax.bitcast_convert_type(y, jnp.uint32),
        )

    assert_same(fun, W, X, in_axes=AXES, tiles=(3,))


@parametrize_few("seed", range(8))
def test_random_rules(seed):
    chance = random.Random(seed)
    for _ in range(4):
        case = draw(chance)
        assert check(case) in ("exact", "ill-conditioned", "refused", "undefined"), case
    jax.clear_caches()


@pytest.mark.slow
def test_random_rules_compiled():
    chance = random.Random(99)
    for _ in range(3):
        case = draw(chance, order=1)
        assert check(case, compile=True) in ("exact", "ill-conditioned"), case


@pytest.fixture
def newer_calls():
    """JAX's newer `custom_vjp` and `remat`, whose calls are Python objects."""
    flags = ("jax_custom_vjp3", "jax_remat3")
    before = [getattr(jax.config, flag) for flag in flags]
    for flag in flags:
        jax.config.update(flag, True)
    yield
    for flag, value in zip(flags, before, strict=True):
        jax.config.update(flag, value)


def test_newer_calls(newer_calls):
    rule = with_backward(lambda x, c: (2 * c * jnp.cos(x),), jnp.sin)
    layer = jax.checkpoint(between(rule))
    assert "call_hi_primitive" in {e.primitive.name for e in jax.make_jaxpr(layer)(W, X).eqns}
    assert_same(layer, W, X, in_axes=AXES, tiles=(3,))
    assert not whole(layer, W, X)
    assert jaxtile.operations(layer, W, X).macs == jaxtile.operations(between(rule), W, X).macs > 0


def with_tangent(tangent, fun=lambda x: x * 2):
    """`fun` with a `custom_jvp` rule."""
    call = jax.custom_jvp(fun)
    call.defjvp(lambda primals, tangents: (call(*primals), tangent(*primals, *tangents)))
    return call


def centred(x):
    return x - x.mean(1, keepdims=True)


RUN_WHOLE = {
    "a rule that mixes": (with_tangent(lambda x, t: t * jnp.sort(x, 1)), "cannot be tiled"),
    "a rule that reduces": (with_tangent(lambda x, t: t * x.max(1)), "reduces over a tiled axis"),
    "a rule that says where arrays lie": (
        with_tangent(lambda x, t: jax.device_put(2 * t, jax.devices()[0])),
        "says where the whole array is to lie",
    ),
    "a rule that changes at a place": (
        with_tangent(lambda x, t: 2 * t.at[:, x.astype(int).sum() % 7].multiply(0.5)),
        "not one block at a constant place",
    ),
    "a function that reduces": (with_backward(lambda x, c: (c,), centred), "it reduces over"),
    "a function of another size": (
        with_backward(lambda x, c: (jnp.repeat(c, 2, 1)[:, :7],), lambda x: x[:, ::2]),
        "its results have other sizes",
    ),
    "a maximum": (with_backward(lambda x, c: (c * x.max(1),)), "uses a reduction"),
    "integers": (
        with_backward(lambda x, c: (c.astype(jnp.int32).astype(c.dtype),)),
        "is not linear in the cotangent, or rounds it",
    ),
}


@pytest.mark.parametrize("rule, reason", RUN_WHOLE.values(), ids=RUN_WHOLE.keys())
def test_what_runs_whole_says_why(rule, reason):
    fun = between(rule)
    interpreted(fun, W, X, tiles=(3,))
    (found,) = whole(fun, W, X)
    assert reason in found.reason


def test_a_rule_that_exchanges_the_tiled_axes():
    rule, schedule = with_tangent(lambda x, t: 2 * t.swapaxes(1, 2)), {"tiles": (3, 2)}
    fun = lambda w, x: jnp.tanh(rule(conv(x, w)))  # noqa: E731
    args, schedule["in_axes"] = (normal(4, 3, 3, 2, 2), normal(3, 1, 6, 6, 2)), (None, (1, 2))
    interpreted(fun, *args, **schedule)
    (found,) = whole(fun, *args, **schedule)
    assert "has its tiled axes in other dimensions than what reads it" in found.reason


def test_an_operand_of_a_rule_that_is_read_by_window():
    scaled = jax.custom_jvp(lambda x, scale: x * scale)
    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * primals[1]))
    fun = lambda w, x, scale: conv(scaled(conv(x, w), scale), w)  # noqa: E731
    interpreted(fun, W, X, SCALE, tiles=(3,), in_axes=(None, (1,), None))
    assert not whole(fun, W, X, SCALE, in_axes=(None, (1,), None))


def test_what_a_rule_computes_whole_and_reads_by_window():
    def weighted(x):
        return x * jnp.cumsum(jnp.arange(7.0))[:, None]

    fun = between(with_tangent(lambda x, t: 2 * weighted(t), weighted))
    interpreted(fun, W, X, tiles=(3,))
    assert not whole(fun, W, X)


def test_a_tangent_that_closes_over_a_traced_array():
    def fun(w, x):
        inner = conv(x, w)
        return conv(with_tangent(lambda x, t: t * inner)(inner), w)

    with pytest.raises(jaxtile.TilingError, match=r"closes over an array.*pass it to the function"):
        jaxtile.checkpoint(fun, in_axes=AXES, tiles=(3,))(W, X)


def test_a_rule_of_a_rule_that_reduces():
    """Once it is differentiated as it should be; a second time it is refused."""
    inner = with_tangent(lambda x, t: t * x.max(1))
    tiled = jaxtile.checkpoint(
        between(with_tangent(lambda x, t: t * inner(x))), in_axes=AXES, tiles=(3,)
    )
    with pytest.raises(jaxtile.TilingError, match="its derivative rule reduces over a tiled axis"):
        derivative(tiled, 2)
