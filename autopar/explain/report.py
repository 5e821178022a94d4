"""A plan as a report that a person can argue with: the predictions, what it amounts to in sentences, and its tables.

A plan of one mesh and a pipeline print alike. The grid of a pipeline's schedule is the runtime's to draw, which nothing here
may import: a caller that has it hands it in.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.explain.bound import proof_text
from autopar.explain.compared import compared_table, repeated_text, what_is_missing, why_chosen
from autopar.explain.figures import figures_of
from autopar.explain.memory import memory_table
from autopar.explain.pipeline import pipeline_findings, pipeline_header, schedule_title
from autopar.explain.stage_layouts import SENT, as_shown, groups_in_full, pipeline_layouts
from autopar.explain.stages import mesh_text, pipeline_tables, stages_text
from autopar.explain.strategies import findings, traffic
from autopar.explain.tables import collectives_table, kinds_table, tables, time_table
from autopar.explain.units import bytes_text, mfu_text, percent_text, seconds_text
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.plan import Plan

MOST_COMPARED = 5
"""Rows of what was compared beside the tables of a pipeline."""
MOST_LONGEST = 6
"""Rows of the longest collectives of a pipeline."""
TEXT_WIDTH = 160
"""Columns of a report that goes to no terminal."""


def show(
    plan: Plan | PipelinePlan, console: Console | None = None, *, full: bool = False, schedule_grid: str = ""
) -> None:
    """Print the report to `console` (standard output by default).

    `full` gives each leaf and collective a row, and each group of equal stages of a pipeline its own tables. `schedule_grid`: a
    picture of a pipeline's schedule, printed below its stages.
    """
    console = console or standard_output()
    if isinstance(plan, PipelinePlan):
        _show_pipeline(plan, console, schedule_grid, full=full)
        return
    console.print(Text(_header(plan), style="bold"))
    _print_sentences(console, (*what_is_missing(plan), *findings(plan), *traffic(plan), *why_chosen(plan)))
    _print_tables(console, (*tables(plan, full=full), compared_table(plan, full=full)))


def explain(plan: Plan | PipelinePlan, *, full: bool = False, schedule_grid: str = "") -> str:
    """The report as plain text."""
    stream = io.StringIO()
    show(plan, Console(file=stream, width=TEXT_WIDTH, color_system=None), full=full, schedule_grid=schedule_grid)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def standard_output() -> Console:
    """Standard output; wide where it is no terminal, so that a report in a file or a pipe is not folded.

    A width of zero, as some shells without a window say, is none: a console that wide prints nothing.
    """
    console = Console()
    is_given = console.is_terminal or "COLUMNS" in os.environ
    return console if is_given and console.width > 0 else Console(width=TEXT_WIDTH)


def _show_pipeline(plan: PipelinePlan, console: Console, schedule_grid: str, *, full: bool) -> None:
    console.print(Text(pipeline_header(plan), style="bold"))
    _print_sentences(console, (*what_is_missing(plan), *why_chosen(plan), *pipeline_findings(plan)))
    every = [item for stage in plan.stages for item in stage.plan.collectives]
    moved = kinds_table("Collectives per step, of all stages", every)
    compared = compared_table(plan, full=full, most_rows=MOST_COMPARED)
    stages, transfers = pipeline_tables(plan, full=full)
    memory = memory_table(plan, full=full)
    longest = collectives_table("Longest collectives per step, of all stages", every, most=MOST_LONGEST)
    layouts = () if full else pipeline_layouts(plan)
    collectives = (moved,) if full else (moved, longest)
    _print_tables(console, (time_table(plan), stages, memory, transfers, *layouts, *collectives, compared))
    if schedule_grid:
        console.print()
        console.print(Text(schedule_title(plan, schedule_grid), style="bold"))
        console.print(Text(schedule_grid.rstrip("\n")), no_wrap=True, overflow="ignore", crop=False)
    if full:
        for group in groups_in_full(plan):
            _show_group(console, group)


def _show_group(console: Console, group: Sequence[StagePlan]) -> None:
    """The tables of stages that are alike, once."""
    named = stages_text([stage.stage for stage in group]).capitalize()
    each = ", each" if len(group) > 1 else ""
    console.print()
    console.print(Text(f"{named}{each}: mesh {mesh_text(group[0].plan)}", style="bold"))
    _print_tables(console, tables(as_shown(group), full=True, boundary=SENT))


def _print_sentences(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(Text(f"- {sentence}"))


def _print_tables(console: Console, printed: Iterable[Table]) -> None:
    for table in printed:
        if table.row_count:
            console.print()
            console.print(table)


def header(plan: Plan | PipelinePlan) -> str:
    """Where a plan runs, its predictions, and what is proven of it."""
    return pipeline_header(plan) if isinstance(plan, PipelinePlan) else _header(plan)


def _nodes_text(plan: Plan) -> str:
    """The cluster, and which of its nodes."""
    return f"{'the ' + plan.node_kind + ' nodes of ' if plan.node_kind else ''}cluster {plan.cluster}"


def _header(plan: Plan) -> str:
    cut = f", in {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    again = f", backward repeats {repeated_text(plan)}" if plan.recompute else ""
    limit, mfu = plan.memory_limit_bytes, mfu_text(figures_of(plan).mfu)
    of_limit = f" of {bytes_text(limit)} ({percent_text(plan.peak_bytes, limit)})" if limit else ", no limit"
    step = f"{seconds_text(plan.step_s)} = {seconds_text(plan.compute_s)} compute + {seconds_text(plan.comm_s)} communication"
    hidden = f" - {seconds_text(plan.hidden_s)} of it hidden behind compute" if plan.hidden_s > 0 else ""
    lines = (
        f"mesh {mesh_text(plan)} ({plan.num_devices} devices) on {_nodes_text(plan)}{cut}{again}",
        f"predicted step {step}{hidden}; peak memory {bytes_text(plan.peak_bytes)} per device{of_limit}{mfu}",
        f"planned in {seconds_text(plan.planning_s)}, {proof_text(plan)}",
    )
    return "\n".join(lines)
