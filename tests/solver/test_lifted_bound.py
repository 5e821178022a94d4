"""The lifted bound and the quick one against brute force, and against dual ascent on the whole problem."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from autopar.solver import search as solver_search
from autopar.solver.dual_ascent import bound_costs
from autopar.solver.problem import ChoiceProblem, Costs
from autopar.solver.repeated_layers import lift_bound, tie_nodes
from autopar.solver.search import bound_quickly
from autopar.solver.tuning import TUNING

BY_SWEEPS = dataclasses.replace(TUNING, quick_entries=0)
"""No problem is narrow enough for elimination."""


def _stack(layers: int, seed: int, *, choices: int = 3, forbidden: float = 0.0, coupling: float = 1.0) -> Costs:
    """A chain of equal layers of three nodes with a skip, between two ends of their own."""
    rng = np.random.default_rng(seed)
    kinds = [rng.random(choices) for _ in range(3)]
    along = [coupling * rng.random((choices, choices)) for _ in range(4)]
    for matrix in along:
        matrix[rng.random(matrix.shape) < forbidden] = np.inf
    nodes = [rng.random(choices)]
    edges = {}
    for _ in range(layers):
        first = len(nodes)
        nodes += kinds
        edges |= {(first - 1, first): along[0], (first, first + 1): along[1], (first + 1, first + 2): along[2]}
        edges[first - 1, first + 2] = along[3]
    nodes.append(rng.random(choices))
    edges[len(nodes) - 2, len(nodes) - 1] = along[0]
    return Costs.of(nodes, edges)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_choice_goes_below(seed: int, is_tied: bool) -> None:
    costs = _stack(2, seed, forbidden=0.1 * (seed % 3))
    least = min(costs.value(c) for c in itertools.product(range(3), repeat=len(costs.nodes)))
    ties = tie_nodes(costs, radius=1 + seed % 4) if is_tied else None
    assert lift_bound(ChoiceProblem(costs=costs, ties=ties)) <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_the_quick_bound_is_the_optimum_by_elimination_and_below_it_by_sweeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = {pair: rng.random((3, 3)) for pair in itertools.combinations(range(6), 2)}
    for matrix in edges.values():
        matrix[rng.random(matrix.shape) < 0.2 * (seed % 4)] = np.inf
    costs = Costs.of([rng.random(3) for _ in range(6)], edges)
    least = min(costs.value(c) for c in itertools.product(range(3), repeat=6))
    assert bound_quickly(costs) == pytest.approx(least)
    by_sweeps = bound_quickly(costs, tuning=BY_SWEEPS)
    assert 0.5 * least <= by_sweeps < least if seed % 4 == 0 else by_sweeps <= least * (1 + 1e-9)
    enough = 0.9 * by_sweeps
    assert enough <= bound_quickly(costs, cutoff_s=enough, tuning=BY_SWEEPS) <= by_sweeps * (1 + 1e-9)


def test_the_quick_bound_ends_at_the_cutoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reduced away counts, so the ascent has that much less to reach."""
    rng = np.random.default_rng(0)
    edges = {pair: rng.random((3, 3)) for pair in itertools.combinations(range(6), 2)}
    costs = Costs.of([*(rng.random(3) for _ in range(6)), np.array([0.5])], edges)
    cutoffs: list[float] = []

    def note(reduced: Costs, *, cutoff: float, **options: Any) -> Any:
        cutoffs.append(cutoff)
        return bound_costs(reduced, cutoff=cutoff, **options)

    monkeypatch.setattr(solver_search, "bound_costs", note)
    bound_quickly(costs, cutoff_s=4.0, tuning=BY_SWEEPS)
    assert cutoffs == [pytest.approx(3.5)]


@pytest.mark.parametrize("seed", range(10))
def test_is_near_the_bound_of_the_whole_where_layers_hardly_depend_on_each_other(seed: int) -> None:
    costs = _stack(40, seed, coupling=0.05)
    whole = bound_costs(costs)
    assert 0.9 * whole.lower <= lift_bound(ChoiceProblem(costs=costs)) <= whole.upper
