"""One training step as a compiled program: optimiser, schedule, policy, bytes."""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

import jaxtile
import policies
from jaxtile._run.repeats import Repeats
from jaxtile._schedule import Options, scheduled
from policies import format_bytes

from ..data import Dataset
from ..devices.hosts import Devices
from ..devices.memory import Peak
from ..program.config import ConfigError
from ..program.files import write_atomically
from .checkpoints import flatten, unflatten
from .feed import Sent
from .learner import Learner, Weights

_SOUND = jax.ShapeDtypeStruct((), bool)
"""Were all steps before this one finite?"""


class State(NamedTuple):
    """All that a step changes."""

    params: Any
    variables: Any
    optimiser: Any
    ema: Any
    """Moving average of the weights; empty if there is none."""

    @property
    def weights(self) -> Weights:
        """Those to evaluate."""
        return Weights(self.ema or self.params, self.variables)


def new_state(learner: Learner, optimiser: optax.GradientTransformation) -> State:
    """Before the first step; a function of the seed."""
    params, variables = learner.weights()
    average = jax.tree.map(jnp.array, params) if learner.config.train.ema else ()
    return State(params, variables, optimiser.init(params), average)


def make_optimiser(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimiser, and the learning rate as a function of the step."""
    train = config.train
    if train.warmup_steps >= train.steps:
        raise ConfigError(
            f"`train.warmup_steps` (={train.warmup_steps}) must be less than `train.steps` "
            f"(={train.steps})"
        )
    left = train.steps - train.warmup_steps
    after = {
        "constant": optax.constant_schedule(train.learning_rate),
        "cosine": optax.cosine_decay_schedule(train.learning_rate, left),
        "linear": optax.linear_schedule(train.learning_rate, 0.0, left),
    }[train.schedule]
    rate = after
    if train.warmup_steps:
        warmup = optax.linear_schedule(0.0, train.learning_rate, train.warmup_steps)
        rate = optax.join_schedules([warmup, after], [train.warmup_steps])
    decay = train.weight_decay
    optimiser = {
        "sgd": lambda: optax.chain(
            optax.add_decayed_weights(decay), optax.sgd(rate, momentum=train.momentum or None)
        ),
        "adam": lambda: optax.chain(optax.add_decayed_weights(decay), optax.adam(rate)),
        "adamw": lambda: optax.adamw(rate, weight_decay=decay),
        "lamb": lambda: optax.lamb(rate, weight_decay=decay),
    }[train.optimiser]()
    clip = optax.clip_by_global_norm(train.clip_norm) if train.clip_norm else optax.identity()
    return optax.chain(clip, optimiser), rate


def batch_shapes(dataset: Dataset, size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of images and labels."""
    return (
        jax.ShapeDtypeStruct((size, *dataset.shape), dataset.dtype),
        jax.ShapeDtypeStruct((size, *dataset.label_shape), dataset.label_dtype),
    )


class Step:
    """One step of training on batches of one shape; what its loss stores, a policy says."""

    def __init__(
        self,
        learner: Learner,
        optimiser: optax.GradientTransformation,
        batch: Any,
        devices: Devices | None = None,
    ):
        self.learner, self.optimiser, self.devices = learner, optimiser, devices or Devices()
        self.state = _strong(jax.eval_shape(lambda: new_state(learner, optimiser)))
        self.batch = tuple(batch)

    def first_state(self) -> State:
        """Before the first step; a function of the seed."""
        new = jax.jit(
            lambda: new_state(self.learner, self.optimiser), out_shardings=self.devices.replicated
        )
        made = new.lower()
        # It runs once, and LLVM takes seconds to optimise each of its random numbers.
        return made.compile(compiler_options={"xla_backend_optimization_level": 0})()

    def begun_with(self, weights: Weights, source: str) -> State:
        """Before the first step, with the weights of another run."""
        for ours, theirs in zip(self.state[:2], weights, strict=True):
            unflatten(ours, flatten(theirs), source)  # an error if it is of another model
        params, variables = jax.tree.map(jnp.asarray, tuple(weights))
        average = jax.tree.map(jnp.array, params) if self.state.ema else ()
        return State(params, variables, self.optimiser.init(params), average)

    def traced(self, policy: Any) -> Any:
        """The step under a policy; None: the plain loss, as it was written, on one device."""
        if policy is None:
            return self._of(self.learner.loss).trace(self.state, _SOUND, *_strong(self.batch))
        axes, devices = self.learner.in_axes(2), self.devices
        options = devices.options(axes[2])
        options["skip"] = self.learner.config.skip
        loss = jaxtile.checkpoint(self.learner.loss, in_axes=axes, policy=policy, **options)
        state = devices.typed(self.state, replicated=True)
        sound = devices.typed(_SOUND, replicated=True)
        batch = devices.typed(self.batch, replicated=False)
        return self._of(loss, devices.replicated).trace(state, sound, *batch)

    def repeats(self, policy: Any) -> Callable[[Any, Any], int]:
        """From images and labels to how many tiles a step skips forwards, or more."""
        options = Options.of(self.learner.in_axes(2), policy=policy, skip=True)
        schedule, _ = scheduled(self.learner.loss, self._loss_arguments, {}, options)
        count, given = Repeats(schedule), self._loss_arguments[:2]

        def skipped(images: Any, labels: Any) -> int:
            return sum(count(jax.tree.leaves((*given, images, labels))).values())

        return skipped

    def plan(self, budget: int, progress: Callable[[str], None] | None = None) -> policies.Plan:
        """For the whole step on one device: optimiser, gradients and batch included, and the next
        batch, which is sent while a step runs.
        """
        ahead = self.batch_bytes
        try:
            return policies.plan(
                self.learner.loss,
                *self._loss_arguments,
                in_axes=self.learner.in_axes(2),
                budget=max(1, budget - ahead),
                step=self._of,
                step_args=(self.state, _SOUND, *self.batch),
                skip=self.learner.config.skip,
                # All processes of a run must come to the same plan, however fast each is. On a CPU
                # the fastest of three is chance, and two runs should do the same.
                time_limit=60 if jax.process_count() == 1 else math.inf,
                measure=jax.process_count() == 1 and jax.default_backend() != "cpu",
                steps=self.learner.config.train.steps,
                progress=progress,
            )
        except policies.BudgetError as error:
            smallest = error.smallest + ahead
            raise policies.BudgetError(
                f"of the budget of {format_bytes(budget)} the next batch takes "
                f"{format_bytes(ahead)}. For the rest: {error}. With the batch that is "
                f"{format_bytes(smallest)}",
                smallest,
            ) from error

    @property
    def batch_bytes(self) -> int:
        """On the device."""
        return sum(x.size * x.dtype.itemsize for x in self.batch if not _hosted(x))

    def outline(self) -> jaxtile.policy.Outline:
        axes = self.learner.in_axes(2)
        return jaxtile.policy.outline(self.learner.loss, *self._loss_arguments, in_axes=axes)

    @property
    def _loss_arguments(self) -> tuple[Any, ...]:
        return (self.state.params, self.state.variables, *self.batch)

    def _of(self, loss: Callable[..., Any], place: Any = None) -> Callable[..., Any]:
        def step(
            state: State, sound: jax.Array, images: jax.Array, labels: jax.Array
        ) -> tuple[State, dict]:
            (value, variables), gradients = jax.value_and_grad(loss, has_aux=True)(
                state.params, state.variables, images, labels
            )
            return self._updated(state, sound, value, variables, gradients)

        return jax.jit(step, donate_argnums=0, out_shardings=place)

    def update(self) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
        """The end of a step, for a loss that was differentiated elsewhere: the new state, from the
        old one, whether that is sound, the loss, the new variables and the gradients.
        """
        return jax.jit(self._updated, donate_argnums=0)

    def _updated(
        self, state: State, sound: jax.Array, value: jax.Array, variables: Any, gradients: Any
    ) -> tuple[State, dict[str, jax.Array]]:
        decay = self.learner.config.train.ema

        def averaged(ema: Any, params: Any) -> Any:
            return jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, ema, params)

        updates, moments = self.optimiser.update(gradients, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = averaged(state.ema, params) if decay else ()
        norm = optax.tree.norm(gradients)
        # A step that is not finite changes nothing, so that what came before can be saved; nor does
        # one that was begun behind it, before that was known.
        new = State(params, variables, moments, ema)
        finite = sound & _all_finite((value, norm, new))
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return new, {"loss": value, "gradient_norm": norm, "finite": finite}


def _all_finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def _hosted(x: jax.ShapeDtypeStruct) -> bool:
    return x.sharding is not None and x.sharding.memory_kind == "pinned_host"


def _strong(shapes: Any) -> Any:
    """Without weak types, which a checkpoint does not keep, and without places."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def choose_policy(
    step: Step, text: str, file: pathlib.Path, progress: Callable[[str], None] | None = None
) -> Any:
    """The policy that a config names; for a budget a plan, kept in a file for the next time.

    All processes of a run come to the same plan: it depends on the function and the kind of device.
    """
    if not text.startswith("budget:"):
        return policies.resolve(text)
    budget = policies.parse_bytes(text.removeprefix("budget:"))
    if progress is not None:
        progress(f"planning for {format_bytes(budget)}")
    if file.exists():
        try:
            plan = policies.Plan.load(file)
            outline, device = step.outline(), policies.costs().device
            wanted = (budget - step.batch_bytes, outline.fingerprint, device)
            if (plan.budget, plan.fingerprint, plan.device) == wanted:
                plan.choose(outline)  # an error if it names what is not there
                return plan
        except ValueError as error:
            print(f"warning: {error}; planning anew", flush=True)
    plan = step.plan(budget, progress)
    if not step.devices.is_first:
        return plan
    write_atomically(file, json.dumps(plan.as_json(), indent=1) + "\n")
    return plan


class Program:
    """The compiled step of a run, and its bytes."""

    def __init__(self, step: Step, policy: Any):
        began = time.perf_counter()
        traced = step.traced(policy)
        self.devices = step.devices
        # What a mesh's devices hold is not estimated yet.
        self.estimated = estimated_bytes(traced) if self.devices.mesh is None else None
        self.step = traced.lower().compile()
        self.bytes = jaxtile.Bytes.of(self.step).total
        skips = policy is not None and step.learner.config.skip
        self.repeats = step.repeats(policy) if skips else None
        self.compile_seconds = time.perf_counter() - began
        self.peak = Peak()

    def bytes_text(self) -> str:
        """Of a step; on a mesh, of each device."""
        estimated = "" if self.estimated is None else f" ({format_bytes(self.estimated)} estimated)"
        each = "" if self.devices.mesh is None else f" on each of {self.devices.mesh.size} devices"
        return f"{format_bytes(self.bytes)}{each}{estimated}"

    def skipped(self, batch: Sent) -> int:
        """Tiles of a step that are skipped forwards, or more."""
        return batch.skipped

    def memory_text(self) -> str:
        peak = self.peak.observed()
        return f"step {format_bytes(self.bytes)}" if peak is None else f"peak {format_bytes(peak)}"


def estimated_bytes(traced: Any) -> int:
    """Of a traced step, before it is compiled: a guess."""
    return jaxtile.estimate_memory(traced).bytes.total
