"""The planner's dynamic programme: against an exact integer programme, and its properties."""

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxtile._plan.model import Stretches
from jaxtile._plan.solver import ChosenStretch, fastest, measured, smallest


def random_tables(seed: int) -> Stretches:
    """Any numbers will do: the programme knows nothing of graphs."""
    rng = np.random.default_rng(seed)
    cuts, modes = rng.integers(2, 7), rng.integers(1, 4)
    shape = (modes, cuts, cuts)
    seconds = rng.integers(1, 30, shape).astype(float)
    seconds[rng.random(shape) < 0.2] = np.inf
    seconds[0] = np.where(np.isfinite(seconds[0]), seconds[0], 17)  # keeping is always possible
    peak, added = rng.integers(1, 40, shape).astype(float), rng.integers(0, 20, shape).astype(float)
    span = np.subtract.outer(np.arange(cuts), np.arange(cuts)).T
    added[0] = 12 * span  # additive, as what plain JAX keeps is
    return Stretches(tuple(range(cuts)), (None,) * modes, seconds, peak, added)


def optimum(tables: Stretches, budget: float) -> float | None:
    """Which stretches to use: a path from the first cut to the last, by scipy's HiGHS."""
    stages = [
        (m, i, j)
        for m, i, j in np.ndindex(*tables.seconds.shape)
        if i < j and np.isfinite(tables.seconds[m, i, j])
    ]
    cuts, n = len(tables.cuts), len(stages)
    flow = np.zeros((cuts, n))
    fits = np.zeros((n, n))
    large = budget + tables.peak.max() + tables.added.clip(0).sum()
    for s, (m, i, j) in enumerate(stages):
        flow[i, s] += 1
        flow[j, s] -= 1
        # If s is used, what earlier stretches store and what s needs is within the budget.
        for t, (k, _, b) in enumerate(stages):
            fits[s, t] = tables.added[k, stages[t][1], b] if b <= i else 0
        fits[s, s] += tables.peak[m, i, j] + large
    ends = np.zeros(cuts)
    ends[0], ends[-1] = 1, -1
    found = milp(
        [tables.seconds[s] for s in stages],
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(flow, ends, ends),
            LinearConstraint(fits, -np.inf, budget + large),
        ],
    )
    return float(found.fun) if found.success else None


@pytest.mark.parametrize("seed", range(60))
def test_against_an_integer_programme(seed):
    tables = random_tables(seed)
    for budget in (10, 20, 30, 45, 70, 200):
        found, best = fastest(tables, budget), optimum(tables, budget)
        if best is None:
            assert found is None
            continue
        assert found.seconds == pytest.approx(best)
        assert found.peak <= budget
        assert found == measured(tables, found.stages)


@pytest.mark.parametrize("seed", range(60))
def test_smallest(seed):
    tables = random_tables(seed)
    found = smallest(tables)
    assert optimum(tables, found.peak) is not None
    assert optimum(tables, found.peak - 1) is None


@pytest.mark.parametrize("seed", range(60))
def test_a_larger_budget_is_never_slower(seed):
    tables = random_tables(seed)
    # Large numbers are rounded to slots.
    scaled = Stretches(
        tables.cuts, tables.modes, tables.seconds, tables.peak * 12345.678, tables.added * 12345.678
    )
    times = []
    for budget in np.linspace(0, 100, 60) * 12345.678:
        found = fastest(scaled, budget)
        times.append(np.inf if found is None else found.seconds)
        assert found is None or found.peak <= budget
    assert times == sorted(times, reverse=True)


def test_a_path_is_measured_in_order():
    tables = random_tables(1)
    stages = tuple(ChosenStretch(0, i, i + 1) for i in range(len(tables.cuts) - 1))
    found = measured(tables, stages)
    assert found.seconds == sum(tables.seconds[s] for s in stages)
    assert found.peak == max(12 * s.start + tables.peak[s] for s in stages)
