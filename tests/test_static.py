"""Arguments that are not arrays: static ones, and modules with functions and flags in them."""

import dataclasses
import enum
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtile
from jaxtile import nn
from jaxtile._graph.static import Static

from .support import assert_close, conv, normal, plain_results, results, scalar

IMAGE, KERNEL = normal(0, 2, 11, 7, 3), normal(1, 3, 3, 3, 3)
TILED = {"in_axes": (None, (1, 2), None), "tiles": (3, 4)}


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A module as Equinox makes them: everything that it has is a leaf."""

    kernel: Any
    activation: Any
    kind: str = "same"
    flag: bool = True
    sizes: tuple = (2, 0.5)

    def __call__(self, x):
        y = self.activation(conv(x, self.kernel, padding=self.kind.upper()))
        if self.flag:
            y = jnp.concatenate([y] * self.sizes[0], -1)
        return y * self.sizes[1]


def assert_same(fun, *args, static=(), **options):
    """Values and gradients of the kernel and the image, beside arguments that are no arrays."""

    def run(f):
        return lambda w, x: f(w, x, *args)

    tiled = jaxtile.checkpoint(fun, **(TILED | {"static_argnums": static} | options))
    assert_close(results(run(tiled), (KERNEL, IMAGE)), plain_results(run(fun), (KERNEL, IMAGE)))


def branching(w, x, mode):
    if mode is Mode.TRAIN or mode in ("train", True, b"train", jnp.float64, np.dtype("int8")):
        return jnp.tanh(conv(x, w))
    return conv(x, w, stride=2)


@pytest.mark.parametrize(
    "mode", [True, False, "train", "test", Mode.TRAIN, Mode.TEST, b"train", None]
)
def test_flags_and_names_are_static_by_themselves(mode):
    assert_same(branching, mode)


@pytest.mark.parametrize("dtype", [jnp.float64, np.float32, np.dtype("int8")])
def test_types_are_static_by_themselves(dtype):
    assert_same(lambda w, x, t: conv(x, w) + jnp.ones(3, t), dtype)


@pytest.mark.parametrize("static", [2, (2,), [-1]])
@pytest.mark.parametrize("times", [1, 3])
def test_static_argnums(static, times):
    def fun(w, x, times):
        for _ in range(times):
            x = jnp.tanh(conv(x, w))
        return x

    assert_same(fun, times, static=static)


@pytest.mark.parametrize("config", [{"stride": 2}, [2], {1, 2}, np.array([2, 2])], ids=str)
def test_a_static_argument_need_not_be_hashable(config):
    def fun(w, x, config):
        return conv(x, w, stride=len(config))

    assert_same(fun, config, static=2)


def test_an_object_that_jax_does_not_know_is_static_if_asked():
    class Settings:
        stride = 2

    def fun(w, x, settings):
        return conv(x, w, stride=settings.stride)

    assert_same(fun, Settings(), static=2)
    with pytest.raises(jaxtile.TilingError, match=r"`settings` .* neither an array .*static_argn"):
        jaxtile.checkpoint(fun, **TILED)(KERNEL, IMAGE, Settings())


def test_functions_are_static_by_themselves():
    assert_same(lambda w, x, f: f(conv(x, w)), jax.nn.gelu)
    assert_same(
        lambda w, x, f: f["a"][0](conv(x, w)) + f["b"], {"a": [jnp.sin], "b": KERNEL[0, 0, 0]}
    )


def test_functions_and_names_as_keywords():
    def fun(w, x, *, activation, kind):
        return activation(conv(x, w, padding=kind))

    tiled = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=(3, 4))
    plain, got = (
        lambda w, x, f=f: f(w, x, activation=jax.nn.relu, kind="VALID") for f in (fun, tiled)
    )
    assert_close(results(got, (KERNEL, IMAGE)), plain_results(plain, (KERNEL, IMAGE)))


@pytest.mark.parametrize("flag", [True, False])
def test_a_module_with_functions_names_and_numbers(flag):
    """Its numbers are static too: a pool of Equinox begins with -inf, and must know that."""

    def fun(w, x):
        return Layer(w, jax.nn.silu, "same", flag)(x)

    def tiled(w, x):
        run = jaxtile.checkpoint(lambda layer, x: layer(x), in_axes=(None, (1, 2)), tiles=(3, 4))
        return run(Layer(w, jax.nn.silu, "same", flag), x)

    assert_close(results(tiled, (KERNEL, IMAGE)), plain_results(fun, (KERNEL, IMAGE)))


def test_a_tiled_method_of_a_module():
    class Model(eqx.Module):
        kernel: jax.Array
        activation: Any = jax.nn.relu

        def plain(self, x):
            return self.activation(conv(x, self.kernel))

        tiled = jaxtile.checkpoint(plain, in_axes=(None, (1, 2)), tiles=(3, 4))

    plain, tiled = (lambda w, x, f=f: f(Model(w), x) for f in (Model.plain, Model.tiled))
    assert_close(results(tiled, (KERNEL, IMAGE)), plain_results(plain, (KERNEL, IMAGE)))


def test_equinox_as_it_is():
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 4, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(eqx.nn.PReLU(0.1)),
            eqx.nn.MaxPool2d(3, 2, padding=1),
            eqx.nn.Dropout(0.5, inference=True),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.AvgPool2d(2, 1),
            eqx.nn.Lambda(jax.nn.relu),
        ]
    )
    model = jax.tree.map(lambda x: x.astype("float64") if eqx.is_array(x) else x, model)
    image = IMAGE.transpose(0, 3, 1, 2)

    def apply(model, x):
        return jax.vmap(model)(x)

    tiled = jaxtile.checkpoint(apply, in_axes=(None, (2, 3)), tiles=(2, 3))
    plain, got = (
        eqx.filter_jit(eqx.filter_value_and_grad(lambda m, f=f: scalar(f(m, image))))
        for f in (apply, tiled)
    )
    want, found = plain(model), got(model)
    assert_close(*(eqx.filter(x, eqx.is_array) for x in (found, want)))
    assert tiled.explain(model, image).regions[0].grid == (2, 3)


def test_numbers_are_traced_as_by_jit():
    """So a loop over learning rates plans once, and derivatives are as they were."""
    seen = []

    def fun(w, x, scale):
        seen.append(isinstance(scale, jax.core.Tracer))
        return conv(x, w) * scale

    tiled = jaxtile.checkpoint(fun, **TILED)
    assert_close(tiled(KERNEL, IMAGE, 0.5), fun(KERNEL, IMAGE, 0.5))
    assert_close(tiled(KERNEL, IMAGE, (2,)[0]), fun(KERNEL, IMAGE, 2))
    assert seen == [True, False, True, False]
    assert_close(
        jax.grad(lambda s: scalar(tiled(KERNEL, IMAGE, s)))(0.5),
        jax.grad(lambda s: scalar(fun(KERNEL, IMAGE, s)))(0.5),
    )


def test_with_a_budget_and_a_policy():
    def fun(w, x, activation, times):
        for _ in range(times):
            x = activation(conv(x, w))
        return x.mean()

    for options in ({"budget": "100MB"}, {"policy": "sqrt"}, {"tiles": (3, 4)}):
        assert_same(fun, jnp.tanh, 2, static=3, **{"in_axes": (None, (1, 2), None, None)} | options)


def test_inside_another():
    inner = jaxtile.checkpoint(branching, static_argnums=2, **TILED)
    assert_same(lambda w, x, mode: jnp.tanh(inner(w, x, mode)), "train")


def test_modules_of_nnx():
    model = nn.Conv(3, 2, (3, 3), rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def fun(model, x, activation, times, *, flag):
        for _ in range(times):
            x = activation(x)
        return model(x) if flag else x

    tiled = nn.checkpoint(fun, in_axes=(None, (1, 2), None, None), tiles=(3, 4), static_argnums=3)
    plain, got = (
        nnx.value_and_grad(lambda m, f=f: scalar(f(m, IMAGE, jnp.tanh, 2, flag=True)))(model)
        for f in (fun, tiled)
    )
    assert_close(jax.tree.leaves(got), jax.tree.leaves(plain))


def test_a_module_that_is_no_pytree_is_not_half_changed():
    class Counter(nnx.Module, pytree=False):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            return jnp.tanh(x) * self.count[...]

    counter = Counter()
    tiled = jaxtile.checkpoint(lambda m, x: m(x), in_axes=(None, (1, 2)), tiles=(3, 4))
    with pytest.raises(Exception, match=r"trace level"):
        tiled(counter, IMAGE)
    assert counter.count[...] == 0
    tiled = nn.checkpoint(lambda m, x: m(x), in_axes=(None, (1, 2)), tiles=(3, 4))
    assert_close(tiled(counter, IMAGE), jnp.tanh(IMAGE))
    assert counter.count[...] == 1


def test_operations_of_a_module():
    layer = Layer(KERNEL, jnp.tanh, flag=False)
    counted = jaxtile.operations(lambda layer, x: layer(x), layer, IMAGE)
    plain = jaxtile.operations(lambda w, x: jnp.tanh(conv(x, w)) * 0.5, KERNEL, IMAGE)
    assert counted.flops == plain.flops


def test_a_stream():
    def fun(layer, x, mode):
        return layer(x) if mode == "train" else x[..., :1] / layer.sizes[1]

    run = jaxtile.stream(fun, **TILED)
    for sizes, mode in (
        ((1, 2.0), "train"),
        ((1, 2.0), "test"),
        ((1, 0.0), "test"),
        ((1, -0.0), "test"),
    ):
        layer = Layer(KERNEL, jnp.tanh, sizes=sizes)
        x = jnp.abs(IMAGE)
        np.testing.assert_allclose(run(layer, x, mode), fun(layer, x, mode), rtol=1e-12)


def test_equal_static_values():
    assert Static(1) != Static(True) != Static(1.0)
    assert Static(0.0) != Static(-0.0)
    assert Static(float("nan")) == Static(float("nan"))
    assert Static("a") == Static("a")
    assert hash(Static("a")) == hash(Static("a"))
    config = [1]
    assert Static(config) == Static(config) != Static([1])
    assert Static((config,)) != Static(([1],))


@pytest.mark.parametrize(
    "static, words",
    [
        (3, r"`static_argnums` \(=\(3,\)\) .* there are 3"),
        ((-4,), r"`static_argnums` \(=\(-4,\)\)"),
        ("x", r"`static_argnums` \(='x'\) must be"),
        (True, r"`static_argnums` \(=True\) must be"),
        (0, r"`w` is static .* `w` is an array \(float64\[3,3,3,3\]\)"),
        (2, r"`layer` is static .* `layer\['a'\]` is an array"),
    ],
)
def test_wrong_static_argnums(static, words):
    with pytest.raises(jaxtile.TilingError, match=words):
        jaxtile.checkpoint(lambda w, x, layer: conv(x, w), static_argnums=static, **TILED)(
            KERNEL, IMAGE, {"a": KERNEL}
        )


@pytest.mark.parametrize("mode", ["train", {"mode": "train"}])
def test_what_is_static_has_no_axes(mode):
    axes = {"mode": (1, 2)} if isinstance(mode, dict) else (1, 2)
    tiled = jaxtile.checkpoint(
        lambda w, x, mode: conv(x, w), in_axes=(None, (1, 2), axes), tiles=(3, 4)
    )
    with pytest.raises(jaxtile.TilingError, match=r"tiles axes \(1, 2\) of 'train', .* static"):
        tiled(KERNEL, IMAGE, mode)


def test_a_branch_on_what_is_traced_says_what_to_do():
    def fun(w, x, times):
        return conv(x, w) if times > 1 else x

    tiled = jaxtile.checkpoint(fun, **TILED)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        tiled(KERNEL, IMAGE, 2)
    assert any("static_argnums" in note for note in error.value.__notes__)
    assert_same(fun, 2, static=2)


def test_a_plan_for_arguments_that_are_not_arrays():
    """With an activation function, a name and a flag; and its plan is one for `checkpoint`."""

    def loss(kernel, image, activation, options, twice):
        for _ in range(2 if twice else 1):
            image = activation(jax.lax.conv(image, kernel, (1, 1), options["padding"]))
        return jnp.mean(image**2)

    args = jnp.full((4, 4, 3, 3), 0.1), jnp.ones((1, 4, 16, 16)), jnp.tanh, {"padding": "SAME"}, 1
    tiling = {"in_axes": (None, (2, 3), None, None, None), "static_argnums": 4}
    plan = jaxtile.plan(loss, *args, budget="1MiB", progress=lambda line: None, **tiling)
    tiled = jaxtile.checkpoint(loss, policy=plan, **tiling)
    found, expected = (jax.grad(f)(*args) for f in (tiled, loss))
    assert_close(found, expected)
