"""A lower bound of a deep problem, found on the problem in which alike nodes choose alike.

A reparametrisation with any messages is a bound. So messages may be shared: dual ascent runs on the tied problem, which does not
grow with the depth, and each edge of the whole problem gets the messages of the edge that it was added to, divided by the
number of edges there. The bound of the whole problem is then

    sum_v min_p (c_v[p] + sum_e x_e[p]) + sum_e min_pq (R_e[p, q] - x_e[p] - y_e[q])

where nodes whose costs and messages agree, and edges whose matrices and messages agree, are looked at once (Mladenov, Ahmadi
and Kersting, "Lifted linear programming", 2012: on an equitable partition nothing is lost).

In: a problem. Out: seconds that no choice of the whole problem goes below. What can go wrong: ties look at a few edges around a
node only, so a node near the ends of the stack has other messages than its class. The bound is then below what dual ascent on
the whole problem reaches, and further sweeps may lower it; a few are the best (`Tuning.lifted_sweeps`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np

from autopar.solver.classes import merge_classes
from autopar.solver.dual_ascent import pass_messages
from autopar.solver.problem import ChoiceProblem, Costs, Ties
from autopar.solver.repeated_layers import tie_nodes

Pair = tuple[int, int]
"""Two classes of nodes, the lower number first."""
Shares = Mapping[Pair, tuple[np.ndarray, np.ndarray]]
"""The messages that each edge between two classes gets at its ends: seconds, arrays (choices,)."""


def lift_bound(problem: ChoiceProblem) -> float:
    """Seconds that no choice of the whole problem goes below, memory left out."""
    ties = problem.ties
    if problem.classes is not None:
        problem, ties = merge_classes(problem, problem.classes), None
    if ties is None:
        ties = tie_nodes(problem.costs, radius=problem.tuning.radius)
    counts = Counter(_pair(ties, edge) for edge in problem.costs.edges)
    best = -np.inf
    for sweeps in problem.tuning.lifted_sweeps:
        messages = pass_messages(ties.costs, counts, sweeps=sweeps, budget=problem.budget)
        shares = {pair: (x / counts[pair], y / counts[pair]) for pair, (x, y) in messages.items()}
        best = max(best, _evaluate(problem.costs, ties, shares))
    return float(best)


def _pair(ties: Ties, edge: Pair) -> Pair:
    a, b = int(ties.class_of[edge[0]]), int(ties.class_of[edge[1]])
    return (a, b) if a < b else (b, a)


@dataclasses.dataclass(frozen=True, eq=False)
class _Edge:
    """An edge of the whole problem after messages: what its ends take over (choices,), and the least that is left."""

    messages: tuple[np.ndarray, np.ndarray]
    least: float


def _evaluate(costs: Costs, ties: Ties, shares: Shares) -> float:
    """The bound of the whole problem with these messages."""
    edges: dict[tuple[int, int, int], _Edge] = {}
    around: dict[int, list[tuple[tuple[int, int, int], int]]] = {v: [] for v in costs.nodes}
    total, big = 0.0, _more_than_any(costs)
    class_of = ties.class_of.tolist()
    for (u, v), matrix in costs.edges.items():
        key = (class_of[u], class_of[v], id(matrix))
        if key not in edges:
            edges[key] = _reparametrise(np.where(np.isfinite(matrix), matrix, big), key[0], key[1], shares)
        total += edges[key].least
        around[u].append((key, 0))
        around[v].append((key, 1))
    nodes: dict[object, float] = {}
    for v, cost in costs.nodes.items():
        alike = (class_of[v], tuple(sorted(around[v])))
        if alike not in nodes:
            parts = [edges[key].messages[end] for key, end in around[v]]
            nodes[alike] = float(np.min(sum(parts, np.where(np.isfinite(cost), cost, big))))
        total += nodes[alike]
    return total


def _reparametrise(matrix: np.ndarray, a: int, b: int, shares: Shares) -> _Edge:
    """An edge between a node of class a and one of class b."""
    if a == b:  # the tied problem holds such an edge as costs of its node
        x = y = np.diagonal(matrix) / 2
    elif a < b:
        x, y = shares[a, b]
    else:
        y, x = shares[b, a]
    return _Edge((x, y), float((matrix - x[:, None] - y[None, :]).min()))


def _more_than_any(costs: Costs) -> float:
    """Seconds above those of every finite choice, to take the place of infinity."""
    arrays = (*costs.nodes.values(), *costs.edges.values())
    most = {id(a): float(np.max(a[np.isfinite(a)], initial=0.0)) for a in arrays}
    return 4.0 * sum(most[id(a)] for a in arrays) + 1.0
