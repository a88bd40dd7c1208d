"""What `jaxtile.memory` reports: estimated, compiled and observed bytes, and what is held."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtile
from jaxtile import compiled_bytes
from jaxtile._memory import hlo, report
from jaxtile._memory.estimate import estimate_memory
from jaxtile._memory.report import memory

from .reference_models import shape
from .support import conv, parametrize_few


def network(params, x):
    for i, w in enumerate(params):
        x = checkpoint_name(jax.nn.relu(conv(x, w)), f"layer{i}")
    return x


def shapes(size=256, layers=6, channels=16, dtype="float32"):
    params = [shape(3, 3, channels, channels, dtype=dtype)] * layers
    return params, shape(1, size, size, channels, dtype=dtype)


def training(fun=network):
    return jax.value_and_grad(lambda p, x: jnp.mean(fun(p, x) ** 2))


TILED = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))


@parametrize_few("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fun", [network, jax.checkpoint(network), TILED], ids=["plain", "again", "tiled"]
)
def test_what_is_compiled_only_for_its_bytes_has_those_of_what_runs(fun, dtype):
    lowered = jax.jit(training(fun)).lower(*shapes(dtype=dtype))
    assert compiled_bytes(lowered) == jaxtile.Bytes.of(lowered.compile())


def test_bytes_add_up():
    found = memory(training(), *shapes())
    for b in (found.estimated.bytes, found.compiled.bytes):
        assert b.total == b.fixed + b.temporaries
        assert b.fixed == b.arguments + b.outputs - b.aliases
    assert found.estimated.bytes.fixed == pytest.approx(found.compiled.bytes.fixed, rel=0.01)


def test_the_estimate_ranks_schedules():
    """It is not promised to be right, but tiles take less than the whole."""

    def estimated(fun):
        return estimate_memory(jax.jit(training(fun)).trace(*shapes())).bytes.temporaries

    again = jaxtile.checkpoint(network, in_axes=(None, (1, 2)))
    assert estimated(TILED) < 0.7 * estimated(network)
    assert estimated(again) <= 1.5 * estimated(network)
    activation = 4 * 256 * 256 * 16
    assert estimated(network) >= 6 * activation


def test_donated_arguments_are_not_counted_twice():
    def update(params, x):
        value, gradients = training()(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params, x = shapes()
    kept, donated = memory(update, params, x), memory(jax.jit(update, donate_argnums=0), params, x)
    weights = sum(4 * p.size for p in params)
    for found in (donated.estimated.bytes, donated.compiled.bytes):
        assert found.aliases == weights
    assert kept.estimated.bytes.aliases == kept.compiled.bytes.aliases == 0
    assert "aliases" in str(donated)
    assert "aliases" not in str(kept)


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

        traced = jax.jit(fun).trace(shape(1024, 512), shape(512, 512))
        return estimate_memory(traced).bytes.temporaries

    assert temporaries(400) == temporaries(4) >= 4 * 1024 * 512


def test_what_a_loop_stacks_grows_with_its_length():
    def temporaries(length):
        def fun(x):
            return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x), x @ x), x, length=length)[1] ** 2)

        return estimate_memory(jax.jit(fun).trace(shape(256, 256))).bytes.temporaries

    assert temporaries(32) - temporaries(16) == 16 * 4 * 256 * 256


def test_the_report_shows_whether_anything_is_computed_again():
    plain = memory(training(), *shapes())
    merged = memory(training(jax.checkpoint(network, prevent_cse=False)), *shapes())
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))
    again = memory(training(tiled), *shapes())
    layers = len(shapes()[0])
    assert plain.compiled.convolutions == plain.estimated.convolutions
    assert merged.estimated.convolutions > plain.estimated.convolutions
    assert merged.compiled.convolutions == plain.compiled.convolutions
    assert again.compiled.convolutions == plain.compiled.convolutions + layers
    assert again.compiled.loops == again.estimated.loops == 2
    assert again.compiled.bytes.temporaries < 0.5 * merged.compiled.bytes.temporaries
    assert "traced but not compiled" in str(merged)
    assert "traced but not compiled" not in str(plain)


def test_recomputation_is_seen():
    again = jaxtile.checkpoint(network, in_axes=(None, (1, 2)))
    found = memory(training(again), *shapes())
    plain = memory(training(), *shapes())
    assert found.compiled.convolutions == found.estimated.convolutions
    assert found.compiled.convolutions > plain.compiled.convolutions


def test_the_largest_values_are_listed():
    found = memory(training(), *shapes()).compiled.largest
    sizes = [kept.bytes for kept in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 * 256 * 256 * 16
    assert any("conv_general_dilated" in kept.where for kept in found)


def test_all_of_a_compiled_program_is_read():
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))
    for fun in (network, tiled):
        executable = jax.jit(training(fun)).lower(*shapes()).compile()
        program = hlo.read(executable.as_text())
        assert program.unread == 0
        largest = max(hlo.held(program), key=lambda b: b.leaf.bytes)
        assert largest.leaf.shape == (1, 256, 256, 16)


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
    program = hlo.read(GPU)
    assert hlo.counts(program) == hlo.Counts(convolutions=1, loops=1, chains=0)
    # The convolution's result is the loop's carry and the output; its scratch is freed before.
    assert sum(b.leaf.bytes for b in hlo.held(program)) == 4 * 4 * 8 * 4


def test_what_cannot_be_read_is_said():
    def broken():
        raise NotImplementedError("no analysis here")

    nothing = types.SimpleNamespace(memory_analysis=broken, as_text=lambda: "no program")
    found, missing = report._read_compiled(nothing)
    assert found.bytes is None
    assert found.convolutions is None
    assert "no analysis here" in missing[0]
    assert len(missing) == 2
    assert hlo.read("ENTRY %main () -> f32[] {\n  %x = what is this\n}") is None


def test_observed_peak(monkeypatch):
    peaks = []
    device = types.SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"peak_bytes_in_use": peaks.pop(0)}
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])

    def observe(fun, *numbers):
        peaks[:] = numbers
        return report._observe(fun, (jnp.ones(3),), {}, donates=False)

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
        jax.jit(lambda x: memory(jnp.sin, x).compiled.bytes.total)(jnp.ones(3))


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
def test_any_function_has_an_estimate(fun):
    found = estimate_memory(jax.jit(fun).trace(shape(16, 16)))
    assert found.bytes.arguments == 4 * 256
    assert found.bytes.outputs > 0
