"""Evaluate a jaxpr with NumPy, equation by equation.

Random cases are many and small: compiling one takes a second, interpreting it milliseconds. What is
checked is the program that jaxtile makes, not the compiler. Primitives without an entry here are
run by JAX, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxtile._graph.inline import any_call


def interpret(fun: Callable[..., Any], *args: Any) -> Any:
    """`fun(*args)`, traced and then interpreted."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    found = _run(closed, [np.asarray(x) for x in jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _run(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))

    def read(var: Any) -> Any:
        return np.asarray(var.val, var.aval.dtype) if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(v) for v in eqn.invars])
        for var, x in zip(eqn.outvars, out, strict=True):
            assert tuple(np.shape(x)) == tuple(var.aval.shape), (eqn.primitive, var.aval)
            env[var] = x
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Any]) -> list[Any]:
    called = any_call(eqn)
    if called is not None:
        return _run(called, operands)
    name, params = eqn.primitive.name, eqn.params
    match name:
        case "scan":
            return _scan(eqn, operands)
        case "cond":
            branch = int(np.clip(operands[0], 0, len(params["branches"]) - 1))
            return _run(params["branches"][branch], operands[1:])
        case "optimization_barrier":
            return operands
        case "split":
            ends = np.cumsum(params["sizes"])[:-1]
            return np.split(operands[0], ends, params["axis"])
        case "platform_index":
            names = [[] if p is None else p for p in params["platforms"]]
            at = next((i for i, p in enumerate(names) if "cpu" in p), len(names) - 1)
            return [np.int32(at)]
    if name in _NUMPY and _can(eqn) and not any(_is_key(x) for x in operands):
        with np.errstate(all="ignore"):
            out = np.asarray(_NUMPY[name](*operands, params=params))
        return [out.astype(eqn.outvars[0].aval.dtype, copy=False)]
    out = eqn.primitive.bind(
        *[x if _is_key(x) else jnp.asarray(x) for x in operands],
        **eqn.primitive.get_bind_params(params),
    )
    out = out if eqn.primitive.multiple_results else [out]
    return [x if _is_key(x) else np.asarray(x) for x in out]


def _can(eqn: Any) -> bool:
    """Groups of a convolution, and rounding away from zero, are left to JAX."""
    groups = {eqn.params.get(f"{kind}_group_count", 1) for kind in ("feature", "batch")}
    to_even = str(eqn.params.get("rounding_method", 1)) in ("1", "RoundingMethod.TO_NEAREST_EVEN")
    return groups == {1} and to_even


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.float64), jax.dtypes.extended)


def _scan(eqn: Any, operands: list[Any]) -> list[Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    if "ft_in" in params:  # from jax 0.12 on
        n_consts, n_carry, _ = map(len, params["ft_in"].unpack())
    else:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
    xs = operands[n_consts + n_carry :]
    steps = range(params["length"])
    collected = []
    for i in reversed(steps) if params["reverse"] else steps:
        out = _run(body, [*consts, *carry, *(x[i] for x in xs)])
        carry = out[:n_carry]
        collected.append(out[n_carry:])
    if params["reverse"]:
        collected.reverse()
    stacked = [
        np.stack(parts) if parts else np.zeros(var.aval.shape, var.aval.dtype)
        for var, *parts in zip(eqn.outvars[n_carry:], *collected, strict=True)
    ]
    return [*carry, *stacked]


def _broadcast(x, params):
    shape = [1] * len(params["shape"])
    for d, n in zip(params["broadcast_dimensions"], np.shape(x), strict=True):
        shape[d] = n
    return np.broadcast_to(np.reshape(x, shape), params["shape"])


def _converted(x, dtype):
    real = np.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return (x.real if real else x).astype(dtype)


def _pad(x, value, params):
    config = params["padding_config"]
    if not config:
        return x
    if any(inner for _, _, inner in config):
        inside = [
            n + max(0, n - 1) * inner for n, (_, _, inner) in zip(x.shape, config, strict=True)
        ]
        wide = np.full(inside, value, x.dtype)
        wide[tuple(slice(None, None, 1 + inner) for _, _, inner in config)] = x
        x = wide
    x = np.pad(x, [(max(0, lo), max(0, hi)) for lo, hi, _ in config], constant_values=value)
    return x[
        tuple(slice(max(0, -lo), x.shape[d] - max(0, -hi)) for d, (lo, hi, _) in enumerate(config))
    ]


def _starts(x, starts, sizes):
    return tuple(
        slice(s := int(np.clip(start, 0, n - size)), s + size)
        for start, n, size in zip(starts, x.shape, sizes, strict=True)
    )


def _update(x, update, *starts, params):
    x = np.array(x)
    x[_starts(x, starts, update.shape)] = update
    return x


def _convolve(lhs, rhs, params):
    """A sum over the kernel's positions of shifted images times matrices."""
    dims = params["dimension_numbers"]
    lhs, rhs = np.transpose(lhs, dims.lhs_spec), np.transpose(rhs, dims.rhs_spec)
    padding = [
        (lo, hi, d - 1)
        for (lo, hi), d in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    lhs = _pad(lhs, 0, {"padding_config": [(0, 0, 0), (0, 0, 0), *padding]})
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    sizes = [
        max(0, (n - (k - 1) * d - 1) // s + 1)  # a kernel may be wider than the image
        for n, k, d, s in zip(lhs.shape[2:], rhs.shape[2:], dilation, strides, strict=True)
    ]
    out = 0.0
    for at in np.ndindex(*rhs.shape[2:]):
        part = lhs[
            (
                slice(None),
                slice(None),
                *(
                    slice(i * d, i * d + max(0, (n - 1) * s + 1), s)
                    for i, d, n, s in zip(at, dilation, sizes, strides, strict=True)
                ),
            )
        ]
        out = out + np.einsum("ni...,oi->no...", part, rhs[(slice(None), slice(None), *at)])
    return np.transpose(out, np.argsort(dims.out_spec))


def _dot(lhs, rhs, params):
    (left, right), (batch_left, batch_right) = params["dimension_numbers"]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    of_left = [next(names) for _ in lhs.shape]
    of_right = [next(names) for _ in rhs.shape]
    for i, j in zip((*left, *batch_left), (*right, *batch_right), strict=True):
        of_right[j] = of_left[i]
    out = [of_left[d] for d in batch_left]
    out += [n for d, n in enumerate(of_left) if d not in (*left, *batch_left)]
    out += [n for d, n in enumerate(of_right) if d not in (*right, *batch_right)]
    return np.einsum(f"{''.join(of_left)},{''.join(of_right)}->{''.join(out)}", lhs, rhs)


def _unary(fun):
    return lambda x, params: fun(x)


def _binary(fun):
    return lambda x, y, params: fun(x, y)


_NUMPY: dict[str, Callable[..., Any]] = {
    name: _unary(fun)
    for name, fun in {
        "neg": np.negative,
        "abs": np.abs,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "exp": np.exp,
        "log": np.log,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sign": np.sign,
        "square": np.square,
        "logistic": lambda x: 1 / (1 + np.exp(-x)),
        "not": np.logical_not,
        "copy": np.array,
        "copy_p": np.array,
        "name": lambda x: x,
        "is_finite": np.isfinite,
        "floor": np.floor,
        "log1p": np.log1p,
        "one_minus_square": lambda x: (1 - x) * (1 + x),
    }.items()
} | {
    name: _binary(fun)
    for name, fun in {
        "add": np.add,
        "add_any": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "pow": np.power,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
    }.items()
}
_NUMPY |= {
    "broadcast_in_dim": lambda x, *_, params: _broadcast(x, params),
    "reshape": lambda x, *_, params: (
        np.reshape(np.transpose(x, params["dimensions"]), params["new_sizes"])
        if params["dimensions"]
        else np.reshape(x, params["new_sizes"])
    ),
    "squeeze": lambda x, params: np.squeeze(x, params["dimensions"]),
    "transpose": lambda x, params: np.transpose(x, params["permutation"]),
    "reduce_sum": lambda x, params: np.sum(x, tuple(params["axes"])),
    "reduce_max": lambda x, params: np.max(x, tuple(params["axes"])),
    "convert_element_type": lambda x, params: _converted(np.asarray(x), params["new_dtype"]),
    "integer_pow": lambda x, params: np.power(x, params["y"]),
    "select_n": lambda which, *cases, params: (
        np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)
    ),
    "concatenate": lambda *xs, params: np.concatenate(xs, params["dimension"]),
    "slice": lambda x, params: x[
        tuple(
            slice(a, b, s)
            for a, b, s in zip(
                params["start_indices"],
                params["limit_indices"],
                params["strides"] or (1,) * x.ndim,
                strict=True,
            )
        )
    ],
    **dict.fromkeys(
        ("dynamic_slice", "jaxtile_read_on_host"),
        lambda x, *starts, params: x[_starts(x, starts, params["slice_sizes"])],
    ),
    "dynamic_update_slice": _update,
    "jaxtile_write_on_host": _update,
    "conv_general_dilated": _convolve,
    "dot_general": _dot,
    "rev": lambda x, params: np.flip(x, params["dimensions"]),
    "round": lambda x, params: np.round(x),
    "pad": lambda x, value, params: _pad(x, value, params),
    "iota": lambda *_, params: np.broadcast_to(
        np.arange(params["shape"][params["dimension"]]).reshape(
            [-1 if d == params["dimension"] else 1 for d in range(len(params["shape"]))]
        ),
        params["shape"],
    ),
}
