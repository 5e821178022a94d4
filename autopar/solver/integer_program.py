"""The intra-operator choice as an integer program, built with PuLP and solved with HiGHS.

Minimise  sum_v c_v . s_v + sum_(u,v) R_uv . e_uv  over

    s_v[p] in {0, 1}      node v takes choice p
    e_uv[p, q] >= 0       the same for a pair, relaxed (the tight form: linking makes it integral)

subject to

    choose[v]             sum_p s_v[p] = 1
    link[u, v, p]         sum_q e_uv[p, q] = s_u[p]
    link[u, v, q]         sum_p e_uv[p, q] = s_v[q]
    memory[t]             sum_(v in t) m_v . s_v <= limit_t

In: costs, edges, live sets. Out: a choice per node, and the proven lower bound. What can go wrong: no choice fits the memory;
`solve` then returns no choice. The work is limited by branch-and-bound nodes, not by time, so results are reproducible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pulp

Edges = Mapping[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class LiveSet:
    """Memory at one program point: bytes of each choice of each live node that is still open, and what is left of the limit."""

    name: str
    bytes_of: Mapping[int, np.ndarray]
    limit_bytes: float


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """`choice` is None when nothing fits; `lower` is the proven bound on the objective."""

    choice: Mapping[int, int] | None
    lower: float


def solve(
    costs: Mapping[int, np.ndarray], edges: Edges, live_sets: Sequence[LiveSet], *, node_limit: int, gap: float
) -> Solution:
    """Build and solve the program; see the module's text."""
    scale = _scale(costs, edges)
    model = pulp.LpProblem("intra_op", pulp.LpMinimize)
    s = choice_variables(model, costs)
    e = pair_variables(model, edges)
    model.setObjective(objective(costs, edges, s, e, scale))
    one_choice_each(model, s)
    pairs_agree(model, s, e)
    memory_fits(model, s, live_sets)
    options: dict[str, Any] = {"mip_max_nodes": node_limit, "random_seed": 0}
    solver = pulp.HiGHS(msg=False, threads=1, gapRel=gap, **options)
    _run(model, solver)
    values = {v: [pulp.value(x) for x in row] for v, row in s.items()}
    if any(x is None for row in values.values() for x in row):
        return Solution(None, np.inf)
    choice = {v: int(np.argmax(row)) for v, row in values.items()}
    if any(max(row) < 0.99 for row in values.values()):
        return Solution(None, np.inf)
    highs = getattr(model, "solverModel", None)
    bound = float(highs.getInfo().mip_dual_bound) * scale if highs is not None else -np.inf
    return Solution(choice, bound)


def _run(model: Any, solver: Any) -> None:
    """Solve. PuLP 3 has no name for the status in which HiGHS ends at the limit of nodes; it has read the values by then."""
    try:
        model.solve(solver)
    except KeyError as error:
        if "kSolutionLimit" not in str(error):
            raise


def _scale(costs: Mapping[int, np.ndarray], edges: Edges) -> float:
    """Objective coefficients are divided by this, so that tolerances of the solver mean something."""
    finite = [float(np.max(a[np.isfinite(a)], initial=0.0)) for a in (*costs.values(), *edges.values())]
    return max(finite, default=1.0) or 1.0


def choice_variables(model: Any, costs: Mapping[int, np.ndarray]) -> dict[int, list[Any]]:
    """s_v[p] in {0, 1}; a choice of infinite cost is fixed to 0."""
    return {
        v: [model.add_variable(f"s_{v}_{p}", 0, 1 if np.isfinite(c) else 0, "Integer") for p, c in enumerate(cost)]
        for v, cost in costs.items()
    }


def pair_variables(model: Any, edges: Edges) -> dict[tuple[int, int], list[list[Any]]]:
    """e_uv[p, q] >= 0; a pair of infinite cost is fixed to 0."""
    return {
        (u, v): [
            [
                model.add_variable(f"e_{u}_{v}_{p}_{q}", 0, 1 if np.isfinite(r) else 0, "Continuous")
                for q, r in enumerate(row)
            ]
            for p, row in enumerate(matrix)
        ]
        for (u, v), matrix in edges.items()
    }


def objective(costs: Mapping[int, np.ndarray], edges: Edges, s: Any, e: Any, scale: float) -> Any:
    """sum_v c_v . s_v + sum_uv R_uv . e_uv, in units of `scale`."""
    nodes = [_finite(c) / scale * x for v, cost in costs.items() for c, x in zip(cost, s[v], strict=True)]
    pairs = [
        _finite(r) / scale * x
        for pair, matrix in edges.items()
        for row, xs in zip(matrix, e[pair], strict=True)
        for r, x in zip(row, xs, strict=True)
    ]
    return pulp.lpSum(nodes + pairs)


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0


def one_choice_each(model: Any, s: Mapping[int, list[Any]]) -> None:
    """choose[v]: sum_p s_v[p] = 1."""
    for v, row in s.items():
        model.addConstraint(pulp.lpSum(row) == 1, f"choose_{v}")


def pairs_agree(model: Any, s: Mapping[int, list[Any]], e: Mapping[tuple[int, int], list[list[Any]]]) -> None:
    """link: the pair's rows sum to the choice of u, its columns to the choice of v."""
    for (u, v), rows in e.items():
        for p, row in enumerate(rows):
            model.addConstraint(pulp.lpSum([*row, -1 * s[u][p]]) == 0, f"link_{u}_{v}_row_{p}")
        for q, column in enumerate(zip(*rows, strict=True)):
            model.addConstraint(pulp.lpSum([*column, -1 * s[v][q]]) == 0, f"link_{u}_{v}_column_{q}")


def memory_fits(model: Any, s: Mapping[int, list[Any]], live_sets: Sequence[LiveSet]) -> None:
    """memory[t]: sum over live nodes of m_v . s_v <= limit_t, in units of the limit."""
    for number, live in enumerate(live_sets):
        scale = max(live.limit_bytes, 1.0)
        terms = [
            float(b) / scale * x for v, row in live.bytes_of.items() for b, x in zip(row, s[v], strict=True) if b > 0
        ]
        model.addConstraint(pulp.lpSum(terms) <= live.limit_bytes / scale, f"memory_{number}_{live.name}")
