"""The model of many devices sends what the compiled program sends; its program and its errors."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType

import jaxtile
from experiments import scaling
from experiments.measuring.problems import Problem
from experiments.scaling import Link, Scaled, scaled, squarest
from jaxtile._plan.costs import BUILT_IN

from .meshes import devices, on, sharded
from .support import conv, max_pool, normal, parametrize_few
from .test_experiments import run
from .test_mesh_messages import halos, messages
from .test_models import NAMES

STORED = ("first", "second")


def network(weights, rest, x):
    """Two blocks; with batch statistics if `rest` says so."""
    for name, w in zip(STORED, weights, strict=True):
        x = conv(jnp.sin(conv(x, w)), w)
        if rest:
            mean, square = x.mean((0, 1, 2)), jnp.square(x).mean((0, 1, 2))
            x = (x - mean) / jnp.sqrt(square - mean**2 + 1)
        x = checkpoint_name(max_pool(x, 2, 2), name)
    return jnp.sum(jnp.sin(x))


def modelled(mesh, tile, statistics=False):
    """The step as the model has it, and the step itself with its arguments."""
    weights = [normal(i, 3, 3, 2, 2) for i in range(2)]
    rest, image = {"norms": jnp.zeros(())} if statistics else {}, normal(9, 1, 64, 32, 2)
    found = Problem(network, (weights, rest, image), (None, None, (1, 2)))
    model = scaled(found, STORED, mesh, tile, BUILT_IN["gpu"])
    tiled = jaxtile.checkpoint(
        network,
        in_axes=found.in_axes,
        tiles="whole" if tile == "whole" else model.tiles,
        policy=NAMES(*STORED),
        **on(*mesh),
    )
    placed = sharded(devices(*mesh, axis_types=(AxisType.Auto,) * 2), image)
    return model, jax.value_and_grad(tiled), (weights, rest, placed)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@parametrize_few(("mesh", "tile"), [((2, 2), "whole"), ((4, 2), 8)])
def test_halos_are_those_of_the_compiled_program(mesh, tile):
    model, step, arguments = modelled(mesh, tile)
    assert model.halo_bytes == halos(step, *arguments)[0] > 0


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_messages_and_sums_are_those_of_the_program():
    model, step, arguments = modelled((2, 2), "whole", statistics=True)
    lowered = jax.jit(step).lower(*arguments)
    compiled = lowered.compile()
    assert model.messages == max(map(len, messages(compiled).values()))
    # Two norms forwards, again, and their cotangents; the loss and its cotangent; two gradients.
    assert model.sums == 2 * 3 + 2 + 2
    # A norm has two sums in one, and the compiler may find more to combine.
    assert lowered.as_text().count('"stablehlo.all_reduce"') == model.sums + 2 * 3
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())) <= model.sums


def test_exchange_is_counted_as_described():
    step = Scaled(
        mesh=(2, 4),
        block=(1, 1),
        tiles=(2, 2),
        stored_bytes=0,
        halo_bytes=1000,
        messages=7,
        sums=3,
        weight_bytes=800,
        compute=1.0,
    )
    assert step.exchange(Link(100.0, 0.0)) == (1000 + 2 * 7 / 8 * 800) / 100
    assert step.exchange(Link(float("inf"), 1.0)) == 7 + 3 * 2 * 3


def test_overlap_costs_compute():
    one, coarse, fine = (modelled(mesh, tile)[0] for mesh, tile in CASES)
    assert one.halo_bytes == one.messages == one.sums == 0
    assert 1 < coarse.compute * coarse.devices / one.compute < fine.compute * 4 / one.compute


CASES = [((1, 1), "whole"), ((2, 2), "whole"), ((2, 2), 4)]


def test_an_abstract_mesh_is_explained_and_not_run():
    schedule = {
        "in_axes": (None, (1, 2)),
        "mesh": AbstractMesh((16, 32), ("rows", "cols")),
        "mesh_axes": ("rows", "cols"),
    }
    w, x = normal(0, 3, 3, 2, 2), normal(1, 1, 64, 64, 2)
    region = jaxtile.explain(lambda w, x: conv(x, w), w, x, **schedule).regions[0]
    assert region.devices == (16, 32)
    assert region.exchanged.forward > 0
    with pytest.raises(jaxtile.TilingError, match=r"has no devices: only `jaxtile.explain`"):
        jaxtile.checkpoint(lambda w, x: conv(x, w), **schedule)(w, x)


def test_meshes_are_as_square_as_possible():
    assert [squarest(n) for n in (1, 7, 8, 64, 512)] == [(1, 1), (1, 7), (2, 4), (8, 8), (16, 32)]


def test_program():
    done = run("experiments.scaling", "--size=512", "--devices=8,1", "--tile=128")
    assert done.returncode == 0, done.stderr[-2000:]
    eight, one = done.stdout.splitlines()[2:4]
    assert one.startswith("| 1 | 1 x 1 | 512 x 512 | 4 x 4 |")
    assert one.endswith("| 100% |")
    assert eight.startswith("| 8 | 2 x 4 | 256 x 128 | 2 x 2 |")
    assert "computed, not measured: NVIDIA H200" in done.stdout


WRONG = [
    ("devices", ["1", "x"], r"--devices \(=x\) must be a positive whole number"),
    ("devices", [], r"--devices \(=\) must be numbers"),
    ("size", 8, "VGG16 cannot take an image of 8 pixels"),
    ("tile", "0", r"--tile \(=0\) must be a positive whole number"),
    ("bandwidth", 0.0, r"--bandwidth \(=0.0\) must be positive"),
    ("rate", -1.0, r"--rate \(=-1.0\) must be positive"),
    ("latency", float("nan"), r"--latency \(=nan\) must not be negative"),
    ("dtype", "float7", "float7"),
    ("costs", "missing.json", "missing.json"),
]


@pytest.mark.parametrize(("flag", "value", "message"), WRONG)
def test_wrong_flags(flag, value, message):
    flags = {
        "model": "vgg16",
        "size": 64,
        "batch": 1,
        "dtype": "float32",
        "devices": ["1"],
        "tile": "64",
        "bandwidth": None,
        "rate": 1.0,
        "latency": 10.0,
        "costs": None,
    }
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        scaling.run(types.SimpleNamespace(**flags | {flag: value}))


def test_an_error_is_one_line():
    done = run("experiments.scaling", "--devices=0")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: --devices (=0) must be a positive whole number"
