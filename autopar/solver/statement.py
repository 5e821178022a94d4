"""The problem as an integer program that can be read: a PuLP model of any instance, for inspection and as an oracle.

Minimise  sum_v c_v . s_v + sum_(u,v) R_uv . e_uv  over

    s_v[p] in {0, 1}      node v takes choice p
    e_uv[p, q] >= 0       the same for a pair, relaxed (the tight form: linking makes it integral)

subject to

    choose[v]             sum_p s_v[p] = 1
    link[u, v, p]         sum_q e_uv[p, q] = s_u[p]
    link[u, v, q]         sum_p e_uv[p, q] = s_v[q]
    memory[t]             fixed_t + sum_(v in t) m_t,v . s_v <= limit

In: a `ChoiceProblem`. Out: an `LpProblem`, of PuLP 3 or 4; `model.writeLP(path)` prints it. The planner solves the same program
by arrays (`integer_program.py`). What can go wrong: PuLP keeps an object for each number, so large problems take long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pulp

from autopar.solver.problem import ChoiceProblem, Costs, Edges, MemoryRow


class Expression(Protocol):
    """A variable of PuLP, or a sum of such."""

    def __rmul__(self, factor: float, /) -> Expression:
        """The expression times a number."""
        ...


class Model(Protocol):
    """What is used of PuLP's LpProblem, in versions 3 and 4."""

    def add_variable(self, name: str, low: float, high: float | None, category: str, /) -> Expression:
        """Make a variable of the model."""
        ...

    def setObjective(self, objective: Expression, /) -> None:
        """Minimise an expression."""
        ...

    def addConstraint(self, constraint: object, name: str, /) -> None:
        """Demand a constraint."""
        ...

    def solve(self, solver: object, /) -> object:
        """Solve, and set the variables' values."""
        ...


ChoiceVariables = Mapping[int, Sequence[Expression]]
"""s_v by node, one variable per choice."""
PairVariables = Mapping[tuple[int, int], Sequence[Sequence[Expression]]]
"""e_uv by edge, one row per choice of u and one variable in it per choice of v."""


def to_pulp(problem: ChoiceProblem) -> Model:
    """The model of the module's text, unsolved; its variables are named s_v_p and e_u_v_p_q."""
    model: Model = pulp.LpProblem("choice_problem", pulp.LpMinimize)
    s = add_choice_variables(model, problem.costs.nodes)
    e = add_pair_variables(model, problem.costs.edges)
    minimize_costs(model, problem.costs, s, e)
    require_one_choice_each(model, s)
    require_pairs_to_agree(model, s, e)
    require_memory_to_fit(model, s, problem.rows, problem.limit_bytes)
    return model


def add_choice_variables(model: Model, nodes: Mapping[int, np.ndarray]) -> ChoiceVariables:
    """s_v[p] in {0, 1}; a choice of infinite cost is fixed to 0."""
    return {
        v: [model.add_variable(f"s_{v}_{p}", 0, 1 if np.isfinite(c) else 0, "Integer") for p, c in enumerate(cost)]
        for v, cost in nodes.items()
    }


def add_pair_variables(model: Model, edges: Edges) -> PairVariables:
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


def minimize_costs(model: Model, costs: Costs, s: ChoiceVariables, e: PairVariables) -> None:
    """sum_v c_v . s_v + sum_uv R_uv . e_uv, in seconds."""
    nodes = [_finite(c) * x for v, cost in costs.nodes.items() for c, x in zip(cost, s[v], strict=True)]
    pairs = [
        _finite(r) * x
        for pair, matrix in costs.edges.items()
        for row, xs in zip(matrix, e[pair], strict=True)
        for r, x in zip(row, xs, strict=True)
    ]
    model.setObjective(pulp.lpSum(nodes + pairs))


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0


def require_one_choice_each(model: Model, s: ChoiceVariables) -> None:
    """choose[v]: sum_p s_v[p] = 1."""
    for v, row in s.items():
        model.addConstraint(pulp.lpSum(row) == 1, f"choose_{v}")


def require_pairs_to_agree(model: Model, s: ChoiceVariables, e: PairVariables) -> None:
    """link: the pair's rows sum to the choice of u, its columns to the choice of v."""
    for (u, v), rows in e.items():
        for p, row in enumerate(rows):
            model.addConstraint(pulp.lpSum([*row, -1 * s[u][p]]) == 0, f"link_{u}_{v}_row_{p}")
        for q, column in enumerate(zip(*rows, strict=True)):
            model.addConstraint(pulp.lpSum([*column, -1 * s[v][q]]) == 0, f"link_{u}_{v}_column_{q}")


def require_memory_to_fit(model: Model, s: ChoiceVariables, rows: Sequence[MemoryRow], limit_bytes: float) -> None:
    """memory[t]: sum over the nodes of t of m_t,v . s_v <= limit - fixed_t, in limits."""
    scale = max(limit_bytes, 1.0)
    for number, row in enumerate(rows):
        terms = [float(b) / scale * x for v, each in row.bytes_of.items() for b, x in zip(each, s[v], strict=True) if b]
        model.addConstraint(pulp.lpSum(terms) <= (limit_bytes - row.fixed_bytes) / scale, f"memory_{number}_{row.name}")
