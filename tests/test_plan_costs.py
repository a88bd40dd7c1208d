"""Tables of costs: built in, measured, of GPUs that are not here."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

import jaxtile
import policies
from jaxtile._plan.absent import as_moved
from jaxtile._plan.costs import BUILT_IN, Timing, built_in_for_another
from jaxtile._plan.kernels import durations
from jaxtile._plan.measuring import unknown, with_measured
from jaxtile._platform import tracing_for
from jaxtile._run.ordering import host_of

from .test_plan import (
    AXES,
    IMAGE,
    WEIGHTS,
    network,
    plan,
    short,
)


def test_costs(tmp_path, monkeypatch):
    table = dataclasses.replace(BUILT_IN["cpu"], bandwidth=1.0)
    monkeypatch.setenv("JAXTILE_COSTS", str(tmp_path / "costs.json"))
    assert policies.costs() == BUILT_IN["cpu"]  # until something is measured
    table.save(tmp_path / "costs.json")
    assert policies.costs() == table
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a table of costs"):
        policies.costs()


def test_costs_from_a_file(tmp_path):
    BUILT_IN["gpu"].save(tmp_path / "costs.json")
    found = plan(costs=tmp_path / "costs.json")
    assert found.device == "NVIDIA H200 (built in)"
    with pytest.raises(FileNotFoundError, match="none"):
        plan(costs=str(tmp_path / "none.json"))
    with pytest.raises(TypeError, match=r"`costs` \(=3\) must be a `policies.Costs` or the path"):
        plan(costs=3)
    with pytest.raises(TypeError, match=r"`device` \(=3\) must be a GPU's name"):
        plan(device=3)


def test_a_table_of_another_device_is_not_used_silently():
    assert built_in_for_another() is None  # a CPU has its own
    assert built_in_for_another("NVIDIA H200") is None
    assert "NVIDIA A100" in built_in_for_another("NVIDIA A100")
    assert "those of NVIDIA H200" in built_in_for_another("NVIDIA A100")


def has_cuda_plugin() -> bool:
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) for name in names)


def test_a_device_that_nobody_knows():
    with pytest.raises(policies.NoDeviceError, match="must be one of NVIDIA H200"):
        plan(device="NVIDIA X1")


@pytest.mark.skipif(has_cuda_plugin(), reason="the CUDA plugin is installed")
def test_without_the_plugin_no_plan_for_an_absent_device():
    with pytest.raises(policies.NoDeviceError, match="needs JAX's CUDA plugin"):
        plan(device="NVIDIA H200")


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA plugin")
def test_a_plan_for_a_gpu_that_is_not_there():
    found = plan(budget="400kB", device="NVIDIA H200")
    assert found.measured_bytes <= 400_000
    assert found.device.startswith("NVIDIA H200")


@pytest.mark.skipif(not has_cuda_plugin(), reason="needs JAX's CUDA plugin")
def test_an_image_in_the_host_memory_of_a_gpu_that_is_not_there():
    """It counts neither as an argument on the device nor as a result that waits."""
    host = host_of(jax.devices()[0])
    image = jax.ShapeDtypeStruct((1, 1024, 768, 4), "float64", sharding=host)
    found = jaxtile.plan(network, WEIGHTS, image, in_axes=AXES, budget="16MB", device="NVIDIA H200")
    assert found.measured_bytes <= 16_000_000 < 8 * image.size
    assert found.host_bytes == 0


def test_bytes_of_a_step_that_moves_its_arguments_to_host_memory():
    """The compiled program has them in both places; or on the device only, where it reads them
    whole, and needs them there.
    """
    moves = jaxtile.Bytes(arguments=10, outputs=1, aliases=0, temporaries=5, host=8)
    assert as_moved(moves, 6) == jaxtile.Bytes(4, 1, 0, 5, host=2)
    reads_whole = jaxtile.Bytes(10, 1, 0, 5)
    assert as_moved(reads_whole, 6) == reads_whole


def test_what_is_compiled_for_a_gpu_has_no_workaround_for_a_cpu():
    """It waits by a barrier, wherever it is traced."""

    def gradient():
        tiled = jaxtile.checkpoint(lambda *a: short(*a), in_axes=AXES, tiles=(2, 2))
        return str(jax.make_jaxpr(jax.grad(tiled))(WEIGHTS, IMAGE))

    here = gradient()
    with tracing_for("gpu"):
        assert "optimization_barrier" in gradient()
    assert gradient() == here


@pytest.mark.slow
def test_measured(tmp_path, monkeypatch):
    """The kinds of operations are timed once, and kept; and steps of schedules that fit are run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXTILE_COSTS", raising=False)

    def loss(kernel, image):
        for _ in range(3):
            image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
        return jnp.mean(image**2)

    args = jnp.ones((4, 4, 3, 3)), jnp.ones((1, 4, 48, 48))
    axes, lines = (None, (2, 3)), []
    options = {"in_axes": axes, "budget": "300kB", "measure": True, "progress": lines.append}
    found = jaxtile.plan(loss, *args, **options)
    assert found.measured_bytes <= 300_000
    assert found.measured_seconds > 0
    assert jaxtile.policy.outline(loss, *args, in_axes=axes).fingerprint == found.fingerprint
    # Two classes: of the first convolution only the kernel has a gradient.
    table = policies.costs()
    assert len(table.classes) == 2
    for few, many in table.classes.values():
        assert few.positions == 12 * 12
        assert many.positions == 48 * 48
    assert any("timing 2 kinds" in line for line in lines)
    lines.clear()
    again = jaxtile.plan(loss, *args, **options)
    assert not any("timing" in line for line in lines)
    assert again.device == found.device
    assert policies.Plan.from_json(found.as_json()) == found


def two_convolutions(kernel, image):
    """One with that kernel, and one to one channel, position by position."""

    def loss(kernel, last, image):
        image = jax.lax.conv(jax.lax.conv(image, kernel, (1, 1), "SAME"), last, (1, 1), "SAME")
        return jnp.mean(image**2)

    shapes = [kernel, (1, kernel[0], 1, 1), image]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jaxtile.policy.outline(loss, *args, in_axes=(None, None, (2, 3)))


def test_what_takes_no_time_is_not_timed():
    view = two_convolutions((64, 64, 5, 5), (1, 64, 512, 512))
    assert len(unknown(view, BUILT_IN["cpu"])) == 2
    (one,) = unknown(view, BUILT_IN["cpu"], least=0.01)
    assert "[64,64,5,5]" in one


def test_before_few_steps_little_is_timed(tmp_path, monkeypatch):
    """What takes the most time comes first, and nothing if all steps are soon done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAXTILE_COSTS", raising=False)

    view = two_convolutions((8, 8, 3, 3), (1, 8, 32, 32))
    lines: list[str] = []
    none = with_measured(view, BUILT_IN["cpu"], lines.append, steps=1)
    assert none == BUILT_IN["cpu"]
    assert "2 kinds of operations" in lines[0]
    assert "not timed" in lines[0]
    seconds = sum(d.whole for both in durations(view, none).values() for d in both)
    few = with_measured(view, none, lines.append, steps=1 / seconds)  # a second: 50 ms for this
    (one,) = few.classes
    assert "[8,8,3,3]" in one
    assert len(with_measured(view, few, lines.append).classes) == 2


def test_few_steps_are_not_worth_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTILE_COSTS", str(tmp_path / "costs.json"))
    BUILT_IN["cpu"].save(tmp_path / "costs.json")
    lines: list[str] = []

    def loss(x):
        return (x**2).sum()

    options = {"in_axes": 0, "budget": "1MiB", "measure": True, "progress": lines.append}
    found = jaxtile.plan(loss, jnp.ones((8, 8)), steps=1, **options)
    assert found.measured_seconds is None
    assert any("not compared with others" in line for line in lines)
    assert jaxtile.plan(loss, jnp.ones((8, 8)), **options).measured_seconds is not None


def test_nothing_is_measured_on_a_device_that_is_not_here():
    with pytest.raises(ValueError, match="not here"):
        jaxtile.plan(jnp.sum, jnp.ones((4, 4)), in_axes=0, budget=1, device="GPU", measure=True)


def test_measured_times_are_used():
    """Between what was measured there are straight lines, and beyond it time is in proportion."""
    outline = jaxtile.policy.outline(
        lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME").sum(),
        jnp.ones((4, 4, 3, 3)),
        jnp.ones((1, 4, 64, 64)),
        in_axes=(None, (2, 3)),
    )
    (part,) = (p for p in outline.parts if p.sample is not None)
    times = (Timing(256, 2e-3, 3e-3), Timing(1024, 5e-3, 9e-3))
    table = dataclasses.replace(BUILT_IN["cpu"], classes={part.sample.shape_class: times})
    forward, gradient = table.durations(part.operation, part.sample)
    assert forward.whole == pytest.approx(4 * 5e-3)
    assert gradient.whole == pytest.approx(4 * 9e-3)
    assert forward.of(1 / 4) == pytest.approx(5e-3)
    assert forward.of(640 / 4096) == pytest.approx(3.5e-3)
    assert forward.of(0) == table.start
    # With 16384 elements it takes ten times as long; a share of them from 16384 bytes on.
    long = dataclasses.replace(table, long=(2**14, 10.0)).durations(part.operation, part.sample)[0]
    assert long.whole == pytest.approx(10 * forward.whole)
    few = 2**14 / (4096 * 4 * part.sample.equation.out_avals[0].dtype.itemsize)
    assert long.of(few * 0.999) == pytest.approx(forward.of(few * 0.999))
    assert long.of(few) == pytest.approx(10 * forward.of(few))
    longer = dataclasses.replace(table, long=(2**14 + 1, 10.0))
    assert longer.durations(part.operation, part.sample)[0].whole == pytest.approx(forward.whole)


def test_a_chain_takes_what_it_was_measured_to_take():
    """It comes on top of the convolution, before or after; if it was not measured, as a pass over
    memory does. Those of one function are of one class, whatever is scaled or added beside it.
    """

    def network(w, b, x):
        x = jax.lax.conv(x, w, (1, 1), "SAME")
        return jax.lax.conv(jax.nn.silu(x + b), w, (1, 1), "SAME").sum()

    def plain(w, b, x):
        return jax.lax.conv(jax.lax.conv(x, w, (1, 1), "SAME"), w, (1, 1), "SAME").sum()

    args = (jnp.ones((4, 4, 3, 3)), jnp.ones((4, 1, 1)), jnp.ones((1, 4, 64, 64)))
    axes = (None, None, (2, 3))
    none, view = (jaxtile.policy.outline(f, *args, in_axes=axes) for f in (plain, network))
    (name,) = (n for n in unknown(view, BUILT_IN["cpu"]) if n not in unknown(none, BUILT_IN["cpu"]))
    assert name.startswith("chain logistic float")
    size = args[2].size

    def beyond(costs):
        return [
            sum(d[i].whole for d in durations(view, costs).values())
            - sum(d[i].whole for d in durations(none, costs).values())
            for i in (0, 1)
        ]

    bare = dataclasses.replace(BUILT_IN["cpu"], start=0.0)
    passing = 2 * args[2].nbytes / bare.bandwidth
    assert beyond(bare) == pytest.approx([passing, passing * bare.backward["other"]])
    times = {name: (Timing(size // 2, 1.0, 3.0),)}
    assert beyond(dataclasses.replace(bare, classes=times)) == pytest.approx([2.0, 6.0])


def test_a_chain_is_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTILE_COSTS", str(tmp_path / "costs.json"))
    args = (jnp.ones((3, 3)), jnp.ones((8, 8, 3)))
    view = jaxtile.policy.outline(
        lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w), *args, in_axes=(None, (0, 1))
    )
    found = with_measured(view, BUILT_IN["cpu"], lambda line: None).classes
    (times,) = (t for n, t in found.items() if n.startswith("chain integer_pow tanh float"))
    assert [t.positions for t in times] == [2 * 2 * 3, 8 * 8 * 3]
    assert all(t.forward > 0 and t.gradient > 0 for t in times)
