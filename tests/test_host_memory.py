"""A tiled argument in host memory is read by window: it is never whole on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import SingleDeviceSharding

import jaxtile
from experiments.devices.hosts import Devices
from experiments.program.config import base
from experiments.training.feed import placed
from jaxtile import TilingError
from jaxtile._platform import tracing_for
from jaxtile._run.ordering import typed

from .support import assert_close, conv, normal

W = {"a": normal(1, 3, 3, 3, 4), "b": normal(2, 3, 3, 4, 1)}
LABELS = normal(5, 2, 7, 6, 1)
AXES = (None, (1, 2), (1, 2))
SAVED = jax.checkpoint_policies.save_only_these_names("one")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["one", "two"],
    offload_src="device",
    offload_dst="pinned_host",
)


def loss(p, x, labels):
    x = checkpoint_name(conv(x / 255.0, p["a"], 2), "one")
    y = conv(jax.nn.relu(x - x.mean((0, 1, 2))), p["b"])
    return jnp.mean((y - labels) ** 2)


def host(x):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def image(dtype):
    return np.random.default_rng(0).integers(0, 256, (2, 13, 11, 3)).astype(dtype)


def moved(jaxpr):
    """Sizes of all arrays that are copied to another memory, and are not made of one number."""
    even = {v for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" for v in e.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put" and even.isdisjoint(eqn.invars):
            yield from (v.aval.size for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from moved(inner)


@pytest.mark.parametrize(
    "dtype, options",
    [
        (np.uint8, {"tiles": (3, 2), "policy": SAVED}),
        (np.float64, {"tiles": (3, 2)}),
        pytest.param(np.float64, {"policy": "passing:3x2"}, marks=pytest.mark.slow),
    ],
)
def test_windows_are_moved_and_nothing_else(dtype, options):
    x = image(dtype)
    step = jax.value_and_grad(jaxtile.checkpoint(loss, in_axes=AXES, **options))
    args = W, host(x), host(LABELS)
    assert_close(jax.jit(step)(*args), jax.jit(jax.value_and_grad(loss))(W, x, LABELS))
    sizes = [*moved(jax.make_jaxpr(step)(*args).jaxpr)]
    assert sizes
    assert not {x.size, LABELS.size} & {*sizes}


def test_what_runs_untiled_gets_a_copy_on_the_device():
    x = image(np.uint8)
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles="whole")
    got = jax.jit(jax.value_and_grad(tiled))(W, host(x), host(LABELS))
    assert_close(got, jax.jit(jax.value_and_grad(loss))(W, x, LABELS))


def test_no_gradient_of_what_lies_in_host_memory():
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(3, 2))
    x = image(np.float64)
    with pytest.raises(TilingError, match=r"in host memory has no gradient: move it to the device"):
        jax.grad(tiled, argnums=1)(W, host(x), LABELS)
    on_device = jax.device_put(host(x), jax.memory.Space.Device)
    got = jax.jit(jax.grad(tiled, argnums=1))(W, on_device, LABELS)
    assert_close(got, jax.grad(loss, argnums=1)(W, x, LABELS))


@pytest.mark.slow
def test_a_plan_for_an_image_in_host_memory():
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((2, 130, 110, 3), np.uint8, sharding=place)
    labels = jax.ShapeDtypeStruct((2, 65, 55, 1), np.float64)
    quietly = {"progress": lambda line: None}
    plan = jaxtile.plan(loss, W, x, labels, in_axes=AXES, budget="2MB", **quietly)
    assert plan.measured_bytes <= 2_000_000
    step = jax.value_and_grad(jaxtile.checkpoint(loss, in_axes=AXES, policy=plan))
    x, labels = np.resize(image(np.uint8), x.shape), normal(3, *labels.shape)
    assert_close(jax.jit(step)(W, host(x), labels), jax.jit(jax.value_and_grad(loss))(W, x, labels))


def test_shapes_in_host_memory_are_read_by_window():
    """JAX's type of a shape on a single device does not say that it is in host memory."""
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = image(np.uint8)
    shape = typed(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
    step = jax.value_and_grad(jaxtile.checkpoint(loss, in_axes=AXES, tiles=(3, 2)))
    traced = jax.jit(step).trace(W, shape, LABELS)
    assert 0 < max(moved(traced.jaxpr.jaxpr)) < x.size
    got = traced.lower().compile()(W, jax.device_put(x, shape.sharding), LABELS)
    assert_close(got, jax.jit(jax.value_and_grad(loss))(W, x, LABELS))
    config = base("unet")
    config.data.placement = "host"
    placement = placed((jax.ShapeDtypeStruct((1, 64, 64, 3), np.uint8),), config, Devices())
    assert jax.typeof(placement.shapes[0]).memory_space is jax.memory.Space.Host


@pytest.mark.parametrize("tiles", [(3, 2), (7, 6)])  # pixels of one tile are read by many
def test_what_is_offloaded_is_moved_by_window(tiles):
    """There, and back in both passes; and its cotangents."""
    x = image(np.uint8)
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=tiles, policy=OFFLOADED)
    step = jax.value_and_grad(tiled)
    assert_close(jax.jit(step)(W, x, LABELS), jax.jit(jax.value_and_grad(loss))(W, x, LABELS))
    sizes = [*moved(jax.make_jaxpr(step)(W, x, LABELS).jaxpr)]
    assert len(sizes) > 5
    assert max(sizes) < 2 * 7 * 6 * 4


def test_a_window_is_read_once():
    """What is cut out of a window is not read from host memory again: a barrier keeps them apart,
    since XLA makes one slice of two.
    """
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(3, 2), policy=OFFLOADED)
    with tracing_for("gpu"):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(tiled))(W, image(np.uint8), LABELS).jaxpr
    readers = [*readers_of_windows(jaxpr)]
    assert len(readers) >= 4  # forwards and backwards; the sum of cotangents, and that sum itself
    assert set(readers) == {"optimization_barrier"}


def readers_of_windows(jaxpr):
    """What reads, in loops, what has come from host memory."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            puts = [e for e in body.eqns if e.primitive.name == "device_put"]
            windows = [e.outvars[0] for e in puts if on_host(e.invars[0])]
            for e in body.eqns:
                yield from (e.primitive.name for v in e.invars if v in windows)
        for inner in jaxprs_in_params(eqn.params):
            yield from readers_of_windows(inner)


def stretch(w, x):
    """Two results of one shape are made by loops that begin with the same image, and read by one
    loop, whose windows overlap.
    """
    first = checkpoint_name(conv(x, w[0]), "one")
    second = checkpoint_name(conv(x, w[1]) + jnp.mean(first), "two")
    return jnp.sum(jnp.tanh(conv(first, w[1]) * conv(second, w[0])))


@pytest.mark.parametrize(
    "function, arguments",
    [
        (loss, (W, image(np.uint8), LABELS)),
        (stretch, (normal(1, 2, 3, 3, 1, 1), normal(0, 1, 12, 13, 1))),
    ],
)
def test_each_array_in_host_memory_is_made_anew(function, arguments):
    """Of one number, and each of another one: else XLA makes those of one shape once, keeps what it
    made, and copies all of it, in host memory, for every loop that writes there.
    """
    axes = AXES[: len(arguments)]
    tiled = jaxtile.checkpoint(function, in_axes=axes, tiles=(3, 2), policy=OFFLOADED)
    step = jax.value_and_grad(tiled)
    assert_close(jax.jit(step)(*arguments), jax.jit(jax.value_and_grad(function))(*arguments))
    numbers = [*made_on_host(jax.make_jaxpr(step)(*arguments).jaxpr)]
    assert len(numbers) == (4 if function is stretch else 2)  # values and cotangents
    assert len(set(numbers)) == len(numbers)


def made_on_host(jaxpr):
    """How the number is computed that each array is made of which is made in host memory."""
    found: dict = {}

    def how(atom):
        return found.get(atom, (atom,)) if isinstance(atom, Var) else (str(atom),)

    for eqn in jaxpr.eqns:
        inputs = tuple(map(how, eqn.invars))
        if eqn.primitive.name == "device_put" and inputs[0][0] == "broadcast_in_dim":
            yield from inputs[0][2:] * on_host(eqn.outvars[0])
        for v in eqn.outvars:
            found[v] = (eqn.primitive.name, f"{eqn.params} {eqn.outvars.index(v)}", *inputs)
        for inner in jaxprs_in_params(eqn.params):
            yield from made_on_host(inner)


def on_host(variable):
    return variable.aval.memory_space is jax.memory.Space.Host


def test_what_is_offloaded_and_read_whole_is_moved_whole():
    x = image(np.uint8)
    tiles = {"one": (3, 2), ...: "whole"}
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=tiles, policy=OFFLOADED)
    step = jax.value_and_grad(tiled)
    assert_close(jax.jit(step)(W, x, LABELS), jax.jit(jax.value_and_grad(loss))(W, x, LABELS))
    assert 2 * 7 * 6 * 4 in [*moved(jax.make_jaxpr(step)(W, x, LABELS).jaxpr)]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="forward mode of ReLU")
def test_forward_mode_of_what_is_offloaded():
    tiled = jaxtile.checkpoint(loss, in_axes=AXES, tiles=(3, 2), policy=OFFLOADED)
    args = image(np.float64), LABELS
    got = jax.jvp(lambda w: tiled(w, *args), (W,), (W,))
    assert_close(got, jax.jvp(lambda w: loss(w, *args), (W,), (W,)))
