"""Budgets are kept: on the reference models, and on networks that nobody tuned for."""

import itertools
import random

import jax
import jax.numpy as jnp
import pytest

import jaxtile
import policies
from experiments.measuring.problems import problem, shape_of
from jaxtile._plan.planner import default_step

from .random_networks import CHANNELS, Network
from .test_plan import AXES

SMALL = {"unet": 220, "vgg16": 64, "alexnet": None, "resnet50": 64, "local_cnn": None}
SHARES = (0.5, 0.25)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "resnet50", "local_cnn")]


def check_promise(fun, args, in_axes, share: float) -> None:
    """Within a share of plain's temporaries; or else within the budget that the error names."""
    step = default_step(args, in_axes)

    def compiled(fun):
        return jaxtile.Bytes.of(jax.jit(step(fun)).lower(*args).compile())

    plain = compiled(fun)
    budget = int(plain.fixed + share * plain.temporaries)
    quiet = {"in_axes": in_axes, "progress": lambda line: None}
    try:
        found = policies.plan(fun, *args, budget=budget, **quiet)
    except policies.BudgetError as error:
        budget = error.smallest
        found = policies.plan(fun, *args, budget=budget, **quiet)
    tiled = jaxtile.checkpoint(fun, in_axes=in_axes, policy=found)
    assert found.measured_bytes == compiled(tiled).total <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16", "alexnet", *SLOW])
def test_budgets_are_kept_on_the_reference_models(name):
    batch = 8 if name in ("alexnet", "local_cnn") else 1
    found = problem(name, shape_of(name, batch, SMALL[name]), jnp.float32, abstract=True)
    check_promise(found.loss, found.arguments, found.in_axes, 0.65)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "share"), list(itertools.product(range(22), SHARES)))
def test_budgets_are_kept_on_networks_that_nobody_tuned_for(seed, share):
    fun = drawn(seed)
    check_promise(fun, jax.eval_shape(lambda: fun.args), AXES, share)


def drawn(seed: int) -> Network:
    """A random network of six layers, on an image that is large enough to matter."""
    chance = random.Random(seed)
    layers = [("conv", 3, 3, 1, "SAME", 1, 0.5)] + [
        chance.choice(
            [
                ("conv", 3, 3, chance.choice([1, 1, 2]), "SAME", chance.choice([1, 2]), 0.1),
                ("depthwise",),
                ("max_pool", 2, 2, "VALID"),
                ("average_pool",),
                ("act", chance.choice(["relu", "gelu", "unit"])),
                ("batch_norm",),
                ("instance_norm",),
                ("squeeze_excite",),
                ("skip", chance.randrange(9)),
                ("concatenate", chance.randrange(9)),
                ("resize", "bilinear", 64, 48),
            ]
        )
        for _ in range(5)
    ]
    return Network(tuple(layers), (1, 128, 96, CHANNELS), None, None, seed)
