"""A pairwise choice problem as an integer program, built with PuLP and solved with HiGHS.

Minimise  sum_v c_v . s_v + sum_(u,v) R_uv . e_uv  over

    s_v[p] in {0, 1}      node v takes choice p
    e_uv[p, q] >= 0       the same for a pair, relaxed (the tight form: linking makes it integral)

subject to

    choose[v]             sum_p s_v[p] = 1
    link[u, v, p]         sum_q e_uv[p, q] = s_u[p]
    link[u, v, q]         sum_p e_uv[p, q] = s_v[q]
    memory[t]             fixed_t + sum_(v in t) m_t,v . s_v <= limit

In: an objective, memory rows and their limit. Out: `Solved`, `Infeasible` or `Unfinished`. The work is limited by nodes of branch
and bound, not by time, so results are reproducible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pulp

from autopar.solver.budget import Budget
from autopar.solver.outcomes import Unfinished
from autopar.solver.problem import Costs, Edges, MemoryRow


@dataclasses.dataclass(frozen=True, eq=False)
class Solved:
    """A choice of every node within the limit, and seconds that no such choice goes below."""

    choice: Mapping[int, int]
    lower_bound_s: float


@dataclasses.dataclass(frozen=True)
class Infeasible:
    """Proven: no choice of finite costs is within the limit."""


INFEASIBLE = -1
"""PuLP's number of a model that nothing fulfils, in versions 3 and 4."""


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


def solve_integer_program(
    costs: Costs,
    rows: Sequence[MemoryRow] = (),
    limit_bytes: float = np.inf,
    *,
    node_limit: int,
    gap: float,
    budget: Budget | None = None,
) -> Solved | Infeasible | Unfinished:
    """Build the program of the module's text and solve it.

    Args:
        costs: the objective.
        rows: the memory rows.
        limit_bytes: their limit.
        node_limit: nodes of branch and bound at most.
        gap: the relative gap at which a choice counts as optimal.
        budget: limits the time, and pays for every entry.

    Returns:
        The best choice found; or that there is none; or that none was found within the limits.
    """
    budget = budget or Budget()
    if budget.is_over:
        return Unfinished()
    budget.spend(costs.pairs)
    if any(_sum_of_least(row) > limit_bytes - row.fixed_bytes for row in rows):
        return Infeasible()
    scale = _scale_of(costs)
    model: Model = pulp.LpProblem("intra_op", pulp.LpMinimize)
    s = add_choice_variables(model, costs.nodes)
    e = add_pair_variables(model, costs.edges)
    minimize_costs(model, costs, s, e, scale)
    require_one_choice_each(model, s)
    require_pairs_to_agree(model, s, e)
    require_memory_to_fit(model, s, rows, limit_bytes)
    options: dict[str, int] = {"mip_max_nodes": node_limit, "random_seed": 0}
    seconds = budget.seconds_left if np.isfinite(budget.seconds_left) else None
    if _status(model, pulp.HiGHS(msg=False, threads=1, gapRel=gap, timeLimit=seconds, **options)) == INFEASIBLE:
        return Infeasible()
    taken = {v: [pulp.value(x) for x in row] for v, row in s.items()}
    if any(x is None for row in taken.values() for x in row) or any(max(row) < 0.99 for row in taken.values()):
        return Unfinished()
    return Solved({v: int(np.argmax(row)) for v, row in taken.items()}, _dual_bound(model) * scale)


def _sum_of_least(row: MemoryRow) -> float:
    """Bytes that the nodes of a row need at least."""
    return sum(float(b.min()) for b in row.bytes_of.values())


def _status(model: Model, solver: object) -> int | None:
    """Solve, and say how that ended in PuLP's numbers: PuLP 3 returns the number, PuLP 4 an account with the number in it.

    None: at the limit of nodes, for which PuLP 3 has no name; it has read the values by then.
    """
    try:
        ended = model.solve(solver)
    except KeyError as error:
        if "kSolutionLimit" not in str(error):
            raise
        return None
    number = getattr(getattr(ended, "status", None), "value", ended)
    return number if isinstance(number, int) else None


def _dual_bound(model: Model) -> float:
    """The bound that branch and bound has proven, in units of the objective; none if PuLP does not keep HiGHS's model."""
    highs = getattr(model, "solverModel", None)
    return float(highs.getInfo().mip_dual_bound) if highs is not None else -np.inf


def _scale_of(costs: Costs) -> float:
    """Objective coefficients are divided by this, so that tolerances of the solver mean something."""
    arrays = (*costs.nodes.values(), *costs.edges.values())
    finite = [float(np.max(a[np.isfinite(a)], initial=0.0)) for a in arrays]
    return max(finite, default=1.0) or 1.0


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


def minimize_costs(model: Model, costs: Costs, s: ChoiceVariables, e: PairVariables, scale: float) -> None:
    """sum_v c_v . s_v + sum_uv R_uv . e_uv, in units of `scale` seconds."""
    nodes = [_finite(c) / scale * x for v, cost in costs.nodes.items() for c, x in zip(cost, s[v], strict=True)]
    pairs = [
        _finite(r) / scale * x
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
    """memory[t]: sum over the nodes of t of m_t,v . s_v <= limit - fixed_t, in units of that."""
    for number, row in enumerate(rows):
        room = limit_bytes - row.fixed_bytes
        scale = max(room, 1.0)
        terms = [
            float(b) / scale * x for v, each in row.bytes_of.items() for b, x in zip(each, s[v], strict=True) if b > 0
        ]
        model.addConstraint(pulp.lpSum(terms) <= room / scale, f"memory_{number}_{row.name}")
