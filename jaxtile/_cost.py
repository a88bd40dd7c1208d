"""Work of an equation: floating-point operations on given shapes.

A multiplication and an addition count one each, so a convolution costs twice its multiply-adds.
Elementwise primitives cost one operation per output element, reductions and pools one per element
they read, and data movement nothing. Zeros that a transposed convolution inserts between its inputs
are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._rules import Equation

Shape = Sequence[int]

_MOVEMENT = frozenset(
    """
    broadcast_in_dim transpose squeeze slice split dynamic_slice dynamic_update_slice rev
    concatenate stack unstack tile pad reshape iota gather name copy stop_gradient
    convert_element_type bitcast_convert_type
    """.split()
)
_OVER_INPUT = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax
    argmin cumsum cumprod cummax cummin cumlogsumexp sort top_k
    """.split()
)


def flops(eqn: Equation, in_shapes: Sequence[Shape], out_shapes: Sequence[Shape]) -> int:
    """Operations on operands and results of these shapes: those of a tile, or the whole."""
    name = eqn.primitive.name
    if name in _MOVEMENT or not out_shapes:
        return 0
    out = math.prod(out_shapes[0])
    if name == "conv_general_dilated":
        dims = eqn.params["dimension_numbers"]
        kernel = [eqn.in_avals[1].shape[d] for d in dims.rhs_spec]
        return 2 * out * math.prod(kernel[1:]) // math.prod(eqn.params["lhs_dilation"])
    if name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(in_shapes[0][d] for d in contracted[0])
    if name.startswith("reduce_window"):
        return out * math.prod(eqn.params["window_dimensions"])
    if name in _OVER_INPUT:
        return math.prod(in_shapes[0])
    return out
