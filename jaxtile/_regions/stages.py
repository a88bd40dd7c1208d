"""The instructions of a tile, in stages. Equal stages are traced once.

A stage is a convolution, or another expensive equation, and what lies between the one before it and
itself. Regions that compute the same values again run the same stages, and networks repeat
themselves. So many stages are equal: their equations are alike, and on the same windows. JAX traces
and lowers one of them, and one pullback, and a compiler inlines the calls.

A tile is differentiated stage by stage, and not by JAX as a whole. JAX makes two calls of the
derivative of a call, and hands what the second needs from the one to the other. Here the pullback
of a stage gets the inputs of the stage and computes it again; a compiler, which has inlined both,
finds that it has this already. So what is held between them is for the compiler to choose.

Known inefficiency: a region still has as many calls as it has stages, and windows that grow with
the distance to the result, until they are as large as the array, make stages that are not equal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._graph.values import Node, Value
from .._rules.plainly import plainly
from .tile import (
    Column,
    Cut,
    Instruction,
    Scalars,
    Slot,
    TiledEquation,
    TilePlan,
    evaluate,
    lookup,
    source,
)

RECOMPUTED = "rematted_computation"
"""What `jax.checkpoint` calls its recomputation in the names of operations, and so do we."""

Arrays = Sequence[jax.Array]
Cotangents = dict[Value, jax.Array]
Record = tuple["Stage", tuple[bool, ...], Sequence[Value], Arrays, Arrays]
"""A stage that was run, and its derivative is wanted: of which inputs, what these are, its inputs
and its positions."""


class RunStage:
    """Runs stages and their pullbacks, and traces equal ones once."""

    def __init__(self) -> None:
        def tile(stage: Stage, arrays: Arrays, scalars: Arrays) -> list[jax.Array]:
            with plainly("undifferentiated"):
                return stage.run(arrays, scalars)

        self._run = jax.jit(tile, static_argnums=0)
        self._pull = jax.jit(pullback, static_argnums=(0, 1))

    def __call__(self, stage: Stage, arrays: Arrays, scalars: Arrays) -> list[jax.Array]:
        found: list[jax.Array] = self._run(stage, arrays, scalars)
        return found

    def pull(self, record: Record, cotangents: Cotangents) -> None:
        """Take the cotangents of a stage's outputs, and add to those of its inputs."""
        stage, wanted, sources, arrays, scalars = record
        mine = [cotangents.pop(v, None) for v in stage.outputs]
        if all(c is None for c in mine):
            return
        found = self._pull(stage, wanted, arrays, scalars, mine)
        for value, c in zip(sources, found, strict=True):
            if c is not None:
                cotangents[value] = c if value not in cotangents else cotangents[value] + c


def pullback(
    stage: Stage,
    wanted: Sequence[bool],
    arrays: Arrays,
    scalars: Arrays,
    cotangents: Sequence[jax.Array | None],
) -> list[jax.Array | None]:
    """The cotangents of the wanted inputs of a stage; None: they are zero.

    The stage is run once more. A compiler sees that it has that already.
    """
    places = [i for i, w in enumerate(wanted) if w]
    reached: list[bool] = []

    def run(some: Arrays) -> list[jax.Array]:
        full = list(arrays)
        for i, x in zip(places, _watched(some, reached), strict=True):
            full[i] = x
        results = stage.run(full, scalars)
        return [x for x, c in zip(results, cotangents, strict=True) if c is not None]

    _, pull = jax.vjp(run, [arrays[i] for i in places])
    (found,) = pull([c for c in cotangents if c is not None])
    return [x if r else None for x, r in zip(found, reached or [False] * len(found), strict=True)]


def _watched(arrays: Arrays, reached: list[bool]) -> Arrays:
    """The same arrays; when they are differentiated, it is noted which of them have cotangents."""

    @jax.custom_vjp
    def same(arrays: Arrays) -> Arrays:
        return arrays

    def forward(arrays: Any) -> tuple[Arrays, None]:
        return [x.value for x in arrays], None

    def backward(_: None, cotangents: Sequence[Any]) -> tuple[list[Any]]:
        reached[:] = [not isinstance(c, SymbolicZero) for c in cotangents]
        return ([c if r else None for c, r in zip(cotangents, reached, strict=True)],)

    same.defvjp(forward, backward, symbolic_zeros=True)
    found: Arrays = same(arrays)
    return found


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
    ):
        """`there`: what a tile has before its first stage; `wanted`: what other stages read."""
        self.instructions = instructions
        made = dict.fromkeys(v for i in instructions for v in i.node.outputs)
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

    def run(self, arrays: Arrays, scalars: Arrays) -> list[jax.Array]:
        env = dict(zip(self.inputs, arrays, strict=True))
        row = dict(zip(self.columns, scalars, strict=True))
        evaluate(self.instructions, env, row)
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
            tuple(numbers[v] for v in self.inputs),
            tuple(numbers[v] for v in self.outputs),
            tuple(
                (
                    i.node.kind,
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
    for cut in (*instruction.reads, *instruction.crops):
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
    ):
        """`there`: what a tile has before; `wanted`: what is to be there at the end."""
        self._run_stage = run
        self._chosen = [i for i in plan.instructions if nodes is None or i.node in nodes]
        self._stages = _stages(self._chosen, there, wanted)

    def run(self, env: dict[Value, jax.Array], row: Scalars) -> None:
        """Extend `env` (windows of tiled inputs, whole global inputs) by what is wanted."""
        if self._stages is None:
            return self.run_inline(env, row)
        with _one_mesh():
            for stage in self._stages:
                arrays = [lookup(env, v) for v in stage.inputs]
                self._run(stage, arrays, env, row)

    def run_inline(self, env: dict[Value, jax.Array], row: Scalars) -> None:
        """The same, equation by equation: for JAX to differentiate."""
        evaluate(self._chosen, env, row)

    def pulled(
        self, env: dict[Value, jax.Array], row: Scalars, wanted: Collection[Value]
    ) -> Callable[[Cotangents], Cotangents] | None:
        """The same, and the pullback from values to the wanted ones, stage by stage.

        None: it must be left to JAX.
        """
        if self._stages is None or any(
            i.node.changes_value for s in self._stages for i in s.instructions
        ):
            return None
        records: list[Record] = []
        active = {*wanted}
        with _one_mesh():
            for stage in self._stages:
                sources = [source(env, v) for v in stage.inputs]
                arrays = [lookup(env, v) for v in stage.inputs]
                given = tuple(
                    v in active and _is_inexact(x) for v, x in zip(sources, arrays, strict=True)
                )
                scalars = self._run(stage, arrays, env, row)
                if any(given):
                    active.update(stage.outputs)
                    moved = [v for v, w in zip(sources, given, strict=True) if w]
                    records.append((stage, given, moved, arrays, scalars))

        def pull(cotangents: Cotangents) -> Cotangents:
            with _one_mesh():
                for record in reversed(records):
                    self._run_stage.pull(record, cotangents)
            return cotangents

        return pull

    def _run(
        self, stage: Stage, arrays: Arrays, env: dict[Value, jax.Array], row: Scalars
    ) -> Arrays:
        scalars = [row[k] for k in stage.columns]
        env.update(zip(stage.outputs, self._run_stage(stage, arrays, scalars), strict=True))
        return scalars


def _one_mesh() -> AbstractContextManager[None]:
    """JAX sets the mesh, even if there is none, while it transposes, and would trace all again."""
    found: AbstractContextManager[None] = jax.sharding.use_abstract_mesh(
        jax.sharding.get_abstract_mesh()
    )
    return found


def _is_inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _stages(
    instructions: Sequence[Instruction], there: Collection[Value], wanted: Collection[Value]
) -> Sequence[Stage] | None:
    """The same instructions, in stages, if all of them are equations on windows."""
    equations = [i for i in instructions if isinstance(i, TiledEquation)]
    if len(equations) < len(instructions) or any(i.node.reduction for i in equations):
        return None
    runs: dict[int, list[TiledEquation]] = {}
    for instruction in equations:
        runs.setdefault(instruction.node.stage, []).append(instruction)
    found, wanted = [], {*wanted}
    for _, run in sorted(runs.items(), reverse=True):
        found.append(Stage(run, there, wanted))
        wanted.update(found[-1].inputs)
    return found[::-1]
