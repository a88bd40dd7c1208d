"""The gradients that a GPU gets instead of JAX's own, compared with those, on a CPU."""

import itertools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtile
from jaxtile._rules import convolve, max_pool, products

from .support import normal, parametrize_few


def params_of(fun, *arguments):
    """The one equation of `fun`: its primitive and parameters."""
    (equation,) = jax.make_jaxpr(fun)(*arguments).eqns
    return equation.primitive, equation.params


POOLS = [
    (window, stride, padding)
    for window, stride, padding in itertools.product((3, 2), (2, 1, 3), ((1, 2), (0, 0), (1, 0)))
    if max(padding) < window
]


@parametrize_few("window, stride, padding", POOLS, always=5)
@pytest.mark.parametrize("start, combine", [(-jnp.inf, lax.max), (jnp.inf, lax.min)])
def test_gradient_of_a_pool(window, stride, padding, start, combine):
    x = jnp.round(normal(0, 2, 8, 9, 2))  # with ties

    def pool(x):
        windows, strides = (1, window, 2, 1), (1, stride, 2, 1)
        pads = ((0, 0), padding, (0, 1), (0, 0))
        return lax.reduce_window(x, start, combine, windows, strides, pads)

    primitive, params = params_of(pool, x)

    @jax.jit
    def both(x):
        y, pull = jax.vjp(pool, x)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)
        return pull(cotangent)[0], max_pool._summed(primitive, params, x, cotangent)

    expected, found = both(x)
    assert jnp.abs(expected).max() > 0
    assert jnp.abs(found - expected).max() < 1e-12


@parametrize_few("kernel", [1, 4, 2, 3], always=2)
@parametrize_few("dilation", [2, 3])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (-1, 2), (3, 0)])
def test_gradient_of_a_transposed_convolution(kernel, dilation, padding):
    x, w = normal(0, 2, 7, 8, 3), normal(1, kernel, 2, 3, 4)

    def conv(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            (padding, (1, 1)),
            lhs_dilation=(dilation, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    _, params = params_of(conv, x, w)
    assert convolve._is_transposed(params)
    y, pull = jax.vjp(lambda w: conv(x, w), w)
    cotangent = jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)
    found = convolve._of_strided_kernel(params, x, w, cotangent)
    assert jnp.abs(found - pull(cotangent)[0]).max() < 1e-11


@parametrize_few("stride", [2, 1, 3])
@parametrize_few("dilation", [2, 1])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (-1, 2), (3, -1)])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_gradient_of_a_depthwise_convolution(stride, dilation, padding, multiplier):
    x, w = normal(0, 2, 19, 8, 3), normal(1, 3, 2, 1, 3 * multiplier)

    def conv(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride, 1),
            (padding, (1, 1)),
            rhs_dilation=(dilation, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    _, params = params_of(conv, x, w)
    assert convolve._is_depthwise(params, w)

    @jax.jit
    def both(x, w):
        y, pull = jax.vjp(lambda w: conv(x, w), w)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)
        return pull(cotangent)[0], convolve._of_depthwise_kernel(params, x, w, cotangent)

    expected, found = both(x, w)
    assert jnp.abs(expected).max() > 0
    assert jnp.abs(found - expected).max() < 1e-12


@parametrize_few("strides", [(2, 5), (2, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (3, 3), (-1, 2), (2, -3)])
@parametrize_few("size", [11, 12])
@pytest.mark.parametrize("order", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC")])
def test_a_strided_convolution_of_few_channels(strides, padding, size, order):
    if order[0] == "NHWC":
        x, w = normal(0, 2, size, 13, 3), normal(1, 5, 4, 3, 2)
    else:
        x, w = normal(0, 2, 3, size, 13), normal(1, 2, 3, 5, 4)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, strides, (padding, (1, 0)), dimension_numbers=order)

    _, params = params_of(conv, x, w)
    assert convolve._is_narrow(params, x)

    def by_blocks(x, w):
        return convolve._by_blocks(params, x, w)

    @jax.jit
    def both(x, w):
        cotangent = jnp.cos(jnp.arange(conv(x, w).size, dtype=x.dtype))
        results = []
        for form in conv, by_blocks:
            y, pull = jax.vjp(form, x, w)
            results.append((y, *pull(cotangent.reshape(y.shape))))
        return results

    expected, found = both(x, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    assert all(jnp.abs(a - b).max() < 1e-12 for a, b in zip(found, expected, strict=True))
    assert all(jnp.abs(a).max() > 0 for a in expected)


@parametrize_few("padding", [((-1, 2), (3, 0)), ((0, 0), (0, 0)), ((2, 2), (1, 1))])
@pytest.mark.parametrize("order", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NHWC")])
def test_a_convolution_as_products(padding, order, monkeypatch):
    monkeypatch.setattr(products, "LARGE", 2)
    if order[0] == "NHWC":
        x, w = normal(0, 2, 8, 9, 3), normal(1, 4, 2, 3, 5)
    else:
        x, w = normal(0, 2, 3, 8, 9), normal(1, 5, 3, 4, 2)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=order)

    _, params = params_of(conv, x, w)
    assert products.has_large_kernel(params, x, w)
    y, pull = jax.vjp(conv, x, w)
    cotangent = jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)
    found = [
        products.by_rows(params, x, w),
        *products.gradients_by_rows(params, x, w, cotangent),
    ]
    expected = [y, *pull(cotangent)]
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    assert all(jnp.abs(a - b).max() < 1e-12 for a, b in zip(found, expected, strict=True))


@parametrize_few("spatial", [1, 3])
def test_a_convolution_as_products_in_other_dimensions(spatial):
    x, w = normal(0, 2, *(6,) * spatial, 2), normal(1, *(3,) * spatial, 2, 4)
    letters = "DHW"[-spatial:]
    order = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1,) * spatial, "SAME", dimension_numbers=order)

    _, params = params_of(conv, x, w)
    y, pull = jax.vjp(conv, x, w)
    found = [products.by_rows(params, x, w), *products.gradients_by_rows(params, x, w, y)]
    expected = [y, *pull(y)]
    assert all(jnp.abs(a - b).max() < 1e-11 for a, b in zip(found, expected, strict=True))


def test_dense_layers_as_convolutions_are_products_on_a_gpu():
    """Where XLA compiles for: nothing is run."""
    x = jax.ShapeDtypeStruct((1, 9, 9, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((7, 7, 512, 4096), jnp.bfloat16)

    def step(x, w):
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=layout)
        return y.astype(jnp.float32).sum()

    tiled = jaxtile.checkpoint(step, in_axes=((1, 2), None), tiles=(2, 2))
    traced = jax.jit(jax.grad(tiled, (0, 1))).trace(x, w)
    text = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert "stablehlo.convolution" in text["cpu"]
    assert "stablehlo.convolution" not in text["cuda"]
    assert "stablehlo.dot_general" in text["cuda"]
