"""A pairwise choice problem as an integer program of arrays, solved by HiGHS.

The program is the one that `statement.py` writes to be read. Its columns are the places of `problem.py`, s_v[p], then the pairs,
e_uv[p, q]; its rows say that each node takes one choice, that pairs agree with the choices at both ends, and that memory fits.
A memory row counts only what a choice takes beyond the least of its node, in units of the room that is left or of its largest
entry.

In: an objective, memory rows and their limit. Out: `Solved`, `Infeasible` or `Unfinished`. All limits but that of time are the
same on every machine: nodes of branch and bound, and looks, the times that HiGHS asks whether to go on, every few hundred
iterations of the simplex method; it tells Python no count of these. What can go wrong: HiGHS keeps rows up
to a tolerance, so a choice of many gigabytes may be some bytes above the limit; who asks for a limit checks the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import highspy
import numpy as np

from autopar.solver.budget import Budget
from autopar.solver.local_search import improve_choice
from autopar.solver.memory_rows import MemoryRow, Spans
from autopar.solver.outcomes import Unfinished
from autopar.solver.problem import Costs, FlatCosts

Status = highspy.HighsModelStatus


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """Minimise objective . x subject to low <= A x <= high and 0 <= x <= upper.

    Attributes:
        objective: of each column, a float array (columns,).
        upper: of each column, a float array (columns,).
        is_integer: of each column, bools (columns,).
        low: of each row, a float array (rows,).
        high: of each row, a float array (rows,).
        entry_row: the row of each entry of A, ints (entries,).
        entry_column: the column of each entry, ints (entries,).
        entry: its value, a float array (entries,).
    """

    objective: np.ndarray
    upper: np.ndarray
    is_integer: np.ndarray
    low: np.ndarray
    high: np.ndarray
    entry_row: np.ndarray
    entry_column: np.ndarray
    entry: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When to end.

    Attributes:
        nodes: of branch and bound.
        gap: the relative gap at which a solution counts as optimal.
        looks: at the limits; see the module's text.
        seconds: of wall time.
        is_over: asked at every look; true ends the search.
    """

    nodes: int
    gap: float
    looks: float = np.inf
    seconds: float = np.inf
    is_over: Callable[[], bool] = lambda: False


@dataclasses.dataclass(frozen=True, eq=False)
class Ended:
    """How a program ended.

    Attributes:
        solution: the best solution found, a float array (columns,), or None.
        bound: no solution goes below this; minus infinity if there is none.
        is_infeasible: proven: there is no solution.
        looks: at the limits.
    """

    solution: np.ndarray | None
    bound: float
    is_infeasible: bool
    looks: int


def solve_program(program: Program, limits: Limits, start: np.ndarray | None = None) -> Ended:
    """Solve a mixed integer or, if no column is an integer, a linear program.

    Args:
        program: the program.
        limits: when to end.
        start: a solution to begin with, a float array (columns,); one that breaks a row does no harm.
    """
    highs: Any = _QuietHighs()  # type: ignore[no-untyped-call]
    options: dict[str, bool | int | float] = {
        "threads": 1,
        "random_seed": 0,
        "mip_detect_symmetry": False,  # HiGHS does so on the side, and whether it is ready in time decided which optimum came
        "mip_rel_gap": limits.gap,
        "mip_max_nodes": limits.nodes,
        "time_limit": min(limits.seconds, highspy.kHighsInf),
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    _pass_model(highs, program)
    if start is not None:
        highs.setSolution(len(start), np.arange(len(start), dtype=np.int32), start)
    watch = _Watch(limits)
    highs.cbMipInterrupt += watch.look
    highs.run()
    return _read_ended(highs, bool(program.is_integer.any()), watch.looks)


class _QuietHighs(highspy.Highs):
    """HiGHS without its output.

    HiGHS 1.16 says its name on standard output, in front of what `--json` prints, as soon as its callbacks are enabled, which its
    constructor does; so it has to be silenced before that.
    """

    def enableCallbacks(self) -> None:
        """Called by the constructor."""
        self.setOptionValue("output_flag", False)
        self.setOptionValue("log_to_console", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _pass_model(highs: Any, program: Program) -> None:
    order = np.argsort(program.entry_row, kind="stable")
    rows, columns = len(program.low), len(program.objective)
    starts = np.searchsorted(program.entry_row[order], np.arange(rows)).astype(np.int32)
    highs.passModel(
        columns,
        rows,
        len(order),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        program.objective,
        np.zeros(columns),
        program.upper,
        program.low,
        program.high,
        starts,
        program.entry_column[order].astype(np.int32),
        program.entry[order],
        program.is_integer.astype(np.int32),
    )


class _Watch:
    """Counts the looks at the limits, and ends the search at one of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.looks = limits, 0

    def look(self, event: Any) -> None:
        """Called by HiGHS."""
        self.looks += 1
        event.data_in.user_interrupt = self.looks > self.limits.looks or self.limits.is_over()


def _read_ended(highs: Any, is_mixed: bool, looks: int) -> Ended:
    info, status = highs.getInfo(), highs.getModelStatus()
    has_one = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    solution = np.array(highs.getSolution().col_value) if has_one else None
    bound = float(info.mip_dual_bound) if is_mixed else float(info.objective_function_value)
    is_bound = is_mixed or status == Status.kOptimal
    return Ended(
        solution,
        bound if is_bound and np.isfinite(bound) and abs(bound) < highspy.kHighsInf else -np.inf,
        status in (Status.kInfeasible, Status.kUnboundedOrInfeasible),
        looks,
    )


WORK_PER_LOOK = 3_000
"""Units of work between two looks of HiGHS at its limits, per pair of the problem: a few hundred iterations of the simplex
method. As measured on dense problems of 4,000 pairs, of which a sweep of dual ascent takes 5 ns a pair, a look 15 us."""


TOLERANCE = 1e-6
"""HiGHS drops branches that are worse by less than this, in the objective's unit."""


@dataclasses.dataclass(frozen=True, eq=False)
class Solved:
    """A choice of every node within the limit, and seconds that no such choice goes below."""

    choice: Mapping[int, int]
    lower_bound_s: float


@dataclasses.dataclass(frozen=True)
class Infeasible:
    """Proven: no choice of finite costs is within the limit."""


Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of entries of the constraint matrix."""


def solve_integer_program(
    costs: Costs,
    rows: Sequence[MemoryRow] = (),
    limit_bytes: float = np.inf,
    *,
    node_limit: int,
    gap: float,
    budget: Budget | None = None,
    start: Mapping[int, int] | None = None,
) -> Solved | Infeasible | Unfinished:
    """Build the program of the module's text and solve it.

    Args:
        costs: the objective.
        rows: the memory rows.
        limit_bytes: their limit.
        node_limit: nodes of branch and bound at most.
        gap: the relative gap at which a choice counts as optimal.
        budget: limits time and looks of HiGHS, and pays for every entry.
        start: a choice to begin with.

    Returns:
        The best choice found; or that there is none; or that none was found within the limits.
    """
    budget = budget or Budget()
    if (Spans.of(rows).least() > limit_bytes).any():
        return Infeasible()
    if budget.is_over:
        return Unfinished()
    flat = FlatCosts.of(costs)
    if not flat.numbers:
        return Solved({}, 0.0)
    scale = _scale_of(flat, costs)
    per_look = 1.0 + WORK_PER_LOOK * len(flat.value)
    limits = Limits(
        nodes=node_limit,
        gap=gap,
        looks=budget.work_left / per_look,
        seconds=budget.seconds_left,
        is_over=lambda: budget.is_over,
    )
    ended = solve_program(_program(flat, scale, rows, limit_bytes), limits, _start(flat, start))
    budget.spend(len(flat.value) + per_look * ended.looks)
    return _read(flat, ended, scale)


def _read(flat: FlatCosts, ended: Ended, scale: float) -> Solved | Infeasible | Unfinished:
    if ended.is_infeasible:
        return Infeasible()
    if ended.solution is None:
        return Unfinished()
    parts = np.split(ended.solution[: len(flat.cost)], flat.first[1:-1])
    if any(part.max() < 0.99 for part in parts):
        return Unfinished()
    choice = {v: int(np.argmax(part)) for v, part in zip(flat.numbers, parts, strict=True)}
    return Solved(choice, (ended.bound - TOLERANCE) * scale)


def _scale_of(flat: FlatCosts, costs: Costs) -> float:
    """Objective coefficients are divided by this, so that the tolerances of the solver, 1e-6, are far below what matters.

    It is a thousandth of the way from the sum of all least entries to the value of some choice. The largest entry says less: that
    of an instance of the IOPDDL contest is thousands of optima, and bounds were wrong by 1e-4.
    """
    both = np.concatenate([flat.cost, flat.value])
    top = float(np.max(np.abs(both[np.isfinite(both)]), initial=0.0)) or 1.0
    some = improve_choice({v: int(np.argmin(cost)) for v, cost in costs.nodes.items()}, costs)
    least = sum(float(values.min()) for values in (*costs.nodes.values(), *costs.edges.values()))
    way = costs.value(some) - least
    return max(way / 1e3, top / 1e8) if np.isfinite(way) and way > 0 else top


def _start(flat: FlatCosts, choice: Mapping[int, int] | None) -> np.ndarray | None:
    """A choice as values of all columns."""
    if choice is None:
        return None
    places, pairs = flat.places_of(choice)
    columns = np.zeros(len(flat.cost) + len(flat.value))
    columns[places] = 1.0
    columns[len(flat.cost) + pairs] = 1.0
    return columns


def _program(flat: FlatCosts, scale: float, rows: Sequence[MemoryRow], limit_bytes: float) -> Program:
    """The program in the units of the module's text."""
    objective = np.concatenate([flat.cost, flat.value])
    is_possible = np.isfinite(objective)
    row_of_u, row_of_v, count = _number_links(flat)
    memory, room = _memory_entries(flat, rows, limit_bytes, count)
    entries = [_choose_entries(flat), *_link_entries(flat, row_of_u, row_of_v), memory]
    nodes = len(flat.numbers)
    return Program(
        objective=np.where(is_possible, objective, 0.0) / scale,
        upper=is_possible.astype(float),
        is_integer=np.arange(len(objective)) < len(flat.cost),
        low=np.concatenate([np.ones(nodes), np.zeros(count - nodes), np.full(len(room), -np.inf)]),
        high=np.concatenate([np.ones(nodes), np.zeros(count - nodes), room]),
        entry_row=np.concatenate([entry[0] for entry in entries]),
        entry_column=np.concatenate([entry[1] for entry in entries]),
        entry=np.concatenate([entry[2] for entry in entries]),
    )


def _number_links(flat: FlatCosts) -> tuple[np.ndarray, np.ndarray, int]:
    """The first row of each edge's links to u, to v, and the number of rows up to there; the nodes' own rows come first."""
    heights, widths = flat.sizes[flat.ends[:, 0]], flat.sizes[flat.ends[:, 1]]
    starts = len(flat.numbers) + np.concatenate([[0], np.cumsum(heights + widths)]).astype(np.int64)
    return starts[:-1], starts[:-1] + heights, int(starts[-1])


def _choose_entries(flat: FlatCosts) -> Entries:
    """choose[v]: sum_p s_v[p] = 1."""
    return flat.node_of, np.arange(len(flat.cost)), np.ones(len(flat.cost))


def _link_entries(flat: FlatCosts, row_of_u: np.ndarray, row_of_v: np.ndarray) -> list[Entries]:
    """link: the pair's rows sum to the choice of u, its columns to the choice of v."""
    p, q = flat.pair_choices()
    counts = np.diff(flat.begin)
    pairs = len(flat.cost) + np.arange(len(flat.value))
    entries = []
    for end, row_of, choice in ((0, row_of_u, p), (1, row_of_v, q)):
        node = flat.ends[:, end]
        sizes = flat.sizes[node]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        own = (
            np.repeat(row_of, sizes) + within,
            np.repeat(flat.first[node], sizes) + within,
            np.full(len(within), -1.0),
        )
        entries += [(np.repeat(row_of, counts) + choice, pairs, np.ones(len(pairs))), own]
    return entries


def _memory_entries(
    flat: FlatCosts, rows: Sequence[MemoryRow], limit_bytes: float, first_row: int
) -> tuple[Entries, np.ndarray]:
    """memory[t]: what choices take beyond the least, and the room for it in each row, a float array (rows,)."""
    spans = Spans.of(rows).beyond_least()
    first = np.zeros(max(flat.numbers) + 2, dtype=np.int64)
    first[np.array(flat.numbers)] = flat.first[:-1]
    row, place, used = spans.expand(first)
    key, which = np.unique(
        row * len(flat.cost) + place, return_inverse=True
    )  # HiGHS never ends where an entry comes twice
    row, place, used = key // len(flat.cost), key % len(flat.cost), np.bincount(which, used, len(key))
    left = limit_bytes - spans.fixed
    scale = np.maximum(left, 1e-30)
    np.maximum.at(scale, row, used)
    return (first_row + row, place, used / scale[row]), left / scale
