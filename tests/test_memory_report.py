"""Predicted memory against compiled memory, and what the report says."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxtile
import models
from jaxtile import _compiled, _memory
from jaxtile._memory import memory, predict_memory

from .reference_models import abstract, shape
from .support import conv


def step(model, *data, in_axes=None, tiles=None, saved=()):
    """Loss and gradient of all weights, and shapes of the arguments."""
    graphdef, params, rest = nnx.split(abstract(model), nnx.Param, ...)

    def loss(params, rest, *data):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return merged.loss(*data), nnx.state(merged, nnx.BatchStat)

    if tiles is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        axes = (None, None, *in_axes)
        loss = jaxtile.checkpoint(loss, in_axes=axes, tiles=tiles, policy=policy)
    return jax.value_and_grad(loss, has_aux=True), (params, rest, *data)


IMAGES = (shape(8, 572, 572, 1), shape(8, 388, 388, dtype="int32"))
PICTURE = shape(1, 1024, 1024, 3)
BATCH = shape(128, 224, 224, 3)
SUMS = {"pool1": (4, 1, 1), "conv2": None, "conv3/Conv2D": (64, 1, 1), "conv3/BiasAdd": None}
SUMS |= {f"conv{i}/{op}": g for i in (4, 5) for op, g in (("Conv2D", (8, 1, 1)), ("BiasAdd", None))}
CASES = {
    "unet": lambda: step(models.UNet, *IMAGES),
    "resnet50": lambda: step(models.ResNet50, PICTURE, shape(1, dtype="int32")),
    "alexnet": lambda: step(models.AlexNet, BATCH),
    "alexnet, 8 images at a time": lambda: step(
        models.AlexNet, BATCH, in_axes=((0, 1, 2),), tiles=(16, 1, 1)
    ),
    # One number of each sum is read again later: not the summand that it could be computed from.
    "alexnet, sums stored": lambda: step(
        models.AlexNet, BATCH, in_axes=((0, 1, 2),), tiles={**SUMS, ...: (8, 1, 1)}, saved=SUMS
    ),
    "vgg16": lambda: step(models.VGG16, PICTURE),
    "vgg16, two grids": lambda: step(
        models.VGG16,
        PICTURE,
        in_axes=((1, 2),),
        tiles={"pool2": (4, 4), ...: (2, 2)},
        saved=("pool2",),
    ),
    "local_cnn": lambda: step(models.LocalCNN, shape(256, 41, 41, 1), shape(256, dtype="int32")),
}


@pytest.mark.parametrize("case", CASES)
def test_prediction_is_near_what_is_compiled(case):
    fun, arguments = CASES[case]()
    found = memory(fun, *arguments)
    predicted, compiled = found.predicted.bytes, found.compiled.bytes
    assert predicted.total == pytest.approx(compiled.total, rel=0.05)
    assert predicted.arguments == compiled.arguments
    assert predicted.outputs == pytest.approx(compiled.outputs, rel=0.01)
    assert found.predicted.convolutions == found.compiled.convolutions


def network(params, x):
    for i, w in enumerate(params):
        x = checkpoint_name(jax.nn.relu(conv(x, w)), f"layer{i}")
    return x


def shapes(size=256, layers=6, channels=16, dtype="float32"):
    params = [shape(3, 3, channels, channels, dtype=dtype)] * layers
    return params, shape(1, size, size, channels, dtype=dtype)


def training(fun=network):
    return jax.value_and_grad(lambda p, x: jnp.mean(fun(p, x) ** 2))


def test_kinds_add_up():
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(2, 2))
    for fun, loops in ((network, 0), (tiled, 2)):
        found = predict_memory(jax.make_jaxpr(training(fun))(*shapes()))
        assert found.loops == loops
        assert (found.tile > 0) == (loops > 0)
        kinds = found.stored, found.recomputed, found.gradients, found.tile, found.gaps
        assert sum(kinds) == found.bytes.temporaries > 0
        b = found.bytes
        assert b.total == b.arguments + b.outputs + b.temporaries - b.aliases


def test_narrow_floats_are_widened():
    found = memory(training(), *shapes(dtype="bfloat16"))
    assert found.predicted.bytes.total == pytest.approx(found.compiled.bytes.total, rel=0.1)


def test_donated_arguments_are_not_counted_twice():
    def update(params, x):
        value, gradients = training()(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params, x = shapes()
    kept, donated = memory(update, params, x), memory(jax.jit(update, donate_argnums=0), params, x)
    weights = sum(4 * p.size for p in params)
    for found in (donated.predicted.bytes, donated.compiled.bytes):
        assert found.aliases == weights
    assert kept.predicted.bytes.aliases == kept.compiled.bytes.aliases == 0
    assert "aliases" in str(donated)
    assert "aliases" not in str(kept)


def test_gradients_do_not_lie_in_the_weights_that_they_change():
    """They are sums over tiles, and all are needed before the first weight is written."""
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))

    def update(params, x):
        value, gradients = training(tiled)(params, x)
        norm = optax.tree.norm(gradients)
        return value, jax.tree.map(lambda p, g: p - g / norm, params, gradients)

    args = shapes(size=16, layers=3, channels=128)
    weights = sum(4 * p.size for p in args[0])
    found = memory(jax.jit(update, donate_argnums=0), *args)
    assert found.predicted.bytes.total == pytest.approx(found.compiled.bytes.total, rel=0.1)
    jaxpr = jax.make_jaxpr(update)(*args)
    donated = [True] * len(args[0]) + [False]
    for platform in ("cpu", "gpu"):
        predicted = predict_memory(jaxpr, donated=donated, platform=platform)
        assert predicted.gradients >= weights
        assert predicted.bytes.aliases == weights


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_loop_holds_one_iteration(loop):
    def temporaries(length):
        def fun(x, w):
            def body(x):
                return jnp.tanh(x @ w)

            if loop == "scan":
                return jax.lax.scan(lambda x, _: (body(x), None), x, length=length)[0]
            return jax.lax.while_loop(
                lambda c: c[0] < length, lambda c: (c[0] + 1, body(c[1])), (0, x)
            )[1]

        return predict_memory(
            jax.make_jaxpr(fun)(shape(1024, 512), shape(512, 512))
        ).bytes.temporaries

    assert temporaries(400) == temporaries(4) >= 4 * 1024 * 512


def test_what_a_loop_stacks_grows_with_its_length():
    def temporaries(length):
        def fun(x):
            return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x), x @ x), x, length=length)[1] ** 2)

        return predict_memory(jax.make_jaxpr(fun)(shape(256, 256))).bytes.temporaries

    assert temporaries(32) - temporaries(16) == 16 * 4 * 256 * 256


def test_what_waits_in_host_memory_takes_none_on_the_device():
    def fun(x, w, offload):
        early = jnp.sin(x @ w)
        kept = jax.device_put(early, jax.memory.Space.Host) if offload else early
        late = jnp.cos(early @ w) @ w @ w @ w
        return jnp.sum(late * jax.device_put(kept, jax.memory.Space.Device))

    def found(offload, platform):
        jaxpr = jax.make_jaxpr(lambda x, w: fun(x, w, offload))(*[shape(256, 256)] * 2)
        return predict_memory(jaxpr, platform=platform)

    array = 4 * 256 * 256
    plain, offloaded = found(False, "gpu"), found(True, "gpu")
    assert (plain.host, offloaded.host) == (0, array)
    assert plain.bytes.temporaries - offloaded.bytes.temporaries == array
    assert found(True, "cpu").bytes == found(False, "cpu").bytes


def test_the_report_shows_whether_anything_is_computed_again():
    plain = memory(training(), *shapes())
    merged = memory(training(jax.checkpoint(network, prevent_cse=False)), *shapes())
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))
    again = memory(training(tiled), *shapes())
    layers = len(shapes()[0])
    assert plain.compiled.convolutions == plain.predicted.convolutions
    assert merged.predicted.convolutions > plain.predicted.convolutions
    assert merged.compiled.convolutions == plain.compiled.convolutions
    assert again.compiled.convolutions == plain.compiled.convolutions + layers
    assert again.compiled.loops == again.predicted.loops == 2
    assert again.compiled.bytes.temporaries < 0.5 * merged.compiled.bytes.temporaries
    assert "traced but not compiled" in str(merged)
    assert "traced but not compiled" not in str(plain)


def test_recomputation_is_seen():
    again = jaxtile.checkpoint(network, in_axes=(None, (1, 2)))
    found = memory(training(again), *shapes())
    plain = memory(training(), *shapes())
    assert found.compiled.convolutions == found.predicted.convolutions
    assert found.compiled.convolutions > plain.compiled.convolutions
    assert found.predicted.recomputed > 0 == plain.predicted.recomputed


def test_the_largest_values_have_names_and_lines():
    found = predict_memory(jax.make_jaxpr(training())(*shapes()))
    assert any(kept.label.startswith("layer") for kept in found.largest)
    assert all(" (" in kept.where and "/tests/" in kept.where for kept in found.largest)
    sizes = [kept.bytes for kept in found.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 * 256 * 256 * 16


def test_the_schedule_explains_the_compiled_bytes():
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))
    for fun in (network, tiled):
        executable = jax.jit(training(fun)).lower(*shapes()).compile()
        program = _compiled.read(executable.as_text())
        assert program.unread == 0
        held = sum(b.bytes for b in _compiled.held(program))
        assert held == pytest.approx(executable.memory_analysis().temp_size_in_bytes, rel=0.05)


GPU = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %p = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%p), index=1
  %big = f32[4,4,8]{2,1,0} broadcast(%x), dimensions={0,1}
  %y = f32[4,4]{1,0} custom-call(%big), custom_call_target="some_kernel"
  ROOT %t = (s32[], f32[4,4]{1,0}) tuple(%i, %y)
}

ENTRY %main (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %c = (f32[4,4]{1,0}, u8[64]{0}) custom-call(%a, %a), custom_call_target="__cudnn$convForward"
  %g = f32[4,4]{1,0} get-tuple-element(%c), index=0
  %z = s32[] constant(0)
  %in = (s32[], f32[4,4]{1,0}) tuple(%z, %g)
  %w = (s32[], f32[4,4]{1,0}) while(%in), condition=%cond, body=%body
  ROOT %r = f32[4,4]{1,0} get-tuple-element(%w), index=1
}
"""


def test_reading_a_gpu_program():
    program = _compiled.read(GPU)
    assert _compiled.counts(program) == _compiled.Counts(convolutions=1, loops=1, chains=0)
    # The convolution's result is the loop's carry and the output; its scratch is freed before.
    assert sum(b.bytes for b in _compiled.held(program)) == 4 * 4 * 8 * 4


def test_what_cannot_be_read_is_said():
    def broken():
        raise NotImplementedError("no analysis here")

    nothing = types.SimpleNamespace(memory_analysis=broken, as_text=lambda: "no program")
    found, missing = _memory._read_compiled(nothing)
    assert found.bytes is None
    assert found.convolutions is None
    assert "no analysis here" in missing[0]
    assert len(missing) == 2
    assert _compiled.read("ENTRY %main () -> f32[] {\n  %x = what is this\n}") is None


def test_observed_peak(monkeypatch):
    peaks = []
    device = types.SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"peak_bytes_in_use": peaks.pop(0)}
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])

    def observe(fun, *numbers):
        peaks[:] = numbers
        return _memory._observe(fun, (jnp.ones(3),), {}, donates=False)

    assert observe(jnp.sin, 100, 300) == (300, "")
    peak, reason = observe(jnp.sin, 300, 300)
    assert peak is None
    assert "never goes down" in reason
    peak, reason = observe(lambda x: x.nothing, 100, 300)
    assert peak is None
    assert "could not be run" in reason


def test_on_the_cpu_the_observed_peak_is_missing():
    found = memory(jnp.sin, jnp.ones(3))
    assert found.observed_peak is None
    assert any("not provided by this backend (cpu)" in sentence for sentence in found.missing)
    assert "not provided by this backend" in str(found)


def test_errors_are_for_users():
    with pytest.raises(TypeError, match=r"`fun` \(=3\) must be callable"):
        memory(3)
    with pytest.raises(TypeError, match="call it outside"):
        jax.jit(lambda x: memory(jnp.sin, x).predicted.bytes.total)(jnp.ones(3))
    with pytest.raises(ValueError, match="`donated` has 2 entries for 1 arguments"):
        predict_memory(jax.make_jaxpr(jnp.sin)(1.0), donated=(True, False))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x.reshape(4, 4, 16).transpose(2, 1, 0) + 1,
        lambda x: conv(x.reshape(1, 16, 8, 2), jnp.ones((3, 3, 2, 2), x.dtype)),
        lambda x: jnp.einsum("bshd,bthd->bhst", *[x.reshape(2, 8, 4, 4)] * 2),
        lambda x: jnp.tensordot(x[None], x[:, None], 1).transpose(2, 1, 0, 3),
        lambda x: jax.lax.scan(lambda c, a: (c, a @ c), x, x[None])[1].transpose(2, 1, 0),
        lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos),
    ],
    ids=["transpose", "conv", "einsum", "dot", "scan", "platform"],
)
def test_reshaped_operands(fun):
    traced = jax.make_jaxpr(fun)(shape(16, 16))
    for platform in ("cpu", "gpu"):
        found = predict_memory(traced, platform=platform)
        assert found.bytes.arguments == 4 * 256
        assert found.bytes.outputs > 0
