"""A plan as a line, as a page and as the full report of a terminal.

In: a plan. Out: text, or text on a console. What can go wrong: a schedule that is too wide for a line; a sentence tells how wide.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.explain import page as pages
from autopar.explain import report
from autopar.explain.figures import meshes_of, node_size
from autopar.explain.verified import headline, verified_table
from autopar.files.whole_file import save
from autopar.inter_op.candidates.pipeline_seconds import schedule_of
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording.run import RecordedRun
from autopar.reports import measured
from autopar.reports.html import page as html_page
from autopar.schedules.grid import draw_grid
from autopar.verification import Verification

if TYPE_CHECKING:
    from autopar.reports.html.contents import Section

MOST_DRAWN = 500
"""Microbatches of a schedule that is drawn as text."""
_LONGEST_BACKWARD = 3
"""Columns of the picture that a backward may take."""


class Answer(Protocol):
    """Something that was asked about a plan, as a table or a sentence."""

    @property
    def table(self) -> Table | str:
        """The table, or why there is none."""
        ...


def line(plan: Plan | PipelinePlan) -> str:
    """A plan in one line."""
    return pages.line(plan)


def page(plan: Plan | PipelinePlan) -> str:
    """A plan in at most `explain.page.MOST_LINES` lines."""
    return pages.page(plan)


def show(plan: Plan | PipelinePlan, console: Console | None = None, *, full: bool = False) -> None:
    """Print the full report; of a pipeline with a picture of its schedule, or what it needs if that is too wide."""
    console = console or report.standard_output()
    picture = draw_schedule(plan) if isinstance(plan, PipelinePlan) else ""
    columns = max(map(len, picture.splitlines()), default=0)
    fits = columns <= console.width
    report.show(plan, console, full=full, schedule_grid=picture if fits else "")
    if isinstance(plan, PipelinePlan) and not (picture and fits):
        needs = f"needs {columns} columns, which is wider than this" if picture else "is too wide for a terminal"
        console.print(Text(f"\nThe picture of the schedule {needs}; the HTML report draws it."))


def say(text: str) -> None:
    """Print text as it is."""
    report.standard_output().print(text, markup=False, highlight=False, soft_wrap=True)


def measured_text(plan: Plan | PipelinePlan, recorded: RecordedRun) -> str:
    """What a recorded run of the plan measured. Raises ArgumentError if it is of another plan."""
    return measured.measured_text(plan, recorded.data)


def html(
    plan: Plan | PipelinePlan,
    path: str | os.PathLike[str] | None = None,
    *,
    recorded: RecordedRun | None = None,
    verified: Verification | None = None,
    answers: Sequence[Answer] = (),
) -> str:
    """A plan as a page of HTML, also written to `path`, if that is given. Raises ArgumentError, see `html.page`.

    `answers`: other plans beside this one, each answer a section.
    """
    first = [] if verified is None else [_verified_section(verified)]
    first += [] if recorded is None else [*_measured_sections(plan, recorded)]
    text = html_page.page(plan, [*first, *map(_answer_section, answers)])
    if path is not None:
        save(Path(path), text)
    return text


def _measured_sections(plan: Plan | PipelinePlan, recorded: RecordedRun) -> Sequence[Section]:
    """The sections of a recorded run, drawn by packages that may be missing."""
    html_page.require_packages()
    from autopar.reports.measured_page import measured_sections

    return list(measured_sections(measured.of_plan(plan, recorded.data)))


def _verified_section(verified: Verification) -> Section:
    """The compiled programs against the plan."""
    html_page.require_packages()
    from autopar.reports.html.contents import Section, cells_of

    title = "Verified" if verified.ok else "Not as planned"
    return Section(title=title, sentences=(headline(verified),), tables=cells_of(verified_table(verified)))


def _answer_section(answer: Answer) -> Section:
    """Other plans beside the plan."""
    html_page.require_packages()
    from autopar.reports.html.contents import Section, cells_of

    table = answer.table
    if isinstance(table, str):
        return Section(title="Other plans", sentences=(table,))
    return Section(title=str(table.title), tables=cells_of(table))


def notebook(plan: Plan | PipelinePlan) -> str | None:
    """The page in a frame, for notebooks; None if what draws it is not installed."""
    return html_page.notebook(plan)


def draw_schedule(plan: PipelinePlan) -> str:
    """Draw the schedule, a forward as one column and the rest in proportion, below the nodes that meshes begin on, if known.

    Nothing of more than `MOST_DRAWN` microbatches.
    """
    if plan.num_microbatches > MOST_DRAWN:
        return ""
    schedule = schedule_of(plan)
    columns = dict.fromkeys(schedule.kinds, 1)
    if "backward" in columns:
        columns["backward"] = _backward_columns(plan)
    lines = draw_grid(schedule, columns).splitlines()
    size = node_size(plan)
    if size is not None:
        firsts = [stages[0].first_device // size for stages in meshes_of(plan).values()]
        heads = [[f"node {node}"] if n == 0 or node != firsts[n - 1] else [] for n, node in enumerate(firsts)]
        lines = [line for head, row in zip(heads, lines, strict=True) for line in (*head, row)]
    return "\n".join(lines) + "\n"


def _backward_columns(plan: PipelinePlan) -> int:
    """How many forwards a backward takes, in whole numbers."""
    forward_s = sum(stage.forward_s for stage in plan.stages)
    backward_s = sum(stage.backward_s for stage in plan.stages)
    return max(1, min(_LONGEST_BACKWARD, round(backward_s / forward_s))) if forward_s else 1
