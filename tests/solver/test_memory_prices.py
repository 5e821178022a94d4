"""Prices on memory: bounds that hold, choices that fit, and mixtures of what was met on the way."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.solver import within_memory
from autopar.solver.budget import Budget
from autopar.solver.memory_prices import price_memory
from autopar.solver.outcomes import Chosen, DoesNotFit, Outcome
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow
from autopar.solver.repeated_layers import tie_layers
from autopar.solver.search import Found, search
from autopar.solver.solve import choose
from autopar.solver.tuning import Tuning
from autopar.solver.within_memory import mix_choices
from tests.solver.problems import choose_of, least_value, stack


def knapsack(nodes: int, *, seed: int = 0) -> tuple[list[np.ndarray], MemoryRow]:
    """Independent nodes, each fast and large or slow and small."""
    random = np.random.default_rng(seed)
    costs = [np.array([1.0, random.uniform(2, 3)]) for _ in range(nodes)]
    row = MemoryRow("all", {v: np.array([random.uniform(1, 2), 0.0]) for v in range(nodes)}, 1.0)
    return costs, row


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

    def solve(priced: Costs) -> Found:
        return Found({v: int(np.argmin(cost)) for v, cost in priced.nodes.items()}, 0.0)

    tuning = dataclasses.replace(Tuning(), good_enough=1e-6)
    problem = ChoiceProblem(costs=Costs.of(costs, {}), rows=[row], limit_bytes=limit, tuning=tuning)
    priced = price_memory(problem, [(0,) * 12], 0.0, solve=solve)
    assert priced.lower_bound_s == pytest.approx(best_dual(costs, row, limit), rel=1e-5)
    assert priced.best is not None
    assert row.used(priced.best.numbers) <= limit
    assert [trial.seconds for trial in priced.trials] == sorted(trial.seconds for trial in priced.trials)
    assert priced.is_exact
    rough = price_memory(problem, [(0,) * 12], 0.0, solve=lambda costs: dataclasses.replace(solve(costs), gap=1e-6))
    assert not rough.is_exact


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_of_searches_that_leave_a_gap_is_one(seed: int) -> None:
    """A search that takes the dearer choice of some nodes says by how much it may exceed the optimum."""
    costs, row = knapsack(12, seed=seed)
    limit, random = 0.5 * row.used([0] * 12), np.random.default_rng(seed)

    def solve_roughly(priced: Costs) -> Found:
        is_dearer = random.random(12) < 0.2
        choice = {v: int(np.argmax(cost) if is_dearer[v] else np.argmin(cost)) for v, cost in priced.nodes.items()}
        least = sum(float(cost.min()) for cost in priced.nodes.values())
        return Found(choice, priced.value(choice) - least)

    problem = ChoiceProblem(costs=Costs.of(costs, {}), rows=[row], limit_bytes=limit)
    priced = price_memory(problem, [(0,) * 12], 0.0, solve=solve_roughly)
    assert 12.0 < priced.lower_bound_s <= best_dual(costs, row, limit) * (1 + 1e-9)


def test_prices_that_bring_a_choice_that_is_known_are_not_tried_again() -> None:
    """A quick search leaves a gap, and finds the same at the same prices: all further rounds would be like this one."""
    costs, row = knapsack(12)
    asked: list[bytes] = []

    def solve_quickly(priced: Costs) -> Found:
        asked.append(b"".join(cost.tobytes() for cost in priced.nodes.values()))
        return Found(dict.fromkeys(range(12), 1), 5.0)

    problem = ChoiceProblem(costs=Costs.of(costs, {}), rows=[row], limit_bytes=0.5 * row.used([0] * 12))
    priced = price_memory(problem, [(0,) * 12], 0.0, solve=solve_quickly)
    assert priced.best is not None
    assert priced.best.numbers == (1,) * 12
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize("seed", range(6))
def test_a_priced_choice_fits_and_lies_between_its_bound_and_a_good_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs, edges = stack(3, seed=seed, choices=3)
    row = MemoryRow("all", {v: random.uniform(0, 4, len(cost)) for v, cost in enumerate(costs)}, 2.0)
    free = choose_of(costs, edges)
    assert isinstance(free, Chosen)
    limit = 0.4 * row.least() + 0.6 * row.used(free.numbers)
    tuning = dataclasses.replace(Tuning(), direct_pairs=20)
    problem = ChoiceProblem(costs=Costs.of(costs, edges), rows=[row], limit_bytes=limit, tuning=tuning)
    found = choose(problem, free=free)
    best = least_value(costs, edges, [row], limit)
    assert isinstance(found, Chosen)
    assert row.used(found.numbers) <= limit
    assert found.lower_bound_s <= best * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert found.seconds <= 1.15 * best


def test_mixing_takes_of_every_node_what_one_of_the_choices_takes() -> None:
    costs, row = knapsack(9, seed=3)
    limit = 0.6 * row.used([0] * 9)

    def mixed(tried: Sequence[tuple[int, ...]]) -> Outcome:
        return mix_choices(ChoiceProblem(costs=Costs.of(costs, {}), rows=[row], limit_bytes=limit), tried)

    found = mixed([(0,) * 9, (1,) * 9])
    assert isinstance(found, Chosen)
    assert found.seconds == pytest.approx(least_value(costs, {}, [row], limit), rel=2e-3)
    half = mixed([(0,) * 9, (0,) * 4 + (1,) * 5])
    assert isinstance(half, DoesNotFit) or set(half.numbers[:4]) == {0}
    assert isinstance(mixed([(0,) * 9]), DoesNotFit)


def test_alike_layers_take_turns_where_memory_is_a_little_short() -> None:
    costs, edges = stack(40)
    sizes = {v: np.linspace(4.0, 1.0, len(cost)) for v, cost in enumerate(costs)}
    row = MemoryRow("point", sizes, 5.0)
    tuning = dataclasses.replace(Tuning(), deep=10, direct_pairs=300)
    problem = tie_layers(ChoiceProblem(costs=Costs.of(costs, edges), tuning=tuning))
    free = choose(problem)
    assert isinstance(free, Chosen)
    limit = 0.99 * row.used(free.numbers)
    found = choose(dataclasses.replace(problem, rows=[row], limit_bytes=limit), free=free)
    assert isinstance(found, Chosen)
    assert row.used(found.numbers) <= limit
    assert found.seconds <= 1.03 * free.seconds, "all layers changed where a few were enough"


def test_prices_that_were_searched_to_the_optimum_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, row = knapsack(12)
    tried: list[bool] = []

    def note(*args: Any, is_quick: bool, **given: Any) -> Found:
        tried.append(is_quick)
        found = search(*args, is_quick=is_quick, **given)
        assert isinstance(found, Found)
        return dataclasses.replace(found, gap=gap)

    monkeypatch.setattr(within_memory, "search", note)
    for gap in (0.0, 1e-3):
        tried.clear()
        found = choose_of(costs, {}, rows=[row], limit_bytes=0.5 * row.used([0] * 12), tuning=Tuning(tiny_pairs=-1))
        assert isinstance(found, Chosen)
        assert all(tried) == (gap == 0)


def test_a_byte_too_much_of_many_costs_one_more_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS keeps a row to a millionth of its scale, so the limit falls by as much, and not by twice a byte each time."""
    programs = []
    solve_integer_program = within_memory.solve_integer_program

    def noting(*args: Any, **options: Any) -> object:
        programs.append(options)
        return solve_integer_program(*args, **options)

    monkeypatch.setattr(within_memory, "solve_integer_program", noting)
    costs = [np.array([1.0, 2.0, 5.0]) for _ in range(4)]
    row = MemoryRow("all", {v: np.array([4e9, 3.9e9, 1e9]) for v in range(4)}, 0.0)
    problem = ChoiceProblem(costs=Costs.of(costs, {}), rows=[row], limit_bytes=16e9 - 1)
    found = mix_choices(problem, [(0,) * 4, (1,) * 4, (2,) * 4])
    assert isinstance(found, Chosen)
    assert row.used(found.numbers) <= 16e9 - 1
    assert found.seconds == 5.0
    assert len(programs) <= 2


@pytest.mark.parametrize("gap_work", [1.0, math.inf])
def test_the_integer_program_ends_before_prices_where_a_gap_has_a_worth(
    monkeypatch: pytest.MonkeyPatch, gap_work: float
) -> None:
    costs, row = knapsack(24, seed=5)
    left: list[float] = []
    solve = within_memory.solve_integer_program

    def note(*given: Any, budget: Budget, **options: Any) -> Any:
        left.append(budget.work_left)
        return solve(*given, budget=budget, **options)

    monkeypatch.setattr(within_memory, "solve_integer_program", note)
    tuning = Tuning(gap_work=gap_work, direct_work=1e7)
    found = choose_of(costs, {}, rows=[row], limit_bytes=0.53 * row.used([0] * 24), tuning=tuning)
    assert isinstance(found, Chosen)
    assert left[0] == (1e7 if math.isfinite(gap_work) else math.inf)
