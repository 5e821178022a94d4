"""The PuLP model that is written to be read has the optimum that brute force finds, in PuLP 3 and 4."""

import itertools

import numpy as np
import pulp
import pytest

from autopar.solver import to_pulp
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow
from tests.solver.problems import least_value


def random_problem(seed: int) -> ChoiceProblem:
    """Five nodes, all joined, with forbidden choices and pairs and two memory rows."""
    random = np.random.default_rng(seed)
    costs = [random.uniform(0, 1, 3) for _ in range(5)]
    costs[1][2] = np.inf
    edges = {pair: random.uniform(0, 1, (3, 3)) for pair in itertools.combinations(range(5), 2)}
    edges[0, 3][0] = np.inf
    rows = [MemoryRow(f"point {t}", {v: random.uniform(0, 9, 3) for v in range(t, 5)}, float(t)) for t in range(2)]
    limit = max(row.least() for row in rows) + 4.0
    return ChoiceProblem(costs=Costs.of(costs, edges), rows=rows, limit_bytes=limit)


@pytest.mark.parametrize("seed", range(6))
def test_the_model_s_optimum_is_that_of_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    model = to_pulp(problem)
    model.solve(pulp.HiGHS(msg=False, threads=1))
    best = least_value(list(problem.costs.nodes.values()), problem.costs.edges, problem.rows, problem.limit_bytes)
    assert pulp.value(model.objective) == pytest.approx(best, rel=1e-6)


def test_the_model_can_be_read(tmp_path) -> None:
    to_pulp(random_problem(0)).writeLP(str(tmp_path / "model.lp"))
    text = (tmp_path / "model.lp").read_text()
    assert all(name in text for name in ("choose_4:", "link_0_3_row_2:", "link_0_3_column_1:", "memory_1_point_1:"))
