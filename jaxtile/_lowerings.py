"""Primitives that XLA makes several operations of, on one platform or another.

The gradient of a max pool needs index arrays; on the CPU, a convolution or a contraction with an
unusual dimension order needs its operands copied into the usual one; on a GPU, kernels are copied
into the library's order, and an image that is padded unevenly is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from ._instructions import RANDOM, Value, is_in_order, narrow

if TYPE_CHECKING:
    from ._program import Program


def _convolution(program: Program, params, avals, inputs, context) -> list[Value]:
    """The CPU's library wants batch first and features last; kernels with features last."""
    numbers, n = params["dimension_numbers"], len(avals[0].shape)
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    operands = [
        program.in_order(inputs[0], (lhs[0], *lhs[2:], lhs[1]), context),
        program.in_order(inputs[1], (*rhs[2:], rhs[1], rhs[0]), context),
    ]
    kernel = inputs[1].base
    gradient = lhs[0] != 0 or (kernel.node is not None and kernel.node.op == "rev")
    if program.platform != "cpu":
        if kernel.node and kernel.node.op == "rev":  # the same copy serves for gradients
            kernel = kernel.node.inputs[0]
        if kernel.array in program.arguments:
            operands[1] = _prepared(program, kernel, context)
        operands[0] = _padded(program, params, operands[0], context)
    usual = (out[0], *out[2:], out[1]) if program.platform == "cpu" else tuple(range(n))
    made = jax.ShapeDtypeStruct([avals[0].shape[d] for d in usual], avals[0].dtype)
    result = program.some("conv_general_dilated", operands, context, [made], params)[0]
    result.node.adds = not gradient
    back = [usual.index(d) for d in range(n)]
    if is_in_order(result, back):
        return [result]
    return [program.one("transpose", [result], context, avals[0], tuple(back))]


def _prepared(program: Program, kernel: Value, context) -> Value:
    """The kernel in the order that a GPU's library wants; for a loop, copied before it."""
    if program.inside:
        program.prepared[kernel] = None
        return kernel
    copy = program.one("transpose", [kernel], context, kernel, "kernel", fusible=False)
    copy.node.for_layout = True
    return copy


def _padded(program: Program, params, image: Value, context) -> Value:
    """A GPU's library pads both ends alike; other padding is a copy of the image.

    Zeros around the image are padding, too. The gradient of a kernel reads the image at the forward
    pass's stride (here, a dilation): what is beyond the last stride does not matter.
    """
    padding, spatial = params["padding"], params["dimension_numbers"].lhs_spec[2:]
    if any(n != 1 for n in params["lhs_dilation"]) or any(min(pair) < 0 for pair in padding):
        return image
    zeros = _zeros_around(image)
    if zeros and all(zeros[d] == (0, 0) for d in range(len(zeros)) if d not in spatial):
        around = (zeros[d] for d in spatial)
        padding = [(lo + a, hi + b) for (lo, hi), (a, b) in zip(padding, around, strict=True)]
        image = image.node.inputs[0]
    if all(hi <= lo < hi + s for (lo, hi), s in zip(padding, params["rhs_dilation"], strict=True)):
        return image
    shape = list(image.shape)
    for d, (lo, hi) in zip(spatial, padding, strict=True):
        shape[d] += lo + hi
    aval = jax.ShapeDtypeStruct(shape, image.dtype)
    return program.one("pad", [image], context, aval, tuple(padding))


def _zeros_around(value: Value) -> list[tuple[int, int]]:
    """How many zeros lie before and after the array that it is made of; else nothing."""
    if value.node is None or value.view_of or "padding_config" not in value.node.params:
        return []
    fill, config = value.node.inputs[1], value.node.params["padding_config"]
    if fill.name != "zero" or any(min(numbers[:2]) < 0 or numbers[2] for numbers in config):
        return []
    return [(lo, hi) for lo, hi, _ in config]


def _contraction(program: Program, params, avals, inputs, context) -> list[Value]:
    """Batch dimensions first, contracted ones next to the other operand.

    Two exchanged dimensions are no matter.
    """
    contracted, batch = params["dimension_numbers"]
    operands = []
    for value, c, b, is_right in zip(inputs, contracted, batch, (False, True), strict=True):
        free = [d for d in range(len(value.shape)) if d not in c and d not in b]
        if list(b) != list(range(len(b))) or len(c) != 1 or len(free) != 1:
            order = [*b, *c, *free] if is_right else [*b, *free, *c]
            value = program.in_order(value, order, context)
        operands.append(value)
    return program.some("dot_general", operands, context, avals, params)


def _max_pool_gradient(program: Program, params, avals, inputs, context) -> list[Value]:
    """One array of positions per dimension, reduced along with the values, then scattered to."""
    source, operand = inputs
    index, like = np.dtype("int32"), jax.ShapeDtypeStruct
    shape = [n + lo + hi for n, (lo, hi) in zip(operand.shape, params["padding"], strict=True)]
    padded = tuple(shape) != operand.shape
    if padded:
        aval = like(shape, operand.dtype)
        operand = program.one("pad", [operand], context, aval, params["padding"])
    positions = []
    if program.platform == "cpu":  # elsewhere they are fused into the reduction
        positions = [
            program.one("positions", [], context, like(shape, index), d, fusible=False)
            for d in range(len(shape))
        ]
    window = program.node("reduce_window", [operand, *positions], context, params=params)
    wide = np.dtype("float32") if narrow(operand.dtype) else operand.dtype
    window.output(source.shape, wide)
    indices = [window.output(source.shape, index) for _ in shape]
    if program.platform == "cpu":  # elsewhere they are fused into the scatter
        aval = like((*source.shape, len(indices)), index)
        indices = [program.one("indices", indices, context, aval, fusible=False)]
    updates = program.one("copy", [source], context, like(source.shape, source.dtype))
    zeros = program.zeros(shape, operand.dtype, context)
    scatter = program.node("scatter into zeros", [zeros, *indices, updates], context, in_place=True)
    result = scatter.output(shape, operand.dtype)
    return [program.one("slice", [result], context, avals[0], "crop") if padded else result]


def _random_bits(program: Program, params, avals, inputs, context) -> list[Value]:
    """Two words per element; what is done with them is fused into their readers."""
    words = [jax.ShapeDtypeStruct(avals[0].shape, np.dtype("uint32"))] * 2
    made = _random_words(program, params, words, inputs, context)
    return [program.one("xor", made, context, avals[0])]


def _random_words(program: Program, params, avals, inputs, context) -> list[Value]:
    """On the CPU a loop makes both; elsewhere they are arithmetic like any other."""
    if program.platform == "cpu":
        return program.some("random_bits", inputs, context, avals, params)
    return [program.one(RANDOM, inputs, context, a, k) for k, a in enumerate(avals)]


LOWERINGS = {
    "conv_general_dilated": _convolution,
    "dot_general": _contraction,
    "select_and_scatter_add": _max_pool_gradient,
    "random_bits": _random_bits,
    "threefry2x32": _random_words,
}
