"""Where the time of a step goes: real profiles of small steps on this machine."""

import collections
import gzip
import json

import jax
import jax.numpy as jnp
import pytest

import jaxtile
import policies
from experiments.measuring import profile

AXES = (None, (1, 2))
LAYERS = 3


def scores(kernels, image):
    for kernel in kernels:
        image = jnp.tanh(
            jax.lax.conv_general_dilated(
                image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return image


def loss(kernels, image):
    """One sum: in tiles, both passes are one loop, and nothing is computed again."""
    return jnp.mean(scores(kernels, image) ** 2)


def pooled(kernels, image):
    return jnp.sum(jnp.mean(scores(kernels, image), (0, 1, 2)) ** 2)


def arguments():
    """Of 32 bits: XLA makes one kernel of some loops over small arrays of 64 bits."""
    kernels = [jnp.full((3, 3, 4, 4), 0.1, jnp.float32)] * LAYERS
    return kernels, jnp.ones((1, 32, 32, 4), jnp.float32)


def compiled(policy, fun=loss):
    if policy is not None:
        fun = jaxtile.checkpoint(fun, in_axes=AXES, policy=policy)

    def step(kernels, image):
        value, gradients = jax.value_and_grad(fun)(kernels, image)
        return value, [
            k - 0.1 * jnp.sqrt(g * g + 1) for k, g in zip(kernels, gradients, strict=True)
        ]

    return jax.jit(step).lower(*arguments()).compile()


def traced(program, folder, steps=2):
    jax.block_until_ready(program(*arguments()))
    with profile.traced(folder) as step:
        for _ in range(steps):
            with step():
                jax.block_until_ready(program(*arguments()))


# How often a convolution runs in a step: of the first layer there is no gradient of the image.
PLAIN = {"forward": LAYERS, "backward": 2 * LAYERS - 1}
TILES = {name: 4 * times for name, times in PLAIN.items()}
TIMES = [
    (loss, None, PLAIN),
    (loss, "recompute_all", {**PLAIN, "recomputed": LAYERS}),
    (loss, "tiled:2x2", TILES),
    (pooled, "tiled:2x2", {**TILES, "recomputed": 4 * LAYERS}),
]


@pytest.mark.parametrize(("fun", "text", "times"), TIMES)
def test_convolutions_are_found_in_their_regions(tmp_path, fun, text, times):
    policy = None if text is None else policies.resolve(text)
    program = compiled(policy, fun)
    traced(program, tmp_path)
    steps, events = profile.read(tmp_path, program.as_text())
    assert len(steps) == 2
    found = collections.Counter(e.region for e in events if "conv" in e.computes)
    assert {name: count / 2 for name, count in found.items()} == times
    assert any(e.region == "update" for e in events)
    assert all(a <= e.start < b for e in events[:1] for a, b in steps[:1])

    outline = jaxtile.policy.outline(fun, *arguments(), in_axes=AXES)
    expected = profile.predicted(outline, policy)
    assert expected["forward"] > 0
    assert expected["backward"] > expected["forward"]
    assert (expected["recomputed"] > 0) == (text is not None)
    table = profile.report(tmp_path, program, expected).splitlines()
    assert "of 2 that were traced" in table[0]
    row = next(line for line in table if line.startswith("forward"))
    assert row.split()[-1] == f"{expected['forward'] * 1e3:.4g}"
    assert any(line.startswith("waiting") for line in table)


def test_a_plan_predicts_what_it_takes_beyond_plain():
    quietly = {"progress": lambda line: None}
    plan = jaxtile.plan(loss, *arguments(), in_axes=AXES, budget="100kB", **quietly)
    outline = jaxtile.policy.outline(loss, *arguments(), in_axes=AXES)
    expected = profile.predicted(outline, plan)
    assert expected["recomputed"] == pytest.approx(plan.seconds - plan.plain_seconds, rel=0.01)
    assert sum(expected.values()) == pytest.approx(plan.seconds)


def test_what_runs_beside_others_is_known_by_its_kernel(tmp_path):
    """As on a GPU, where a window of an array in host memory is read meanwhile."""
    program = """HloModule jit_step

%wrapped_dynamic-slice_computation (a: u8[64], b: s32[]) -> u8[16] {
  %a = u8[64]{0:S(5)} parameter(0)
  %b = s32[] parameter(1)
  ROOT %slice.1 = u8[16]{0} dynamic-slice(%a, %b), dynamic_slice_sizes={16}
}

ENTRY %main (x: u8[64], i: s32[]) -> u8[16] {
  %x = u8[64]{0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %dynamic-slice-start.1 = ((u8[64]{0:S(5)}, s32[]), u8[16]{0}, u32[]) fusion-start(%x, %i), \
kind=kLoop, calls=%wrapped_dynamic-slice_computation
  ROOT %dynamic-slice-done.1 = u8[16]{0} fusion-done(%dynamic-slice-start.1)
}
"""
    kernels = {"wrapped_dynamic_slice": "moved", "something_else": "other programs"}
    names = {"process_name": "/device:GPU:0", "thread_name": "Stream #1"}
    found = [
        {"ph": "M", "pid": 1, "tid": 2 * (i > 0), "name": kind, "args": {"name": name}}
        for i, (kind, name) in enumerate(names.items())
    ]
    del found[0]["tid"]
    found += [{"ph": "X", "pid": 9, "tid": 9, "name": "jaxtile_step", "ts": 0, "dur": 100}]
    found += [
        {"ph": "X", "pid": 1, "tid": 2, "name": k, "ts": 10, "dur": 5, "args": {}} for k in kernels
    ]
    with gzip.open(tmp_path / "one.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": found}, file)
    _, events = profile.read(tmp_path, program)
    assert {e.kernel: e.region for e in events} == kernels


def test_a_kernel_in_a_graph_is_the_next_product(tmp_path):
    """On a GPU a graph of kernels has one name, and a library's kernels in it have none of ours."""
    product = 'custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", metadata={op_name='
    program = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %product.1 = f32[8,8]{{1,0}} {product}"jit(step)/jvp()/dot_general"}}
  %tanh.1 = f32[8,8]{{1,0}} tanh(%product.1), metadata={{op_name="jit(step)/jvp()/tanh"}}
  %product.2 = f32[8,8]{{1,0}} {product}"jit(step)/transpose(jvp())/dot_general"}}
  ROOT %sine.1 = f32[8,8]{{1,0}} sine(%product.2), metadata={{op_name="jit(step)/sin"}}
}}
"""
    ran = ["nvjet_128x128", "tanh_1", "Memset", "nvjet_128x128", "sine_1"]
    regions = ["forward", "forward", "moved", "backward", "update"]
    args = {"hlo_module": "jit_step", "hlo_op": "command_buffer_1"}
    found = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "Stream #1"}},
        {"ph": "X", "pid": 9, "tid": 9, "name": "jaxtile_step", "ts": 0, "dur": 100},
    ]
    for i, kernel in reversed([*enumerate(ran)]):
        event = {"ph": "X", "pid": 1, "tid": 2, "name": kernel, "ts": 10 * i + 20, "dur": 5}
        found.append({**event, "args": args})
    with gzip.open(tmp_path / "one.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": found}, file)
    _, events = profile.read(tmp_path, program)
    assert [(e.kernel, e.region) for e in events] == list(zip(ran, regions, strict=True))


def test_an_empty_profile_is_said(tmp_path):
    program = compiled(None)
    traced(program, tmp_path, steps=0)
    assert "no steps" in profile.report(tmp_path, program, {})
