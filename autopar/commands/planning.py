"""`plan`: find a plan without devices, print it, and write it to a file. `show`: print a plan from a file.

The report of a pipeline holds a picture of its schedule if that is short.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from autopar.api import ParallelStep
from autopar.commands.planning_options import FOR_PIPELINES, count_devices, make_parallel
from autopar.commands.subject import Subject, find_subject
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.live_line import live_line
from autopar.errors import ArgumentError, AutoparError, PlanError
from autopar.explain import TEXT_WIDTH, show, standard_output
from autopar.files.whole_file import save
from autopar.inter_op.plan_pipeline import schedule_of
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.progress import enter
from autopar.schedules.grid import draw_grid
from autopar.simulate.plan_overlap import overlap_of, overlap_table, own_cluster

_LONGEST_BACKWARD = 3
"""Columns of the picture that a backward may take."""


def plan(options: argparse.Namespace) -> int:
    """Plan a step from shapes alone; print the plan and write it to `options.output`, if given."""
    output: Path | None = options.output
    count = count_devices(options)
    with live_line(options.verbose):
        enter("building the model")
        subject = find_subject(options.model, options.sizes)
        step = make_parallel(subject.step, count, options)
        with interruptible(step.stop_planning) as interruption:
            found = plan_step(step, subject, options)
    if output is not None:
        save(output, found.to_json())
    console = standard_output()
    show_plan(found, console, full=options.full)
    if output is not None:
        console.print(f"\nplan written to {output}", markup=False, highlight=False)
    interruption.finish()
    return 0


def plan_step(step: ParallelStep, subject: Subject, options: argparse.Namespace) -> Plan | PipelinePlan:
    """Plan a step; ArgumentError if the plan has one mesh and a pipeline's options were given."""
    found = step.plan(subject.state, subject.batch)
    if isinstance(found, Plan) and (options.schedule != "auto" or (options.virtual_stages or 1) > 1):
        raise ArgumentError(FOR_PIPELINES)
    return found


def show_file(options: argparse.Namespace) -> int:
    """Print the plan in a file that `plan -o` wrote."""
    try:
        show_plan(read_plan(options.file), standard_output(), full=options.full)
    except AutoparError:
        raise
    except ValueError as error:  # the plan's mesh is none that its cluster has
        raise PlanError(f"{options.file}: {error}: plan again") from None
    return 0


def show_plan(plan: Plan | PipelinePlan, console: Console, *, full: bool) -> None:
    """Print a plan; a pipeline's with a picture of its schedule, if that is not too wide."""
    picture = draw_schedule(plan) if isinstance(plan, PipelinePlan) else ""
    show(plan, console, full=full, schedule_grid=picture)
    cluster = own_cluster(plan)
    if cluster is not None:
        console.print()
        console.print(overlap_table(overlap_of(plan, cluster)))


def draw_schedule(plan: PipelinePlan) -> str:
    """Draw the schedule, a forward as one column and the rest in proportion; nothing if a line would be too long."""
    if plan.num_microbatches > TEXT_WIDTH:
        return ""
    schedule = schedule_of(plan)
    columns = dict.fromkeys(schedule.kinds, 1)
    if "backward" in columns:
        columns["backward"] = _backward_columns(plan)
    picture = draw_grid(schedule, columns)
    return picture if max(map(len, picture.splitlines())) <= TEXT_WIDTH else ""


def _backward_columns(plan: PipelinePlan) -> int:
    """How many forwards a backward takes, in whole numbers."""
    forward_s = sum(stage.forward_s for stage in plan.stages)
    backward_s = sum(stage.backward_s for stage in plan.stages)
    return max(1, min(_LONGEST_BACKWARD, round(backward_s / forward_s))) if forward_s else 1


def read_plan(path: Path) -> Plan | PipelinePlan:
    """Read a plan of either kind; ArgumentError or PlanError if the file cannot be read or holds no plan."""
    try:
        return plan_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a plan that `autopar plan -o` wrote: it is not text in UTF-8") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
