"""`plan`: find a plan without devices, print it, write it to a file. `explain`, `show`: print a plan of a file, or write a page.

The report of a pipeline holds a picture of its schedule if that is short.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from autopar.api import ParallelStep
from autopar.commands.arguments.subject import Subject, find_subject
from autopar.commands.plans.document import (
    answers_document,
    conflict_document,
    leaf_document,
    plan_document,
)
from autopar.commands.plans.flags import conflict_in_flags
from autopar.commands.plans.parallel import FOR_PIPELINES, count_devices, make_parallel
from autopar.commands.terminal.interruption import Interruption, interruptible
from autopar.commands.terminal.printing import print_json, reports
from autopar.errors import ArgumentError, AutoparError, OutOfMemoryError, PlanError, warn
from autopar.explain import standard_output
from autopar.explain.units import bytes_text
from autopar.files.whole_file import save
from autopar.live_line import show_progress
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.program.step import describe_missing_state
from autopar.progress import enter
from autopar.reports.report import Answer, html, show
from autopar.why.classic import Classic
from autopar.why.conflict import BUDGET_S
from autopar.why.deadline import Deadline, nothing_found
from autopar.why.report import Why
from autopar.why.what_if import WhatIf

_IN_ALL, _FOR_THE_PLAN, _FOR_PLANS = 0.95, 0.5, 0.4
"""Of the time, where what conflicts is asked for: for all searches, so that the answer is there when it is over; of that, for the
plan, whose search is then left; and for that search by its own clock."""
_Answers: TypeAlias = Mapping[str, Classic | WhatIf | Why]
"""Answers about a plan, by the flag that asks."""
NOTHING_FITS = 1
"""The exit status where no plan fits and what conflicts is printed."""


def plan(options: argparse.Namespace) -> int:
    """Plan a step from shapes alone; print the plan and write it to `options.output`, if given."""
    output: Path | None = options.output
    count = count_devices(options)
    with show_progress(options.verbose):
        enter("building the model")
        subject = find_subject(options.model, options.sizes)
        step = make_parallel(subject.step, count, _with_time_for_the_conflict(options))
        deadline = Deadline(_IN_ALL * (options.planning_seconds or math.inf))
        with interruptible(lambda: step.stop_planning() and deadline.hurry()) as interruption:
            try:
                found = _plan_until(deadline, step, subject, options)
            except OutOfMemoryError as error:
                if options.conflict:
                    return _print_conflict(error, deadline, options, interruption)
                raise
            if output is not None:
                save(output, found.to_json())
    atexit.register(gc.freeze)  # or the interpreter looks for garbage in all that was planned before it ends
    console = reports(as_json=options.json)
    answers, asking = _ask(found, options, is_stopped=interruption.number is not None)
    with interruptible(lambda: interruption.number is None) as printing:  # a signal that comes now finds the plan
        _print(found, options, console, answers)
        for line in _notes(found, options):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        write_page(found, options.html, console, answers=tuple(_beside(answers).values()))
    interruption.finish()
    asking.finish("the plan was found already; what was not answered by then is left out")
    printing.finish("the plan was found already")
    return 0


def _with_time_for_the_conflict(options: argparse.Namespace) -> argparse.Namespace:
    """The options; if what conflicts is asked for, with less than half of the time for finding plans, see `_plan_until`."""
    if not options.conflict or options.planning_seconds is None:
        return options
    seconds = _FOR_PLANS * options.planning_seconds
    return argparse.Namespace(**{**vars(options), "planning_seconds": seconds})


def _plan_until(
    deadline: Deadline, step: ParallelStep, subject: Subject, options: argparse.Namespace
) -> Plan | PipelinePlan:
    """Plan a step; if what conflicts is asked for, in half of the time. Raises OutOfMemoryError where that was too short, too."""
    if not options.conflict:
        return plan_step(step, subject, options)
    found = deadline.run(lambda: plan_step(step, subject, options), _FOR_THE_PLAN * deadline.clock.seconds_left)
    if found is None:
        raise nothing_found(deadline)
    return found


def _print_conflict(
    error: OutOfMemoryError, deadline: Deadline, options: argparse.Namespace, interruption: Interruption
) -> int:
    """Find out and print what conflicts, as far as it is found when the time is up or a signal comes."""
    atexit.register(gc.freeze)  # as below
    if options.planning_seconds is None:
        deadline = Deadline(BUDGET_S)
    with interruption.stopping_by(deadline.stop):
        answer = conflict_in_flags(error, deadline)
    if options.json:
        print_json(conflict_document(answer))
    else:
        standard_output().print(str(answer), markup=False, highlight=False, soft_wrap=True)
    interruption.finish("the answer is what was found so far")
    return NOTHING_FITS


def _notes(found: Plan | PipelinePlan, options: argparse.Namespace) -> Iterator[str]:
    """What is said behind a report, a blank line before it: that nothing conflicts if that was asked, for which machine it is if
    none was named, and the file."""
    notes = []
    if options.conflict:
        limit = f" of {bytes_text(found.memory_limit_bytes)}" if found.memory_limit_bytes else ", and there is no limit"
        notes.append(f"--conflict: nothing conflicts, the plan takes {bytes_text(found.peak_bytes)}{limit} per device")
    if options.cluster == "auto" and options.leaf is None:
        notes.append("planned for virtual CPU devices, the preset cpu; --cluster names another machine")
    if options.output is not None:
        notes.append(f"plan written to {options.output}")
    if notes:
        yield ""
    yield from notes


def _ask(found: Plan | PipelinePlan, options: argparse.Namespace, *, is_stopped: bool) -> tuple[_Answers, Interruption]:
    """Answer what is asked about a plan, by its flag; a signal leaves what is not answered yet, and so does one from before.

    Raises PlanError for a leaf that the plan does not have.
    """
    deadline, answers = Deadline(), {}
    questions = {name: getattr(found, name) for name in ("classic", "what_if") if getattr(options, name)}
    if options.leaf is not None:
        questions["leaf"] = lambda: found.why(options.leaf)
    if is_stopped:
        deadline.stop()
    # What a signal raises may be lost, as in a finaliser; an alarm then rings until the search is left.
    with interruptible(lambda: deadline.hurry() and deadline.stop()) as asking:
        for name, question in questions.items():
            with show_progress(options.verbose):
                answer = deadline.run(question, math.inf)
            if answer is not None:
                answers[name] = answer
    return answers, asking


def _beside(answers: _Answers) -> dict[str, Classic | WhatIf]:
    """Those that are other plans beside the one that was found."""
    return {name: answer for name, answer in answers.items() if not isinstance(answer, Why)}


def _print(found: Plan | PipelinePlan, options: argparse.Namespace, console: Console, answers: _Answers) -> None:
    """Print the plan, or why a leaf has its layout if that is known, and the other plans that are asked for."""
    why = answers.get("leaf")
    if options.json:
        document = leaf_document(why) if isinstance(why, Why) else plan_document(found)
        print_json(document | answers_document(_beside(answers)))
        return
    if why is None:
        show(found, console, full=options.full)
    else:
        console.print(str(why), markup=False, highlight=False, soft_wrap=True)
    for answer in _beside(answers).values():
        console.print(f"\n{answer}", markup=False, highlight=False, soft_wrap=True)


def plan_step(
    step: ParallelStep, subject: Subject, options: argparse.Namespace, *, is_trained: bool = False
) -> Plan | PipelinePlan:
    """Plan a train step; warn, or refuse if it is to be trained, where it returns no state.

    Raises ArgumentError if the plan has one mesh and a pipeline's options were given.
    """
    found = step.plan(subject.state, subject.batch)
    if isinstance(found, Plan) and (options.schedule != "auto" or (options.virtual_stages or 1) > 1):
        raise ArgumentError(FOR_PIPELINES)
    plans = [stage.plan for stage in found.stages] if isinstance(found, PipelinePlan) else [found]
    missing = describe_missing_state([leaf for plan in plans for leaf in plan.inputs], step.signature.name)
    if missing is not None and is_trained:
        raise ArgumentError(missing)
    if missing is not None:
        warn(missing)
    return found


def show_file(options: argparse.Namespace) -> int:
    """Print the plan in a file that `plan -o` wrote."""
    try:
        found, console = read_plan(options.file), reports(as_json=options.json)
        if options.json:
            print_json(plan_document(found))
        elif options.html is None or options.full:
            show(found, console, full=options.full)
        write_page(found, options.html, console)
    except AutoparError:
        raise
    except ValueError as error:  # the plan's mesh is none that its cluster has
        raise PlanError(f"{options.file}: {error}: plan again") from None
    return 0


def write_page(
    plan: Plan | PipelinePlan, path: Path | None, console: Console, *, answers: Sequence[Answer] = ()
) -> None:
    """Write the report of a plan as HTML, if a file is named. Raises ArgumentError if what draws it is missing."""
    if path is not None:
        html(plan, path, answers=answers)
        console.print(f"report written to {path}", markup=False, highlight=False)


def read_plan(path: Path) -> Plan | PipelinePlan:
    """Read a plan of either kind; ArgumentError or PlanError if the file cannot be read or holds no plan."""
    try:
        return plan_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a plan that `autopar plan -o` wrote: it is not text in UTF-8") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}; `autopar plan MODEL -o FILE` writes one") from None
