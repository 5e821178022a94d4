"""Dual ascent a level at a time is dual ascent node by node; on trees it ends at the optimum."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.dual_ascent import Bounded, bound_costs
from autopar.solver.problem import Costs
from autopar.solver.tuning import Tuning
from tests.solver.problems import value_of


def bound(costs, edges, *, sweeps, **given) -> Bounded:
    """`bound_costs` with so many sweeps."""
    return bound_costs(Costs.of(costs, edges), tuning=dataclasses.replace(Tuning(), sweeps=sweeps), **given)


def random_problem(seed, *, nodes, tree=False):
    """Costs, and edges between some pairs of nodes, or to one earlier node each."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, nodes)
    costs = [draw.integers(0, 20, n).astype(float) for n in sizes]
    pairs = [(int(draw.integers(v)), v) for v in range(1, nodes)]
    if not tree:
        pairs = [pair for pair in itertools.combinations(range(nodes), 2) if draw.random() < 0.4]
    return costs, {(u, v): draw.integers(0, 20, (sizes[u], sizes[v])).astype(float) for u, v in pairs}


def node_by_node(costs, edges, *, sweeps):
    """The sweeps as the module's text says them, one node and one edge after another."""
    costs, edges = {v: c.copy() for v, c in enumerate(costs)}, {pair: m.copy() for pair, m in edges.items()}
    for number in range(2 * sweeps):
        up = number % 2 == 0
        for v in sorted(costs, reverse=not up):
            ends = [(m if u == v else m.T, (w if u == v else u) > v) for (u, w), m in edges.items() if v in (u, w)]
            for matrix, _ in ends:
                least = matrix.min(axis=1)
                costs[v] += least
                matrix -= least[:, None]
            ahead = [matrix for matrix, higher in ends if higher == up]
            if ahead:
                share = costs[v] / max(len(ahead), len(ends) - len(ahead))
                for matrix in ahead:
                    matrix += share[:, None]
                costs[v] -= share * len(ahead)
    return costs, edges


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5))
def test_sweeps_are_those_of_one_node_after_another(seed, nodes, sweeps):
    costs, edges = random_problem(seed, nodes=nodes)
    bounded = bound(costs, edges, sweeps=sweeps)
    shifted, between = node_by_node(costs, edges, sweeps=sweeps)
    for v, cost in shifted.items():
        np.testing.assert_allclose(bounded.shifted.nodes[v], cost, atol=1e-9)
    assert set(bounded.shifted.edges) == set(between)
    for pair, matrix in between.items():
        np.testing.assert_allclose(bounded.shifted.edges[pair], matrix, atol=1e-9)
    lower = sum(c.min() for c in shifted.values()) + sum(m.min() for m in between.values())
    assert bounded.lower == pytest.approx(min(lower, bounded.upper))


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_shifted_costs_are_an_equivalent_problem(seed, nodes):
    costs, edges = random_problem(seed, nodes=nodes)
    bounded = bound(costs, edges, sweeps=7)
    shifted = [bounded.shifted.nodes[v] for v in range(nodes)]
    choice = [int(p) for p in np.random.default_rng(seed).integers([len(c) for c in costs])]
    assert value_of(shifted, bounded.shifted.edges, choice) == pytest.approx(value_of(costs, edges, choice))


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_on_a_tree_the_choice_meets_the_bound(seed, nodes):
    costs, edges = random_problem(seed, nodes=nodes, tree=True)
    bounded = bound(costs, edges, sweeps=96)
    assert bounded.upper == pytest.approx(bounded.lower, rel=1e-6)
    assert bounded.upper == pytest.approx(value_of(costs, edges, [bounded.choice[v] for v in range(nodes)]))


def test_where_the_bound_is_tight_the_greedy_choice_from_the_lowest_node_up_meets_it():
    met = 0
    for seed in range(40):
        costs, edges = random_problem(seed, nodes=40, tree=True)
        bounded = bound(costs, edges, sweeps=8, gap=0.0)
        met += bounded.upper - bounded.lower <= 1e-6 * bounded.upper
    assert met >= 38


def test_a_choice_that_is_forbidden_is_taken_by_nobody():
    costs = [np.array([1.0, np.inf]), np.array([0.0, 0.0])]
    bounded = bound(costs, {(0, 1): np.array([[np.inf, 5.0], [0.0, 0.0]])}, sweeps=8)
    assert (bounded.choice, bounded.upper) == ({0: 0, 1: 1}, 6.0)
