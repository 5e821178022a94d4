"""The integer program says whether it solved the problem, proved that there is no solution, or just ended."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from autopar.solver.integer_program import Infeasible, Solved, solve_integer_program
from autopar.solver.outcomes import Unfinished
from autopar.solver.problem import Costs, MemoryRow
from tests.solver.problems import least_value, value_of


def dense(nodes: int, *, choices: int, seed: int = 0) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """Random costs, and edges between all nodes."""
    random = np.random.default_rng(seed)
    costs = [random.uniform(0, 1, choices) for _ in range(nodes)]
    return costs, {(u, v): random.uniform(0, 1, (choices, choices)) for u, v in itertools.combinations(range(nodes), 2)}


def random_row(nodes: int, *, choices: int, seed: int = 1) -> MemoryRow:
    random = np.random.default_rng(seed)
    return MemoryRow("all", {v: random.uniform(0, 1, choices) for v in range(nodes)}, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_solution_is_the_best_within_the_limit_and_its_bound_is_below(seed: int) -> None:
    costs, edges = dense(5, choices=3, seed=seed)
    row = random_row(5, choices=3, seed=seed)
    limit = row.least() + 0.5
    solved = solve_integer_program(Costs.of(costs, edges), [row], limit, node_limit=500, gap=1e-7)
    best = least_value(costs, edges, [row], limit)
    assert isinstance(solved, Solved)
    assert value_of(costs, edges, solved.choice) == pytest.approx(best, rel=1e-6)
    assert solved.lower_bound_s <= best * (1 + 1e-9)


def test_nothing_is_printed_not_even_by_the_library_that_is_called() -> None:
    """Versions of HiGHS differ in what silences them, and print once a process; what a command prints may be JSON."""
    solve = (
        "import numpy as np; from autopar.solver.integer_program import *; "
        "assert solve_integer_program(Costs({0: np.arange(2.0)}, {}), node_limit=5, gap=0.1).choice == {0: 0}"
    )
    done = subprocess.run([sys.executable, "-c", solve], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_without_a_solution_is_infeasible_and_not_unfinished() -> None:
    """Each node and each row alone could be met."""
    rows = [MemoryRow("first", {0: np.array([2.0, 0.0])}), MemoryRow("second", {0: np.array([0.0, 2.0])})]
    costs, edges = dense(2, choices=2)
    assert solve_integer_program(Costs.of(costs, edges), rows, 1.0, node_limit=500, gap=1e-7) == Infeasible()
    forbidden = {(0, 1): np.full((2, 2), np.inf)}
    assert solve_integer_program(Costs.of(costs, forbidden), node_limit=500, gap=1e-7) == Infeasible()


def subset_sum(count: int, *, seed: int) -> tuple[list[np.ndarray], list[MemoryRow], float]:
    """Two rows that only subsets of one exact size meet: there is one, and it is hard to find."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1_000, 10_000, count).astype(float)
    limit = float(sizes[random.permutation(count)[: count // 2]].sum())
    taken = MemoryRow("taken", {v: np.array([0.0, size]) for v, size in enumerate(sizes)})
    left = MemoryRow("left", {v: np.array([size, 0.0]) for v, size in enumerate(sizes)}, 2 * limit - sizes.sum())
    return [random.uniform(0, 1, 2) for _ in range(count)], [taken, left], limit


def test_a_limit_of_nodes_without_a_solution_is_unfinished_and_never_infeasible() -> None:
    """Versions of HiGHS differ in which of these they solve before the first branch."""
    found = []
    for seed in range(6):
        costs, rows, limit = subset_sum(24, seed=seed)
        found.append(solve_integer_program(Costs.of(costs, {}), rows, limit, node_limit=1, gap=0.0))
    assert Unfinished() in found
    assert Infeasible() not in found


@pytest.mark.parametrize("room", [0.02, 0.5])
def test_a_limit_of_nodes_gives_what_was_found_and_its_bound(room: float) -> None:
    costs, edges = dense(14, choices=6)
    row = random_row(14, choices=6)
    limit = row.least() + room
    solved = solve_integer_program(Costs.of(costs, edges), [row], limit, node_limit=1, gap=0.0)
    assert isinstance(solved, Solved)
    assert row.used([solved.choice[v] for v in range(14)]) <= limit + 1e-6
    assert solved.lower_bound_s <= value_of(costs, edges, solved.choice) * (1 + 1e-9)
