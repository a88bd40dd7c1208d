"""Values that are whole in the forward pass and not kept: exact, and at the price that is said."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

import jaxtile
from jaxtile._regions.stages import Stage
from jaxtile.policy import Choice

from .interpreter import interpret
from .support import assert_close, conv, parametrize_few


@dataclasses.dataclass(frozen=True)
class Results:
    """A policy for the results of all convolutions, a letter for each: kept, passing, restored or
    in host memory.

    The last letter stands for all that follow.
    """

    grid: object
    states: str
    forward: tuple[int, ...] | None = None

    def choose(self, outline):
        base = Choice(self.grid, forward=self.forward)
        convs = [p.name for p in outline.parts if p.operation.kind == "convolution"]
        states = self.states.ljust(len(convs), self.states[-1])
        places = {"p": "passing", "r": "restored", "h": "host"}
        chosen = {
            name: base._replace(place=places.get(state, "device"))
            for name, state in zip(convs, states, strict=True)
        }
        return chosen | {...: base}


def normed(x, scale, fast):
    x = x - 0.5
    mean = x.mean((0, 1, 2), keepdims=True)
    square = (x**2).mean((0, 1, 2), keepdims=True) - mean**2
    variance = square if fast else ((x - mean) ** 2).mean((0, 1, 2), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-2) * scale


def network(params, x, *, fast=True):
    """Convolutions and batch norms with skips; its activation is not 0 at 0."""
    for k, (kernel, scale) in enumerate(params):
        y = jax.nn.softplus(normed(conv(x, kernel), scale, fast))
        x = x + y if k % 2 else y
    return jnp.mean(x**3)


def arguments(layers=4, size=(2, 9, 7, 2), kernel=3):
    rng = np.random.default_rng(0)
    shape = (kernel, kernel, size[-1], size[-1])
    params = [
        (jnp.asarray(rng.standard_normal(shape) * 0.5), jnp.asarray(1 + rng.random(size[-1])))
        for _ in range(layers)
    ]
    return params, jnp.asarray(rng.standard_normal(size))


def tiled(policy, fun=network, **options):
    return jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), policy=policy, **options)


@parametrize_few("fast", [True, False])
@parametrize_few(
    "policy",
    [
        Results((3, 2), "p"),
        Results((2, 2), "rkpr", forward=(1, 1)),
        Results((1, 1), "kprk"),
        Results("whole", "prrp"),
        Results((9, 7), "k"),
        Results((4, 4), "pppk", forward=(2, 1)),
        Results((3, 2), "r"),
        Results((2, 2), "rprk", forward=(1, 1)),
        Results((1, 1), "rrkr"),
        Results("whole", "ppkp"),
        Results("whole", "r"),
        Results(None, "p"),
        Results(None, "rprr"),
    ],
    always=2,
)
def test_same_value_and_gradients(policy, fast):
    args, fun = arguments(), functools.partial(network, fast=fast)
    step = jax.jit(jax.value_and_grad(tiled(policy, fun), (0, 1)))
    assert_close(step(*args), interpret(jax.value_and_grad(fun, (0, 1)), *args))


@pytest.mark.slow
def test_second_derivative():
    args = arguments(layers=2)

    def twice(fun):
        def inner(params, x):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(fun)(params, x)))

        return jax.grad(inner, (0, 1))

    got = jax.jit(twice(tiled(Results((2, 2), "pr"))))(*args)
    assert_close(got, interpret(twice(network), *args))


def test_second_derivative_by_way_of_what_passes():
    """The windows of passing inputs are computed again, from what has tangents itself."""

    def network(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(conv(x, kernel))
        return jnp.mean(x**3)

    params, x = arguments(layers=3, size=(1, 6, 5, 1))
    kernels = [kernel for kernel, _ in params]

    def product(fun):
        """Of the second derivative and a vector."""
        return jax.jvp(lambda k: jax.grad(fun)(k, x), (kernels,), ([2 * k for k in kernels],))[1]

    got = jax.jit(functools.partial(product, tiled(Results((2, 2), "p"), network)))()
    assert_close(got, product(network))


@pytest.mark.parametrize("grid", [(2, 2), "whole"])
def test_forward_mode_over_reverse_mode_of_rules_in_what_is_restored(grid):
    """Its forward pass is differentiated itself; a function with a rule for reverse mode alone has
    no forward mode.
    """

    def network(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(conv(x, kernel)) + jnp.tanh(x)
        return jnp.mean(x**3)

    params, x = arguments(layers=2, size=(1, 6, 5, 1))
    kernels = [kernel for kernel, _ in params]

    def product(fun):
        return jax.jvp(lambda k: jax.grad(fun)(k, x), (kernels,), ([2 * k for k in kernels],))[1]

    got = interpret(functools.partial(product, tiled(Results(grid, "r"), network)))
    assert_close(got, interpret(functools.partial(product, network)))


@pytest.mark.slow
def test_on_a_mesh():
    mesh = jax.make_mesh((2, 2), ("rows", "cols"))
    args = arguments()
    for grid in ((2, 1), "whole", None):
        fun = tiled(Results(grid, "pkr"), mesh=mesh, mesh_axes=("rows", "cols"))
        got = jax.jit(jax.value_and_grad(fun, (0, 1)))(*args)
        assert_close(got, interpret(jax.value_and_grad(network, (0, 1)), *args))


def convolutions(fun, *args):
    """How often as much as one whole convolution of `args` is executed, in loops too."""

    def count(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            found = [count(body) for body in jaxprs_in_params(eqn.params)] or [0]
            branch = eqn.primitive.name == "cond"  # one branch per platform
            total += (max(found) if branch else sum(found)) * eqn.params.get("length", 1)
            if eqn.primitive.name == "conv_general_dilated":
                # Two of these three are the positions and channels of the image, one the kernel's.
                shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
                total += math.sqrt(math.prod(math.prod(s) for s in shapes))
        return total

    plain = math.sqrt(math.prod(args[1].shape) ** 2 * math.prod(args[0][0][0].shape))
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # a compiler leaves the rest out
    return count(needed) / plain


@pytest.mark.parametrize("layers", [2, 4])
def test_work(layers):
    """With m norms and nothing kept, counted in the program: forwards each convolution runs once;
    backwards the k-th region runs k of them, and two gradients (the first one has no gradient of
    its image). The loss is differentiated when it is computed.
    """
    args, m = arguments(layers, size=(1, 8, 8, 2), kernel=1), layers

    def work(policy, **options):
        return convolutions(jax.value_and_grad(tiled(policy, **options)), *args)

    plain = convolutions(jax.value_and_grad(network), *args)
    assert plain == pytest.approx(3 * m - 1)
    assert work(Results((2, 2), "p")) == pytest.approx(plain + m * (m + 1) / 2)
    # If they are kept, it is plain JAX's: what only a norm's statistics follow is not run again.
    assert work(Results((2, 2), "k")) == pytest.approx(plain)
    # If they are restored, they run once more.
    assert work(Results((2, 2), "r")) == pytest.approx(plain + m)
    # If nothing is whole, the region of each norm runs everything before it, in both directions.
    nothing = sum(k + k + (2 * k - 1) for k in range(1, m + 1)) + m + (2 * m - 1)
    assert work(jax.checkpoint_policies.nothing_saveable, tiles=(2, 2)) == pytest.approx(nothing)


def test_explained():
    explained = tiled(Results((2, 2), "kp", forward=(1, 1))).explain(*arguments(layers=3))
    (first, second, third), text = explained.regions[:3], str(explained)
    assert (first.grid, first.forward_grid) == ((2, 2), (1, 1))
    assert [len(r.passing) for r in (first, second, third)] == [0, 1, 1]
    assert first.stored_bytes > second.stored_bytes
    assert third.recomputed_flops > second.recomputed_flops > first.recomputed_flops
    assert "passing" in text
    assert "1 x 1 tiles and backwards 2 x 2 tiles" in text


@pytest.mark.slow
def test_needs_less_memory_than_kept():
    params, _ = arguments(layers=12)
    x = jax.ShapeDtypeStruct((1, 256, 256, 2), jnp.float64)

    def bytes_of(states):
        step = jax.jit(jax.value_and_grad(tiled(Results((4, 4), states))))
        return jaxtile.compiled_bytes(step.lower(params, x)).temporaries

    kept = bytes_of("k")
    assert bytes_of("p") < 0.4 * kept
    assert bytes_of("rrk" * 4) < 0.75 * kept


def test_readers_share_one_cotangent():
    """However many regions read a stored array, the sums of its cotangent are one array."""
    rng = np.random.default_rng(0)
    x = jax.ShapeDtypeStruct((1, 256, 256, 2), jnp.float64)

    def bytes_of(readers):
        kernels = [jnp.asarray(rng.standard_normal((3, 3, 2, 2))) for _ in range(readers + 1)]

        def fun(kernels, x):
            y, total = conv(x, kernels[0]), 0.0
            for kernel in kernels[1:]:
                total += jnp.tanh(conv(y * (1 + 0.1 * total), kernel)).mean() ** 2
            return total

        step = jax.jit(jax.value_and_grad(tiled(Results((8, 8), "k"), fun)))
        assert len(tiled(Results((8, 8), "k"), fun).explain(kernels, x).regions) > readers
        return jaxtile.compiled_bytes(step.lower(kernels, x)).temporaries

    one_array = 256 * 256 * 2 * 8
    kept = 3 * one_array  # the results of three more convolutions
    assert bytes_of(5) - bytes_of(2) < kept + 1.5 * one_array


def test_what_cannot_pass_is_kept():
    """An output, and what depends on a function whose value changes when it is differentiated."""

    @jax.custom_vjp
    def rounded(x):
        return x

    rounded.defvjp(lambda x: (jnp.round(4 * x) / 4, None), lambda _, c: (c,))

    def fun(params, x):
        y = conv(rounded(x), params[0][0])
        z = conv(jnp.tanh(y), params[1][0])
        return z, jnp.mean(normed(z, params[1][1], True) ** 3)

    args = arguments(layers=2)

    def loss(fun):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(fun(*a)[0] ** 2) + fun(*a)[1]))(*args)

    assert_close(loss(tiled(Results((3, 2), "pr"), fun)), loss(fun))


@pytest.mark.parametrize("grid", [(3, 2), "whole"])
def test_beside_what_is_restored_a_value_may_change(grid):
    """The regions that are run again compute what they are when they are differentiated."""

    @jax.custom_vjp
    def rounded(x):
        return x

    rounded.defvjp(lambda x: (jnp.round(4 * x) / 4, None), lambda _, c: (c,))

    def fun(params, x):
        restored = jnp.tanh(conv(x, params[0][0]))
        return jnp.mean(restored * conv(rounded(x), params[0][0]) ** 3)

    args = arguments(layers=1)
    step = jax.jit(jax.value_and_grad(tiled(Results(grid, "rk"), fun), (0, 1)))
    assert_close(step(*args), interpret(jax.value_and_grad(fun, (0, 1)), *args))


def test_effects_happen_once(capfd):
    def fun(params, x):
        first = conv(x, params[0][0])
        jax.debug.print("mean {}", first.mean())
        return jnp.mean(jnp.tanh(conv(jnp.tanh(first), params[1][0])) ** 3)

    args = arguments(layers=2)
    step = jax.jit(jax.value_and_grad(tiled(Results((3, 2), "r"), fun)))
    assert_close(step(*args), jax.jit(jax.value_and_grad(fun))(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 2


def traced_stages(monkeypatch, layers, kernel, policy, **options):
    """How many stages of tiles are traced for a step of a network."""
    args = arguments(layers, size=(1, 8, 8, 2), kernel=kernel)
    traced = []
    run = Stage.run
    monkeypatch.setattr(Stage, "run", lambda self, *a: traced.append(self) or run(self, *a))
    jax.make_jaxpr(jax.value_and_grad(tiled(policy, **options)))(*args)
    monkeypatch.undo()
    return len(traced)


@parametrize_few(
    ("policy", "options"),
    [
        (Results((2, 2), "p"), {}),
        (jax.checkpoint_policies.nothing_saveable, {"tiles": (2, 2)}),
        (Results((2, 2), "k"), {}),
        (Results((2, 2), "r"), {}),
    ],
    always=2,
)
def test_equal_stages_are_traced_once(monkeypatch, policy, options):
    """However often the layers before a norm are computed again. Layers of width 1 are alike on all
    tiles. Those of width 3 are so as soon as their windows are as large as the image: of m layers,
    the first ones before each of the m norms.
    """
    few, many = (traced_stages(monkeypatch, m, 1, policy, **options) for m in (5, 7))
    assert many == few
    few, many, more = (traced_stages(monkeypatch, m, 3, policy, **options) for m in (3, 4, 5))
    assert more - many <= many - few


def test_alike_layers_that_differ():
    """In a derivative rule, in a constant, in the array that a function closes over."""

    def surrogate(slope):
        @jax.custom_jvp
        def act(x):
            return jnp.maximum(x, 0)

        act.defjvp(lambda x, t: (act(*x), jnp.where(x[0] > 0, t[0], slope * t[0])))
        return act

    def fun(params, x):
        for k, (kernel, scale) in enumerate(params):
            offset = np.asarray([0.1, 0.2]) * (k + 1)
            x = surrogate(0.1 * (k // 2))(normed(conv(x, kernel), scale, True) + 0.25 * (k % 2))
            x = x * (1 + offset)
        return jnp.mean(x**3)

    args = arguments(layers=4)
    want = jax.jit(jax.value_and_grad(fun, (0, 1)))(*args)
    for states in ("k", "p"):
        step = jax.jit(jax.value_and_grad(tiled(Results((3, 2), states), fun), (0, 1)))
        assert_close(step(*args), want)


@pytest.mark.parametrize("grid", [(3, 2), "whole"])
@pytest.mark.parametrize("states", ["p", "r"])
def test_what_is_computed_again_has_a_name(grid, states):
    """Profiles tell it from the rest of the backward pass by that."""
    step = jax.jit(jax.grad(tiled(Results(grid, states))))
    text = step.lower(*arguments(layers=3)).compile().as_text()
    paths = set(re.findall(r'op_name="([^"]*/conv_general_dilated)"', text))
    backward = {path for path in paths if "transpose(" in path}
    after = {path: path.partition("rematted_computation")[2] for path in backward}
    again = {path for path, rest in after.items() if rest and "transpose(" not in rest}
    assert again
    assert backward - again
    assert all(path.count("transpose(") > 1 for path in backward - again)
    assert not any("rematted_computation" in path for path in paths - backward)
