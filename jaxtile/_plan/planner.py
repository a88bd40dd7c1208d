"""The budget planner: `jaxtile.plan`, and the policy behind `jaxtile.checkpoint(budget=...)`.

A budget limits what the compiled training step needs: `temporaries + arguments + outputs -
aliases`. The step is part of the question, since the gradients and the optimiser need memory too.
Here the function, its arguments and the step are put together; `search` finds the schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._amounts import parse_bytes
from .._graph.static import shown
from .._graph.trace import Traced, flat_axes, only_arrays
from .._platform import tracing_for
from .._run.ordering import host_of, on_host, to_device, typed
from .._schedule import Options, tiled
from ..policy import Choice, Choices, Outline, outline
from .absent import absent_device, bytes_moved, moving, placed
from .costs import Costs, built_in_for_another, has_host_memory, host_memory
from .costs import costs as costs_of_device
from .measuring import with_measured
from .plan import Plan
from .search import TIME_LIMIT, TIME_LIMIT_ELSEWHERE, Search, Terms


def plan(
    fun: Callable[..., Any],
    *args: Any,
    in_axes: Any,
    budget: int | str,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    step_args: Sequence[Any] | None = None,
    offload: bool | int | str = False,
    costs: Costs | str | os.PathLike[str] | None = None,
    measure: bool = False,
    steps: float = math.inf,
    device: str | None = None,
    time_limit: float | None = None,
    static_argnums: int | Sequence[int] = (),
    skip: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest schedule of `fun` whose compiled training step fits a budget of bytes.

    Args:
      fun: as for `jaxtile.checkpoint`; functions of NNX modules too.
      args: arrays or `jax.ShapeDtypeStruct`s. Bind keyword arguments with `functools.partial`.
      in_axes: as for `jaxtile.checkpoint`.
      budget: bytes, as `"2GiB"`: of arguments, outputs and temporaries of the compiled step.
      step: from the tiled function to the step that is compiled; by default the value and the
        gradients with respect to all float arguments that are not tiled. If the step has an
        optimiser in it, say so here: `step=lambda tiled: train_step_of(tiled)`.
      step_args: the arguments of the step, if they are not `args`.
      offload: may results wait in host memory, and in how many bytes of it, as `"48GiB"`? True: in
        as many as XLA has for arrays there, which is 64 GiB, unless JAX was started with another
        number in `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, and in at most three quarters of it all.
      costs: rates of the device, or a file of them; by default those that were measured for it, or
        built in.
      measure: may the planner run something? Then it times kinds of operations that its table of
        costs does not have, and keeps these times for this device; and it runs a few steps of the
        two or three best schedules, on arguments of zeros, and takes the fastest. The budget must
        be free on the device.
      steps: how many steps will be taken with the plan. If they are few, little time is spent on
        measuring: timing operations and comparing schedules each last about a twentieth of what
        all steps will.
      device: a GPU that need not be there, as "NVIDIA H200", or a file that describes it to XLA.
        JAX's CUDA plugin must be. The plan is then not compiled as it will run: plan again on the
        GPU itself, or look at `jaxtile.memory` there.
      time_limit: seconds after which no better schedule is looked for, once one fits; by default
        60, and 300 if the device is not here and so waits for nobody. Processes that must come to
        the same plan need `math.inf`.
      static_argnums: as for `jaxtile.checkpoint`.
      skip: as for `jaxtile.checkpoint`, which must then have it too. Times are those of all tiles.
      progress: called with a line of text before each search for a schedule, and before and after
        each compilation; by default they are printed to the standard error.

    Raises:
      BudgetError: nothing fits; it says the smallest budget that works.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> def loss(kernel, image):
    ...     for _ in range(3):
    ...         image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    ...     return jnp.mean(image**2)
    >>> kernel, image = jnp.ones((8, 8, 3, 3)), jnp.ones((1, 8, 64, 64))
    >>> axes = (None, (2, 3))
    >>> quietly = {"progress": lambda line: None}
    >>> plan = jaxtile.plan(loss, kernel, image, in_axes=axes, budget="600kB", **quietly)
    >>> plan.measured_bytes <= 600_000
    True
    >>> tiled = jaxtile.checkpoint(loss, in_axes=axes, policy=plan)
    >>> bool(jnp.allclose(tiled(kernel, image), loss(kernel, image)))
    True
    """
    if _has_modules(args):
        fun, args = _without_modules(fun, args, step)
    args, step_args = typed((args, step_args))
    options = Options.of(in_axes, static_argnums=static_argnums)
    args, _ = only_arrays(fun, args, {}, options.static_argnums)
    view = _told(outline(fun, *args, in_axes=in_axes), skip)
    if not view.parts:
        raise ValueError("there is nothing to plan: the function has no operations")
    device = None if device == jax.devices()[0].device_kind else device
    if measure and device is not None:
        raise ValueError(f"nothing can be measured on {device!r}: it is not here")
    given = args if step_args is None else step_args
    terms = Terms(
        parse_bytes(budget),
        _table(costs, device),
        host=_host_memory(offload, device),
        moved=0 if device is None else bytes_moved(given),
        platform=None if device is None else "gpu",
        measure=measure,
        steps=steps,
        time_limit=_patience(device) if time_limit is None else time_limit,
        progress=progress,
    )
    if costs is None and (warning := built_in_for_another(device)):
        terms.say(f"plan: {warning}")
    if measure:
        terms = dataclasses.replace(terms, costs=with_measured(view, terms.costs, terms.say, steps))
    make = step or default_step(args, in_axes, _has_gradients(view))
    if device is not None:
        make, given = _for_absent(make, given, device)
    traced = _evaluated(view.traced, fun, options.static_argnums)
    with tracing_for(terms.platform):
        return Search(view, _steps(traced, in_axes, make, given, skip), terms).run()


def _patience(device: str | None) -> float:
    return TIME_LIMIT if device is None else TIME_LIMIT_ELSEWHERE


def _table(costs: Costs | str | os.PathLike[str] | None, device: str | None) -> Costs:
    """The rates to plan with."""
    if not isinstance(device, str | None):
        raise TypeError(f"`device` (={device!r}) must be a GPU's name, as 'NVIDIA H200', or a file")
    if costs is None:
        return costs_of_device(device)
    if isinstance(costs, Costs):
        return costs
    if not isinstance(costs, str | os.PathLike):
        raise TypeError(f"`costs` (={costs!r}) must be a `policies.Costs` or the path of a table")
    return Costs.load(costs)


def _told(view: Outline, skip: bool) -> Outline:
    """If tiles are skipped, no loop does both passes, and the loss is a sum as any other."""
    return dataclasses.replace(view, loss=None) if skip else view


def _for_absent(
    make: Callable[..., Any], args: Sequence[Any], device: str
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """How to make a step, and its arguments, for a device that is not there."""
    return lambda tiled: moving(make(tiled), args), placed(args, absent_device(device))


def _host_memory(offload: bool | int | str, device: str | None) -> int:
    """Bytes of host memory for results that wait; 0 on a CPU, which has no memory apart."""
    if offload is False or (device is None and not has_host_memory()):
        return 0
    return host_memory(here=device is None) if offload is True else parse_bytes(offload)


def _steps(
    fun: Callable[..., Any],
    in_axes: Any,
    make: Callable[..., Any],
    given: Sequence[Any],
    skip: bool,
) -> Callable[[Any], Any]:
    """From a policy to the traced step of a function; from None to the plain one."""

    def traced(policy: Any) -> Any:
        options = Options(in_axes, policy=policy, skip=skip)
        run = make(fun if policy is None else tiled(fun, options))
        return (run if hasattr(run, "trace") else jax.jit(run)).trace(*given)

    return traced


class Budget:
    """A policy that plans when it first sees a function, and keeps the plan for these shapes."""

    def __init__(self, budget: int | str, skip: bool = False):
        self.bytes, self.skip = parse_bytes(budget), skip
        self._plans: dict[Any, Choices] = {}

    def __repr__(self) -> str:
        return f"budget:{self.bytes}"

    def choose(self, outline: Outline) -> Choices:
        if not outline.parts:
            return {...: Choice(None)}
        key = outline.fingerprint, *map(on_host, outline.traced.arguments)
        if key not in self._plans:
            view = _told(outline, self.skip)
            self._plans[key] = plan_outline(view, self.bytes, self.skip).choices
        return self._plans[key]


def plan_outline(view: Outline, budget: int, skip: bool) -> Plan:
    """The plan for a function that is known by its outline only, with the default step."""
    known = view.traced
    in_axes = tuple(_as_in_axes(labels, known.rank) for labels in known.in_axes)
    # What the function closes over may be traced; it becomes arguments.
    held = [*known.jaxpr.invars, *known.jaxpr.constvars]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in held]
    there = host_of(jax.devices()[0])
    for i, x in enumerate(known.arguments):
        if on_host(x):
            shapes[i] = jax.ShapeDtypeStruct(shapes[i].shape, shapes[i].dtype, sharding=there)
    in_axes += (None,) * len(known.jaxpr.constvars)

    def fun(*leaves: Any) -> Any:
        n = len(known.jaxpr.invars)
        return _evaluate(known, leaves[n:], leaves[:n])

    make = default_step(shapes, in_axes, _has_gradients(view))
    # Other processes must come to the same plan, however fast each is.
    terms = Terms(budget, costs_of_device(), time_limit=math.inf)
    return Search(view, _steps(fun, in_axes, make, shapes, skip), terms).run()


def _evaluated(
    known: Traced, fun: Callable[..., Any], static_argnums: Sequence[int]
) -> Callable[..., Any]:
    """The function as it was traced: its equations, which are faster to trace again than a
    library's Python code. For arguments of other shapes or types, the function itself.
    """
    expected = [(v.aval.shape, v.aval.dtype) for v in known.jaxpr.invars]

    @functools.wraps(fun)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves(only_arrays(fun, args, kwargs, static_argnums))
        if [(jnp.shape(x), jax.dtypes.result_type(x)) for x in leaves] != expected:
            return fun(*shown(args), **shown(kwargs))
        results = _evaluate(known, known.consts, leaves)
        return jax.tree.unflatten(known.out_tree, results)

    return evaluated


def _evaluate(known: Traced, consts: Sequence[Any], leaves: Sequence[Any]) -> list[jax.Array]:
    """The equations; a result that is a constant is an array too."""
    given = zip(leaves, known.jaxpr.invars, strict=True)
    moved = [
        to_device(x) if jax.typeof(x).memory_space is not v.aval.memory_space else x
        for x, v in given
    ]
    return [jnp.asarray(x) for x in jax.core.eval_jaxpr(known.jaxpr, consts, *moved)]


def default_step(
    args: Sequence[Any], in_axes: Any, has_gradients: bool = True
) -> Callable[..., Any]:
    """From a function to its value and its gradients, if it has any.

    If the first result is a number, it is the loss; otherwise the loss is the sum of all results.
    """
    tiled_axes, _ = flat_axes(in_axes, tuple(args), jax.tree.leaves(tuple(args)))
    leaves, tree = jax.tree.flatten(tuple(args))
    floats = [i for i, x in enumerate(leaves) if _is_float(x)]
    wanted = [i for i in floats if not any(a is not None for a in tiled_axes[i])] or floats

    def step_of(tiled: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any) -> Any:
            given = jax.tree.leaves(args)

            def loss(some: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
                full = list(given)
                for i, x in zip(wanted, some, strict=True):
                    full[i] = x
                out = tiled(*jax.tree.unflatten(tree, full))
                results = [x for x in jax.tree.leaves(out) if _is_float(x)]
                if results and results[0].ndim == 0:
                    return results[0].real, out
                sums = [jnp.sum(x.real.astype(jnp.float32)) for x in results]
                return functools.reduce(jnp.add, sums, jnp.float32(0)), out

            if not wanted or not has_gradients:
                return tiled(*args)
            return jax.value_and_grad(loss, has_aux=True)([given[i] for i in wanted])

        return step

    return step_of


def _as_in_axes(labels: Sequence[int | None], rank: int) -> Any:
    if not any(a is not None for a in labels):
        return None
    return tuple(labels.index(a) if a in labels else None for a in range(rank))


def _without_modules(
    fun: Callable[..., Any], args: tuple[Any, ...], step: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of NNX modules as a function of their states."""
    from .._modules import Pure  # Flax is imported by those who have its modules only

    if step is not None:
        raise ValueError(
            "`step` cannot be given together with NNX modules: split them with `nnx.split` and "
            "plan the function of their states"
        )
    pure = Pure(fun, args, {})
    return pure, pure.args


def _has_gradients(view: Outline) -> bool:
    return any(_is_float(v.aval) for v in view.traced.jaxpr.outvars)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", None) or jnp.result_type(x), jnp.inexact)


def _has_modules(args: Any) -> bool:
    """Are there NNX modules or variables? Those in an `nnx.State`, a pytree, do not count."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False

    def known(x: Any) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable | nnx.State)

    found = jax.tree.leaves(args, is_leaf=known)
    return any(isinstance(x, nnx.Pytree | nnx.Variable) for x in found)
