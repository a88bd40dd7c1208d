"""The instructions of a tile, in stages. Equal stages are traced once.

A stage is a convolution, or another expensive equation, and what lies between the one before it and
itself. Regions that compute the same values again run the same stages, and networks repeat
themselves. So many stages are equal: their equations are alike, and on the same windows. JAX traces
one of them. Of those that are not differentiated it also lowers one, which a compiler inlines.

Known inefficiency: a region still has as many calls as it has stages, and windows that grow with
the distance to the result, until they are as large as the array, make stages that are not equal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import jax
from jax import lax

from .._graph.values import Node, Value
from .._rules.plainly import plainly
from .tile import Column, Cut, Instruction, Scalars, Slot, TiledEquation, TilePlan, evaluate, lookup

Arrays = Sequence[jax.Array]
Known = tuple[int | None, ...]
_AT_ONCE = 2  # arrays that are read to compute another
_SMALL = 2**16  # bytes
RunStage = Callable[["Stage", Known, Arrays, Arrays], list[jax.Array]]


def stage_runner() -> RunStage:
    """A function that runs stages, and traces equal ones once."""

    def tile(stage: Stage, known: Known, arrays: Arrays, scalars: Arrays) -> list[jax.Array]:
        others = iter(scalars)
        return stage.run(arrays, [next(others) if k is None else k for k in known])

    called = jax.jit(tile, static_argnums=(0, 1))
    # The derivative of a call is two calls, and between these XLA held more, by a tenth.
    inlined = jax.jit(tile, static_argnums=(0, 1), inline=True)
    return lambda stage, *args: (inlined if stage.differentiated else called)(stage, *args)


class Stage:
    """A function of the arrays of its `inputs` and the positions in its `columns`.

    Stages are equal if they are the same function: the same steps of alike equations, connected in
    the same way.
    """

    def __init__(
        self,
        instructions: Sequence[TiledEquation],
        there: Collection[Value],
        wanted: Collection[Value],
        differentiated: bool,
        written: Collection[Value] = (),
    ):
        """`there`: what a tile has before its first stage; `wanted`: what other stages read;
        `written`: what a compiler may not compute as part of its readers.
        """
        self.instructions, self.differentiated = instructions, differentiated
        made = dict.fromkeys(v for i in instructions for v in i.node.outputs)
        self.written = {v for v in made if v in written}
        operands = [v for i in instructions for v in i.node.inputs]
        read = dict.fromkeys(v for v in operands if v.tiled or not v.array.concrete)
        known = [v for v in made if v in there]
        self.inputs = [*(v for v in read if v not in made), *known]
        self.outputs = [v for v in made if v in wanted]
        slots = [slot for i in instructions for slot in _slots(i)]
        self.columns = list(dict.fromkeys(s.index for s in slots if isinstance(s, Column)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stage) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def run(self, arrays: Arrays, scalars: Sequence[jax.Array | int]) -> list[jax.Array]:
        env = dict(zip(self.inputs, arrays, strict=True))
        row = dict(zip(self.columns, scalars, strict=True))
        with nullcontext() if self.differentiated else plainly("undifferentiated"):
            evaluate(self.instructions, env, row, self.written)
        return [env[v] for v in self.outputs]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> Hashable:
        """The instructions, with values and columns numbered."""
        made = (v for i in self.instructions for v in i.node.outputs)
        numbers: dict[Value, int] = {}
        for value in itertools.chain(self.inputs, made):
            numbers.setdefault(value, len(numbers))
        columns = {index: k for k, index in enumerate(self.columns)}

        def column(slot: Slot) -> Hashable:
            return (columns[slot.index],) if isinstance(slot, Column) else slot

        def cut(read: Cut | None) -> Hashable:
            """What it fills in follows from the step."""
            return read and tuple((o._replace(slot=0), column(o.slot)) for o in read.offsets)

        return (
            self.differentiated,
            tuple(numbers[v] for v in self.inputs),
            tuple(numbers[v] for v in self.outputs),
            frozenset(numbers[v] for v in self.written),
            tuple(
                (
                    i.node.like,
                    id(i.step),
                    tuple(numbers.get(v) for v in i.node.inputs),
                    tuple(map(cut, i.reads)),
                    tuple(map(column, i.positions)),
                    tuple(map(cut, i.crops)),
                )
                for i in self.instructions
            ),
        )


def _slots(instruction: TiledEquation) -> Iterator[Slot]:
    for cut in instruction.cuts:
        yield from () if cut is None else (o.slot for o in cut.offsets)
    yield from instruction.positions


class Program:
    """What a tile computes, or the part of it that some equations compute, stage by stage."""

    def __init__(
        self,
        plan: TilePlan,
        run: RunStage,
        there: Collection[Value],
        wanted: Collection[Value],
        nodes: Collection[Node] | None = None,
        differentiated: bool = True,
    ):
        """`there`: what a tile has before; `wanted`: what is to be there at the end."""
        chosen = [i for i in plan.instructions if nodes is None or i.node in nodes]
        self.run_stage = run
        self.written = {*()} if differentiated else _written(chosen)
        self.parts: list[_Part] = []
        for own in reversed(_parts(chosen, self.written)):
            steps = _stages(own, there, wanted, differentiated, self.written)
            self.parts.insert(0, _Part(own, steps))
            wanted = {*wanted, *(v for i in own if i.node is not None for v in i.node.inputs)}

    def run(self, env: dict[Value, jax.Array], row: Scalars) -> None:
        """Extend `env` (windows of tiled inputs, whole global inputs) by what is wanted."""
        # JAX sets the mesh, even if there is none, while it transposes, and would trace all again.
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            for k, part in enumerate(self.parts):
                late = part.after(self.parts[k - 1], env) if k else {}
                kept = {v: env[v] for v in late}
                env |= late
                for step in part.steps:
                    self._run(step, env, row)
                env |= kept

    def _run(self, step: Stage | Instruction, env: dict[Value, jax.Array], row: Scalars) -> None:
        if not isinstance(step, Stage):
            return evaluate([step], env, row, self.written)
        arrays = [lookup(env, v) for v in step.inputs]
        scalars = [row[k] for k in step.columns]
        known = tuple(k if isinstance(k, int) else None for k in scalars)
        others = [k for k in scalars if not isinstance(k, int)]
        results = self.run_stage(step, known, arrays, others)
        env.update(zip(step.outputs, results, strict=True))


class _Part(NamedTuple):
    """Of a program: up to a value that is written, and its steps."""

    instructions: Sequence[Instruction]
    steps: Sequence[Stage | Instruction]

    def after(self, part: _Part, env: Mapping[Value, jax.Array]) -> dict[Value, jax.Array]:
        """The small globals that it reads, or else all of them, but only once another part is done.
        A compiler would run convolutions first that wait for nothing, and hold all their results.
        """
        last = part.instructions[-1].node
        assert last is not None
        read = {v: env[v] for i in self.instructions if i.node for v in i.node.inputs if v in env}
        mine = {v: x for v, x in read.items() if not v.tiled and not v.concrete}
        small = {v: x for v, x in mine.items() if x.nbytes <= _SMALL} or mine
        there = [env[v] for v in last.outputs if v in env]
        arrays, _ = lax.optimization_barrier((list(small.values()), there))
        return dict(zip(small, arrays, strict=True))


def _parts(instructions: Sequence[Instruction], written: set[Value]) -> list[list[Instruction]]:
    """Each but the last ends where something is written."""
    parts: list[list[Instruction]] = [[]]
    for instruction in instructions:
        parts[-1].append(instruction)
        if isinstance(instruction, TiledEquation) and written & {*instruction.node.outputs}:
            parts.append([])
    return [part for part in parts if part]


def _stages(
    instructions: Sequence[Instruction],
    there: Collection[Value],
    wanted: Collection[Value],
    differentiated: bool,
    written: Collection[Value],
) -> Sequence[Stage | Instruction]:
    """The same instructions, in stages, if all of them are equations on windows."""
    equations = [i for i in instructions if isinstance(i, TiledEquation)]
    if len(equations) < len(instructions) or any(i.node.reduction for i in equations):
        return instructions
    runs: dict[int, list[TiledEquation]] = {}
    for instruction in equations:
        runs.setdefault(instruction.node.stage, []).append(instruction)
    found, wanted = [], {*wanted}
    for _, run in sorted(runs.items(), reverse=True):
        found.append(Stage(run, there, wanted, differentiated, written))
        wanted.update(found[-1].inputs)
    return found[::-1]


def _written(instructions: Sequence[Instruction]) -> set[Value]:
    """What is to be an array of its own, so that no more than two others need be there for a third.

    The ends of residual blocks are sums of sums. A compiler would add up the results of many
    convolutions at once, and have all of them for that.
    """
    arrays: dict[Value, frozenset[Value]] = {}
    written = set[Value]()
    for instruction in instructions:
        if not isinstance(instruction, TiledEquation):
            continue
        node = instruction.node
        read = [v for v in node.inputs if v.tiled]
        together = frozenset[Value]().union(*(arrays.get(v, {v}) for v in read))
        if len(together) > _AT_ONCE:
            written |= {v for v in read if len(arrays.get(v, ())) > 1}
            arrays |= {v: frozenset({v}) for v in read}
            together = frozenset(read)
        for value in node.outputs:
            arrays[value] = together if node.fuses else frozenset({value})
    return written
