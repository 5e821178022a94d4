"""Problems for the solver's tests, and the objective and the optimum as the statement of the problem says them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.solver.outcomes import Outcome
from autopar.solver.problem import ChoiceProblem, Costs, Edges, MemoryRow
from autopar.solver.solve import choose

KINDS = 3
"""Nodes per layer of `stack`."""


def value_of(costs: Sequence[np.ndarray], edges: Edges, choice: Sequence[int] | Mapping[int, int]) -> float:
    """sum_v c_v[s_v] + sum_(u,v) R_uv[s_u, s_v], apart from the code under test."""
    nodes = [float(costs[v][choice[v]]) for v in range(len(costs))]
    return sum(nodes) + sum(float(edges[u, v][choice[u], choice[v]]) for u, v in edges)


def least_value(
    costs: Sequence[np.ndarray], edges: Edges, rows: Sequence[MemoryRow] = (), limit_bytes: float = np.inf
) -> float:
    """The least objective over all choices within memory, by brute force; infinite if there is none."""
    best = np.inf
    for choice in itertools.product(*(range(len(cost)) for cost in costs)):
        if all(row.used(choice) <= limit_bytes for row in rows):
            best = min(best, value_of(costs, edges, choice))
    return best


def choose_of(costs: Sequence[np.ndarray], edges: Edges, **given: Any) -> Outcome:
    """`choose` for costs as a list."""
    return choose(ChoiceProblem(costs=Costs.of(costs, edges), **given))


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
