"""Refusals: our own exception, with the primitive, the line, the shapes, and what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import jaxtile.nn
from jaxtile import TilingError
from jaxtile.policy import Choice

from .support import assert_same, conv, normal, parametrize_few

IMAGE = normal(0, 1, 8, 6, 2)
W = normal(1, 3, 3, 2, 2)


def refused(fun, *words, args=(W, IMAGE), in_axes=(None, (1, 2)), tiles=(2, 2), policy=None):
    with pytest.raises(TilingError) as caught:
        jaxtile.checkpoint(fun, in_axes=in_axes, tiles=tiles, policy=policy)(*args)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


MIXES = {
    "fft": lambda w, x: jnp.fft.fft(x, axis=1).real,
    "dot_general": lambda w, x: jnp.einsum("nhwc,nkwc->nhk", x, x),
    "reshape": lambda w, x: x.reshape(1, 6, 8, 2),
    "cumsum": lambda w, x: jnp.cumsum(x, 1),
    "sort": lambda w, x: jnp.sort(x, 2),
    "argmax": lambda w, x: jnp.argmax(x, 1),
    "reduce_prod": lambda w, x: jnp.prod(x, (1, 2)),
    "conv_general_dilated": lambda w, x: jax.lax.conv(
        x, w.transpose(3, 2, 0, 1)[:, :1].repeat(8, 1), (1, 1), "SAME"
    ),
    "gather": lambda w, x: jnp.take_along_axis(x, jnp.argmax(x, 3)[..., None], 1),
    "while": lambda w, x: jax.lax.while_loop(lambda c: c.sum() < 0, jnp.sin, x),
    "tile": lambda w, x: jnp.tile(x, (1, 2, 1, 1)),
}


@pytest.mark.parametrize("primitive", MIXES)
def test_an_op_that_mixes_a_tiled_axis(primitive):
    message = refused(
        MIXES[primitive], f"`{primitive}`", "test_errors.py:", "8*", "6*", "What to do"
    )
    assert "site-packages" not in message


def test_a_look_up_outside_the_array():
    refused(
        lambda w, x: x.at[:, jnp.array([0, 20])].get(mode="fill"),
        "`gather` along tiled dimension 1 reads outside the array",
    )


def test_a_look_up_by_indices_that_are_cut():
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    refused(
        lambda table, index: jax.lax.gather(table, index, numbers, (1, 1)),
        "`gather` reads its index vectors along a tiled dimension",
        args=(normal(0, 5, 4), jnp.array([[1, 2], [3, 0]])),
        in_axes=(None, (1,)),
        tiles=(2,),
    )


@parametrize_few(
    "primitive", ["fft", "reshape", "cumsum", "argmax", "dot_general", "sort"], always=2
)
def test_what_is_stored_may_be_mixed(primitive):
    """The way out that the message names: store the operand, and the rest runs untiled."""

    def fun(w, x):
        stored = checkpoint_name(jnp.tanh(conv(x, w)), "stored")
        return MIXES[primitive](w, stored), conv(stored, w)

    policy = jax.checkpoint_policies.save_only_these_names("stored")
    assert_same(fun, W, IMAGE, in_axes=(None, (1, 2)), tiles=(2, 3), policy=policy)


def test_a_named_argument_may_be_mixed():
    def fun(w, x):
        return checkpoint_name(x, "image").reshape(1, -1), jax.nn.relu(
            checkpoint_name(conv(x, w), "c")
        ).reshape(1, 48, 2)

    policy = jax.checkpoint_policies.save_only_these_names("image", "c")
    assert_same(fun, W, IMAGE, in_axes=(None, (1, 2)), tiles=(2, 3), policy=policy)


def test_two_tiled_axes_in_one_dimension():
    refused(lambda w, x: x + jnp.swapaxes(x, 1, 2), "different tiled axes", args=(W, IMAGE[:, :6]))
    refused(
        lambda w, x: conv(w, x), "needs its whole kernel", args=(IMAGE, W), in_axes=(None, (0, 1))
    )


def test_more_tiles_than_rows():
    refused(lambda w, x: conv(x, w, 4), "3 tiles", "2 rows", "'output'", tiles=(3, 2))


@pytest.mark.parametrize(
    "in_axes, words",
    [
        ((None,), ["1 entries", "2 positional arguments"]),
        ((None, None), ["tiles nothing"]),
        ((None, (1, 7)), ["axis 7", "(1, 8, 6, 2)"]),
        ((None, (1, 1)), ["twice"]),
        (((0,), (1, 2)), ["same number of axes"]),
        ((None, {"image": (1, 2)}), ["pytree prefix"]),
        (1.5, ["1.5", "one entry per argument"]),
    ],
)
def test_wrong_in_axes(in_axes, words):
    refused(lambda w, x: conv(x, w), "`in_axes`", *words, in_axes=in_axes)


@pytest.mark.parametrize(
    "tiles, words",
    [
        ((2,), ["(2,)", "has 2"]),
        ((2, 0), ["(2, 0)", "positive"]),
        ((2, 1.5), ["1.5", "positive integers"]),
        ({"missing": (2, 2), ...: (2, 2)}, ["'missing'", "no stored value"]),
        ({"missing": (2, 2)}, ["...", "no grid"]),
        (4, ["4", "tuple"]),
        ((True, 2), ["True", "positive integers"]),
    ],
)
def test_wrong_tiles(tiles, words):
    refused(lambda w, x: conv(x, w), "`tiles", *words, tiles=tiles)


def test_mismatched_sizes():
    refused(
        lambda a, b: a + b,
        *("incompatible shapes", "a float64[1, 8*, 6*, 2]", "b float64[1, 5*, 6*, 2]", "resize"),
        args=(IMAGE, IMAGE[:, :5]),
        in_axes=((1, 2), (1, 2)),
    )


def test_a_call_that_the_function_does_not_take():
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        jaxtile.checkpoint(lambda x: x, in_axes=(1, None), tiles=(2,))(IMAGE, W)


def test_axes_per_argument_as_in_vmap():
    """One axis per argument is one tiled axis; two different ones could also be axes of each."""

    def fun(x, y):
        return jnp.tanh(x * 2) + (0 if y.ndim < x.ndim else y)

    for y, axes in ((normal(3, 4), (0, None)), (normal(3, 5, 4), (0, 0))):
        explained = jaxtile.explain(fun, normal(2, 5, 4), y, in_axes=axes, tiles=(5,))
        (region,) = explained.regions
        assert {use.name: use.window for use in region.reads}["x"] == (1,)
        assert ("y" in {use.name for use in region.reads}) == (axes == (0, 0))
        assert_same(fun, normal(2, 5, 4), y, in_axes=axes, tiles=(5,))
    refused(fun, r"((0, 1), (0, 1)), or ((0,), (1,))", args=(IMAGE, IMAGE), in_axes=(0, 1))


def test_not_a_function():
    options = {"in_axes": ((1, 2),)}
    for refused in (
        lambda: jaxtile.checkpoint(3, **options),
        lambda: jaxtile.nn.checkpoint(3, **options),
        lambda: jaxtile.explain(3, IMAGE, **options),
        lambda: jaxtile.plan(3, IMAGE, budget="1GiB", **options),
        lambda: jaxtile.policy.outline(3, IMAGE, **options),
        lambda: jaxtile.stream(3, **options, tiles=(2, 2)),
        lambda: jaxtile.memory(3, IMAGE),
        lambda: jaxtile.operations(3, IMAGE),
    ):
        with pytest.raises(TypeError, match=r"`fun` \(=3\) must be callable"):
            refused()


@dataclasses.dataclass(frozen=True)
class Chosen:
    choices: object

    def choose(self, outline):
        return self.choices


WHOLE = Choice("whole")


@pytest.mark.parametrize(
    "choices, message",
    [
        (None, "`choose` returned None"),
        ({...: (2, 2)}, r"chose (2, 2) for ..."),
        ({"sums": WHOLE}, "chose a grid for 'sums', which is no result of the function; is 'sum'"),
        ({"sum": Choice((2, 2), "disk")}, "puts 'sum' in place 'disk': it must be one of 'device'"),
        ({"sum": Choice((2, 2), forward=(0, 1))}, "`tiles['sum']` (=(0, 1)) must be positive"),
        ({...: Choice((2, 2), forward=(2,))}, "`tiles[...]` (=(2,)) must have one number per"),
        ({...: Choice((2,), forward=(1,))}, "`tiles[...]` (=(2,)) must have one number per"),
    ],
)
def test_what_a_policy_may_choose(choices, message):
    def fun(w, x):
        return jnp.sin(checkpoint_name(conv(x, w), "sum"))

    refused(fun, message, policy=Chosen(choices), tiles="whole")
    assert_same(fun, W, IMAGE, in_axes=(None, (1, 2)), policy=Chosen({"sum": Choice([2, 2])}))


@pytest.mark.parametrize("decision", ["yes", None, 1])
def test_what_a_policy_may_return(decision):
    fun, policy = lambda w, x: jnp.sin(conv(x, w)), lambda *a, **k: decision
    refused(fun, f"`policy` returned {decision!r}", policy=policy)


def test_keys_of_tiles_are_names():
    refused(lambda w, x: jnp.sin(x), "`tiles` has a grid for 1", tiles={1: (2, 2), ...: (2, 2)})


@pytest.mark.parametrize("entry", [1.5, "hw", {1, 2}])
def test_entries_of_in_axes(entry):
    refused(lambda w, x: x, f"has the entry {entry!r}", in_axes=(None, entry))


def test_programs_that_are_not_compiled_yet():
    with pytest.raises(TypeError, match="is not lowered"):
        jaxtile.compiled_bytes(jnp.sin)
    with pytest.raises(TypeError, match="is not traced"):
        jaxtile.estimate_memory(jnp.sin)
    with pytest.raises(TilingError, match="must have a shape and a dtype"):
        jaxtile.masked("image.tif", W)
