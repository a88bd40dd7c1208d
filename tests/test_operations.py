"""`jaxtile.operations`: work and traffic of any function; and the replay of a list of them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import models
from jaxtile import nn, ops

from .replay import replay
from .support import normal

VECTOR = normal(0, 8)
MATRIX = normal(1, 4, 4)


def flops(fun, *args):
    return jaxtile.operations(fun, *args).flops


@pytest.mark.parametrize(
    "fun, per_element",
    [
        (lambda x, y: x + y, 1),
        (lambda x, y: jax.nn.relu(x + y), 1),
        (lambda x, y: jnp.exp(x), 1),
        (lambda x, y: 3 * x, 0),
        (lambda x, y: jnp.tanh(3 * x + 1), 1),
        (lambda x, y: x[0] * (x + y), 2),
        (lambda x, y: x.astype(jnp.float32), 0),
        (lambda x, y: jnp.where(x > 0, x, y), 1),
        (lambda x, y: jnp.arange(8) * 2 + 1, 0),
        (lambda x, y: x[::-1], 0),
    ],
)
def test_elementwise_work_is_fused(fun, per_element):
    assert flops(fun, VECTOR, VECTOR + 1) == 8 * per_element


def test_reductions_pools_and_contractions():
    image, kernel = normal(0, 1, 8, 8, 2), normal(1, 3, 3, 2, 4)
    assert flops(lambda x: x.sum(), VECTOR) == 8
    assert flops(lambda x: x @ x, MATRIX) == 2 * 64
    assert flops(ops.conv, image, kernel) == 2 * 64 * 4 * 9 * 2
    assert flops(lambda x, k: ops.conv_transpose(x, k), image, kernel[:2, :2]) == 2 * 64 * 4 * 4 * 2
    assert flops(lambda x, k: ops.conv(x, k, groups=2), image, kernel[:, :, :1]) == 2 * 64 * 4 * 9
    assert flops(ops.max_pool, image) == 4 * 4 * 2 * 4


def test_loops_and_branches():
    product = 2 * 64
    scan = lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]  # noqa: E731
    assert flops(scan, MATRIX) == 5 * product
    assert jaxtile.operations(scan, MATRIX).macs == 5 * product // 2
    branch = lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)  # noqa: E731
    assert jaxtile.operations(branch, MATRIX).macs == product // 2
    loop = lambda x: lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ c, x)  # noqa: E731
    assert jaxtile.operations(loop, MATRIX).macs == product // 2


def test_a_tiled_function_counts_as_the_plain_one():
    image, kernel = normal(0, 1, 8, 8, 2), normal(1, 3, 3, 2, 2)
    tiled = jaxtile.checkpoint(ops.conv, in_axes=((1, 2), None), tiles=(2, 2))
    assert flops(tiled, image, kernel) == flops(ops.conv, image, kernel)


def test_operations_end_at_names_and_at_shared_values():
    def fun(x, w):
        y = checkpoint_name(jnp.tanh(x @ w), "hidden")
        shared = y * y
        return checkpoint_name(shared + 1, "a"), checkpoint_name(shared.sum(), "b")

    found = jaxtile.operations(fun, MATRIX, MATRIX)
    assert [t.name for t in found.arguments] == ["x", "w"]
    assert [(o.name, [t.name for t in o.inputs]) for o in found.operations] == [
        ("hidden", ["x", "w"]),
        ("mul", ["hidden"]),
        ("a", ["mul"]),
        ("b", ["mul"]),
    ]
    assert found["hidden"].traffic == 3 * 16 * 8
    assert found.activation_bytes == (3 * 16 + 1) * 8
    with pytest.raises(KeyError, match="near are"):
        found["hidde"]


def test_every_output_of_a_primitive_counts():
    found = jaxtile.operations(lambda x: jnp.split(x, 2), VECTOR)
    assert found.activation_bytes == VECTOR.nbytes


def test_a_module_in_training_mode():
    model = models.UNet(1, 2, channels=2, depth=1, rngs=nnx.Rngs(0))
    found = nn.operations(lambda model, x: model(x), model, jnp.ones((1, 20, 20, 1)))
    assert found["d0c.drop"].kind == "random"
    assert model.dropout.rngs.count[...] == 0


def test_replay():
    steps = [("a", ["x"], ["p", "q"]), ("b", ["p"], ["r"]), ("c", ["q", "r"], ["r"])]
    sizes = {"x": 100, "p": 10, "q": 20, "r": 5}
    assert replay(steps, sizes) == (35, "b")
    assert replay(steps, sizes, resident=["x"]) == (135, "b")
    assert replay(steps[::2], sizes) == (30, "a")
    assert replay(steps, sizes | {"r": 1}, keep=["p"]) == (31, "b")
    with pytest.raises(ValueError, match="no bytes for q"):
        replay(steps, {"p": 1, "r": 1})
