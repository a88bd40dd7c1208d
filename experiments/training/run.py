"""A run: what it is made of, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import policies

from ..data import Batches
from ..devices.hosts import Devices
from ..measuring.profile import predicted
from ..program.config import ConfigError
from ..program.progress import Now
from .evaluation import Evaluation
from .feed import Sent, placed
from .from_disk import FromDisk, choose_tiles
from .learner import Learner
from .out_of_memory import Budgets, OutOfMemory, Stopped
from .saved import Saved
from .setup import Refusal, examined_data, without_order
from .step import Program, Step, batch_shapes, choose_policy, make_optimiser
from .trained import first_weights
from .workdir import Workdir


class Rates:
    """Learning rates by step, computed for many steps at a time: one that is asked for between
    steps would be computed by the device, behind the step that runs by then.
    """

    _AT_ONCE = 4096

    def __init__(self, schedule: Callable[[Any], Any]):
        self._schedule, self._first, self._rates = schedule, 0, np.zeros(0)

    def __call__(self, step: int) -> float:
        if not self._first <= step < self._first + len(self._rates):
            self._first = step - step % self._AT_ONCE
            steps = np.arange(self._first, self._first + self._AT_ONCE)
            self._rates = np.asarray(jax.vmap(self._schedule)(steps))
        return float(self._rates[step - self._first])


class Run:
    """A run in its folder: made, compiled, then taken up where it stopped.

    Attributes:
      done: steps so far.
      state: after them, and after the step that runs, if one does.
      sound: was that finite, and all before it?
      record: what is saved beside the state, the best evaluation so far.
    """

    def __init__(self, config: ConfigDict, workdir: Workdir, devices: Devices, now: Now):
        self.config, self.workdir, self.devices = config, workdir, devices
        now("tracing the model")
        self.learner = Learner(config)
        now("looking at the data")
        self.train_set, self.eval_set = examined_data(self.learner, workdir.path, devices)
        optimiser, rate = make_optimiser(config)
        self.learning_rate = Rates(rate)
        shapes = batch_shapes(self.train_set, config.train.batch_size)
        self.placement = placed(shapes, config, devices)
        if self.placement.text:
            print(self.placement.text, flush=True)
        self.step = Step(self.learner, optimiser, self.placement.shapes, devices)
        self.budgets = Budgets(config.policy, workdir.path, alone=devices.processes == 1)
        self.saved = Saved(workdir.path, config.checkpoint.keep, devices)
        self.restore(now)
        self.total = config.train.steps
        if self.done > self.total:
            raise ConfigError(
                f"`train.steps` (={self.total}) is less than the {self.done} steps done already"
            )

    def restore(self, now: Now) -> None:
        """Go back to the last checkpoint, or to the beginning."""
        now("making weights, or restoring them")
        self.done, self.state, self.record = self.saved.restore(self.step)
        if self.done == 0 and self.config.start_from:
            weights, new = first_weights(self.learner, self.config.start_from)
            self.state = self.step.begun_with(weights, self.config.start_from)
            print(f"beginning with the weights of {self.config.start_from}{new}", flush=True)

    def compile(self, now: Now, batches: Batches) -> None:
        """Choose the policy, and compile a step and an evaluation while the first batches are made.

        These have to wait for the plan, since it comes from measured times.
        """
        with Refusal(), OutOfMemory(self.step, self.budgets, self.done):
            if not self.on_disk:
                plan = self.workdir.path / "plan.json"
                self.policy = choose_policy(self.step, self.budgets.policy, plan, now)
            if self.done < self.total:
                batches.begin()
            self.program = self._from_disk() if self.on_disk else self._compiled(now)
            now("compiling the evaluation")
            self.evaluation = Evaluation(
                self.step, self.eval_set, self.program.bytes, from_disk=self.on_disk
            )
        seconds = self.program.compile_seconds + self.evaluation.compile_seconds
        print(
            f"compiled in {seconds:.0f} s: a step needs {self.program.bytes_text()}, policy "
            f"{self.budgets.policy}\nevaluation of {self.evaluation.text}",
            flush=True,
        )

    @property
    def on_disk(self) -> bool:
        return self.placement.where == "disk"

    def _compiled(self, now: Now) -> Program:
        now("compiling the step")
        program = Program(self.step, self.policy)
        on_gpu = jax.default_backend() == "gpu"
        if self.config.deterministic and on_gpu and (names := without_order(program.step)):
            print(
                f"warning: the step has {names} operations, which add in no fixed order on a GPU: "
                "a run that goes on may differ in the last bits",
                flush=True,
            )
        return program

    def _from_disk(self) -> FromDisk:
        tiles = choose_tiles(self.step, self.budgets.policy)
        self.policy = policies.resolve(tiles.policy)
        return FromDisk(self.step, tiles, self.workdir.path)

    def take_up(self, now: Now) -> None:
        """Place the state on the devices, and bring the folder to where the state is."""
        now("placing the weights")
        self.state = self.devices.everywhere(self.state)
        self.sound = self.devices.everywhere(np.array(True))
        self.workdir.adopt(self.config)
        every = self.config.eval.every
        evaluated = self.workdir.rewind(
            self.done, range(every, self.done + 1, every) if every else ()
        )
        self.saved.forget_best_after(self.done)
        lost = self.done == self.total and self.done not in evaluated
        if self.devices.from_first(np.array(lost)):
            now("evaluating, since the last evaluation was lost")
            self.evaluate()  # the summary is about it

    def begin(self, batch: Sent) -> dict[str, jax.Array]:
        """One step of the state, which need not have ended when this returns; its numbers."""
        self.state, values = self.program.step(self.state, self.sound, batch.images, batch.labels)
        self.sound = values["finite"]
        return values

    def accept(self, values: dict[str, float], batch: Sent) -> dict[str, Any]:
        """Count the step, and write its line of metrics. One that is not finite ends the run."""
        if not values["finite"]:
            self.save()
            raise Stopped(_not_finite(self.done, values, batch, self.saved.folder))
        self.done += 1
        line = {
            "step": self.done,
            "loss": values["loss"],
            "gradient_norm": values["gradient_norm"],
            "learning_rate": self.learning_rate(self.done - 1),
        }
        self.workdir.write(line)
        return line

    def evaluate(self) -> dict[str, Any]:
        """Metrics over the held-out images; the weights are kept if they are the best so far."""
        result = {"step": self.done, "split": "eval", **self.evaluation(self.state.weights)}
        self.workdir.write(result)
        quality, best = result[self.learner.task.quality], self.record["best"]
        if quality is not None and (best is None or quality > best["quality"]):
            self.record["best"] = {"step": self.done, "quality": quality}
            self.saved.save_best(self.done, self.state, self.record)
        return result

    def save(self) -> None:
        """A checkpoint, after the metrics that lead to it are on the disk."""
        self.workdir.sync()
        self.saved.save(self.done, self.state, self.record)

    def predicted(self) -> dict[str, float]:
        """Seconds of a step by region, as the planner has them."""
        return predicted(self.step.outline(), self.policy)

    def pauses_after(self, step: int) -> bool:
        """Is there something to do with the state after this step, before the next one?"""
        config = self.config
        return any(
            self._is_due(step, every) for every in (config.eval.every, config.checkpoint.every)
        )

    def is_due(self, every: int) -> bool:
        """Of what is done every so many steps, and after the last one; 0: only then."""
        return self._is_due(self.done, every)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.total or bool(every and step % every == 0)


def _not_finite(done: int, values: dict[str, float], batch: Sent, folder: Any) -> str:
    return (
        f"step {done + 1} is not finite: the loss is {values['loss']}, the norm of the gradients "
        f"{values['gradient_norm']}, and the batch was {', '.join(batch.names)}. The weights from "
        f"before are saved in {folder / str(done)}. A lower train.learning_rate, more "
        "train.warmup_steps, a smaller train.clip_norm or dtype float32 may help"
    )
