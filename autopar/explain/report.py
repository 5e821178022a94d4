"""A plan as a report that a person can argue with: the predictions, the strategies it amounts to, and its tables."""

from __future__ import annotations

import io
import math
import os

from rich.console import Console
from rich.text import Text

from autopar.explain.strategies import findings, traffic
from autopar.explain.tables import tables
from autopar.explain.units import bytes_text, percent_text, seconds_text
from autopar.plan import Plan

TEXT_WIDTH = 160
"""Columns of a report that goes to no terminal."""


def show(plan: Plan, console: Console | None = None, *, full: bool = False) -> None:
    """Print the report to `console` (standard output by default); `full` gives each leaf and collective a row."""
    console = console or standard_output()
    console.print(_header(plan))
    for sentence in (*findings(plan), *traffic(plan)):
        console.print(Text(f"- {sentence}"))
    for table in tables(plan, full=full):
        if table.row_count:
            console.print()
            console.print(table)


def explain(plan: Plan, *, full: bool = False) -> str:
    """The report as plain text."""
    stream = io.StringIO()
    show(plan, Console(file=stream, width=TEXT_WIDTH, color_system=None), full=full)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def standard_output() -> Console:
    """Standard output; wide where it is no terminal, so that a report in a file or a pipe is not folded."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=TEXT_WIDTH)


def _header(plan: Plan) -> Text:
    mesh = ", ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))
    limit = plan.memory_limit_bytes
    of_limit = f" of {bytes_text(limit)} ({percent_text(plan.peak_bytes, limit)})" if limit else ", no limit"
    step = f"{seconds_text(plan.step_s)} = {seconds_text(plan.compute_s)} compute + {seconds_text(plan.comm_s)}"
    lines = (
        f"mesh {mesh} ({math.prod(plan.mesh_shape)} devices) on cluster {plan.cluster}",
        f"predicted step {step} communication; peak memory {bytes_text(plan.peak_bytes)} per device{of_limit}",
        f"planned in {seconds_text(plan.planning_s)}, {_proof_text(plan)}",
    )
    return Text("\n".join(lines), style="bold")


def _proof_text(plan: Plan) -> str:
    if plan.is_optimal:
        return "proven optimal under the cost model"
    if plan.lower_bound_s <= 0:
        return "not proven optimal: no bound on the best plan is known"
    gap = plan.step_s / plan.lower_bound_s - 1
    return f"not proven optimal: at most {gap:.1%} slower than the best plan under the cost model"
