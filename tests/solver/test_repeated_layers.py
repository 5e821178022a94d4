"""Deep problems: what looks alike chooses alike, and the bound is of the whole problem."""

import dataclasses

import numpy as np
import pytest

from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, NotSearched, Unfinished
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow
from autopar.solver.repeated_layers import number_alike, tie_layers, tie_nodes
from autopar.solver.solve import choose
from autopar.solver.tuning import Tuning
from tests.solver.problems import KINDS, choose_of, stack, value_of


def deep(costs, edges, *, nodes, **given) -> ChoiceProblem:
    """A problem with ties, where more than so many nodes count as deep."""
    tuning = dataclasses.replace(Tuning(), deep=nodes)
    return tie_layers(ChoiceProblem(costs=Costs.of(costs, edges), tuning=tuning, **given))


def test_the_middle_layers_of_a_stack_are_alike_and_its_ends_are_not() -> None:
    costs, edges = stack(12)
    classes = number_alike(Costs.of(costs, edges), radius=3)
    middle = [classes[KINDS * layer : KINDS * (layer + 1)].tolist() for layer in range(4, 8)]
    assert all(layer == middle[0] for layer in middle)
    assert len(set(middle[0])) == KINDS
    assert classes[0] not in middle[0]
    assert classes[-1] not in middle[0]


def test_nodes_with_equal_costs_and_different_edges_are_not_alike() -> None:
    costs = [np.zeros(2)] * 4
    near, far = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    classes = number_alike(Costs.of(costs, {(0, 1): near, (2, 3): far}), radius=6)
    assert classes[0] != classes[2]
    classes = number_alike(Costs.of(costs, {(0, 1): near, (2, 3): near}), radius=6)
    assert classes[0] == classes[2] != classes[1] == classes[3]


@pytest.mark.parametrize("seed", range(20))
def test_a_tied_choice_costs_in_the_whole_problem_what_it_costs_tied(seed: int) -> None:
    costs, edges = stack(5, seed=seed, choices=3)
    ties = tie_nodes(Costs.of(costs, edges), radius=2)
    assert len(ties.costs.nodes) < len(costs)
    random = np.random.default_rng(seed)
    numbers = [int(random.integers(len(cost))) for cost in ties.costs.nodes.values()]
    whole = ties.extend(numbers)
    tied = list(ties.costs.nodes.values())
    assert value_of(tied, ties.costs.edges, numbers) == pytest.approx(value_of(costs, edges, whole), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_a_deep_choice_is_feasible_and_its_bound_does_not_exceed_the_optimum(seed: int) -> None:
    costs, edges = stack(40, seed=seed)
    problem = deep(costs, edges, nodes=10)
    found = choose(problem)
    best = choose_of(costs, edges)
    assert problem.ties is not None
    assert isinstance(found, Chosen)
    assert isinstance(best, Chosen)
    assert found.seconds == pytest.approx(value_of(costs, edges, found.numbers))
    assert found.lower_bound_s <= best.seconds * (1 + 1e-9)
    assert found.seconds <= best.seconds * (1 + 2 * Tuning().good_enough)


def test_a_deep_choice_keeps_the_memory_limit_of_the_whole() -> None:
    costs, edges = stack(30)
    sizes = {v: np.linspace(1.0, 4.0, len(cost)) for v, cost in enumerate(costs)}
    row = MemoryRow("point", sizes, 5.0)
    problem = deep(costs, edges, nodes=10)
    free = choose(problem)
    assert isinstance(free, Chosen)
    limit = 0.5 * (row.least() + row.used(free.numbers))
    found = choose(dataclasses.replace(problem, rows=[row], limit_bytes=limit), free=free)
    assert isinstance(found, Chosen)
    assert row.used(found.numbers) <= limit < row.used(free.numbers)
    assert found.seconds >= free.seconds
    too_low = dataclasses.replace(problem, rows=[row], limit_bytes=row.least() - 1.0)
    assert choose(too_low, free=free) == DoesNotFit(row.least())


def test_a_deep_problem_is_left_where_its_bound_exceeds_the_cutoff() -> None:
    costs, edges = stack(30)
    best = choose_of(costs, edges)
    assert isinstance(best, Chosen)
    left = choose(deep(costs, edges, nodes=10, cutoff_s=0.5 * best.seconds))
    assert isinstance(left, CutOff)
    assert 0.5 * best.seconds <= left.lower_bound_s <= best.seconds * (1 + 1e-12)


def differing(cost: float) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """A chain of 40 alike nodes whose neighbours pay for choosing alike."""
    matrix = np.array([[cost, 0.0], [0.0, cost]])
    return [np.ones(2) for _ in range(40)], {(v, v + 1): matrix for v in range(39)}


def test_ties_that_cost_too_much_are_given_up() -> None:
    """Neighbours in the middle of a chain are alike, and had better differ."""
    costs, edges = differing(10.0)
    classes = number_alike(Costs.of(costs, edges), radius=6)
    assert classes[19] == classes[20]
    found = choose(deep(costs, edges, nodes=4))
    assert isinstance(found, Chosen)
    assert found.seconds == pytest.approx(40.0)


def test_what_ties_make_impossible_is_not_said_to_be_impossible() -> None:
    """A chain whose neighbours must differ is possible, but not with ties between them."""
    costs, edges = differing(np.inf)
    assert isinstance(choose_of(costs, edges), Chosen)
    assert choose(deep(costs, edges, nodes=4)) == Unfinished()
    assert isinstance(choose(deep(costs, edges, nodes=4, cutoff_s=100.0)), NotSearched)


def test_a_limit_that_ties_cannot_meet_is_not_said_to_be_too_low() -> None:
    """Of two alike neighbours one fits in the first way and one in the second, but both only if they differ."""
    costs, edges = differing(0.5)
    rows = [MemoryRow("one way", {v: np.array([1.0, 0.0]) for v in range(40)})]
    rows += [MemoryRow("other", {v: np.array([0.0, 1.0]) for v in range(40)})]
    problem = dataclasses.replace(deep(costs, edges, nodes=4), rows=rows, limit_bytes=20.0)
    whole = choose(dataclasses.replace(problem, ties=None))
    assert isinstance(whole, Chosen)
    assert choose(problem, free=whole) == Unfinished()
