"""What the model of a GPU's compiler does: fusion, order, packing. No GPU is needed."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import settings

import jaxtile
from jaxtile import _buffers, _fusion, _schedule
from jaxtile._memory import predict_memory
from jaxtile._packing import packed_bytes
from jaxtile._program import Program

from .random_networks import networks
from .reference_models import shape
from .support import conv
from .test_memory_report import network, shapes, training


def test_on_a_gpu_kernels_are_prepared_before_a_loop():
    """Once per loop, in the order that the library wants; not once per tile."""
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(4, 4))
    args = shapes(size=32, layers=3, channels=64)
    found = predict_memory(jax.make_jaxpr(training(tiled))(*args), platform="gpu", largest=20)
    kernels = [k for k in found.largest if k.label == "kernel in another dimension order"]
    assert [k.shape for k in kernels] == [(3, 3, 64, 64)] * 3
    assert {k.kind for k in kernels} == {"tile"}


def pooled(params, x, *, window=2, padding="SAME"):
    for w in params:
        x = jax.nn.relu(conv(x, w, padding=padding))
        x = nnx.max_pool(x, (window, window), (2, 2))
    return x


def labels(found):
    return [k.label for k in found.largest]


def test_on_a_gpu_zeros_are_one_array_and_are_held():
    """The relu, its gradient and the pool's share them, so they lie in memory all the while."""
    args = shapes(layers=1)
    step = jax.make_jaxpr(training(pooled))(*args)
    found = predict_memory(step, platform="gpu", largest=20)
    assert labels(found).count("max (broadcast_in_dim)") == 1
    assert "select_and_scatter_add (indices)" not in labels(found)
    # The relu is fused into the pool and its gradient, which read each element once.
    assert "max" not in labels(found)
    overlapping = jax.make_jaxpr(training(lambda p, x: pooled(p, x, window=3)))(*args)
    assert "max" in labels(predict_memory(overlapping, platform="gpu", largest=20))


@pytest.mark.parametrize("window", [2, 3])
def test_on_a_gpu_a_pool_also_finds_what_it_chose(window):
    """In the forward pass, so that its operand, which nothing else reads, is not held."""

    def fun(params, x):
        return pooled(params, jnp.sin(x) * jnp.cos(x), window=window).sum()

    stored = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=None)
    params, x = shapes(size=64, layers=1, channels=64)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(stored))(params, x)
    pools = [n for n in Program(jaxpr.jaxpr, "gpu").nodes if n.op == "reduce_window_max"]
    assert [[str(v.dtype) for v in n.outputs] for n in pools] == [["float32", "uint8"]]
    assert all(n.context.kind == "stored" for n in pools)
    [on_cpu] = [n for n in Program(jaxpr.jaxpr, "cpu").nodes if n.op == "reduce_window_max"]
    assert len(on_cpu.outputs) == 1


def test_on_a_gpu_a_kernel_is_copied_once():
    """In the order that the library wants, for the convolution and its gradient."""
    found = predict_memory(
        jax.make_jaxpr(jax.grad(lambda p, x: training()(p, x)[0], argnums=1))(
            *shapes(size=8, layers=1, channels=128)
        ),
        platform="gpu",
        largest=20,
    )
    copies = [k for k in found.largest if "in another dimension order" in k.label]
    assert [k.shape for k in copies] == [(3, 3, 128, 128)]
    assert "rev" not in labels(found)


@pytest.mark.parametrize(("padding", "copies"), [(((1, 1), (1, 1)), 0), (((0, 2), (0, 2)), 1)])
def test_on_a_gpu_uneven_padding_is_a_copy(padding, copies):
    jaxpr = jax.make_jaxpr(training(lambda p, x: pooled(p, x, padding=padding)))(*shapes(layers=1))
    found = predict_memory(jaxpr, platform="gpu", largest=20)
    assert labels(found).count("conv_general_dilated (pad)") == copies


@pytest.mark.parametrize(("zeros", "made"), [((1, 1), "sin"), ((1, 2), "pad")])
def test_on_a_gpu_zeros_around_an_image_are_padding(zeros, made):
    """The library pads both ends alike; other zeros are written around the image."""

    def fun(params, x):
        around = jnp.pad(jnp.sin(x), ((0, 0), zeros, zeros, (0, 0)))
        return conv(around, params[0], padding="VALID")

    jaxpr = jax.make_jaxpr(training(fun))(*shapes(layers=1)).jaxpr
    kernels = [k.first.op for k in _fusion.kernels(Program(jaxpr, "gpu"))]
    assert [op for op in kernels if op in ("sin", "pad")] == [made]


@pytest.mark.parametrize("forward", [False, True])
def test_on_a_gpu_kernels_that_read_the_same_array_are_one(forward):
    """A relu and its gradient, unless the gradient needs the relu."""

    def fun(w, v, x, cotangent):
        before = conv(x, w)
        after, backward = jax.vjp(lambda x: conv(jax.nn.relu(x), v), before)
        [gradient] = backward(jnp.sin(after) if forward else cotangent)
        _, kernel = jax.vjp(lambda v: conv(jax.nn.relu(before), v), v)
        return kernel(cotangent), conv(gradient, w)

    w, x = shape(3, 3, 16, 16), shape(1, 32, 32, 16)
    kernels = _fusion.kernels(Program(jax.make_jaxpr(fun)(w, w, x, x).jaxpr, "gpu"))
    [relu] = [k for k in kernels if any(n.op == "max" for n in k.parts)]
    assert [n.op for n in relu.parts] == (["max"] if forward else ["max", "select_n"])
    on_cpu = _fusion.kernels(Program(jax.make_jaxpr(fun)(w, w, x, x).jaxpr, "cpu"))
    assert all(len(k.parts) == 1 for k in on_cpu)


def test_on_a_gpu_what_only_a_joint_kernel_reads_is_not_written():
    """Three functions of one maximum; compiled for an H200 (jax 0.11.2): 6.007 images."""

    def fun(weights, x):
        largest = functools.reduce(jnp.maximum, [conv(x, w) for w in weights])
        results = [f(largest) for f in (jnp.sin, jnp.cos, jnp.tanh)]
        return sum(jnp.sum(conv(y, w)) for y, w in zip(results, weights, strict=True))

    weights, x = shapes(layers=3)
    found = predict_memory(jax.make_jaxpr(fun)(weights, x), platform="gpu", largest=20)
    assert "max" not in labels(found)
    assert found.bytes.temporaries == pytest.approx(6 * 256 * 256 * 16 * 4, rel=2e-3)


def test_on_a_gpu_a_convolution_adds_another_array():
    """To its result, with the bias, before it is written; not if that is read elsewhere."""

    def ops(fun):
        w, x = shape(3, 3, 16, 16), shape(1, 32, 32, 16)
        kernels = _fusion.kernels(Program(jax.make_jaxpr(fun)(w, shape(16), x).jaxpr, "gpu"))
        return [node.op for k in kernels for node in k.parts if not node.for_layout]

    assert ops(lambda w, b, x: jnp.sin(x) + (conv(x, w) + b)) == ["sin", "conv_general_dilated"]
    assert ops(lambda w, b, x: (conv(x, w), x + conv(x, w))) == ["conv_general_dilated", "add"]


def norms(params, x):
    for w in params:
        x = conv(x, w)
        x = x - x.mean((0, 1, 2))
        x = jax.nn.relu(x * jax.lax.rsqrt(jnp.square(x).mean((0, 1, 2)) + 1e-5))
    return x


def gates(params, x):
    for w in params:
        x = conv(x, w) * jax.nn.sigmoid(conv(x, 2 * w))
    return x


@pytest.mark.parametrize(
    ("fun", "images"), [(network, 12.001), (pooled, 4.502), (norms, 12.006), (gates, 19.003)]
)
def test_on_a_gpu_compiled_bytes_of_small_networks(fun, images):
    """As compiled for an H200 (jax 0.11.2): temporaries of the loss and all gradients."""
    found = predict_memory(jax.make_jaxpr(training(fun))(*shapes()), platform="gpu")
    assert found.bytes.temporaries == pytest.approx(images * 256 * 256 * 16 * 4, rel=5e-3)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("guarded", [False, True])
def test_on_a_gpu_an_optimiser_works_in_the_order_of_the_library(size, guarded):
    """On the kernel's copy and on its gradient; the momentum is copied to its place at the end.

    Compiled for an H200 (jax 0.11.2): 3.000 to 3.001 kernels of temporaries in each case.
    """

    def step(w, momentum, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(conv(x, w))))(w)
        moved = 0.9 * momentum + gradient
        new = w - 0.1 * moved
        if not guarded:
            return new, moved
        finite = jnp.isfinite(new).all() & jnp.isfinite(moved).all()
        return jnp.where(finite, new, w), jnp.where(finite, moved, momentum)

    w, x = shape(size, size, 512, 512), shape(1, 8, 8, 512)
    jaxpr = jax.make_jaxpr(step)(w, w, x)
    found = predict_memory(jaxpr, platform="gpu", donated=[True, True, False])
    kernel = size * size * 512 * 512 * 4
    assert found.bytes.temporaries == pytest.approx(3 * kernel, rel=1e-3)


def test_on_a_gpu_a_long_sum_is_not_computed_twice():
    """Both readers, one after the other, would read eight arrays; written once, they read one."""

    def fun(x, w):
        total = sum(jnp.split(x @ w, 8, axis=1)[i] for i in range(8))
        return jnp.cos(total) * (jnp.sin(total) @ w[:, :64])

    jaxpr = jax.make_jaxpr(fun)(shape(4096, 64), shape(64, 512)).jaxpr
    assert "add" in [k.first.op for k in _fusion.kernels(Program(jaxpr, "gpu"))]


def test_on_a_gpu_what_is_read_often_is_held_in_its_narrow_type():
    """The change to float32, in which norms compute, is part of each reader."""

    def fun(params, x):
        wide = functools.reduce(jnp.maximum, [conv(x, w) for w in params]).astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        return [conv((wide * f(mean)).astype(x.dtype), params[0]) for f in (jnp.negative, jnp.abs)]

    jaxpr = jax.make_jaxpr(fun)(*shapes(dtype="bfloat16"))
    found = predict_memory(jaxpr, platform="gpu", largest=20)
    held = [k for k in found.largest if len(k.shape) == 4]
    assert "max" in [k.label for k in held]
    assert {str(k.dtype) for k in held} == {"bfloat16"}


def test_on_a_gpu_a_number_is_part_of_what_reads_it():
    """The zeros of a relu, also of one that an overlapping pool computes again for each window."""

    def fun(params, x):
        for w in params:
            x = jax.nn.relu(conv(x, w))
        return nnx.max_pool(x, (3, 3), (2, 2))

    found = predict_memory(jax.make_jaxpr(fun)(*shapes(layers=2)), platform="gpu", largest=20)
    assert "conv_general_dilated" in labels(found)
    assert "max (broadcast_in_dim)" not in labels(found)


def test_on_a_gpu_what_is_concatenated_is_not_stored_first():
    def fun(params, x):
        maps = [conv(x, w) for w in params]
        joined = jnp.concatenate([jnp.tanh(m) for m in maps], 3)
        return conv(joined, jnp.concatenate(params, 2)) + sum(maps)

    traced = jax.make_jaxpr(fun)(*shapes(layers=2))
    cpu, gpu = (predict_memory(traced, platform=p, largest=20) for p in ("cpu", "gpu"))
    assert "tanh" in labels(cpu)
    assert "tanh" not in labels(gpu)


def test_on_a_gpu_a_mask_is_held_and_its_random_words_are_not():
    def fun(params, x):
        for i, w in enumerate(params):
            x = conv(x, w)
            mask = jax.random.bernoulli(jax.random.key(i), 0.5, x.shape)
            x = jnp.where(mask, jnp.tanh(x), 0)
        return x

    traced = jax.make_jaxpr(training(fun))(*shapes(layers=2))
    cpu, gpu = (predict_memory(traced, platform=p, largest=20) for p in ("cpu", "gpu"))
    assert any(str(k.dtype) == "bool" for k in gpu.largest)
    assert not any(str(k.dtype) == "uint32" and len(k.shape) == 4 for k in gpu.largest)
    assert cpu.bytes.temporaries > gpu.bytes.temporaries


def test_on_a_gpu_a_bias_does_not_make_its_gradient_wait():
    """What is summed is a cotangent of every layer, and each is made and summed by one kernel."""

    def fun(params, x):
        for w, bias in params:
            x = jax.nn.relu(conv(x, w) + bias)
        return x

    weights, x = shapes()
    with_bias = [(w, shape(16)) for w in weights]
    program = Program(jax.make_jaxpr(training(fun))(with_bias, x).jaxpr, "gpu")
    sums = [
        kernel
        for kernel in _fusion.kernels(program)
        for node in kernel.parts
        if node.op == "reduce_sum" and node.inputs[0].shape == x.shape and node.outputs[0].shape
    ]
    assert len(sums) == len(weights)
    assert all(x.shape in [v.shape for v in kernel.outputs] for kernel in sums)


def check_orders(jaxpr):
    """Each has every kernel once, after what makes its operands; loops' bodies too."""
    pending = [Program(jaxpr, "gpu")]
    while pending:
        program = pending.pop()
        pending += [body for node in program.nodes for body in node.bodies]
        kernels = _fusion.kernels(program)
        made = [v for k in kernels for v in k.outputs]
        assert len(made) == len(set(made))
        maker = {v: k for k in kernels for v in k.outputs}
        for order in (_schedule._least_first, _schedule._shared_first, _schedule._depth_first):
            ordered = order(program, kernels, maker)
            assert len(ordered) == len(kernels)
            assert set(ordered) == set(kernels)
            done = set()
            for kernel in ordered:
                assert all(maker[v] in done for v in kernel.reads if v in maker)
                assert all(v in maker for v in kernel.reads if v.node and not v.literal)
                done.add(kernel)


def test_every_order_has_every_kernel_once():
    tiled = jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=(2, 2))
    for fun in (network, pooled, norms, gates, tiled):
        check_orders(jax.make_jaxpr(training(fun))(*shapes(size=64)).jaxpr)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@hypothesis.given(networks())
def test_orders_of_random_networks(drawn):
    hypothesis.note(repr(drawn))
    tiled = jaxtile.checkpoint(
        drawn, in_axes=(None, (1, 2)), tiles=drawn.tiles, policy=drawn.policy
    )
    for fun in (drawn, tiled):
        loss = jax.grad(lambda *args, fun=fun: sum(map(jnp.sum, fun(*args))), argnums=(0, 1))
        check_orders(jax.make_jaxpr(loss)(*drawn.args).jaxpr)


def test_packing():
    def block(*intervals):
        return packed_bytes([_buffers.Buffer(*i, "stored", None) for i in intervals])

    assert block((4, 0, 1), (4, 2, 3)) == 4
    assert block((4, 0, 2), (4, 2, 3)) == 8
    # The small one lies where the large one does not end; nothing fits beside it then.
    assert block((8, 0, 1), (3, 1, 4), (8, 4, 5), (7, 2, 3)) == 11
    assert block() == 0
