"""A plan as a page, what `print(plan)` prints, and as a line, what a debugger shows.

In: a plan. Out: text of at most `MOST_LINES` lines: the header, what the layouts amount to, where the time goes, the leaves or
stages that weigh most, and the longest collectives. What can go wrong: more rows than there is room for; the last line tells what
prints all.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.explain.compared import what_is_missing
from autopar.explain.figures import figures_of
from autopar.explain.fitted import GAP
from autopar.explain.paths import file_of, layout_text, path_patterns
from autopar.explain.pipeline import pipeline_findings
from autopar.explain.report import header
from autopar.explain.stages import brief_stage_table, mesh_text
from autopar.explain.strategies import findings
from autopar.explain.tables import group_collectives, hidden_text, longest_first, new_table, time_table, where_text
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import CollectivePlan, Plan, ValuePlan

MOST_LINES = 40
PAGE_WIDTH = 80
_CUT_SHORT = ("leaf", "what lives there", "from")
"""Columns whose cells may lose their ends."""
_SENTENCES, _LEAVES, _COLLECTIVES = 6, 6, 5


def line(plan: Plan | PipelinePlan) -> str:
    """Where a plan runs and what it should cost."""
    where = f"{plan.num_stages} stages" if isinstance(plan, PipelinePlan) else f"mesh {mesh_text(plan)}"
    figures = figures_of(plan)
    size = f"step {seconds_text(figures.step_s)}, {bytes_text(figures.peak_bytes)} per device"
    return f"<{type(plan).__name__}: {where} ({plan.num_devices} devices) on {plan.cluster}, {size}>"


def page(plan: Plan | PipelinePlan) -> str:
    """The report in brief."""
    found = pipeline_findings(plan) if isinstance(plan, PipelinePlan) else findings(plan)
    said = (*what_is_missing(plan), *found)[:_SENTENCES]
    tables = [time_table(plan), brief_stage_table(plan) if isinstance(plan, PipelinePlan) else _leaves_table(plan)]
    every = plan.collectives if isinstance(plan, Plan) else [c for stage in plan.stages for c in stage.plan.collectives]
    below = [
        line for table in (*tables, _collectives_table(every)) if table.row_count for line in ("", *_lines_of(table))
    ]
    above = [part for line in header(plan).splitlines() for part in _in_two(line)]
    lines = [*above, *_said(said, MOST_LINES - 2 - len(above) - len(below)), *below]
    end = "plan.show() prints the whole report"
    if len(lines) > MOST_LINES - 2:
        lines = [*lines[: MOST_LINES - 3], "..."]
    return "\n".join([*lines, "", end])


def _leaves_table(plan: Plan) -> Table:
    """The leaves of the state that take most memory, by equal layout."""
    table = new_table("Largest leaves of the state", "leaf", "layout", "per device", numbers=("per device",))
    alike: dict[object, list[ValuePlan]] = {}
    for value in plan.inputs:
        if value.role == "state":
            alike.setdefault((value.shape, value.dtype, value.spec), []).append(value)
    groups = sorted(alike.values(), key=lambda group: -sum(value.bytes_per_device for value in group))
    for group in groups[:_LEAVES]:
        patterns = [str(pattern) for pattern in path_patterns(value.path for value in group)]
        more = f", and {len(patterns) - 1} more" if len(patterns) > 1 else ""
        size = bytes_text(sum(value.bytes_per_device for value in group))
        table.add_row(*map(Text, (patterns[0] + more, layout_text(group[0].spec), size)))
    return table


def _collectives_table(collectives: Sequence[CollectivePlan]) -> Table:
    """The collectives that take longest, by equal size and line."""
    table = new_table("Longest collectives", "kind", "predicted", "hidden", "from", numbers=("predicted", "hidden"))
    for group in longest_first(group_collectives(collectives))[:_COLLECTIVES]:
        seconds = sum(item.count * item.predicted_s for item in group)
        hidden_s = sum(item.count * item.hidden_s for item in group)
        kind = f"{group[0].kind} over {', '.join(group[0].axes)}"
        where = where_text([item.scope for item in group], file_of(group[0].source))
        table.add_row(*map(Text, (kind, seconds_text(seconds), hidden_text(hidden_s), where)))
    return table


def _lines_of(table: Table) -> list[str]:
    stream = io.StringIO()
    natural = [max(len(str(text)) for text in (column.header, *column.cells)) for column in table.columns]
    room = PAGE_WIDTH - sum(natural) - GAP * (len(natural) - 1)
    for column, width in zip(table.columns, natural, strict=True):
        column.no_wrap, column.overflow = True, "ellipsis"
        column.width = max(1, width + min(0, room)) if column.header in _CUT_SHORT else width
    title, table.title = table.title, None  # which a table folds to its own width
    Console(file=stream, width=PAGE_WIDTH, color_system=None).print(table)
    return [str(title), *(line.rstrip() for line in stream.getvalue().splitlines())]


def _said(sentences: Sequence[str], room: int) -> Iterator[str]:
    """Sentences, a line for each at least; the first may take more of those that there is room for, others lose their ends."""
    spare = max(0, room - len(sentences))
    for sentence in sentences:
        lines = _wrapped(f"- {sentence}")
        if len(lines) - 1 > spare:
            lines = [_fitting(f"- {sentence}")]
        spare -= len(lines) - 1
        yield from lines


def _in_two(line: str) -> list[str]:
    """A line of the header; where it is too long, it goes on below its semicolon."""
    first, semicolon, rest = line.partition("; ")
    if len(line) <= PAGE_WIDTH or not rest:
        return _wrapped(line)
    return [first + semicolon.rstrip(), *_wrapped(f"  {rest}")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _fitting(text: str) -> str:
    return text if len(text) <= PAGE_WIDTH else f"{text[: PAGE_WIDTH - 3]}..."
