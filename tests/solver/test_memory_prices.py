"""Prices on memory: bounds that hold, choices that fit, and mixtures of what was met on the way."""

import itertools

import numpy as np
import pytest

from autopar.solver import integer_program, solve
from autopar.solver.memory_prices import MemoryRow, Pricing
from autopar.solver.repeated_layers import ChoiceProblem
from autopar.solver.solve import choose, mixed, value_of
from tests.solver.test_repeated_layers import stack


def knapsack(nodes: int, *, seed: int = 0) -> tuple[list[np.ndarray], MemoryRow]:
    """Independent nodes, each fast and large or slow and small."""
    random = np.random.default_rng(seed)
    costs = [np.array([1.0, random.uniform(2, 3)]) for _ in range(nodes)]
    row = MemoryRow("all", {v: np.array([random.uniform(1, 2), 0.0]) for v in range(nodes)}, 1.0)
    return costs, row


def best_within(
    costs: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray], row: MemoryRow, limit: float
) -> float:
    every = itertools.product(*(range(len(cost)) for cost in costs))
    return min((value_of(costs, edges, c) for c in every if row.used(c) <= limit), default=np.inf)


def best_dual(costs: list[np.ndarray], row: MemoryRow, limit: float) -> float:
    """max over one price of min over choices of cost + price x excess, by trying all prices at which a node changes."""
    at = [0.0, *(limit * (cost[1] - cost[0]) / row.bytes_of[v][0] for v, cost in enumerate(costs))]

    def dual(price: float) -> float:
        each = [min(cost + price / limit * row.bytes_of[v]) for v, cost in enumerate(costs)]
        return sum(each) - price * (1 - row.fixed_bytes / limit)

    return max(map(dual, at))


@pytest.mark.parametrize("seed", range(8))
def test_prices_reach_the_best_bound_that_prices_can(seed: int) -> None:
    costs, row = knapsack(12, seed=seed)
    limit = 0.5 * row.used([0] * 12)

    def solve(priced: list[np.ndarray]) -> tuple[tuple[int, ...], float]:
        numbers = tuple(int(np.argmin(cost)) for cost in priced)
        return numbers, float(sum(cost.min() for cost in priced))

    pricing = Pricing(costs, [row], limit, solve, lambda choice: value_of(costs, {}, choice))
    priced = pricing.run([(0,) * 12], 0.0, cutoff_s=np.inf, good_enough=1e-6)
    assert priced.lower_bound_s == pytest.approx(best_dual(costs, row, limit), rel=1e-5)
    assert priced.best is not None
    assert row.used(priced.best.numbers) <= limit
    assert [trial.seconds for trial in priced.trials] == sorted(trial.seconds for trial in priced.trials)


@pytest.mark.parametrize("seed", range(6))
def test_a_priced_choice_fits_and_lies_between_its_bound_and_a_good_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    costs, edges = stack(3, seed=seed, choices=3)
    row = MemoryRow("all", {v: random.uniform(0, 4, len(cost)) for v, cost in enumerate(costs)}, 2.0)
    free = choose(costs, edges)
    assert free is not None
    limit = 0.4 * row.least() + 0.6 * row.used(free.numbers)
    monkeypatch.setattr(solve, "DIRECT_PAIRS", 20)
    found = choose(costs, edges, rows=[row], limit_bytes=limit, free=free)
    best = best_within(costs, edges, row, limit)
    assert found is not None
    assert row.used(found.numbers) <= limit
    assert found.lower_bound_s <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert found.seconds <= 1.15 * best


def test_mixing_takes_of_every_node_what_one_of_the_choices_takes() -> None:
    costs, row = knapsack(9, seed=3)
    limit = 0.6 * row.used([0] * 9)
    found = mixed(costs, {}, rows=[row], limit_bytes=limit, tried=[(0,) * 9, (1,) * 9])
    assert found is not None
    assert found.seconds == pytest.approx(best_within(costs, {}, row, limit), rel=2e-3)
    half = mixed(costs, {}, rows=[row], limit_bytes=limit, tried=[(0,) * 9, (0,) * 4 + (1,) * 5])
    assert half is None or set(half.numbers[:4]) == {0}
    assert mixed(costs, {}, rows=[row], limit_bytes=limit, tried=[(0,) * 9]) is None


def test_alike_layers_take_turns_where_memory_is_a_little_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.repeated_layers.DEEP", 10)
    monkeypatch.setattr(solve, "DIRECT_PAIRS", 300)
    costs, edges = stack(40)
    sizes = {v: np.linspace(4.0, 1.0, len(cost)) for v, cost in enumerate(costs)}
    row = MemoryRow("point", sizes, 5.0)
    problem = ChoiceProblem(costs, edges)
    free = problem.choose()
    assert free is not None
    limit = 0.99 * row.used(free.numbers)
    found = problem.choose(rows=[row], limit_bytes=limit, free=free)
    assert found is not None
    assert row.used(found.numbers) <= limit
    assert found.seconds <= 1.03 * free.seconds, "all layers changed where a few were enough"


def test_a_limit_of_nodes_gives_what_was_found_or_nothing_and_no_error() -> None:
    random = np.random.default_rng(0)
    costs = {v: random.uniform(0, 1, 6) for v in range(14)}
    edges = {(u, v): random.uniform(0, 1, (6, 6)) for u, v in itertools.combinations(range(14), 2)}
    live = integer_program.LiveSet("all", {v: random.uniform(0, 1, 6) for v in range(14)}, 4.0)
    solution = integer_program.solve(costs, edges, [live], node_limit=1, gap=0.0)
    if solution.choice is not None:
        assert sum(live.bytes_of[v][p] for v, p in solution.choice.items()) <= 4.0 + 1e-6
        value = value_of(list(costs.values()), edges, [solution.choice[v] for v in range(14)])
        assert solution.lower <= value * (1 + 1e-9)
