"""`jvp`, `jacfwd`, `linearize`, `hessian`, and forward mode over and under reverse mode."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxtile

from .meshes import devices, on
from .support import assert_close, conv, max_pool, normal, parametrize_few, scalar, words

WEIGHTS = [normal(i, 3, 3, 2, 2) for i in range(2)]
IMAGE = normal(9, 2, 9, 7, 2)
TIED = jnp.round(IMAGE)
DIRECTION = jax.tree.map(lambda x: jnp.cos(3 * x), (WEIGHTS, IMAGE))
TILED = {"in_axes": (None, (1, 2)), "tiles": (3, 2)}


def normed(x):
    return (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-2)


def network(w, x):
    x = checkpoint_name(normed(conv(x, w[0])), "norm")
    x = checkpoint_name(max_pool(jnp.maximum(x, 0), 2, 2, "SAME"), "pool")
    return conv(jnp.tanh(x) + 0.3, w[1])


def integers(w, x):
    y = conv(x, w[0])
    return y, (y > 0).sum((1, 2)), jnp.floor(y).astype(int), jnp.argmax(y, -1)


NETWORKS = {
    "network": network,
    "strided": lambda w, x: conv(jnp.tanh(conv(x, w[0], stride=2)) + 1, w[1], padding="VALID"),
    "transposed": lambda w, x: lax.conv_transpose(x, w[0], (2, 2), "SAME"),
    "depthwise": lambda w, x: conv(x, w[0][:, :, :1], feature_group_count=2),
    "maximum": lambda w, x: conv(x, w[0]).max((1, 2)),
    "ties": lambda w, x: (lax.stop_gradient(TIED) + 0 * x + x - lax.stop_gradient(x)).max((1, 2)),
    "minimum along one axis": lambda w, x: conv(x, w[0]).min(1),
    "softmax": lambda w, x: jnp.exp(jax.nn.log_softmax(conv(x, w[0]), (1, 2))) * x,
    "gelu and softmax": lambda w, x: jax.nn.softmax(jax.nn.gelu(conv(x, w[0])), -1),
    "contraction": lambda w, x: jnp.einsum("nhwc,nhwd->ncd", conv(x, w[0]), x),
    "integers": integers,
    "layers": lambda w, x: lax.scan(lambda x, k: (conv(x, k), x.mean()), x, jnp.stack(w)),
    "resized": lambda w, x: jax.image.resize(conv(x, w[0]), (2, 14, 11, 2), "bilinear"),
    "padded": lambda w, x: conv(jnp.pad(x, ((0, 0), (2, 1), (1, 1), (0, 0)), "reflect"), w[0]),
    "reversed": lambda w, x: jnp.concatenate([conv(x, w[0]), x[:, ::-1]], 1),
    "weights only": lambda w, x: conv(x, w[0]) * jnp.tanh(w[1]).sum(),
}
SMOOTH = ["network", "strided", "maximum", "contraction"]


def moved(fun, jit=True):
    def run(primals, tangents):
        out, moving = jax.jvp(fun, primals, tangents)
        return out, [t for t in jax.tree.leaves(moving) if t.dtype != jax.dtypes.float0]

    return (jax.jit(run) if jit else run)((WEIGHTS, IMAGE), DIRECTION)


expected = functools.cache(moved)


@parametrize_few("name", NETWORKS, always=6)
def test_jvp(name):
    fun = NETWORKS[name]
    assert_close(moved(jaxtile.checkpoint(fun, **TILED)), expected(fun))


def test_a_function_with_a_rule():
    """Before 0.12 JAX forgets a rule that is called by another, so there is no forward mode."""

    def fun(w, x):
        return conv(jax.nn.relu(jnp.round(conv(x, w[0]))) + x, w[1])

    tiled = jaxtile.checkpoint(fun, **TILED)
    if jax.__version_info__ < (0, 12):
        for run in (moved, lambda f: moved(f, jit=False), lambda f: jax.jacfwd(f)(WEIGHTS, IMAGE)):
            with pytest.raises(jaxtile.TilingError, match=r"limit of jaxtile before jax 0\.12"):
                run(tiled)
        # What it advises instead.
        assert_close(moved(jax.checkpoint(fun)), moved(fun))
        gradients = [jax.grad(lambda *a, f=f: scalar(f(*a)), (0, 1)) for f in (tiled, fun)]
        assert_close(*map(moved, gradients))
    else:
        assert_close(moved(tiled), moved(fun))


@parametrize_few(
    "options",
    [
        {"tiles": "whole"},
        {"tiles": None},
        {"tiles": (5, 4)},
        {"tiles": (1, 1)},
        {"policy": "passing:2x2"},
        {"policy": "sqrt"},
        {"policy": "store_all"},
        {"policy": jax.checkpoint_policies.save_only_these_names("norm", "pool")},
        {
            "policy": jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["norm"],
                offload_src="device",
                offload_dst="pinned_host",
            )
        },
    ],
    always=5,
    ids=words,
)
@parametrize_few("jit", [True, False])
def test_schedules(options, jit):
    tiled = jaxtile.checkpoint(network, **(TILED | options))
    assert_close(moved(tiled, jit), expected(network, jit))


@pytest.mark.parametrize("argument", [0, 1])
def test_tangents_of_one_argument(argument):
    """The other one has none, not even zeros."""

    def run(f):
        def of_one(x):
            return f(x, IMAGE) if argument == 0 else f(WEIGHTS, x)

        given = ((WEIGHTS, IMAGE)[argument],), (DIRECTION[argument],)
        return jax.jit(functools.partial(jax.jvp, of_one))(*given)

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))


@pytest.mark.slow
def test_linearize():
    def run(f):
        out, push = jax.linearize(f, WEIGHTS, IMAGE)
        return out, push(*DIRECTION), jax.linear_transpose(push, WEIGHTS, IMAGE)(out)

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))


def test_jacfwd_is_jacrev():
    def fun(w, x):
        return normed(conv(x, w[0])).max((1, 2))

    tiled = jaxtile.checkpoint(fun, **TILED)
    want = jax.jit(jax.jacrev(fun))(WEIGHTS, IMAGE)
    assert_close(jax.jit(jax.jacfwd(tiled))(WEIGHTS, IMAGE), want)
    assert_close(jax.jit(jax.jacrev(tiled))(WEIGHTS, IMAGE), want)


@parametrize_few("name", SMOOTH)
@parametrize_few("kind", ["over reverse", "under reverse", "twice"])
def test_second_derivatives(name, kind):
    def run(f):
        def push(g):
            return lambda w, x: jax.jvp(g, (w, x), DIRECTION)[1]

        def pull(g):
            return jax.grad(lambda w, x: scalar(g(w, x)), (0, 1))

        made = {
            "over reverse": lambda: push(pull(f)),
            "under reverse": lambda: pull(push(f)),
            "twice": lambda: push(push(f)),
        }[kind]()
        return jax.jit(made)(WEIGHTS, IMAGE)

    fun = NETWORKS[name]
    assert_close(run(jaxtile.checkpoint(fun, **TILED)), run(fun))


@parametrize_few("outer", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
@parametrize_few("tiles", [(2,), (4,), "whole"])
@parametrize_few("largest", [1.0, -0.0])
def test_second_derivatives_of_ties_between_tiles(outer, inner, tiles, largest):
    x = jnp.array([largest, largest, largest - 1, largest, largest - 2])

    def fun(x):
        return jnp.sin(2 * x.max(0)) + jnp.cos(x.min(0)) * x.max(0)

    tiled = jaxtile.checkpoint(fun, in_axes=((0,),), tiles=tiles)
    assert_close(*(jax.jit(outer(inner(f)))(x) for f in (tiled, fun)))


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(2, 2), "whole", None])
def test_hessian(tiles):
    image, kernel = normal(0, 1, 5, 4, 1), normal(1, 3, 3, 1, 1)

    def fun(w, x):
        return jnp.sin(normed(conv(jnp.tanh(conv(x, w)), w))).mean()

    tiled = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=tiles)
    assert_close(*(jax.jit(jax.hessian(f, (0, 1)))(kernel, image) for f in (tiled, fun)))


def test_vmap_of_tangents():
    def run(f):
        def one(direction):
            return jax.jvp(f, (WEIGHTS, IMAGE), direction)[1]

        several = jax.tree.map(lambda x: jnp.stack([x, x**2]), DIRECTION)
        return jax.jit(jax.vmap(one))(several)

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))


def test_jvp_of_vmap():
    def run(f):
        def each(w, x):
            return jax.vmap(lambda x: f(w, x[None]))(x)

        return jax.jit(lambda a, b: jax.jvp(each, a, b))((WEIGHTS, IMAGE), DIRECTION)

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))


@pytest.mark.slow
def test_third_derivatives_of_vmap():
    def small(w, x):
        return conv(jnp.tanh(conv(x, w[0])), w[1])

    def run(f):
        def each(w, x):
            return jnp.tanh(jax.vmap(lambda x: f(w, x[None]))(x))

        first = jax.grad(lambda w, x: scalar(each(w, x)))
        second = jax.grad(lambda w, x: scalar(first(w, x)))
        return jax.jit(jax.grad(lambda w, x: scalar(second(w, x)), (0, 1)))(WEIGHTS, IMAGE)

    assert_close(run(jaxtile.checkpoint(small, **TILED)), run(small), 1e-10)


def test_inside_scan_and_remat():
    """A loop over training steps, differentiated."""

    def run(f):
        def step(w, _):
            gradient = jax.grad(lambda w: scalar(jax.checkpoint(f)(w, IMAGE)))(w)
            return jax.tree.map(lambda a, g: a - 0.01 * g, w, gradient), None

        def train(w):
            return lax.scan(step, w, None, length=2)[0]

        return jax.jit(lambda w, t: jax.jvp(train, (w,), (t,)))(WEIGHTS, DIRECTION[0])

    def small(w, x):
        return conv(jnp.tanh(conv(x, w[0])), w[1])

    assert_close(run(jaxtile.checkpoint(small, **TILED)), run(small))


def test_inside_shard_map():
    mesh = devices(2, names=("data",), axis_types=(AxisType.Auto,))

    def run(f):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data")) * 2, out_specs=P("data")
        )
        def push(w, x, tw, tx):
            return jax.jvp(f, (w, x), (tw, tx))[1]

        return jax.jit(push)(WEIGHTS, IMAGE, *DIRECTION)

    assert_close(run(jaxtile.checkpoint(network, **TILED)), run(network))


def test_bfloat16_sums_are_wide():
    """As in reverse mode: the tangent of a sum is added up as the sum is."""
    ones = jnp.ones((1, 64, 64, 1), jnp.bfloat16)
    tiled = jaxtile.checkpoint(lambda x: x.sum(), in_axes=((1, 2),), tiles=(8, 8))
    assert jax.jvp(tiled, (ones,), (ones,))[1] == 4096


def test_a_rule_without_forward_mode_is_an_error_as_ever():
    @jax.custom_vjp
    def rule(x):
        return x * 2

    rule.defvjp(lambda x: (x * 2, x), lambda x, c: (c * jnp.cos(x),))

    def fun(w, x):
        return conv(rule(conv(x, w[0])), w[1])

    for f in (fun, jaxtile.checkpoint(fun, **TILED)):
        with pytest.raises((TypeError, jaxtile.TilingError), match=r"forward.mode.*custom_vjp"):
            moved(f)


def test_on_a_mesh_it_is_refused():
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(1, 1), **on(2, 2))
    with pytest.raises(jaxtile.TilingError, match=r"forward mode .* mesh .*What to do"):
        moved(tiled)
