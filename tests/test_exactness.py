"""The table in docs/exactness.md, run row by row."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .interpreter import interpret
from .random_rules import clipped_back, surrogate
from .support import assert_close, conv, max_pool, normal, scalar

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "exactness.md"
ROW = re.compile(r"^\| `(?P<example>.+?)` \| (?P<outcome>tiles|whole|refused) \| (?P<note>.*)\|$")
ROWS = [m.groupdict() for m in map(ROW.match, DOCS.read_text().splitlines()) if m]
W, X = normal(0, 3, 3, 2, 2), normal(1, 1, 12, 9, 2)
SCHEDULE = {
    "in_axes": (None, (1, 2)),
    "tiles": (4, 2),
    "policy": jax.checkpoint_policies.save_only_these_names("stored"),
}


def rule(backward):
    call = jax.custom_vjp(lambda x: x * 2)
    call.defvjp(lambda x: (call(x), x), lambda x, c: (backward(x, c),))
    return call


@jax.custom_vjp
def forward_only(x):
    return x * 1


forward_only.defvjp(lambda x: (jnp.round(x * 4) / 4, None), lambda _, c: (c,))


@jax.custom_jvp
def another_value(x):
    return x * 1


another_value.defjvp(lambda x, dx: (jnp.round(x[0] * 4) / 4 + jnp.sin(x[0]), 2 * dx[0]))


def closes_over(x):
    made_inside = jnp.tanh(x)
    return rule(lambda x, c: c * made_inside)(x)


NAMES = {
    "conv": conv,
    "max_pool": max_pool,
    "name": checkpoint_name,
    "key": jax.random.key(0),
    "rule": rule,
    "forward_only": forward_only,
    "another_value": another_value,
    "closes_over": closes_over,
    "surrogate": surrogate,
    "clipped_back": clipped_back,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
}


def read(example: str):
    """The function that a row shows, and which derivative of it."""
    order = {"forward": 0, "second": 2, "third": 3}.get(example.partition("(")[0], 1)
    code = compile(example, str(DOCS), "eval")
    same = dict.fromkeys(("forward", "second", "third"), lambda y: y)
    return lambda w, x: eval(code, NAMES | same | {"w": w, "x": x}), order


def derivatives(fun, order: int):
    """The outputs and all gradients of their sum, or of the squares of gradients."""

    def value(args, n=1):
        if n == order:
            return scalar(fun(*args))
        return sum(jnp.sum(g**2) for g in jax.grad(value)(args, n + 1))

    def run(w, x):
        return fun(w, x), jax.grad(value)((w, x))

    def run_forwards(*args):
        direction = jax.tree.map(jnp.cos, args)
        gradient = jax.grad(lambda *args: scalar(fun(*args)), (0, 1))
        return [jax.jvp(f, args, direction) for f in (fun, gradient)]

    if order == 0:
        return jax.jit(run_forwards)(W, X)

    return interpret(run, W, X)


def test_the_table_was_found():
    assert {row["outcome"] for row in ROWS} == {"tiles", "whole", "refused"}
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=[row["example"] for row in ROWS])
def test_row(row):
    fun, order = read(row["example"])
    tiled = jaxtile.checkpoint(fun, **SCHEDULE)
    mended = "before jax 0.12" in row["note"] and jax.__version_info__ >= (0, 12)
    if row["outcome"] == "refused" and not mended:
        words = re.search(r'"(.+)"', row["note"]).group(1)
        with pytest.raises(jaxtile.TilingError, match=words):
            derivatives(tiled, order)
        return
    whole = jaxtile.explain(fun, W, X, **SCHEDULE).whole
    assert bool(whole) == (row["outcome"] == "whole")
    assert_close(derivatives(tiled, order), derivatives(fun, order), 1e-12 if order < 2 else 1e-10)
