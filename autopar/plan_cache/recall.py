"""Recall a plan instead of searching for it, and keep what a search finds.

In: what is asked for, how to search, and how to restore a plan. Out: the step with its plan. A restart of a training script so
plans in the time that it takes to trace and to restore. A plan that ended early is recalled by searches that have no more
seconds than it had, and after longer ones that found nothing faster. Its lines of source are those of today, and what its
search warned of is said again. What can go wrong: a kept plan cannot be restored; then there is a line in the log, and a search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from autopar.errors import AutoparError, listening_to_warnings, warn
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.plan_cache.entry import Entry
from autopar.plan_cache.folder import cache_folder
from autopar.plan_cache.key import key_of, list_sources
from autopar.plan_cache.offered import take_offer
from autopar.program.step import TracedStep
from autopar.progress import LOGGER, enter
from autopar.settings import Settings, count_devices


class _Planned(Protocol):
    @property
    def plan(self) -> Plan | PipelinePlan: ...


P = TypeVar("P", bound=_Planned)


def recall_or_search(
    settings: Settings,
    traced: TracedStep,
    *,
    search: Callable[[], P],
    restore: Callable[[Plan | PipelinePlan], P],
) -> P:
    """The step with the plan that is offered or that the cache has for it, or the one that a search finds, which is then kept.

    Args:
        settings: what is asked for.
        traced: the step.
        search: finds a plan.
        restore: makes of a plan what a search makes.

    Raises:
        AutoparError: what the search raises.
    """
    offered = take_offer(settings, restore)
    if offered is not None:
        return offered
    folder = cache_folder() if settings.uses_cache else None
    key = None if folder is None else key_of(settings, traced)
    if folder is None or key is None:
        return search()
    entry = folder.find(key)
    if entry is not None and entry.serves(settings.planning_seconds):
        recalled = _recall(entry, traced, restore)
        if recalled is not None:
            return recalled
    with listening_to_warnings() as said:
        planned = search()
    found = Entry(
        key=key,
        subject=_describe(settings, traced, planned.plan),
        plan=planned.plan.to_json(),
        sources=list_sources(traced),
        warnings=tuple(dict.fromkeys(said)),
        searched_s=_searched_s(settings, planned.plan),
    )
    if entry is None:
        folder.keep(found)
        return planned
    earlier = _recall(entry, traced, restore, faster_than_s=planned.plan.step_s)
    best, other = (found, entry) if earlier is None else (entry, found)
    folder.keep(best.add_search(other.searched_s))
    return planned if earlier is None else earlier


def _recall(
    entry: Entry,
    traced: TracedStep,
    restore: Callable[[Plan | PipelinePlan], P],
    *,
    faster_than_s: float = math.inf,
) -> P | None:
    """The step with the plan of an entry; None if that is not faster, or cannot be restored."""
    try:
        plan = _with_sources(plan_from_json(entry.plan), dict(zip(entry.sources, list_sources(traced), strict=True)))
        if plan.step_s >= faster_than_s:
            return None
        enter("restoring the plan of an earlier run")
        with listening_to_warnings() as said:
            planned = restore(plan)
    except (AutoparError, ValueError, LookupError, TypeError) as error:
        LOGGER.info("the plan in the cache for %s cannot be restored: %s", entry.key[:12], error)
        return None
    for message in entry.warnings:
        if message not in said:
            warn(message)
    LOGGER.info("the plan is that of an earlier run, from the cache: %s", entry.key[:12])
    return planned


def _searched_s(settings: Settings, plan: Plan | PipelinePlan) -> float | None:
    """How many seconds the search had, if it ended early."""
    limit = math.inf if settings.planning_seconds is None else settings.planning_seconds
    return min(limit, settings.budget.elapsed_s) if plan.ended_early else None


def _with_sources(plan: Plan | PipelinePlan, today: dict[str, str]) -> Plan | PipelinePlan:
    """A plan with the lines of source as they are today."""
    if isinstance(plan, PipelinePlan):
        stages = [dataclasses.replace(stage, plan=_lines_of_today(stage.plan, today)) for stage in plan.stages]
        return dataclasses.replace(plan, stages=tuple(stages))
    return _lines_of_today(plan, today)


def _lines_of_today(plan: Plan, today: dict[str, str]) -> Plan:
    collectives = (dataclasses.replace(one, source=today.get(one.source, one.source)) for one in plan.collectives)
    return dataclasses.replace(plan, collectives=tuple(collectives))


def _describe(settings: Settings, traced: TracedStep, plan: Plan | PipelinePlan) -> str:
    """What a plan is for and what it is, in a few words."""
    batch = ", ".join(f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in traced.inputs if leaf.role == "batch")
    chosen = f"{plan.num_stages} stages" if isinstance(plan, PipelinePlan) else f"mesh {plan.mesh_shape}"
    return f"{batch or 'no batch'}; {count_devices(settings)} devices of {plan.cluster}: {chosen}"
