"""A choice made better one node at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.problem import Costs

WORTH_IT = 1e-12
"""Relative gain below which a change counts as rounding."""


def improve_choice(choice: Mapping[int, int], costs: Costs, budget: Budget | None = None) -> dict[int, int]:
    """Change the choice of single nodes while that lowers the objective and the budget lasts; deterministic."""
    budget = budget or Budget()
    near: dict[int, list[tuple[int, np.ndarray]]] = {v: [] for v in costs.nodes}
    for (u, v), m in costs.edges.items():
        near[u].append((v, m))
        near[v].append((u, m.T))
    best = dict(choice)
    pending: Sequence[int] = sorted(costs.nodes)
    while pending:
        touched: set[int] = set()
        for v in pending:
            if budget.is_over:
                return best
            budget.spend(len(costs.nodes[v]) * (1 + len(near[v])))
            total = costs.nodes[v] + sum(m[:, best[w]] for w, m in near[v])
            p = int(np.argmin(total))
            if np.isfinite(total[p]) and total[best[v]] - total[p] > WORTH_IT * abs(total[p]):
                best[v] = p
                touched.update(w for w, _ in near[v])
        pending = sorted(touched)
    return best
