"""Steps of training are begun one ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.devices.hosts import Devices
from experiments.training.ahead import Ahead
from experiments.training.feed import Sent
from experiments.training.instruments import Clock
from experiments.training.learner import Learner
from experiments.training.run import Rates
from experiments.training.step import Step, make_optimiser

from .tiny_config import get_config


class Steps:
    """What `Ahead` asks of a run, with a note of the order; the loss of a step is its number."""

    config = ConfigDict({"data": {"kind": "cells"}})

    def __init__(self, pauses=(), on_disk=False, batches=9, processes=1):
        self.devices = Devices()
        self.devices.processes = processes
        self.done, self.on_disk, self.pauses, self.order = 0, on_disk, pauses, []
        self.begun, self.batches = 0, batches

    def pauses_after(self, step):
        return step in self.pauses

    def begin(self, batch):
        self.begun += 1
        self.order.append(f"begin {self.begun}")
        return {"loss": batch.images.sum(), "finite": jnp.array(True)}

    def feed(self):
        for number in range(1, self.batches + 1):
            yield Sent(jnp.array([number]), jnp.array([0]), (f"{number}.png",))
        raise OSError("9.png cannot be read")


def ahead(run):
    clock = Clock(None, 1, (8, 8, 1))
    clock.last = 0.0  # the step before was short
    return Ahead(run, run.feed(), clock, lambda text: None)


def take(run, steps, number, last=False):
    for _ in range(number):
        values, batch = steps.next(last=last)
        run.done += 1
        run.order.append(f"end {run.done}")
        assert values["loss"] == run.done
        assert batch.names == (f"{run.done}.png",)
        assert batch.images.is_deleted()


def test_a_step_is_begun_before_the_last_one_has_ended():
    run = Steps(pauses=(3,))
    take(run, ahead(run), 4)
    assert run.order == [
        *("begin 1", "begin 2", "end 1", "begin 3", "end 2", "end 3"),
        *("begin 4", "begin 5", "end 4"),
    ]


def test_none_is_begun_behind_the_last_one():
    run = Steps()
    steps = ahead(run)
    take(run, steps, 1)
    take(run, steps, 1, last=True)
    assert run.order == ["begin 1", "begin 2", "end 1", "end 2"]
    assert steps.running is None


ONE_BY_ONE = ["begin 1", "end 1", "begin 2", "end 2"]


@pytest.mark.parametrize("options", [{"on_disk": True}, {"processes": 2}])
def test_some_steps_are_begun_one_by_one(options):
    run = Steps(**options)
    take(run, ahead(run), 2)
    assert run.order == ONE_BY_ONE


def test_long_steps_are_begun_one_by_one():
    run = Steps()
    steps = ahead(run)
    for _ in range(2):
        steps.clock.last = 2.0
        take(run, steps, 1)
    assert run.order == ONE_BY_ONE


def test_an_error_comes_at_its_own_step():
    run = Steps(batches=2)
    steps = ahead(run)
    take(run, steps, 2)
    for _ in range(2):
        with pytest.raises(OSError, match=r"9\.png cannot be read"):
            steps.next(last=False)


def test_nothing_changes_behind_a_step_that_is_not_finite():
    config = get_config()
    learner = Learner(config)
    images, labels = np.zeros((2, 32, 32, 1), np.float32), np.zeros((2, 32, 32), np.int32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (images, labels)]
    step = Step(learner, make_optimiser(config)[0], shapes)
    state = step.first_state()
    gradients, update = jax.tree.map(jnp.ones_like, state.params), step.update()
    before = jax.tree.map(np.array, state)
    changed = {}
    for loss, sound in ((1.0, False), (np.nan, True), (1.0, True)):
        state, values = update(state, np.array(sound), loss, before.variables, gradients)
        same = jax.tree.map(np.array_equal, jax.tree.map(np.array, state), before)
        changed[bool(values["finite"])] = not all(jax.tree.leaves(same))
    assert changed == {False: False, True: True}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_rates_are_those_of_the_schedule(schedule):
    config = get_config()
    config.train.update(steps=10_000, schedule=schedule, warmup_steps=20)
    _, wanted = make_optimiser(config)
    found = Rates(wanted)
    for step in (0, 1, 19, 20, 4095, 4096, 9_999, 3):
        assert found(step) == pytest.approx(float(wanted(step)), rel=1e-5, abs=1e-9)
