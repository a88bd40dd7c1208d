"""What `explain` says equals the arithmetic."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .support import conv, max_pool, normal


def chain(params, x):
    for w in params:
        x = conv(x, w)
    return x


def test_halo_and_operations_of_a_chain_of_convolutions():
    layers, channels, size, grid = 3, 2, 32, 4
    params = [normal(i, 3, 3, channels, channels) for i in range(layers)]
    image = normal(9, 1, size, size, channels)
    (region,) = jaxtile.explain(
        chain, params, image, in_axes=(None, (1, 2)), tiles=(grid, grid)
    ).regions
    tile = size // grid
    assert region.tiles == grid**2
    assert region.ops == {"conv_general_dilated": layers}
    assert region.reads[0].window == (tile + 2 * layers,) * 2
    assert region.reads[0].halo == ((layers, layers),) * 2
    per_position = 2 * 9 * channels**2
    assert region.plain_flops == layers * size**2 * per_position
    # Layer k of n produces the tile and n - k positions of halo on every side.
    produced = [(tile + 2 * (layers - k)) ** 2 for k in range(1, layers + 1)]
    assert region.tiled_flops == grid**2 * sum(produced) * per_position
    assert region.halo_share == pytest.approx(1 - layers * tile**2 / sum(produced))
    assert region.stored_bytes == size**2 * channels * 8


def test_strides_reach_further_on_one_side():
    def fun(w, x):
        return max_pool(conv(x, w, 2))

    explanation = jaxtile.explain(
        fun, normal(0, 3, 3, 1, 1), normal(1, 1, 64, 64, 1), in_axes=(None, (1, 2)), tiles=(4, 2)
    )
    (use,) = explanation.regions[0].reads
    assert use.window == (17, 33)
    assert use.halo == ((0, 1), (0, 1))


def test_regions_names_and_bytes():
    def fun(w, x):
        x = checkpoint_name(jnp.tanh(conv(x, w)), "first")
        x = checkpoint_name(max_pool(conv(x, w)), "pool")
        return x.mean((1, 2)) @ w[0, 0]

    policy = jax.checkpoint_policies.save_only_these_names("first", "pool")
    args = normal(0, 3, 3, 2, 2), normal(1, 1, 16, 16, 2)
    explanation = jaxtile.explain(fun, *args, in_axes=(None, (1, 2)), tiles=(2, 2), policy=policy)
    assert [[w.name for w in r.writes] for r in explanation.regions] == [
        ["first"],
        ["pool", "reduce_sum"],
    ]
    assert [[w.name for w in r.reads] for r in explanation.regions] == [["x"], ["first"]]
    assert explanation.stored_bytes == 8 * (16 * 16 * 2 + 8 * 8 * 2 + 2)
    assert explanation.global_flops > 0
    text = str(explanation)
    for word in ("region 0", "first", "pool", "halo", "tanh", "2 x 2 tiles"):
        assert word in text


def test_only_what_a_derivative_needs_is_recomputed():
    """Of a chain of convolutions all but the last; of a region that is not recomputed, nothing."""
    w, x = normal(0, 3, 3, 2, 2), normal(1, 1, 16, 16, 2)

    def overhead(layers, tiles):
        return jaxtile.explain(chain, [w] * layers, x, in_axes=(None, (1, 2)), tiles=tiles).overhead

    assert overhead(3, {...: None}) == 1
    for tiles in ("whole", (1, 1)):
        assert overhead(1, tiles) == 1
        assert overhead(3, tiles) == pytest.approx(1 + 2 / 9)


def test_elementwise_functions_are_recomputed_for_their_derivative():
    w, x = normal(0, 3, 3, 2, 2), normal(1, 1, 16, 16, 2)
    axes = (None, (1, 2))
    through = jaxtile.explain(lambda w, x: jnp.sin(conv(x, w)), w, x, in_axes=axes)
    assert through.recomputed_flops == 2 * 9 * 2 * x.size
    own = jaxtile.explain(lambda w, x: jnp.tanh(conv(x, w)), w, x, in_axes=axes)
    assert own.recomputed_flops == own.forward_flops


def test_shapes_are_enough():
    shape = jax.ShapeDtypeStruct
    args = [shape((3, 3, 1, 1), "float32")] * 4, shape((1, 40_000, 40_000, 1), "float32")
    explanation = jaxtile.explain(chain, *args, in_axes=(None, (1, 2)), tiles=(40, 40))
    assert explanation.regions[0].reads[0].window == (1008, 1008)


def test_an_array_of_fewer_rows_than_tiles():
    def enlarged(x):
        return jnp.repeat(x, 8, 0)

    (region,) = jaxtile.explain(enlarged, jnp.ones(3), in_axes=((0,),), tiles=(6,)).regions
    assert region.reads[0].window == (1,)
