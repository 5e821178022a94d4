"""Deep problems: what looks alike chooses alike, and the bound is of the whole problem."""

import numpy as np
import pytest

from autopar.solver import repeated_layers
from autopar.solver.memory_prices import MemoryRow
from autopar.solver.repeated_layers import ChoiceProblem, alike, tied
from autopar.solver.solve import choose, value_of

KINDS = 3
"""Nodes per layer of `stack`."""


def stack(
    layers: int, *, seed: int = 0, choices: int = 4
) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """A chain of equal layers of three nodes, with a short cut past each, and its own ends."""
    random = np.random.default_rng(seed)
    own = [random.uniform(0, 2, choices) for _ in range(KINDS)]
    inside = [random.uniform(0, 3, (choices, choices)) for _ in range(KINDS)]
    past = random.uniform(0, 3, (choices, choices))
    costs = [own[v % KINDS].copy() for v in range(KINDS * layers)]
    costs[0] = random.uniform(0, 2, choices)
    costs[-1] = random.uniform(0, 2, choices)
    edges = {(v, v + 1): inside[v % KINDS] for v in range(KINDS * layers - 1)}
    edges |= {(v, v + KINDS): past for v in range(0, KINDS * (layers - 1), KINDS)}
    return costs, edges


def test_the_middle_layers_of_a_stack_are_alike_and_its_ends_are_not() -> None:
    costs, edges = stack(12)
    classes = alike(costs, edges, radius=3)
    middle = [classes[KINDS * layer : KINDS * (layer + 1)].tolist() for layer in range(4, 8)]
    assert all(layer == middle[0] for layer in middle)
    assert len(set(middle[0])) == KINDS
    assert classes[0] not in middle[0]
    assert classes[-1] not in middle[0]


def test_nodes_with_equal_costs_and_different_edges_are_not_alike() -> None:
    costs = [np.zeros(2)] * 4
    near, far = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    classes = alike(costs, {(0, 1): near, (2, 3): far})
    assert classes[0] != classes[2]
    classes = alike(costs, {(0, 1): near, (2, 3): near})
    assert classes[0] == classes[2] != classes[1] == classes[3]


@pytest.mark.parametrize("seed", range(20))
def test_a_tied_choice_costs_in_the_whole_problem_what_it_costs_tied(seed: int) -> None:
    costs, edges = stack(5, seed=seed, choices=3)
    ties = tied(costs, edges, radius=2)
    assert len(ties.costs) < len(costs)
    random = np.random.default_rng(seed)
    numbers = [int(random.integers(len(cost))) for cost in ties.costs]
    whole = ties.extend(numbers)
    assert value_of(ties.costs, ties.edges, numbers) == pytest.approx(value_of(costs, edges, whole), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_a_deep_choice_is_feasible_and_its_bound_does_not_exceed_the_optimum(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_layers, "DEEP", 10)
    costs, edges = stack(40, seed=seed)
    found = ChoiceProblem(costs, edges).choose()
    best = choose(costs, edges)
    assert found is not None
    assert best is not None
    assert found.seconds == pytest.approx(value_of(costs, edges, found.numbers))
    assert found.lower_bound_s <= best.seconds * (1 + 1e-9)
    assert found.seconds <= best.seconds * (1 + 2 * repeated_layers.GOOD_ENOUGH)


def test_a_deep_choice_keeps_the_memory_limit_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "DEEP", 10)
    costs, edges = stack(30)
    sizes = {v: np.linspace(1.0, 4.0, len(cost)) for v, cost in enumerate(costs)}
    row = MemoryRow("point", sizes, 5.0)
    problem = ChoiceProblem(costs, edges)
    free = problem.choose()
    assert free is not None
    limit = 0.5 * (row.least() + row.used(free.numbers))
    found = problem.choose(rows=[row], limit_bytes=limit, free=free)
    assert found is not None
    assert row.used(found.numbers) <= limit < row.used(free.numbers)
    assert found.seconds >= free.seconds
    assert problem.choose(rows=[row], limit_bytes=row.least() - 1.0, free=free) is None


def test_a_deep_problem_is_left_where_its_bound_exceeds_the_cutoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "DEEP", 10)
    costs, edges = stack(30)
    best = choose(costs, edges)
    assert best is not None
    left = ChoiceProblem(costs, edges, cutoff_s=0.5 * best.seconds).choose()
    assert left is not None
    assert left.numbers == ()
    assert 0.5 * best.seconds <= left.lower_bound_s <= best.seconds * (1 + 1e-12)


def test_ties_that_cost_too_much_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in the middle of a chain are alike, and had better differ."""
    monkeypatch.setattr(repeated_layers, "DEEP", 4)
    differ = np.array([[10.0, 0.0], [0.0, 10.0]])
    costs = [np.ones(2) for _ in range(40)]
    edges = {(v, v + 1): differ for v in range(39)}
    classes = alike(costs, edges)
    assert classes[19] == classes[20]
    found = ChoiceProblem(costs, edges).choose()
    assert found is not None
    assert found.seconds == pytest.approx(40.0)
