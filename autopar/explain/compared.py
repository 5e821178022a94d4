"""Which numbers of microbatches and schedules were compared, and why the chosen one won.

In: the `Alternative`s of a plan. Out: a table, fastest first, and sentences on what won and what there was no time for. What was
only estimated is marked: it was not planned, because the estimate promised no gain. What can go wrong: nothing was compared; then
there is neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from autopar.explain.bound import is_proven
from autopar.explain.tables import meshes_left, new_table
from autopar.explain.units import bytes_text, seconds_text, slower_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Alternative, Plan

MOST_ROWS = 10
"""So many rows have the table unless all are asked for."""
_OBSTACLES = {
    "memory": "does not fit the memory",
    "constraints": "cannot meet the constraints",
    "cut": "cannot be cut so",
}
"""What stands in the way of an impossible one, in words; a plan that was written before plans said so knows less."""
_LISTED = 6
_MESHES_NAMED = 2
_MORE_SECONDS = "more planning seconds"


def compared_table(plan: Plan | PipelinePlan, *, full: bool = False, most_rows: int = MOST_ROWS) -> Table:
    """One row per way that was compared, fastest first; no rows if none was."""
    columns = ("stages", "microbatches", "schedule", "recompute", "step", "peak", "")
    numbers = ("stages", "microbatches", "step", "peak")
    table = new_table("Compared (~: estimated, >: at least)", *columns, numbers=numbers, aside=("",))
    rows = sorted(plan.compared, key=_seconds)
    for one in rows if full else rows[:most_rows]:
        table.add_row(
            "-" if one.num_stages is None else str(one.num_stages),
            str(one.num_microbatches),
            _schedule_text(one),
            _recomputed_text(one),
            _step_text(one),
            "-" if one.peak_bytes is None else bytes_text(one.peak_bytes),
            _verdict(one, plan),
        )
    if not full and len(rows) > most_rows:
        table.add_row("", "", f"... {len(rows) - most_rows} more", "", "", "", "slower, or not possible")
    return table


def what_is_missing(plan: Plan | PipelinePlan) -> Iterator[str]:
    """What was assumed of the machine and of numbers, and what more time for planning would do, unless the plan is proven."""
    if plan.is_cluster_assumed:
        yield f"planned for the preset {plan.cluster}, which was assumed: cluster= names the machine"
    yield from _finite_text(plan)
    if not plan.ended_early:
        if not is_proven(plan):
            yield f"the search came to its end{_left_text(plan)}: {_MORE_SECONDS} would find the same plan"
        return
    stopped = f"planning stopped after {seconds_text(plan.planning_s)}"
    listed, others = "; ".join(plan.not_compared[:_LISTED]), len(plan.not_compared) - _LISTED
    if not listed:
        yield f"{stopped}, before everything was compared: {_MORE_SECONDS} would compare the rest"
        return
    more = f"; and {others} more" if others > 0 else ""
    yield f"{stopped}; {_MORE_SECONDS} would also compare: {listed}{more}"


def _left_text(plan: Plan | PipelinePlan) -> str:
    """Which meshes the search leaves by itself, as they could save less than their search is worth."""
    left = meshes_left(plan) if isinstance(plan, Plan) else ()
    named = " and ".join(left) if len(left) <= _MESHES_NAMED else f"{len(left)} meshes"
    return f", and left {named} for the little that could be saved there" if left else ""


def _finite_text(plan: Plan | PipelinePlan) -> Iterator[str]:
    """The products that take terms of a sum as if their other factor were finite."""
    products = plan.assumed_finite
    if products:
        others = len(products) - _LISTED
        listed = ", ".join(products[:_LISTED]) + (f", and {others} more" if others > 0 else "")
        yield (
            "each microbatch does its part of these products, which is right where the other factor is finite, and a divisor no "
            f"zero: {listed}; elsewhere results may be NaN in place of an infinity"
        )


def why_chosen(plan: Plan | PipelinePlan) -> Iterator[str]:
    """Say which way won against which, if several were compared; of a pipeline, also how long one mesh would have taken."""
    chosen = next((one for one in plan.compared if _is_chosen(one, plan)), None)
    others = sorted((one for one in plan.compared if one is not chosen), key=_seconds)
    if chosen is None or not others:
        return
    slower = (one for one in others if _seconds(one) >= plan.step_s)
    nearest = next((one for one in slower if _told_from(chosen, one, plan) != _told_from(one, chosen, plan)), None)
    words = f"{_told_from(nearest, chosen, plan)} is the fastest of {len(plan.compared)} ways compared"
    if not math.isfinite(_seconds(others[0])):
        is_memory = all(one.obstacle in ("", "memory") for one in others)
        yield f"{words}: {'nothing else fits the memory' if is_memory else 'no other one is possible'}"
        return
    if nearest is not None and math.isfinite(_seconds(nearest)):
        sure = {"": "", "~": "an estimated ", ">": "at least "}[_doubt(nearest)]
        words += f"; next is {_told_from(chosen, nearest, plan)}, {sure}{_slower(nearest, plan)}"
    yield words
    if _seconds(others[0]) < plan.step_s:
        yield f"{_told_from(chosen, others[0], plan)} may be faster: {_why_left(plan)}"
    one_mesh = next((one for one in others[1:] if not one.schedule and one.step_s is not None), None)
    if one_mesh is not None and isinstance(plan, PipelinePlan):
        yield f"one mesh would take {_step_text(one_mesh)}, {_slower(one_mesh, plan)}: {_way_text(one_mesh, plan)}"


def _told_from(other: Alternative | None, one: Alternative, plan: Plan | PipelinePlan) -> str:
    """A way in words, with its stages if another one has the same words without them."""
    is_alike = other is not None and _way_text(one, plan) == _way_text(other, plan)
    return _way_text(one, plan, with_stages=is_alike)


def _why_left(plan: Plan | PipelinePlan) -> str:
    """Why a way was not planned that is not known to be slower."""
    return "no time to look into it" if plan.ended_early else "left, as the estimated gain is not worth planning it"


def repeated_text(one: Plan | Alternative) -> str:
    """Which forward work is done again, in words."""
    number = one.recomputed_layers
    layers = "layers'" if number is None else "1 layer's" if number == 1 else f"{_layers_text(number)}'"
    return f"{layers} forward work{', except named values' if one.keeps_named else ''}"


def _layers_text(number: int) -> str:
    return f"{number} layer{'s' * (number != 1)}"


def _recomputed_text(one: Alternative) -> str:
    if not one.recompute:
        return "-"
    number = one.recomputed_layers
    layers = "layers" if number is None else _layers_text(number)
    return f"{layers}, named kept" if one.keeps_named else layers


def _seconds(one: Alternative) -> float:
    known = [s for s in (one.step_s, one.estimate_s, one.at_least_s) if s is not None]
    return known[0] if known else math.inf


def _is_chosen(one: Alternative, plan: Plan | PipelinePlan) -> bool:
    mine: Sequence[object] = (plan.num_microbatches, plan.recompute, plan.step_s)
    if isinstance(plan, Plan) and (one.recomputed_layers, one.keeps_named) != (
        plan.recomputed_layers,
        plan.keeps_named,
    ):
        return False
    if isinstance(plan, PipelinePlan):
        mine = (*mine, plan.schedule, plan.virtual_stages)
        return mine == (one.num_microbatches, one.recompute, one.step_s, one.schedule, one.virtual_stages)
    return mine == (one.num_microbatches, one.recompute, one.step_s)


def _verdict(one: Alternative, plan: Plan | PipelinePlan) -> str:
    if _is_chosen(one, plan):
        return "chosen"
    if math.isinf(_seconds(one)):
        return _OBSTACLES.get(one.obstacle, "does not fit, or cannot be cut so")
    if _seconds(one) < plan.step_s:
        return f"may be faster: {_why_left(plan)}"
    return f"{'at least ' if _doubt(one) == '>' else ''}{_slower(one, plan)}"


def _slower(one: Alternative, plan: Plan | PipelinePlan) -> str:
    return slower_text(_seconds(one), plan.step_s)


def _step_text(one: Alternative) -> str:
    if math.isinf(_seconds(one)) or not _seconds(one):  # impossible, or the clock left nothing known of it
        return "-"
    return f"{_doubt(one)}{seconds_text(_seconds(one))}"


def _doubt(one: Alternative) -> str:
    """Of seconds that are not those of a plan: whether they are estimated, or a bound."""
    if one.step_s is not None:
        return ""
    return "~" if one.estimate_s is not None else ">"


def _schedule_text(one: Alternative) -> str:
    return f"{one.schedule or '-'}{f' x {one.virtual_stages}' if one.virtual_stages > 1 else ''}"


def _way_text(one: Alternative, plan: Plan | PipelinePlan, *, with_stages: bool = False) -> str:
    noun = "microbatch" if one.num_microbatches == 1 else "microbatches"
    schedule = f" in schedule {_schedule_text(one)}" if one.schedule else ""
    form = "" if bool(one.schedule) == isinstance(plan, PipelinePlan) else " in stages" if schedule else " on one mesh"
    if with_stages and one.num_stages is not None:
        form = f" in {one.num_stages} stage{'s' * (one.num_stages != 1)}"
    return f"{one.num_microbatches} {noun}{form}{schedule}{_again_text(one)}"


def _again_text(one: Alternative) -> str:
    """With recomputation, and of how many layers if it is of some."""
    if not one.recompute:
        return ""
    number = one.recomputed_layers
    layers = "" if number is None else f" of {_layers_text(number)}"
    return f" with recomputation{layers}{', except named values' if one.keeps_named else ''}"
