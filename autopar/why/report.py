"""Answers as text.

In: an answer. Out: sentences and a table, and the answer itself, which prints as that. What can go wrong: nothing was asked
that a plan of a file could answer; PlanError says what to do.
"""

from __future__ import annotations

import dataclasses

from rich.text import Text

from autopar.errors import OutOfMemoryError, PlanError
from autopar.explain.paths import layout_text, path_patterns, shape_text
from autopar.explain.tables import new_table
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.settings import Settings
from autopar.why.added import added_text
from autopar.why.conflict import BUDGET_S, Conflict, Relaxation, find_conflict
from autopar.why.deadline import Deadline
from autopar.why.leaf import LayoutPrice, LeafAnswer, why_leaf
from autopar.why.priced import FROM_A_FILE, table_text
from autopar.why.question import Question


@dataclasses.dataclass(frozen=True)
class Why:
    """Why a leaf has its layout; prints as text."""

    answer: LeafAnswer

    def __str__(self) -> str:
        """The answer as text."""
        return leaf_text(self.answer)

    def __repr__(self) -> str:
        """The same, for interactive use."""
        return str(self)


def why(plan: Plan | PipelinePlan, asked: tuple[object, object] | None, path: str) -> Why:
    """Why a leaf of a plan has its layout. Raises PlanError if the plan knows no step, or has no such leaf."""
    if asked is None:
        raise PlanError(FROM_A_FILE)
    settings, traced = asked
    assert isinstance(settings, Settings)
    assert isinstance(traced, TracedStep)
    return Why(why_leaf(Question(settings, traced, plan), path))


@dataclasses.dataclass(frozen=True)
class WhyNot:
    """Why nothing fits the memory; prints as text."""

    answer: Conflict

    def __str__(self) -> str:
        """The answer as text."""
        return conflict_text(self.answer)

    def __repr__(self) -> str:
        """The same, for interactive use."""
        return str(self)


def why_not(error: OutOfMemoryError, budget_s: float | None = None) -> WhyNot:
    """Why nothing fits the memory, found in so many seconds. Raises PlanError if the error knows no step."""
    settings, _ = _asked_of(error)
    return why_not_until(Deadline(budget_s or settings.planning_seconds or BUDGET_S), error)


def why_not_until(deadline: Deadline, error: OutOfMemoryError) -> WhyNot:
    """Why nothing fits the memory, as far as it is found under a clock, which others may stop. Raises PlanError as `why_not`."""
    settings, traced = _asked_of(error)
    return WhyNot(find_conflict(settings, traced, error, deadline))


def _asked_of(error: OutOfMemoryError) -> tuple[Settings, TracedStep]:
    if error.asked is None:
        raise PlanError("the error knows no step: it has to come from parallelize")
    settings, traced = error.asked
    assert isinstance(settings, Settings)
    assert isinstance(traced, TracedStep)
    return settings, traced


def conflict_text(conflict: Conflict) -> str:
    """An answer as text: what conflicts, what fills the memory, and the ways out with their prices."""
    found = "No plan fits" if conflict.is_settled else "No plan was found in the time there was that fits"
    none = f"{found} {bytes_text(conflict.limit_bytes)} per device"
    lines = [f"{none}, whatever is given up." if conflict.is_settled else f"{none}. There may be one."]
    if conflict.wishes:
        lines = [f"{none} and keeps:", *(f"  {wish}" for wish in conflict.wishes)]
        lines += [] if conflict.is_smallest else ["There was no time to find out whether fewer of these conflict."]
    if conflict.state_bytes:
        spread = f"{bytes_text(conflict.state_bytes)} per device, spread evenly over all"
        lines += [f"The state alone takes {spread}; gradients, activations and temporaries come on top."]
    if conflict.tensors:
        lines += ["The largest tensors that are alive together:", *(f"  {tensor}" for tensor in conflict.tensors)]
    table = new_table("What would do, tried", "instead", "step", "peak", numbers=("step", "peak"), aside=("instead",))
    for one in conflict.relaxations:
        figures = (_without_plan(one), "") if one.step_s is None else _figures(one.step_s, one.peak_bytes)
        early = "; the search ended early" if one.ended_early else ""
        table.add_row(*map(Text, (one.words + early, *figures)))
    lines += ["", *table_text(table).splitlines()]
    if not all(one.is_tried for one in conflict.relaxations):
        more = (
            "would try what there was no time for" if conflict.is_settled else "may find a plan, and would try the rest"
        )
        lines.append(f"More planning seconds {more}.")
    return "\n".join(lines)


def _without_plan(one: Relaxation) -> str:
    return "not enough" if one.is_tried else "no time to try"


def _figures(step_s: float, peak_bytes: int | None) -> tuple[str, str]:
    return seconds_text(step_s), bytes_text(peak_bytes or 0)


def leaf_text(answer: LeafAnswer) -> str:
    """An answer as text: what the leaf has, what decides, and the prices of the others."""
    leaf = answer.leaf
    lines = [
        f"{leaf.path}, {leaf.dtype}{shape_text(leaf.shape)}: {layout_text(leaf.spec)}, "
        f"{bytes_text(leaf.bytes_per_device)} per device",
        f"What decides: {answer.decides}.",
    ]
    columns = ("layout", "step", "more", "peak", "what it adds")
    table = new_table("The layouts it could have", *columns, numbers=columns[1:4], aside=columns[4:])
    figures = (seconds_text(answer.step_s), "", bytes_text(answer.peak_bytes))
    table.add_row(*map(Text, (layout_text(leaf.spec), *figures, "chosen")))
    for other in answer.others:
        table.add_row(*map(Text, _cells(other, answer)))
    more = f"{answer.not_tried} more layouts were not tried" if answer.not_tried else ""
    return "\n".join([*lines, "", *table_text(table).splitlines(), *filter(None, [more])])


def _cells(other: LayoutPrice, answer: LeafAnswer) -> tuple[str, ...]:
    if other.step_s is None or other.peak_bytes is None:
        return layout_text(other.spec), "-", "", "", other.problem
    more_s = other.step_s - answer.step_s
    share = f"{seconds_text(abs(more_s))} ({abs(more_s) / answer.step_s:.1%})"
    more = "0 s" if abs(more_s) <= 1e-9 * answer.step_s else f"{share}{' less' if more_s < 0 else ''}"
    moved = [str(pattern) for pattern in path_patterns(other.moves)]
    follow = f"{', '.join(moved[:2])}{', ...' if len(moved) > 2 else ''} lie otherwise too" if moved else ""
    adds = "; ".join(filter(None, [added_text(other.adds), follow]))
    return layout_text(other.spec), seconds_text(other.step_s), more, bytes_text(other.peak_bytes), adds
