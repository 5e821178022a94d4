"""Elimination finds the optimum, says what is impossible, and declines what is too wide."""

import itertools

import numpy as np
import pytest

from autopar.solver.budget import Budget
from autopar.solver.presolve import eliminate, find_order
from autopar.solver.problem import Costs
from tests.solver.problems import least_value, value_of


def random_costs(seed: int, density: float) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, 7)
    costs = [random.uniform(0, 1, size) for size in sizes]
    pairs = [pair for pair in itertools.combinations(range(7), 2) if random.uniform() < density]
    edges = {(u, v): random.uniform(0, 1, (sizes[u], sizes[v])) for u, v in pairs}
    for matrix in edges.values():
        matrix[random.uniform(size=matrix.shape) < 0.2] = np.inf
    return costs, edges


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_brute_force(seed: int, density: float) -> None:
    costs, edges = random_costs(seed, density)
    given = Costs.of(costs, edges)
    order = find_order(given, 1e6)
    assert order is not None
    found = eliminate(given, order, Budget())
    assert found is not None
    best = least_value(costs, edges)
    assert found.value == pytest.approx(best)
    assert list(found.choice) == list(range(7))
    assert value_of(costs, edges, found.choice) == pytest.approx(best)


def test_tables_above_the_limit_are_declined_before_any_is_made() -> None:
    costs = Costs.of([np.zeros(4)] * 6, {pair: np.zeros((4, 4)) for pair in itertools.combinations(range(6), 2)})
    entries = sum(4.0**n for n in range(1, 7))
    assert find_order(costs, entries - 1) is None
    assert find_order(costs, entries) is not None


def test_a_budget_ends_it() -> None:
    costs, edges = random_costs(0, 1.0)
    given = Costs.of(costs, edges)
    order = find_order(given, 1e6)
    assert order is not None
    assert eliminate(given, order, Budget(work=10)) is None
