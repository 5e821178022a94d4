"""HiGHS by arrays: a mixed integer program given as columns and rows, and what it came to.

In: a `Program`, limits. Out: an `Ended`. All limits but that of time are the same on every machine: nodes of branch and bound,
and looks, the times that HiGHS asks whether to go on, every few hundred iterations of the simplex method; it tells Python no
count of these. What can go wrong: a limit ends the search; its best solution, if any, and its bound are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np

Status = highspy.HighsModelStatus


@dataclasses.dataclass(frozen=True, eq=False)
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
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, bool | int | float] = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
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
    return _read(highs, bool(program.is_integer.any()), watch.looks)


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


def _read(highs: Any, is_mixed: bool, looks: int) -> Ended:
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
