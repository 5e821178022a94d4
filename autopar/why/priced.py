"""A step planned under other settings, as a row: what it would cost, or why it has no plan.

In: a name, settings and a traced step. Out: `PricedPlan`, whose figures are those of the plan that was found. What can go wrong:
a search that the clock ends; its row says so.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.decide import decide
from autopar.errors import AutoparError, AutoparWarning, OutOfMemoryError, PlanError
from autopar.explain.report import standard_output
from autopar.explain.stages import mesh_text
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.progress import begin_search
from autopar.settings import Settings, start_clock

FROM_A_FILE = (
    "this plan is data alone, from a file or changed by hand: parallelize(step, plan=plan).plan(state, batch) gives one that "
    "knows its step and can be asked"
)
_SAME = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan under other settings.

    Attributes:
        name: what is different, in words.
        step_s: predicted seconds per step; None if there is no plan.
        peak_bytes: predicted peak memory per device; None if there is no plan.
        what: the plan in a few words, or why there is none.
    """

    name: str
    step_s: float | None
    peak_bytes: int | None
    what: str


def price(name: str, settings: Settings, traced: TracedStep) -> PricedPlan:
    """Plan a step under settings; the clock starts anew. Warnings are about a plan that nobody runs, so they are not issued."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoparWarning)
            plan = decide(start_clock(settings), traced).plan
    except OutOfMemoryError:
        return PricedPlan(name=name, step_s=None, peak_bytes=None, what="does not fit the memory")
    except AutoparError as error:
        reason = str(error).splitlines()[0].partition(": ")[0]
        return PricedPlan(name=name, step_s=None, peak_bytes=None, what=f"has no plan: {reason}")
    return PricedPlan(name=name, step_s=plan.step_s, peak_bytes=plan.peak_bytes, what=words_of(plan))


def price_each(ways: Iterable[tuple[str, Settings]], traced: TracedStep) -> tuple[PricedPlan, ...]:
    """Plan a step in each of several ways, one after the other, each with its name and settings."""
    listed, rows = list(ways), []
    for number, (name, settings) in enumerate(listed, 1):
        begin_search(f"{name}, {number} of {len(listed)}")
        rows.append(price(name, settings, traced))
    return tuple(rows)


def asked_of(asked: tuple[object, object] | None) -> tuple[Settings, TracedStep]:
    """The settings and the step that a plan is the answer to. Raises PlanError if it knows none, or follows another step's."""
    if asked is None:
        raise PlanError(FROM_A_FILE)
    settings, traced = asked
    assert isinstance(settings, Settings)
    assert isinstance(traced, TracedStep)
    if settings.follow is not None:
        raise PlanError("the layouts are those of the step that this one follows: ask the plan of that step")
    return dataclasses.replace(settings, plan=None), traced


def words_of(plan: Plan | PipelinePlan) -> str:
    """A plan in a few words: its mesh or stages, microbatches, what is recomputed."""
    where = (
        f"{plan.num_stages} stages, {plan.schedule}" if isinstance(plan, PipelinePlan) else f"mesh {mesh_text(plan)}"
    )
    cut = f", {plan.num_microbatches} microbatches" if plan.num_microbatches > 1 else ""
    early = "; the search ended early" if plan.ended_early else ""
    return f"{where}{cut}{', recomputes' if plan.recompute else ''}{early}"


def priced_table(title: str, plan: Plan | PipelinePlan, rows: Sequence[PricedPlan], *, this: str) -> Table:
    """The rows as a table, below that of the plan itself, which is called `this`."""
    table = new_table(title, "", "step", "against this plan", "peak", "how", numbers=("step", "peak"), aside=("how",))
    table.add_row(*map(Text, (this, seconds_text(plan.step_s), "", bytes_text(plan.peak_bytes), words_of(plan))))
    for row in rows:
        if row.step_s is None or row.peak_bytes is None:
            table.add_row(*map(Text, (row.name, "-", "", "", row.what)))
        else:
            figures = (seconds_text(row.step_s), against_text(row.step_s, plan.step_s), bytes_text(row.peak_bytes))
            table.add_row(*map(Text, (row.name, *figures, row.what)))
    return table


def table_text(table: Table) -> str:
    """A table as text that fits the terminal."""
    stream = io.StringIO()
    Console(file=stream, width=standard_output().width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def against_text(step_s: float, base_s: float) -> str:
    """How much slower or faster a step is than another: seconds, and the share."""
    more_s = step_s - base_s
    if abs(more_s) <= _SAME * base_s:
        return "the same"
    return f"{seconds_text(abs(more_s))} ({abs(more_s) / base_s:.1%}) {'slower' if more_s > 0 else 'faster'}"
