"""A traced function as XLA sees it first: one flat list of operations.

Calls are inlined, equal operations merged, unused ones dropped. Some operations become several, as
XLA lowers them: the gradient of a max pool needs index arrays; on the CPU, a convolution or a
contraction with an unusual dimension order needs its operands copied into the usual one; on a GPU,
an image that is padded unevenly is copied, and all zeros of one shape are one array.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

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
MOVES = frozenset(
    """
    broadcast_in_dim iota slice pad transpose rev gather dynamic_slice concatenate split
    """.split()
)
# XLA does not compute these twice to save a buffer.
_EXPENSIVE = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1
    lgamma log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh
    """.split()
)
RANDOM = "random words"
OPAQUE = ("shard_map", "pallas_call", "custom_partitioning", "ffi_call", "xla_pmap")


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array. A literal, or one made by a barrier (`source`), takes no buffer of its own."""

    shape: tuple[int, ...]
    dtype: Any
    node: Node | None = None
    literal: bool = False
    source: Value | None = None
    view_of: Value | None = None
    """The array itself, if this is only how one equation sees its shape."""
    name: str | None = None
    readers: list[Node] = dataclasses.field(default_factory=list)
    has_buffer: bool = False
    in_host_memory: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 4)

    @property
    def base(self) -> Value:
        return self if self.view_of is None else self.view_of

    def seen_as(self, shape: tuple[int, ...]) -> Value:
        """With the shape that an equation sees: a reshape is the same array."""
        if self.base.shape == tuple(shape):
            return self.base
        return dataclasses.replace(self.base, shape=tuple(shape), view_of=self.base)

    @property
    def array(self) -> Value:
        value = self.base
        while value.source is not None:
            value = value.source
        return value


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One operation, as XLA sees it."""

    op: str
    inputs: list[Value]
    context: Context
    params: dict[str, Any]
    outputs: list[Value] = dataclasses.field(default_factory=list)
    fusible: bool = False
    in_place: bool = False
    for_layout: bool = False
    """Copies an operand into the dimension order that a library wants."""
    bodies: list[Program] = dataclasses.field(default_factory=list)
    starts: list[Value] = dataclasses.field(default_factory=list)
    """What a loop's carry starts as, per output."""
    merged: int = 0
    """Equal operations that this one stands for, too."""

    @property
    def label(self) -> str:
        """The primitive, and what it became."""
        name = self.context.primitive
        return self.op if self.op == name or not name else f"{name} ({self.op})"

    def output(self, shape: Iterable[int], dtype: Any) -> Value:
        self.outputs.append(Value(tuple(shape), dtype, self))
        return self.outputs[-1]

    @property
    def expensive(self) -> bool:
        if self.op not in _EXPENSIVE or self.outputs[0].dtype.kind not in "fcV":
            return False
        # A division by a constant becomes a multiplication.
        return not (self.op == "div" and self.inputs[1].literal)

    @property
    def constant(self) -> bool:
        """One number everywhere."""
        return self.op == "broadcast_in_dim" and all(v.literal for v in self.inputs)

    def takes_producers(self, platform: str) -> bool:
        """Whether what makes its operands can be fused into it."""
        if self.op == "concatenate" and platform == "cpu":
            # Copied block by block, unless the blocks are rows.
            minor = len(self.outputs[0].shape) - 1
            return self.fusible and len(self.inputs) <= 8 and self.params["dimension"] != minor
        return self.fusible and self.op != "reduce_precision"

    @property
    def overwrites(self) -> bool:
        """Whether the result may lie where an operand of equal shape was."""
        return self.in_place or (self.fusible and self.op not in ("transpose", "rev"))

    @property
    def reduces_windows(self) -> bool:
        return self.op.startswith("reduce_window")

    @property
    def windows_overlap(self) -> bool:
        sizes = self.params["window_dimensions"]
        return any(n > s for n, s in zip(sizes, self.params["window_strides"], strict=True))

    @property
    def effectively_unary(self) -> bool:
        """At most one operand is as large as the result: computing it twice reads no more."""
        rank = len(self.outputs[0].shape)
        large = [
            v
            for v in self.inputs
            if not (v.literal or (v.node and v.node.op in ("broadcast_in_dim", "iota")))
            and len(v.shape) >= rank
        ]
        return len(large) <= 1


@dataclasses.dataclass(frozen=True)
class Context:
    """Where an equation comes from: its kind of work, and its source, innermost call first."""

    kind: str = "stored"
    sources: tuple[Any, ...] = ()
    primitive: str = ""

    def enter(self, eqn: Any) -> Context:
        kind = _kind(eqn.source_info.name_stack) or self.kind
        return Context(kind, (eqn.source_info, *self.sources), eqn.primitive.name)


@functools.lru_cache(maxsize=4096)
def _kind(name_stack: Any) -> str | None:
    """What JAX notes of the transformation that made an equation."""
    text = str(name_stack)
    if "rematted_computation" in text:
        return "recomputed"
    return "gradients" if "transpose(" in text else None


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
            node = self._node("dynamic_slice", [stacked], context, fusible=True)
            env[var] = node.output(var.aval.shape, var.aval.dtype)
        self._run(jaxpr, env, context)
        self.outputs = [self._read(env, v) for v in jaxpr.outvars]
        begin, count = carry
        old = self.arguments[begin : begin + count]
        self.carried = dict(zip(self.outputs[:count], old, strict=True))
        self._drop_unused()
        self._add_into_scatters()
        if platform != "cpu":
            self._copy_shared_zeros()
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
        if name in _LOWERINGS:
            return self._special(name, params, avals, inputs, context)
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
            return [self._one("slice", inputs, context, a, key=i) for i, a in pieces]
        return self._some(name, inputs, context, avals, params, fusible and len(avals) == 1)

    def _moved(self, value: Value, to_host: bool, context: Context) -> Value:
        """A copy in another memory. The CPU has only one, and copies nothing."""
        moved = self._node("device_put", [value], context).output(value.shape, value.dtype)
        moved.name, moved.in_host_memory = value.name, to_host
        return moved

    def _special(self, name, params, avals, inputs, context) -> list[Value]:
        """The CPU has no library for narrow floats: operands are widened, and results narrowed."""
        lower = _LOWERINGS[name]
        if self.platform != "cpu" or not any(narrow(v.dtype) for v in inputs):
            return lower(self, params, avals, inputs, context)

        def cast(value: Value, dtype: Any) -> Value:
            aval = jax.ShapeDtypeStruct(value.shape, dtype)
            return self._one("convert_element_type", [value], context, aval)

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
        return name == "transpose" and _in_order(inputs[0], params["permutation"])

    def _node(self, op: str, inputs: Sequence[Value], context: Context, **kwargs: Any) -> Node:
        kwargs.setdefault("params", {})
        self.nodes.append(Node(op, [v.base for v in inputs], context, **kwargs))
        return self.nodes[-1]

    def _some(self, op, inputs, context, avals, params=None, fusible=False, key=None):
        """An operation, or an equal one that is there already."""
        key = _key(params or {}) if key is None else key
        seen = tuple((v.base, v.shape) for v in inputs)
        known = (op, seen, key, tuple((tuple(a.shape), str(a.dtype)) for a in avals))
        if key is not None and known in self._equal:
            self._equal[known][0].node.merged += 1
            return self._equal[known]
        in_place = op == "dynamic_update_slice" or op.startswith("scatter")
        node = self._node(
            op, inputs, context, params=params or {}, fusible=fusible, in_place=in_place
        )
        self._equal[known] = [node.output(a.shape, a.dtype) for a in avals]
        return self._equal[known]

    def _one(self, op, inputs, context, aval, key=0, fusible=True) -> Value:
        return self._some(op, inputs, context, [aval], None, fusible, ("own", key))[0]

    def _barrier(self, inputs: list[Value], context: Context) -> list[Value]:
        """Waits for all operands, and makes them values that equal no other.

        The CPU compiler of jax 0.10 removes barriers before it merges equal operations: there
        `jax.checkpoint` outside loops computes little again.
        """
        if self.platform == "cpu" and jax.__version_info__ < (0, 11):
            return inputs
        node = self._node("barrier", [v for v in inputs if not v.literal], context)
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
        node = self._node(name, inputs, context)

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

    def _add_into_scatters(self) -> None:
        """A sum with what is scattered into zeros is scattered into the other summand instead."""
        reads = collections.Counter(v for n in self.nodes for v in n.inputs)
        reads.update(self.outputs)
        gone = set()
        for i, node in enumerate(self.nodes):
            if node.op not in ("add", "add_any"):
                continue
            for value, other in (node.inputs, node.inputs[::-1]):
                scatter = value.node
                if scatter and scatter.op == "scatter into zeros" and reads[value] == 1:
                    gone |= {scatter.inputs[0].node} if reads[scatter.inputs[0]] == 1 else set()
                    moved = dataclasses.replace(scatter, op="scatter", outputs=node.outputs)
                    moved.inputs = [other, *scatter.inputs[1:]]
                    node.outputs[0].node = moved
                    self.nodes[i] = moved
                    gone.add(scatter)
                    break
        self.nodes = [n for n in self.nodes if n not in gone]

    def zeros(self, shape: Sequence[int], dtype: Any, context: Context) -> Value:
        """One array for all zeros of a shape: those of a relu, of its gradient, of a scatter."""
        aval = jax.ShapeDtypeStruct(shape, dtype)
        return self._one("broadcast_in_dim", [], context, aval, "zeros")

    def _copy_shared_zeros(self) -> None:
        """A scatter writes over its zeros: over a copy of them, if something else reads them."""
        readers = collections.Counter(v for n in self.nodes for v in n.inputs)
        nodes = []
        for node in self.nodes:
            if node.op == "scatter into zeros" and readers[zeros := node.inputs[0]] > 1:
                copy = Node("copy", [zeros], node.context, {})
                node.inputs[0] = copy.output(zeros.shape, zeros.dtype)
                nodes.append(copy)
            nodes.append(node)
        self.nodes = nodes

    def in_order(self, value: Value, order: Sequence[int], context: Context) -> Value:
        """The array with its dimensions in this order: a copy, on the CPU, unless it is so."""
        if self.platform != "cpu" or _in_order(value, order):
            return value
        made = value.array.node
        context = dataclasses.replace(context, kind=made.context.kind) if made else context
        aval = jax.ShapeDtypeStruct([value.shape[d] for d in order], value.dtype)
        copy = self._one("transpose", [value], context, aval, tuple(order))
        copy.node.for_layout, copy.name = True, value.name
        return copy


def _is_zero(number: Any) -> bool:
    return np.shape(number) == () and not np.any(np.asarray(number))


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


def narrow(dtype: Any) -> bool:
    return str(dtype) in ("bfloat16", "float16")


def _in_order(value: Value, order: Sequence[int]) -> bool:
    large = [d for d in order if value.shape[d] != 1]
    return large == sorted(large)


def _convolution(program: Program, params, avals, inputs, context) -> list[Value]:
    """The CPU's library wants batch first and features last; kernels with features last."""
    numbers, n = params["dimension_numbers"], len(avals[0].shape)
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    operands = [
        program.in_order(inputs[0], (lhs[0], *lhs[2:], lhs[1]), context),
        program.in_order(inputs[1], (*rhs[2:], rhs[1], rhs[0]), context),
    ]
    if program.platform != "cpu":
        kernel = inputs[1].base
        reversed_ = kernel.node.inputs[0] if kernel.node and kernel.node.op == "rev" else None
        if program.inside and reversed_ in program.arguments:  # the same copy serves for gradients
            kernel = operands[1] = reversed_
        if kernel in program.arguments:
            program.prepared[kernel] = None
        operands[0] = _padded(program, params, operands[0], context)
    usual = (out[0], *out[2:], out[1])
    if program.platform != "cpu":
        usual = tuple(range(n))
    made = jax.ShapeDtypeStruct([avals[0].shape[d] for d in usual], avals[0].dtype)
    result = program._some("conv_general_dilated", operands, context, [made], params)[0]
    back = [usual.index(d) for d in range(n)]
    if _in_order(result, back):
        return [result]
    return [program._one("transpose", [result], context, avals[0], tuple(back))]


def _padded(program: Program, params, image: Value, context) -> Value:
    """A GPU's library pads both ends alike; other padding is a copy of the image.

    The gradient of a kernel reads the image at the forward pass's stride (here, a dilation): what
    is beyond the last stride does not matter.
    """
    padding, strides = params["padding"], params["rhs_dilation"]
    alike = all(hi <= lo < hi + s for (lo, hi), s in zip(padding, strides, strict=True))
    dilated = any(n != 1 for n in params["lhs_dilation"])
    if alike or dilated or any(min(pair) < 0 for pair in padding):
        return image
    shape = list(image.shape)
    for d, (lo, hi) in zip(params["dimension_numbers"].lhs_spec[2:], padding, strict=True):
        shape[d] += lo + hi
    aval = jax.ShapeDtypeStruct(shape, image.dtype)
    return program._one("pad", [image], context, aval, tuple(padding))


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
    return program._some("dot_general", operands, context, avals, params)


def _max_pool_gradient(program: Program, params, avals, inputs, context) -> list[Value]:
    """One array of positions per dimension, reduced along with the values, then scattered to."""
    source, operand = inputs
    index, like = np.dtype("int32"), jax.ShapeDtypeStruct
    shape = [n + lo + hi for n, (lo, hi) in zip(operand.shape, params["padding"], strict=True)]
    padded = tuple(shape) != operand.shape
    if padded:
        aval = like(shape, operand.dtype)
        operand = program._one("pad", [operand], context, aval, params["padding"])
    positions = []
    if program.platform == "cpu":  # elsewhere they are fused into the reduction
        positions = [
            program._one("positions", [], context, like(shape, index), d, fusible=False)
            for d in range(len(shape))
        ]
    window = program._node("reduce_window", [operand, *positions], context, params=params)
    wide = np.dtype("float32") if narrow(operand.dtype) else operand.dtype
    window.output(source.shape, wide)
    indices = [window.output(source.shape, index) for _ in shape]
    if program.platform == "cpu":  # elsewhere they are fused into the scatter
        aval = like((*source.shape, len(indices)), index)
        indices = [program._one("indices", indices, context, aval, fusible=False)]
    updates = program._one("copy", [source], context, like(source.shape, source.dtype))
    zeros = program.zeros(shape, operand.dtype, context)
    scatter = program._node(
        "scatter into zeros", [zeros, *indices, updates], context, in_place=True
    )
    result = scatter.output(shape, operand.dtype)
    return [program._one("slice", [result], context, avals[0], "crop") if padded else result]


def _random_bits(program: Program, params, avals, inputs, context) -> list[Value]:
    """Two words per element; what is done with them is fused into their readers."""
    words = [jax.ShapeDtypeStruct(avals[0].shape, np.dtype("uint32"))] * 2
    made = _random_words(program, params, words, inputs, context)
    return [program._one("xor", made, context, avals[0])]


def _random_words(program: Program, params, avals, inputs, context) -> list[Value]:
    """On the CPU a loop makes both; elsewhere they are arithmetic like any other."""
    if program.platform == "cpu":
        return program._some("random_bits", inputs, context, avals, params)
    key = _key(params)
    return [program._one(RANDOM, inputs, context, a, (k, key)) for k, a in enumerate(avals)]


_LOWERINGS = {
    "conv_general_dilated": _convolution,
    "dot_general": _contraction,
    "select_and_scatter_add": _max_pool_gradient,
    "random_bits": _random_bits,
    "threefry2x32": _random_words,
}
