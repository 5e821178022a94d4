"""Recall a plan instead of searching for it, and keep what a search finds.

In: what is asked for, how to search, and how to restore a plan. Out: the step with its plan. A restart of a training script so
plans in the time that it takes to trace: the plan is there at once, and what runs is restored when it is to be compiled
(`Recalled`). A plan that ended early is recalled by searches that have no more seconds than it had, and after longer ones that
found nothing faster. Its lines of source are those of today, and what its search warned of is said again. What can go wrong: a
kept plan cannot be restored; then there is a line in the log, and a search.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from autopar.errors import AutoparError, listening_to_warnings, warn
from autopar.gc_pause import pause_full_collections
from autopar.pipeline_plan import PipelinePlan, kept_plan_from_json
from autopar.plan import Plan
from autopar.plan_cache.entry import Entry
from autopar.plan_cache.folder import CacheFolder, cache_folder
from autopar.plan_cache.key import key_of, list_sources
from autopar.plan_cache.offered import find_offer, take_offer
from autopar.program.step import TracedStep
from autopar.progress import LOGGER, enter
from autopar.runtime.thread_settings import program_settings_here, under
from autopar.settings import Settings, count_devices, start_clock


class _Planned(Protocol):
    @property
    def plan(self) -> Plan | PipelinePlan: ...

    @property
    def traced(self) -> TracedStep: ...


P_co = TypeVar("P_co", bound=_Planned, covariant=True)
P = TypeVar("P", bound=_Planned)


class Recalled(Generic[P_co]):
    """A step with the plan of an earlier run. What runs is restored when it is first asked for, under JAX's settings of now."""

    def __init__(self, plan: Plan | PipelinePlan, restore: Callable[[], P_co]) -> None:
        self._plan, self._restore, self._settings = plan, restore, program_settings_here()

    @functools.cached_property
    def whole(self) -> P_co:
        """The step as it runs; of another plan than `plan` was, if that cannot be restored."""
        enter("restoring the plan of an earlier run")
        with under(self._settings), pause_full_collections():
            return self._restore()

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan."""
        return self.whole.plan if "whole" in vars(self) else self._plan

    @property
    def traced(self) -> TracedStep:
        """The step as it runs, see `whole`."""
        return self.whole.traced


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ways(Generic[P]):
    """How a step gets its plan.

    Attributes:
        search: searches for one, under settings whose clock runs.
        restore: makes of a plan what a search makes, if it is one of this step.
        restore_kept: the same of a plan that the cache has for this very question, with the phases that it was kept with.
        name_phases: the phases to keep with what a search has made, if it has any.
    """

    search: Callable[[Settings], P]
    restore: Callable[[Plan | PipelinePlan], P]
    restore_kept: Callable[[Plan | PipelinePlan, str | None], P]
    name_phases: Callable[[P], str | None]


def recall_or_search(settings: Settings, traced: TracedStep, ways: Ways[P]) -> P | Recalled[P]:
    """The step with the plan that is offered or that the cache has for it, or the one that a search finds, which is then kept.

    Args:
        settings: what is asked for.
        traced: the step.
        ways: how to search, and how to restore.

    Raises:
        AutoparError: what the search raises.
    """
    folder = cache_folder() if settings.uses_cache else None
    key = None if folder is None else key_of(settings, traced)
    question = None
    if folder is not None and key is not None:
        question = _Question(settings=settings, traced=traced, ways=ways, folder=folder, key=key)
    offer = find_offer(settings)
    if offer is not None:
        recalled = None if question is None else question.recall(offer.plan)
        offered = recalled or take_offer(offer, ways.restore)
        if offered is not None:
            return offered
    return ways.search(settings) if question is None else question.answer()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Question(Generic[P]):
    """A step whose plan may be in a folder under a key."""

    settings: Settings
    traced: TracedStep
    ways: Ways[P]
    folder: CacheFolder
    key: str

    @functools.cached_property
    def _entry(self) -> Entry | None:
        return self.folder.find(self.key)

    def recall(self, offered: str) -> Recalled[P] | None:
        """The plan of the folder, if it is the same as one that is offered: that of the folder need not be checked."""
        return self._recall(self._entry) if self._entry is not None and self._entry.plan == offered else None

    def _recall(self, entry: Entry) -> Recalled[P] | None:
        """The plan of an entry, None if it cannot be read."""
        plan = self._plan_of(entry)
        if plan is None:
            return None
        self._repeat_warnings(entry)
        LOGGER.info("the plan is that of an earlier run, from the cache: %s", self.key[:12])
        return Recalled(plan, functools.partial(self._restore, entry, plan))

    def answer(self) -> P | Recalled[P]:
        """The plan of the folder, or that of a search, which is then kept there."""
        entry = self._entry
        if entry is not None and entry.serves(self.settings.planning_seconds):
            recalled = self._recall(entry)
            if recalled is not None:
                return recalled
        planned, found = self._search(self.settings)
        if entry is None:
            self.folder.keep(found)
            return planned
        earlier = self._plan_of(entry)
        if earlier is None or earlier.step_s >= planned.plan.step_s or (again := self._try(entry, earlier)) is None:
            self.folder.keep(found.add_search(entry.searched_s))
            return planned
        self._repeat_warnings(entry)
        self.folder.keep(entry.add_search(found.searched_s))
        return again

    def _search(self, settings: Settings) -> tuple[P, Entry]:
        """What a search finds, and what is to be kept of it."""
        with listening_to_warnings() as said:
            planned = self.ways.search(settings)
        return planned, Entry(
            key=self.key,
            subject=_describe(settings, self.traced, planned.plan),
            plan=planned.plan.to_json(),
            sources=list_sources(self.traced),
            warnings=tuple(dict.fromkeys(said)),
            phases=self.ways.name_phases(planned),
            searched_s=_searched_s(settings, planned.plan),
        )

    def _plan_of(self, entry: Entry) -> Plan | PipelinePlan | None:
        """The plan of an entry, with the lines of source as they are today; None if it cannot be read."""
        try:
            today = dict(zip(entry.sources, list_sources(self.traced), strict=True))
            return _with_sources(kept_plan_from_json(entry.plan), today)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._log(error)
            return None

    def _restore(self, entry: Entry, plan: Plan | PipelinePlan) -> P:
        """The step with a kept plan; with that of a search, if it cannot be restored."""
        restored = self._try(entry, plan)
        if restored is not None:
            return restored
        planned, found = self._search(start_clock(self.settings))
        self.folder.keep(found)
        return planned

    def _try(self, entry: Entry, plan: Plan | PipelinePlan) -> P | None:
        """The step with a kept plan; None, and a line in the log, if it cannot be restored."""
        try:
            return self.ways.restore_kept(plan, entry.phases)
        except (AutoparError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._log(error)
            return None

    def _repeat_warnings(self, entry: Entry) -> None:
        for message in entry.warnings:
            warn(message)

    def _log(self, error: Exception) -> None:
        LOGGER.info("the plan in the cache for %s cannot be restored: %s", self.key[:12], error)


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
