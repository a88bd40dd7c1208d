"""A traced function as XLA sees it first: one flat list of operations.

Calls are inlined, equal operations merged, unused ones dropped. Some operations become several, as
XLA lowers them (`_lowerings`), and several one (`_rewrites`); on a GPU, all zeros of one shape are
one array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ._instructions import MOVES, Context, Node, Value, is_in_order, narrow
from ._lowerings import LOWERINGS
from ._rewrites import rewritten
from ._rules import find
from ._rules._elementwise import Elementwise

_CALLS = frozenset(
    """
    jit pjit remat2 remat checkpoint closed_call core_call call core_closed_call custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr
    """.split()
)
_VIEWS = frozenset(
    """
    reshape squeeze expand_dims copy copy_p name stop_gradient sharding_constraint device_put
    random_wrap random_unwrap bitcast_convert_type pvary
    """.split()
)
OPAQUE = ("shard_map", "pallas_call", "custom_partitioning", "ffi_call", "xla_pmap")


class Program:
    """The operations of a traced function, in order."""

    def __init__(
        self,
        jaxpr: Any,
        platform: str,
        context: Context | None = None,
        carry: tuple[int, int] = (0, 0),
        sliced: int = 0,
    ):
        self.inside = context is not None
        """Is this the body of a loop, or a branch?"""
        context = context or Context()
        self.platform, self.nodes = platform, []
        self.prepared: dict[Value, None] = {}
        """Kernels that a loop gets from outside, and a library wants in another order: a GPU's
        compiler copies them once, before the loop."""
        self._equal: dict[Any, Any] = {}
        self.arguments = [Value(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        constants = [Value(v.aval.shape, v.aval.dtype) for v in jaxpr.constvars]
        env = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, self.arguments, strict=True))
        first_slice = len(jaxpr.invars) - sliced
        for var, stacked in zip(
            jaxpr.invars[first_slice:], self.arguments[first_slice:], strict=True
        ):
            # A loop reads one slice per iteration.
            node = self.node("dynamic_slice", [stacked], context, fusible=True)
            env[var] = node.output(var.aval.shape, var.aval.dtype)
        self._run(jaxpr, env, context)
        self.outputs = [self._read(env, v) for v in jaxpr.outvars]
        begin, count = carry
        old = self.arguments[begin : begin + count]
        self.carried = dict(zip(self.outputs[:count], old, strict=True))
        self._drop_unused()
        self.nodes = rewritten(self.nodes, self.outputs, platform)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                value.readers.append(node)

    def everything(self) -> Iterator[Node]:
        """All operations, those of loop bodies once."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.everything()

    def _read(self, env: dict[Any, Value], atom: Any) -> Value:
        if not hasattr(atom, "val"):
            return env[atom]
        aval = atom.aval
        key = ("literal", str(atom.val), aval.shape, str(aval.dtype))
        name = "zero" if _is_zero(atom.val) else None
        return self._equal.setdefault(key, Value(aval.shape, aval.dtype, literal=True, name=name))

    def _run(self, jaxpr: Any, env: dict[Any, Value], context: Context) -> None:
        for eqn in jaxpr.eqns:
            inputs = [self._read(env, v).seen_as(v.aval.shape) for v in eqn.invars]
            outputs = self._equation(eqn, inputs, context.enter(eqn))
            env.update(zip(eqn.outvars, (v.base for v in outputs), strict=True))

    def _inline(self, closed: Any, inputs: Sequence[Value], context: Context) -> list[Value]:
        jaxpr = closed.jaxpr if hasattr(closed, "consts") else closed
        env = {v: Value(v.aval.shape, v.aval.dtype) for v in jaxpr.constvars}
        env.update(zip(jaxpr.invars, inputs, strict=True))
        self._run(jaxpr, env, context)
        return [self._read(env, v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Value], context: Context) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            if params.get("prevent_cse") and params.get("differentiated"):
                inputs = self._barrier(inputs, context)
            keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
            return self._inline(next(params[k] for k in keys if k in params), inputs, context)
        if name == "optimization_barrier":
            return self._barrier(inputs, context)
        if name in ("scan", "while", "cond"):
            return self._control(name, params, eqn, inputs, context)
        if name == "platform_index":
            names = params["platforms"]
            ours = {"gpu": ("gpu", "cuda", "rocm")}.get(self.platform, (self.platform,))
            chosen = [i for i, n in enumerate(names) if n is None or any(p in n for p in ours)]
            return [Value((), np.dtype("int32"), literal=True, name=f"branch {chosen[0]}")]
        if name == "clamp" and (inputs[1].name or "").startswith("branch "):
            return [inputs[1]]
        avals = [v.aval for v in eqn.outvars]
        if not avals:
            return []
        if name == "device_put" and self.platform != "cpu":
            spaces = [
                (_space(v.aval), _space(o.aval))
                for v, o in zip(eqn.invars, eqn.outvars, strict=True)
            ]
            if any(old != new for old, new in spaces):
                return [
                    self._moved(v, "Host" in new, context)
                    for v, (_, new) in zip(inputs, spaces, strict=True)
                ]
        if name == "name":
            inputs[0].base.name = inputs[0].base.name or params["name"]
        same_number = name in _VIEWS and len(inputs) == len(avals)
        if same_number or self._is_view(name, params, inputs, avals):
            return inputs[: len(avals)]
        if name == "convert_element_type" and inputs[0].literal:
            key = ("literal", inputs[0], str(avals[0].dtype))
            same = dataclasses.replace(inputs[0], dtype=avals[0].dtype)
            return [self._equal.setdefault(key, same)]
        if name in LOWERINGS:
            return self._special(name, params, avals, inputs, context)
        if (simpler := _without_zeros(name, inputs, avals[0])) is not None:
            return [simpler]
        fusible = name in MOVES or isinstance(find(eqn.primitive), Elementwise)
        if self.platform != "cpu" and len(avals) == 1 and avals[0].shape:
            if name == "broadcast_in_dim" and _is_zero_literal(inputs[0]):
                return [self.zeros(avals[0].shape, avals[0].dtype, context)]
            if fusible and name not in MOVES:
                inputs = [
                    self.zeros(avals[0].shape, v.dtype, context) if _is_zero_literal(v) else v
                    for v in inputs
                ]
            fusible |= name.startswith("reduce_window")
        if name == "split":
            pieces = enumerate(avals)
            return [self.one("slice", inputs, context, a, key=i) for i, a in pieces]
        return self.some(name, inputs, context, avals, params, fusible and len(avals) == 1)

    def _moved(self, value: Value, to_host: bool, context: Context) -> Value:
        """A copy in another memory. The CPU has only one, and copies nothing."""
        moved = self.node("device_put", [value], context).output(value.shape, value.dtype)
        moved.name, moved.in_host_memory = value.name, to_host
        return moved

    def _special(self, name, params, avals, inputs, context) -> list[Value]:
        """The CPU has no library for narrow floats: operands are widened, and results narrowed."""
        lower = LOWERINGS[name]
        if self.platform != "cpu" or not any(narrow(v.dtype) for v in inputs):
            return lower(self, params, avals, inputs, context)

        def cast(value: Value, dtype: Any) -> Value:
            aval = jax.ShapeDtypeStruct(value.shape, dtype)
            return self.one("convert_element_type", [value], context, aval)

        single = np.dtype("float32")
        wide = [cast(v, single) if narrow(v.dtype) else v for v in inputs]
        made = [jax.ShapeDtypeStruct(a.shape, single) for a in avals]
        results = lower(self, params, made, wide, context)
        return [cast(v, a.dtype) for v, a in zip(results, avals, strict=True)]

    @staticmethod
    def _is_view(name: str, params: Any, inputs: list[Value], avals: list[Any]) -> bool:
        """A change of shape or type that moves nothing."""
        if name == "convert_element_type":
            return inputs[0].dtype == avals[0].dtype
        if name == "broadcast_in_dim":
            return not inputs[0].literal and math.prod(inputs[0].shape) == math.prod(avals[0].shape)
        return name == "transpose" and is_in_order(inputs[0], params["permutation"])

    def node(self, op: str, inputs: Sequence[Value], context: Context, **kwargs: Any) -> Node:
        kwargs.setdefault("params", {})
        self.nodes.append(Node(op, [v.base for v in inputs], context, **kwargs))
        return self.nodes[-1]

    def some(self, op, inputs, context, avals, params=None, fusible=False, key=None):
        """An operation, or an equal one that is there already."""
        key = _key(params or {}) if key is None else key
        seen = tuple((v.base, v.shape) for v in inputs)
        known = (op, seen, key, tuple((tuple(a.shape), str(a.dtype)) for a in avals))
        if key is not None and known in self._equal:
            self._equal[known][0].node.merged += 1
            return self._equal[known]
        in_place = op == "dynamic_update_slice" or op.startswith("scatter")
        node = self.node(
            op, inputs, context, params=params or {}, fusible=fusible, in_place=in_place
        )
        self._equal[known] = [node.output(a.shape, a.dtype) for a in avals]
        return self._equal[known]

    def one(self, op, inputs, context, aval, key=0, fusible=True) -> Value:
        return self.some(op, inputs, context, [aval], None, fusible, ("own", key))[0]

    def _barrier(self, inputs: list[Value], context: Context) -> list[Value]:
        """Waits for all operands, and makes them values that equal no other.

        The CPU compiler of jax 0.10 removes barriers before it merges equal operations: there
        `jax.checkpoint` outside loops computes little again.
        """
        if self.platform == "cpu" and jax.__version_info__ < (0, 11):
            return inputs
        node = self.node("barrier", [v for v in inputs if not v.literal], context)
        outputs = []
        for value in inputs:
            if not value.literal:
                source, value = value.base, node.output(value.shape, value.dtype)
                value.source, value.name = source, source.name
            outputs.append(value)
        return outputs

    def _control(self, name, params, eqn, inputs, context) -> list[Value]:
        if name == "cond" and (inputs[0].name or "").startswith("branch "):
            chosen = params["branches"][int(inputs[0].name.split()[1])]
            return self._inline(chosen, inputs[1:], context)
        if name == "scan" and params["length"] == 1:  # XLA unrolls it
            return self._inline(params["jaxpr"], inputs, context)
        node = self.node(name, inputs, context)

        def body(closed, **kwargs):
            return Program(closed.jaxpr, self.platform, context, **kwargs)

        if name == "scan":
            if "ft_in" in params:  # from jax 0.12 on
                first, count, _ = map(len, params["ft_in"].unpack())
            else:
                first, count = params["num_consts"], params["num_carry"]
            sliced = len(inputs) - first - count
            node.starts = [v.array for v in inputs[first : first + count]]
            node.bodies = [body(params["jaxpr"], carry=(first, count), sliced=sliced)]
        elif name == "while":
            first = params["body_nconsts"]
            node.starts = [v.array for v in inputs[params["cond_nconsts"] + first :]]
            node.bodies = [body(params["body_jaxpr"], carry=(first, len(node.starts)))]
        else:
            node.bodies = [body(branch) for branch in params["branches"]]
        return [node.output(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    def _drop_unused(self) -> None:
        used: set[Node] = set()
        pending = [v.node for v in self.outputs if v.node]
        while pending:
            node = pending.pop()
            if node not in used:
                used.add(node)
                pending += [v.node for v in node.inputs if v.node]
        self.nodes = [n for n in self.nodes if n in used]

    def zeros(self, shape: Sequence[int], dtype: Any, context: Context) -> Value:
        """One array for all zeros of a shape: those of a relu, of its gradient, of a scatter."""
        aval = jax.ShapeDtypeStruct(shape, dtype)
        return self.one("broadcast_in_dim", [], context, aval, "zeros")

    def in_order(self, value: Value, order: Sequence[int], context: Context) -> Value:
        """The array with its dimensions in this order: a copy, on the CPU, unless it is so."""
        if self.platform != "cpu" or is_in_order(value, order):
            return value
        made = value.array.node
        context = dataclasses.replace(context, kind=made.context.kind) if made else context
        aval = jax.ShapeDtypeStruct([value.shape[d] for d in order], value.dtype)
        copy = self.one("transpose", [value], context, aval, tuple(order))
        copy.node.for_layout, copy.name = True, value.name
        return copy


def _is_zero(number: Any) -> bool:
    return np.shape(number) == () and not np.any(np.asarray(number))


def _without_zeros(name: str, inputs: Sequence[Value], aval: Any) -> Value | None:
    """The value of a sum with zeros, or of a function of zeros that is zero; else None.

    `optax` adds up `square(real) + square(imaginary)`, and real numbers have no imaginary part.
    """
    if name in ("abs", "neg", "square"):
        return inputs[0] if _is_zeros(inputs[0]) else None
    if name not in ("add", "add_any", "sub"):
        return None
    if _is_zeros(inputs[1]) and inputs[0].shape == aval.shape:
        return inputs[0]
    commutes = name != "sub" and inputs[1].shape == aval.shape
    return inputs[1] if commutes and _is_zeros(inputs[0]) else None


def _is_zeros(value: Value) -> bool:
    node = value.base.node
    return node is not None and node.constant and all(map(_is_zero_literal, node.inputs))


def _is_zero_literal(value: Value) -> bool:
    return value.literal and value.name == "zero"


def _key(params: dict[str, Any]) -> Any:
    """Something that is equal for equal equations; None if that cannot be told."""
    key = tuple(sorted((k, id(v) if callable(v) else v) for k, v in params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _space(aval: Any) -> str:
    return str(getattr(aval, "memory_space", ""))
