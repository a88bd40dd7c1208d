"""Under jit, grad, vmap, in a larger model, nested in itself, and over closures."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .support import (
    assert_close,
    assert_same,
    conv,
    max_pool,
    normal,
    parametrize_few,
    plain_results,
    results,
)

POLICIES = jax.checkpoint_policies
IMAGE = normal(0, 1, 16, 13, 3)
PARAMS = [normal(i, 3, 3, 3, 3) for i in (1, 2, 3)]


def trunk(params, x):
    x = checkpoint_name(jnp.tanh(conv(x, params[0])), "first")
    x = checkpoint_name(max_pool(jax.nn.relu(conv(x, params[1]) + 0.3)), "pool")
    return conv(x, params[2])


def tiled_trunk(**kwargs):
    return jaxtile.checkpoint(trunk, **({"in_axes": (None, (1, 2)), "tiles": (3, 4)} | kwargs))


@parametrize_few(
    "policy",
    [
        POLICIES.everything_saveable,
        POLICIES.nothing_saveable,
        POLICIES.dots_saveable,
        POLICIES.save_any_names_but_these("first"),
        POLICIES.save_only_these_names("first", "pool"),
        POLICIES.save_from_both_policies(
            POLICIES.dots_saveable, POLICIES.save_only_these_names("pool")
        ),
    ],
    always=2,
    ids=["everything", "nothing", "dots", "any_but", "only", "both"],
)
def test_policies(policy):
    assert_same(trunk, PARAMS, IMAGE, in_axes=(None, (1, 2)), tiles=(3, 4), policy=policy)


@pytest.mark.parametrize(
    "tiles",
    [{"pool": (4, 3), ...: (2, 2)}, {"pool": (4, 3), ...: None}, {"pool": None, ...: (2, 2)}],
)
def test_grids_per_region(tiles):
    policy = POLICIES.save_only_these_names("pool")
    assert_same(trunk, PARAMS, IMAGE, in_axes=(None, (1, 2)), tiles=tiles, policy=policy)


def test_without_jit():
    assert_close(
        results(tiled_trunk(), (PARAMS, IMAGE), jit=False), plain_results(trunk, (PARAMS, IMAGE))
    )


def test_vmap():
    images = jnp.stack([IMAGE, IMAGE**2])
    stacked = jax.tree.map(lambda w: jnp.stack([w, w + 1]), PARAMS)
    plain, tiled = (lambda p, x, f=f: jax.vmap(f)(p, x) for f in (trunk, tiled_trunk()))
    assert_close(results(tiled, (stacked, images)), plain_results(plain, (stacked, images)))


def test_per_example_gradients():
    images = jnp.stack([IMAGE, IMAGE**2])
    plain, tiled = (
        jax.jit(jax.vmap(jax.grad(lambda p, x, f=f: jnp.sin(f(p, x)).sum()), (None, 0)))
        for f in (trunk, tiled_trunk())
    )
    assert_close(tiled(PARAMS, images), plain(PARAMS, images))


def offloaded_trunk(**kwargs):
    """Its windows in host memory are strips, and blocks."""
    names = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["first", "pool"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return tiled_trunk(policy=names, tiles={"first": (5, 1), ...: (2, 2)}, **kwargs)


@pytest.mark.slow
def test_vmap_where_values_are_offloaded():
    """Of gradients, over images and, in a Hessian, over tangents; of windows, and of all there."""
    images, last = jnp.stack([IMAGE, IMAGE**2]), PARAMS[2][:1, :1]

    def losses(f):
        def loss(last, x):
            return jnp.sin(f([*PARAMS[:2], last], x)).mean()

        return jax.vmap(jax.grad(loss, (0, 1)), (None, 0)), jax.hessian(loss)

    (gradients, hessian), (plain_gradients, plain_hessian) = map(losses, (offloaded_trunk(), trunk))
    assert_close(jax.jit(gradients)(last, images), jax.jit(plain_gradients)(last, images))
    assert_close(jax.jit(hessian)(last, IMAGE), jax.jit(plain_hessian)(last, IMAGE))


def test_what_is_offloaded_is_not_differentiated_backwards_twice():
    def squares(x):
        return jnp.vdot(*[jax.grad(lambda x: jnp.sin(offloaded_trunk()(PARAMS, x)).sum())(x)] * 2)

    with pytest.raises(jaxtile.TilingError, match="gradient of a gradient"):
        jax.make_jaxpr(jax.grad(squares))(IMAGE)


def test_examples_that_skip_other_tiles():
    """They read and write other windows in host memory."""
    images = jnp.stack([IMAGE.at[:, :9].set(0), IMAGE.at[:, 8:].set(0)])

    def gradients(f):
        return jax.jit(jax.vmap(jax.grad(lambda x: jnp.sin(f(PARAMS, x)).sum())))(images)

    assert_close(gradients(offloaded_trunk(skip=True)), gradients(trunk))


def test_a_scan_around_a_tiled_layer_does_not_grow_with_depth():
    def layer(w, x):
        x = jax.nn.relu(x + conv(x, w))
        return x / jnp.sqrt(x.var((0, 1, 2)) + 1e-2)

    def network(layer):
        return lambda ws, x: lax.scan(lambda x, w: (layer(w, x), x.mean()), x, ws)

    tiled = network(jaxtile.checkpoint(layer, in_axes=(None, (1, 2)), tiles=(3, 2)))
    weights = jnp.stack(PARAMS)
    assert_close(results(tiled, (weights, IMAGE)), plain_results(network(layer), (weights, IMAGE)))

    def lines(depth):
        shapes = jax.ShapeDtypeStruct((depth, *weights.shape[1:]), float), IMAGE
        step = jax.grad(lambda *args: tiled(*args)[0].sum())
        return str(jax.make_jaxpr(step)(*shapes)).count("\n")

    assert lines(3) == lines(100)


@pytest.mark.slow
def test_inside_a_larger_model_and_twice():
    def model(f):
        return lambda p, x: conv(f(p, jnp.cos(conv(f(p, x), p[0]))), p[1]).mean() + f(p, x).sum()

    assert_close(
        results(model(tiled_trunk(tiles=(1, 2))), (PARAMS, IMAGE)),
        plain_results(model(trunk), (PARAMS, IMAGE)),
    )


@pytest.mark.slow
def test_nested_in_itself():
    inner = jax.jit(tiled_trunk(tiles=(2, 2)))
    inner(PARAMS, IMAGE)  # the jitted inner function is in the cache with its own schedule

    def outer(params, x):
        return inner(params, jnp.tanh(conv(x, params[0])))

    def plain(params, x):
        return trunk(params, jnp.tanh(conv(x, params[0])))

    nested = jaxtile.checkpoint(outer, in_axes=(None, (1, 2)), tiles=(4, 3))
    assert_close(results(nested, (PARAMS, IMAGE)), plain_results(plain, (PARAMS, IMAGE)))
    twice = jaxtile.checkpoint(jax.checkpoint(tiled_trunk()), in_axes=(None, (1, 2)), tiles=(4, 3))
    assert_close(results(twice, (PARAMS, IMAGE)), plain_results(trunk, (PARAMS, IMAGE)))


def test_closures_over_traced_values():
    def loss(f):
        def run(params, x):
            return jaxtile.checkpoint(
                lambda image: f(params, image), in_axes=((1, 2),), tiles=(3, 4)
            )(x)

        return run

    assert_close(results(loss(trunk), (PARAMS, IMAGE)), plain_results(trunk, (PARAMS, IMAGE)))


def test_pytrees_keyword_arguments_and_untouched_values():
    def fun(params, batch, *, scale):
        image, mask = batch["image"], batch["mask"]
        out = conv(image, params[0]) * mask[..., None] * scale
        return {
            "out": out,
            "same": image,
            "twice": (out, out),
            "n": 3,
            "scale": scale,
            "zeros": jnp.zeros(2),
        }

    batch = {"image": IMAGE, "mask": IMAGE[..., 0] > 0}
    tiled = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=(3, 4))
    plain, got = (lambda p, b, f=f: f(p, b, scale=jnp.float64(2)) for f in (fun, tiled))
    assert_close(results(got, (PARAMS, batch)), plain_results(plain, (PARAMS, batch)))


def test_integer_images_need_no_gradient():
    image = (jnp.abs(IMAGE) * 50).astype(jnp.uint8)

    def fun(params, x):
        return trunk(params, x.astype(jnp.float64) / 255)

    assert_same(fun, PARAMS, image, in_axes=(None, (1, 2)), tiles=(3, 4))
    tiled = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=(3, 4))
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(lambda x: tiled(PARAMS, x).sum())(image)


def test_tiles_share_one_program():
    """The function is traced once, however many tiles there are, and never again under jit."""

    @chex.assert_max_traces(n=1)
    def fun(params, x):
        return trunk(params, x)

    step = jax.jit(
        jax.grad(
            lambda p, x: jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=(8, 6))(p, x).sum()
        )
    )
    step(PARAMS, IMAGE)
    step(PARAMS, IMAGE + 1)


@pytest.mark.slow
def test_second_derivatives():
    def hessian_vector(f):
        def grad(p):
            return jax.grad(lambda p: jnp.sin(f(p, IMAGE)).sum())(p)

        return jax.jit(jax.grad(lambda p: sum(jnp.vdot(g, g) for g in grad(p))))

    assert_close(hessian_vector(tiled_trunk(tiles=(2, 2)))(PARAMS), hessian_vector(trunk)(PARAMS))


def test_bfloat16_is_as_close_to_float64_as_plain():
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, IMAGE))
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), narrow)
    exact = results(trunk, wide)

    def error(f):
        got = results(f, narrow)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
        return max(
            float(jnp.abs(a.astype(jnp.float64) - b).max() / jnp.abs(b).max()) for a, b in pairs
        )

    assert error(tiled_trunk()) <= 1.5 * error(trunk)
