"""Property: on any schedule, under any transformation, a function is the plain one."""

import random

import jax
import pytest

from .random_networks import EXAMPLES
from .random_schedules import check, draw
from .support import parametrize_few


def several(seed, cases, **options):
    chance = random.Random(seed)
    for _ in range(cases):
        case = draw(chance, **options)
        found = check(case)
        assert found.split()[0] in ("exact", "ill-conditioned", "refused", "undefined"), case
    jax.clear_caches()


@parametrize_few("only", ["over first", "product"])
def test_random_schedules(only):
    several(1, 2, only=only)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_many_random_schedules(seed):
    several(seed, EXAMPLES // 3)
