"""Height and width merged into one dimension, before what works by position or reduces over all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile._graph.joint import merge

from .interpreter import interpret
from .support import assert_close, conv, normal, parametrize_few, scalar

WEIGHTS = [normal(i, 3, 3, 2, 2) for i in range(2)]
IMAGE = normal(9, 2, 9, 7, 2)
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 9, 7)))
DENSE, BIAS, KEY = normal(3, 126, 5), normal(5, 2), jax.random.key(0)
TILED = {"in_axes": (None, (1, 2), (1, 2)), "tiles": (3, 2)}


def normed(x, axes):
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-2)


def context(w, x, labels):
    """As in a global context block: a softmax over all positions."""
    weights = jax.nn.softmax(conv(x, w[1])[..., 0].reshape(2, -1), 1)
    pooled = jnp.einsum("npc,np->nc", x.reshape(2, -1, 2), weights)
    return conv(x + pooled[:, None, None], w[0])


def one_hot(w, x, labels):
    scores = jax.nn.log_softmax(conv(x, w[0]).reshape(-1, 2))
    return -(scores * jax.nn.one_hot(labels.reshape(-1), 2)).sum(-1).mean()


def cross_entropy(w, x, labels):
    scores = conv(x, w[0]).reshape(-1, 2)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels.reshape(-1)).mean()


def masked(w, x, labels):
    mask = labels.ravel() == 1
    return (conv(x, w[0]).reshape(-1, 2) * mask[:, None]).sum(0) / jnp.maximum(mask.sum(), 1)


def there_and_back(w, x, labels):
    x = jnp.sin(conv(x, w[0]).reshape(2, -1, 2)) * 2 + BIAS
    return conv(x.reshape(2, 9, 7, 2), w[1])


def gram(w, x, labels):
    flat = conv(x, w[0]).reshape(2, -1, 2)
    return jnp.einsum("npc,npd->ncd", flat, flat)


def window_attention(w, x, labels):
    """As in a Swin transformer: windows of 2 x 2 positions are rows of one array."""
    x = conv(x, w[0])[:, :8, :6]
    rows = x.reshape(2, 4, 2, 3, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2)
    query, key = jnp.split(rows @ jnp.concatenate([w[1][0, 0], w[1][0, 1]], -1), 2, -1)
    rows = jax.nn.softmax(query @ key.transpose(0, 2, 1)) @ rows
    y = rows.reshape(2, 4, 3, 2, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(2, 8, 6, 2)
    return conv(x + jnp.roll(y, (1, 1), (1, 2)), w[1])


def along_channels(w, x, labels):
    scores = conv(x, w[0]).reshape(-1, 2)
    both = jnp.concatenate([scores, scores[:, :1], jnp.cumsum(scores, -1)], -1)
    return jnp.sort(both, -1).mean(0)


def looked_up(w, x, labels):
    """The score of each position's label: by its number, and by its place."""
    scores, rows, columns = jax.nn.log_softmax(conv(x, w[0])), np.arange(9), jnp.arange(7)
    flat = scores.reshape(-1, 2)[jnp.arange(126), labels.ravel() - 2]
    return flat.mean(), conv(
        scores[:, rows[:, None], columns, labels[0]][..., None], w[1][:, :, :1]
    )


@jax.custom_vjp
def rounded(x, step):
    """A straight-through estimator with a learned step."""
    return jnp.round(x / step) * step


rounded.defvjp(
    lambda x, step: (rounded(x, step), (x, step)),
    lambda saved, c: (c, (c * jnp.cos(saved[0])).sum(0)),
)
scaled = jax.custom_jvp(lambda x, scale: x * scale)
scaled.defjvp(lambda xs, ts: (scaled(*xs), 2 * ts[0] * xs[1]))


def recurrent(w, x, labels):
    """A recurrent network over the time of each position."""
    series = jnp.stack([x, conv(x, w[0]), x**2], 3).reshape(-1, 3, 2)

    def cell(state, item):
        state = jnp.tanh(state @ w[1][0, 0] + item)
        return state, state[:, 0]

    last, firsts = lax.scan(cell, jnp.zeros((126, 2)), series.swapaxes(0, 1))
    return last, firsts.mean(0)


def branches(w, x, labels):
    rows = conv(x, w[0]).reshape(-1, 2)
    branches = [jnp.sin, lambda r: r - r.mean(0), lambda r: r * BIAS]
    return lax.switch((w[1].sum() > 0).astype(int) + 1, branches, rows) @ w[1][0, 0]


def temporal(w, x, labels):
    """Convolutions and pools along the time of each position."""
    series = jnp.stack([x, conv(x, w[0]), x**2, x[:, ::-1]], 3).reshape(-1, 8, 1)
    numbers = ("NTC", "TIO", "NTC")
    series = lax.conv_general_dilated(
        series, w[1][0, :, :1], (1,), "SAME", dimension_numbers=numbers
    )
    series = lax.reduce_window(series, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    every = jax.vmap(lambda row: jnp.convolve(row, w[1][0, :, 0, 0], mode="same"))
    return every(series.sum(-1)).reshape(2, 9, 7, 4)


def moved(w, x, labels):
    rows = jnp.pad(conv(x, w[0]).reshape(-1, 2), ((0, 0), (1, 0)), mode="edge")
    first, *_, last = jnp.unstack(jnp.flip(rows, 1), axis=1)
    return jnp.stack([first, first * last], 1), lax.top_k(rows, 2)[0].mean(0)


FUNCTIONS = {
    "rules": lambda w, x, n: scaled(
        rounded(conv(x, w[0]).reshape(-1, 2), 1 + w[1][0, 0, 0] ** 2), BIAS
    ),
    "recurrent": recurrent,
    "branches": branches,
    "temporal": temporal,
    "moved": moved,
    "looked up": looked_up,
    "window attention": window_attention,
    "along channels": along_channels,
    "output": lambda w, x, n: conv(x, w[0]).reshape(-1, 2),
    "ravelled output": lambda w, x, n: (conv(x, w[0]).ravel(), x.reshape(2, -1)),
    "mean": lambda w, x, n: conv(x, w[0]).reshape(2, -1, 2).mean(1),
    "maximum with ties": lambda w, x, n: (
        jnp.round(conv(x, w[0])).reshape(2, -1, 2).max(1) * x.sum()
    ),
    "channels first": lambda w, x, n: (
        conv(x, w[0]).transpose(0, 3, 1, 2).reshape(2, 2, -1).mean(-1)
    ),
    "dense per position": lambda w, x, n: conv(x, w[0]).reshape(-1, 2) @ w[1][0, 0] + BIAS,
    "flatten and dense": lambda w, x, n: jnp.tanh(conv(x, w[0])).reshape(2, -1) @ DENSE,
    "gram": gram,
    "context": context,
    "one hot": one_hot,
    "cross entropy": cross_entropy,
    "masked": masked,
    "accuracy": lambda w, x, n: (conv(x, w[0]).reshape(-1, 2).argmax(-1) == n.ravel()).mean(
        dtype=x.dtype
    ),
    "there and back": there_and_back,
    "norm": lambda w, x, n: normed(conv(x, w[0]).reshape(2, -1, 2), 1).reshape(x.shape),
    "group norm": lambda w, x, n: normed(conv(x, w[0]).reshape(2, 63, 2, 1), (1, 3)),
    "relu": lambda w, x, n: (
        jax.nn.relu(jnp.round(conv(x, w[0])).reshape(-1, 2)).sum(0) + x.ravel().sum()
    ),
    "random": lambda w, x, n: (
        conv(x, w[0]).reshape(-1, 2) * jax.random.bernoulli(KEY, 0.5, (126, 2))
    ),
    "numbered": lambda w, x, n: (conv(x, w[0]).reshape(-1) * jnp.arange(252.0) / 252).sum(),
    "column": lambda w, x, n: conv(x, w[0]).reshape(-1, 2)[:, 1].var(),
    "split channels": lambda w, x, n: jnp.concatenate([x, x], -1).reshape(2, 63, 2, 2).sum((1, 2)),
    "regrouped": lambda w, x, n: conv(x, w[0]).reshape(2, -1).reshape(-1, 2).reshape(2, 9, 7, 2),
    "strided": lambda w, x, n: conv(x, w[0], stride=2).reshape(2, -1, 2).mean(1),
}


def results(fun):
    return jax.jit(derivatives(fun))(WEIGHTS, IMAGE)


def plain_results(fun):
    return interpret(derivatives(fun), WEIGHTS, IMAGE)


def derivatives(fun):
    def loss(w, x):
        out = fun(w, x, LABELS)
        return scalar(out), out

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


@parametrize_few("name", FUNCTIONS, always=9)
def test_merged(name):
    fun = FUNCTIONS[name]
    tiled = jaxtile.checkpoint(fun, **TILED)
    assert_close(results(tiled), plain_results(fun))
    assert not tiled.explain(WEIGHTS, IMAGE, LABELS).whole


SCHEDULES = {
    "one pixel": {"tiles": (9, 7)},
    "whole": {"tiles": "whole"},
    "kept": {"tiles": None},
    "batch too": {"in_axes": (None, (0, 1, 2), (0, 1, 2)), "tiles": (2, 3, 2)},
    "sqrt": {"policy": "sqrt", "tiles": "whole"},
    "budget": {"budget": "10MB", "tiles": "whole"},
}


@parametrize_few("schedule", SCHEDULES, always=2)
@parametrize_few(
    "name", ["cross entropy", "context", "flatten and dense", "output", "norm"], always=2
)
def test_schedules(name, schedule):
    fun = FUNCTIONS[name]
    assert_close(
        results(jaxtile.checkpoint(fun, **(TILED | SCHEDULES[schedule]))), plain_results(fun)
    )


def test_nothing_is_stored_for_a_loss():
    """Nor for a flatten and a dense layer: it is a sum over positions."""
    for name in ("cross entropy", "flatten and dense"):
        tiled = jaxtile.checkpoint(FUNCTIONS[name], **TILED)
        (region,) = tiled.explain(WEIGHTS, IMAGE, LABELS).regions
        assert region.stored_bytes <= 80


def test_one_of_two_is_stored():
    def fun(w, x, labels):
        scores = checkpoint_name(conv(x, w[0]), "scores").reshape(-1, 2)
        return (scores * jax.nn.one_hot(labels.reshape(-1), 2)).sum()

    policy = jax.checkpoint_policies.save_only_these_names("scores")
    assert_close(results(jaxtile.checkpoint(fun, policy=policy, **TILED)), plain_results(fun))


def sorted_positions(w, x, labels):
    return jnp.sort(checkpoint_name(conv(x, w[0]), "map").reshape(2, -1, 2), 1)


def attention(w, x, labels):
    x = checkpoint_name(conv(x, w[0]), "map").reshape(2, -1, 2)
    return jnp.einsum("nij,njc->nic", jax.nn.softmax(jnp.einsum("nic,njc->nij", x, x)), x)


@pytest.mark.parametrize(
    "fun, words",
    [
        (sorted_positions, r"`sort` at .*test_joint.py.* positions that `reshape` merged"),
        (lambda w, x, n: lax.cumsum(x.reshape(2, -1, 2), 1), r"`cumsum` at .*test_joint.py"),
        (attention, r"`dot_general` at .*test_joint.py.* in two dimensions"),
    ],
)
def test_what_mixes_merged_positions_is_refused(fun, words):
    with pytest.raises(jaxtile.TilingError, match=words):
        results(jaxtile.checkpoint(fun, **TILED))


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (clipped(x), None), lambda _, c: (jnp.clip(c, -0.1, 0.1),))

WHOLE = {
    "confusion": lambda w, x, n: (
        jnp.zeros((2, 2)).at[n.ravel(), conv(x, w[0]).reshape(-1, 2).argmax(-1)].add(1.0) * w[1]
    ),
    "segments": lambda w, x, n: jax.ops.segment_sum(conv(x, w[0]).reshape(-1, 2), n.ravel(), 2),
    "clipped": lambda w, x, n: clipped(conv(x, w[0]).reshape(-1, 2)) @ w[1][0, 0],
    "a crop": lambda w, x, n: lax.dynamic_slice_in_dim(
        conv(x, w[0]).reshape(-1, 2), (w[1].sum() > 0).astype(int), 40
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_may_run_whole_does_so_when_merged(name):
    tiled = jaxtile.checkpoint(WHOLE[name], **TILED)
    assert_close(results(tiled), plain_results(WHOLE[name]))
    assert tiled.explain(WEIGHTS, IMAGE, LABELS).whole


def named(w, x):
    return checkpoint_name(conv(x, w[0]), "map")


OTHERWISE = {
    "another order": lambda w, x, n: named(w, x).reshape(-1) * x.swapaxes(1, 2).reshape(-1),
    "a part": lambda w, x, n: named(w, x).reshape(2, -1, 2)[:, 3:],
    "a place": lambda w, x, n: jnp.argmax(named(w, x).reshape(2, -1, 2), 1) * 1.0,
    "a barrier": lambda w, x, n: lax.optimization_barrier(named(w, x).reshape(2, -1, 2)) * 2,
    "a look-up": lambda w, x, n: named(w, x).reshape(-1, 2)[checkpoint_name(n, "map").reshape(-1)],
    "two orders, multiplied": lambda w, x, n: jnp.einsum(
        "npc,npd->ncd", named(w, x).reshape(2, -1, 2), x.swapaxes(1, 2).reshape(2, -1, 2)
    ),
    "steps over positions": lambda w, x, n: lax.map(jnp.sin, named(w, x).reshape(-1, 14)),
}


@pytest.mark.parametrize("fun", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_what_is_merged_in_another_way_is_exact_if_it_is_stored(fun):
    policy = jax.checkpoint_policies.save_only_these_names("map")
    assert_close(results(jaxtile.checkpoint(fun, policy=policy, **TILED)), results(fun))


@pytest.mark.parametrize("fun", [sorted_positions, attention])
def test_the_advice_works(fun):
    policy = jax.checkpoint_policies.save_only_these_names("map")
    assert_close(results(jaxtile.checkpoint(fun, policy=policy, **TILED)), plain_results(fun))


def test_a_stream():
    run = jaxtile.stream(FUNCTIONS["mean"], **TILED)
    args = (WEIGHTS, np.asarray(IMAGE), np.asarray(LABELS))
    assert_close(run(*args), FUNCTIONS["mean"](*args))
    with pytest.raises(jaxtile.TilingError):
        jaxtile.stream(FUNCTIONS["output"], **TILED)(*args)


def test_merge():
    assert merge((2, 9, 7, 2), (126, 2)) == ((2, 9, 7), (2,))
    assert merge((1, 9, 7, 2), (1, 63, 2)) == ((), (9, 7), (2,))
    assert merge((9, 7, 4), (63, 2, 2)) == ((9, 7), (2,), (2,))
    assert merge((9, 7), (7, 9)) is None
    assert merge((0, 7), (0,)) is None
