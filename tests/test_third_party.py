"""The benchmark's networks of other libraries: exact in tiles, and not changed for it."""

import re
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

import jaxtile
from experiments.bench import installed, parsed
from experiments.measuring import baselines
from experiments.measuring.convnext import Block, ConvNeXt
from experiments.measuring.problems import classifier, problem, shape_of
from experiments.measuring.third_party import NETWORKS, of_haiku, of_linen
from experiments.program.config import ConfigError

from .support import assert_close, parametrize_few

WEIGHTS = {"haiku_resnet50": 25_557_032, "convnext": 28_589_128}
BLOCKS = {"haiku_resnet50": 16, "convnext": 18}


def small_resnet():
    return hk.nets.ResNet(
        (1, 0, 0, 0),
        5,
        channels_per_group=(8, 8, 8, 8),
        strides=(2, 1, 1, 1),
        initial_conv_config={"output_channels": 4},
    )


SMALL = {
    "convnext": of_linen(ConvNeXt(classes=5, depths=(1, 1), dims=(4, 6), dtype=jnp.float64), Block),
    "haiku_resnet50": of_haiku(small_resnet),
}


def step(loss):
    """The loss and new batch statistics, and gradients of weights and image."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))


def assert_exact(found, **schedule):
    """Array by array: small gradients are not excused by large ones, and none is zero."""
    tiled = jaxtile.checkpoint(found.loss, in_axes=found.in_axes, **schedule)
    got, want = step(tiled)(*found.arguments), step(found.loss)(*found.arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.any(b != 0)
        assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_tiles_are_exact(name):
    found = classifier(SMALL[name], (1, 32, 32, 3), jnp.float64, 5)
    assert_exact(found, tiles=(2, 2))


@pytest.mark.slow
def test_tiles_of_haikus_whole_network_are_exact():
    found = problem("haiku_resnet50", (1, 64, 64, 3), jnp.float64)
    assert_exact(found, policy="store_convs", tiles=(2, 2))


@pytest.mark.slow
def test_tiles_of_a_deep_convnext_are_exact():
    """With fewer channels: a CPU is slow at the gradients of wide depthwise convolutions."""
    network = of_linen(ConvNeXt(classes=5, dims=(8, 12, 16, 24), dtype=jnp.float64), Block)
    found = classifier(network, (1, 64, 64, 3), jnp.float64, 5)
    assert_exact(found, policy="store_convs", tiles=(2, 2))


@parametrize_few("name", sorted(NETWORKS, reverse=True))
def test_the_reference_is_the_published_network(name):
    found = problem(name, shape_of(name), jnp.bfloat16, abstract=True)
    params, state, image, labels = found.arguments
    assert sum(w.size for w in jax.tree.leaves(params)) == WEIGHTS[name]
    assert {x.dtype for x in jax.tree.leaves((params, image))} == {jnp.dtype(jnp.bfloat16)}
    assert (image.shape, labels.shape) == ((1, 2048, 2048, 3), (1,))
    value, new = jax.eval_shape(found.loss, *found.arguments)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert new == state


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_jax_checkpoint_saves_the_inputs_of_blocks(name, capsys):
    found = problem(name, (1, 32, 32, 3), jnp.bfloat16, abstract=True)
    loss, arguments = baselines.applied("jax_blocks", name, found)
    print_saved_residuals(loss, *arguments)
    assert capsys.readouterr().out.count("named 'block'") == BLOCKS[name]
    assert "name=block" not in str(jax.make_jaxpr(found.loss)(*arguments))


def test_without_haiku(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "haiku", None)
    with pytest.raises(ConfigError, match=re.escape("pip install dm-haiku")):
        parsed("haiku_resnet50,33,float32")
    assert parsed("convnext,33,float32").model == "convnext"
    problems = ["vgg16,128,float32", "haiku_resnet50,128,float32"]
    assert installed(problems) == problems[:1]
    assert "dm-haiku is not installed" in capsys.readouterr().err


def test_an_image_that_is_too_small():
    with pytest.raises(ConfigError, match="at least 32 x 32, not 31 x 31"):
        parsed("convnext,31,float32")
