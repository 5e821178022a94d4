"""`plan`: find a plan without devices, print it, write it to a file. `explain`, `show`: print a plan of a file, or write a page.

The report of a pipeline holds a picture of its schedule if that is short.
"""

from __future__ import annotations

import argparse
import atexit
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from autopar.api import ParallelStep
from autopar.commands.arguments.subject import Subject, find_subject
from autopar.commands.plans.document import answers_document, conflict_document, leaf_document, plan_document
from autopar.commands.plans.flags import conflict_in_flags
from autopar.commands.plans.parallel import FOR_PIPELINES, count_devices, make_parallel
from autopar.commands.terminal.interruption import interruptible
from autopar.commands.terminal.live_line import live_line
from autopar.commands.terminal.printing import print_json, reports
from autopar.errors import ArgumentError, AutoparError, OutOfMemoryError, PlanError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text
from autopar.files.whole_file import save
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.progress import enter
from autopar.reports.report import Answer, html, show
from autopar.why.classic import Classic
from autopar.why.what_if import WhatIf

NOTHING_FITS = 1
"""The exit status where no plan fits and what conflicts is printed."""


def plan(options: argparse.Namespace) -> int:
    """Plan a step from shapes alone; print the plan and write it to `options.output`, if given."""
    output: Path | None = options.output
    count = count_devices(options)
    with live_line(options.verbose):
        enter("building the model")
        subject = find_subject(options.model, options.sizes)
        step = make_parallel(subject.step, count, options)
        with interruptible(step.stop_planning) as interruption:
            try:
                found = plan_step(step, subject, options)
            except OutOfMemoryError as error:
                if not options.conflict:
                    raise
                if options.json:
                    print_json(conflict_document(error))
                else:
                    standard_output().print(
                        str(conflict_in_flags(error)), markup=False, highlight=False, soft_wrap=True
                    )
                return NOTHING_FITS
    atexit.register(gc.freeze)  # or the interpreter looks for garbage in all that was planned before it ends
    if output is not None:
        save(output, found.to_json())
    console = reports(as_json=options.json)
    answers = {name: getattr(found, name)() for name in ("classic", "what_if") if getattr(options, name)}
    _print(found, options, console, answers)
    for line in _notes(found, options):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_page(found, options.html, console, answers=tuple(answers.values()))
    interruption.finish()
    return 0


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


def _print(
    found: Plan | PipelinePlan, options: argparse.Namespace, console: Console, answers: Mapping[str, Classic | WhatIf]
) -> None:
    """Print the plan, or why a leaf has its layout, and the other plans that are asked for."""
    if options.json:
        document = plan_document(found) if options.leaf is None else leaf_document(found, options.leaf)
        print_json(document | answers_document(answers))
        return
    if options.leaf is None:
        show(found, console, full=options.full)
    else:
        console.print(str(found.why(options.leaf)), markup=False, highlight=False, soft_wrap=True)
    for answer in answers.values():
        console.print(f"\n{answer}", markup=False, highlight=False, soft_wrap=True)


def plan_step(step: ParallelStep, subject: Subject, options: argparse.Namespace) -> Plan | PipelinePlan:
    """Plan a step; ArgumentError if the plan has one mesh and a pipeline's options were given."""
    found = step.plan(subject.state, subject.batch)
    if isinstance(found, Plan) and (options.schedule != "auto" or (options.virtual_stages or 1) > 1):
        raise ArgumentError(FOR_PIPELINES)
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
        raise PlanError(f"{path}: {error}") from None
