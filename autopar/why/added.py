"""What the step of one plan does more, and what it does less, than that of another: seconds that add up to the difference.

In: two plans of a step, and the module that is asked about. Out: `Added`s, which add up to what the one step takes more than
the other, and their text. On one mesh they are what the step waits for of each collective, and compute. In stages they are those
of all stages, and transfers; stages work side by side, so the step does not wait for all of it, and the last one, `BESIDE`, is
what it does not wait for. What can go wrong: plans of many collectives; the text names a few and sums up the others.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from autopar.explain.tables import where_text
from autopar.explain.units import seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

SAME = 1e-9
"""Shares of a step that are nothing."""
BESIDE = "work beside that of other stages"
"""What the step waits for less than its stages have more to do, or more than they have less."""
_NAMED = 2


@dataclasses.dataclass(frozen=True)
class Added:
    """Something that a step does more than another: what, and how many seconds longer it takes; negative of what it saves."""

    what: str
    seconds: float


def additions(plan: Plan | PipelinePlan, other: Plan | PipelinePlan, module: str) -> tuple[Added, ...]:
    """What the step of another plan does more than that of this one, that of a module first, then what it saves."""
    here, there = _seconds(plan), _seconds(other)
    found = [Added(what, there.get(what, 0.0) - here.get(what, 0.0)) for what in {**here, **there}]
    left_s = other.step_s - plan.step_s - sum(one.seconds for one in found)
    some = [one for one in found if abs(one.seconds) > SAME * plan.step_s]
    ordered = sorted(some, key=lambda one: (one.seconds < 0, module not in one.what, -abs(one.seconds)))
    last = (Added(BESIDE if isinstance(plan, PipelinePlan) else "other work", left_s),)
    return (*ordered, *(last if abs(left_s) > SAME * plan.step_s else ()))


def added_text(added: Sequence[Added]) -> str:
    """Additions in words: the first of what is added and of what is saved, the sum of the others, and what is not waited for."""
    steps = [one for one in added if one.what != BESIDE]
    more, less = [one for one in steps if one.seconds > 0], [one for one in steps if one.seconds < 0]
    parts = [f"adds {_listed(more)}"] if more else []
    parts += [f"saves {_listed(less)}"] if less else []
    return "; ".join([*parts, *(_beside_text(one, steps) for one in added if one.what == BESIDE)])


def not_waited_for(added: Sequence[Added]) -> float:
    """Seconds that stages have more to do and the step does not wait for; negative of what it gains nothing by."""
    return -sum(one.seconds for one in added if one.what == BESIDE)


def _listed(some: Sequence[Added]) -> str:
    named = some if len(some) == _NAMED + 1 else some[:_NAMED]
    texts = [f"{seconds_text(abs(one.seconds))} of {one.what}" for one in named]
    left = some[len(named) :]
    texts += [f"{seconds_text(abs(sum(one.seconds for one in left)))} in {len(left)} more"] if left else []
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _beside_text(beside: Added, steps: Sequence[Added]) -> str:
    """What stages working side by side make of it: the step does not wait for all that is added, or loses some of the gain."""
    seconds, more_s = seconds_text(abs(beside.seconds)), sum(one.seconds for one in steps)
    if beside.seconds < 0 < more_s:
        return f"{seconds} of that is done beside the work of other stages, and the step does not wait for it"
    if more_s < 0 < beside.seconds:
        return f"{seconds} of that was done beside the work of other stages, and the step gains nothing by it"
    return f"stages wait for each other {seconds} {'less' if beside.seconds < 0 else 'more'}"


def _seconds(plan: Plan | PipelinePlan) -> dict[str, float]:
    """Seconds per step of compute, of what is waited for of each collective by kind, axes and place, and of transfers."""
    plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]
    found: dict[str, float] = defaultdict(float)
    for item in (item for one in plans for item in one.collectives):
        where = where_text([item.scope], item.source) or "the end of the step"
        waited_s = item.count * (item.predicted_s - item.hidden_s)
        found[f"{item.kind} over {', '.join(item.axes)} at {where}"] += waited_s
    found["compute"] = sum(one.compute_s for one in plans)
    if isinstance(plan, PipelinePlan):
        found["transfers between stages"] = sum(one.count * one.predicted_s for one in plan.transfers)
    return found
