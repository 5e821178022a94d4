"""Why nothing fits the memory: the smallest set of wishes that leave no plan, and what giving each of them up would cost.

In: the settings and the traced step for which no plan was found, the error, and how long to look. Out: `Conflict`. A wish is a
constraint, a preset, or an argument that the user gave and that could be left open. Wishes conflict if no plan fits that keeps
them all, whatever the others say. All wishes together conflict, as the error says; from there each is left out where the others
still do. That is an answer at any time, and one from which no wish can be left out if there was time for all. What needs no
search comes first: state that exceeds all devices together, sets of which more is known already. Each relaxation is tried, and
its price is that of the plan found. No search takes more than its share of the time, so that all have some, and none is made
twice. A search that the clock has ended without a plan says nothing: there was no time to try. What can go wrong: a search that
ends by itself before it has found the plan there is; a relaxation is then said to be not enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.errors import OutOfMemoryError
from autopar.explain.units import bytes_text
from autopar.inter_op.attempts import bytes_held
from autopar.inter_op.one_mesh import state_is_too_large
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.constraints import Constraints, Rule, SplitBatch
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.progress import enter
from autopar.settings import Settings, count_devices, make_request
from autopar.solver.budget import Budget
from autopar.why.deadline import Deadline
from autopar.why.question import OUT_OF_TIME, solve

BUDGET_S = 60.0
"""How long to look where nobody says it and planning has no limit."""
_SEARCH = 0.8
"""Of a search's share of the time, for finding plans; in the rest it describes the one that it has."""
_ROOM = 1.25
"""A limit above a plan's own peak by this factor has room for what XLA may need beyond the prediction."""
_FOR_WISHES = 0.6
"""Of the budget, for finding what conflicts; the rest is for prices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user fixed, in words; `field` of the settings is left open if it is given up, or `rules` left out."""

    words: str
    field: str = ""
    open_value: object = "auto"
    rules: tuple[Rule, ...] = ()

    def given_up(self, settings: Settings) -> Settings:
        """The settings without this wish."""
        if not self.rules:
            return dataclasses.replace(settings, **{self.field: self.open_value})  # type: ignore[arg-type]
        constraints = settings.constraints
        left = tuple(one for one in constraints.rules if not any(one is rule for rule in self.rules))
        return dataclasses.replace(settings, constraints=Constraints(left, constraints.without))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Something to give up: in words, and the plan there is then; None if that alone is not enough.

    `is_tried`: whether there was time for it. `ended_early`: whether the clock ended the search for its plan.
    """

    words: str
    step_s: float | None = None
    peak_bytes: int | None = None
    is_tried: bool = True
    ended_early: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why nothing fits.

    Attributes:
        limit_bytes: the memory limit per device.
        wishes: the wishes that leave no plan within it; none if no plan fits whatever is given up.
        tensors: the largest that are alive together, in words.
        relaxations: what was tried, the fastest plan first.
        is_smallest: whether no wish can be left out; else the clock ended before all were tried.
        is_settled: whether no plan fits; else none was found, and the search ended before it had tried all that may.
        state_bytes: of the state on each device, if it is spread evenly over all of them; no plan takes less.
    """

    limit_bytes: int
    wishes: tuple[str, ...]
    tensors: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    is_smallest: bool = True
    is_settled: bool = True
    state_bytes: int = 0


def find_conflict(settings: Settings, traced: TracedStep, error: OutOfMemoryError, deadline: Deadline) -> Conflict:
    """The conflict of a step that fits no memory, and the cheapest ways out.

    Args:
        settings: under which nothing was found.
        traced: the step.
        error: that says so.
        deadline: until when to look.
    """
    tries, limit = _Tries(settings, traced, deadline), make_request(settings).memory_limit_bytes or 0
    every, more_devices = _wishes(settings), isinstance(settings.devices, int) and settings.meshes == "auto"
    tries.ahead = 1 + (2 * len(every) if len(every) > 1 else len(every)) + more_devices
    wishes, is_smallest = _conflicting(tries, every, deadline.clock.part(_FOR_WISHES))
    tries.ahead = 1 + sum(not tries.knows([wish]) for wish in wishes) + more_devices
    relaxations = [_of_plan(f"without {wish.words}", tries.without([wish])) for wish in wishes]
    relaxations.append(_with_more_memory(tries, error))
    if more_devices:
        relaxations.append(tries.price(f"devices={2 * count_devices(settings)}", _on_more_devices(settings)))
    return Conflict(
        limit_bytes=limit,
        wishes=tuple(wish.words for wish in wishes),
        tensors=error.tensors,
        relaxations=tuple(
            sorted(relaxations, key=lambda one: (one.step_s is None, not one.is_tried, one.step_s or 0.0))
        ),
        is_smallest=is_smallest,
        is_settled=error.is_settled,
        state_bytes=math.ceil(
            bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch") / count_devices(settings)
        ),
    )


class _Tries:
    """Searches under one clock, `ahead` of them still to be made."""

    def __init__(self, settings: Settings, traced: TracedStep, deadline: Deadline) -> None:
        self.settings, self.traced, self.deadline = settings, traced, deadline
        self.ahead = 1
        self._known: dict[frozenset[str], Plan | PipelinePlan | str] = {}

    def knows(self, given_up: Sequence[Wish]) -> bool:
        """Whether it has been tried what there is without some wishes."""
        return _key(given_up) in self._known

    def without(self, given_up: Sequence[Wish]) -> Plan | PipelinePlan | str | None:
        """The plan without some wishes, or why there is none; None if there is no time. It is sought once."""
        if not self.knows(given_up):
            settings = self.settings
            for wish in given_up:
                settings = wish.given_up(settings)
            found = self.plan(f"without {', '.join(wish.words for wish in given_up)}", settings)
            if found is None:
                return None
            self._known[_key(given_up)] = found
        return self._known[_key(given_up)]

    def plan(self, words: str, settings: Settings) -> Plan | PipelinePlan | str | None:
        """The plan under some settings, or why there is none; None if there is no time. What needs no search comes first."""
        devices = count_devices(settings)
        if state_is_too_large(self.traced, make_request(settings), devices):
            return f"the state alone is more than {devices} devices hold"
        clock = self.deadline.clock
        if clock.is_late:
            return None
        enter(f"why nothing fits: {words}")
        share_s = clock.seconds_left / max(1, self.ahead)
        self.ahead -= 1
        most_s = min(settings.planning_seconds or share_s, _SEARCH * share_s)
        asked = dataclasses.replace(settings, planning_seconds=most_s)
        found = self.deadline.run(lambda: solve(asked, self.traced), share_s)
        return None if found == OUT_OF_TIME else found

    def price(self, words: str, settings: Settings) -> Relaxation:
        """A relaxation with the plan there is."""
        return _of_plan(words, self.plan(words, settings))


def _wishes(settings: Settings) -> list[Wish]:
    """What the user fixed and could leave open; the rules of presets are one wish."""
    of_preset = [rule for rule in settings.constraints.rules if _is_of_preset(rule)]
    found = [Wish(words=_preset_text(of_preset), rules=tuple(of_preset))] if of_preset else []
    found += [
        Wish(words=_rule_text(rule), rules=(rule,)) for rule in settings.constraints.rules if not _is_of_preset(rule)
    ]
    arguments = (
        ("mesh_shape", "meshes"),
        ("num_stages", "num_stages"),
        ("num_microbatches", "num_microbatches"),
        ("virtual_stages", "virtual_stages"),
        ("recompute", "recompute"),
    )
    for argument, field in arguments:
        value = getattr(settings, field)
        if value != "auto":
            shown = [mesh.shape for mesh in value] if field == "meshes" else value
            found.append(Wish(words=f"{argument}={shown!r}", field=field))
    if settings.options.kinds != PlannerOptions().kinds:
        kinds = PlannerOptions(allow_redundant_compute=settings.options.allow_redundant_compute)
        found.append(Wish(words=f"collectives={sorted(settings.options.kinds)}", field="options", open_value=kinds))
    return found


def _conflicting(tries: _Tries, wishes: Sequence[Wish], clock: Budget) -> tuple[list[Wish], bool]:
    """Wishes that leave no plan, the others given up, and whether none of them can be left out."""
    is_free = _leaves_plan(tries, wishes, ()) if wishes else False
    if is_free is False:
        return [], True
    if is_free is None or len(wishes) == 1:
        return list(wishes), is_free is True
    kept, is_smallest = list(wishes), True
    for wish in wishes:
        fewer = [one for one in kept if one is not wish]
        found = None if clock.is_late else not fewer or _leaves_plan(tries, wishes, fewer)
        is_smallest = is_smallest and found is not None
        kept = fewer if found is False else kept
    return kept, is_smallest


def _leaves_plan(tries: _Tries, wishes: Sequence[Wish], kept: Sequence[Wish]) -> bool | None:
    """Whether there is a plan that keeps some of the wishes; None if there is no time to find out."""
    found = tries.without([wish for wish in wishes if wish not in kept])
    return None if found is None else not isinstance(found, str)


def _with_more_memory(tries: _Tries, error: OutOfMemoryError) -> Relaxation:
    """The lowest limit that is known to do, or one that does for the fastest plan without a limit."""
    settings, needed = tries.settings, error.needed_bytes
    if needed is not None:
        words = f"memory_limit_bytes={needed:_} ({bytes_text(needed)} per device)"
        return tries.price(words, dataclasses.replace(settings, memory_limit_bytes=needed))
    free = tries.plan("without a memory limit", dataclasses.replace(settings, memory_limit_bytes=2**60))
    if free is None or isinstance(free, str):
        return _of_plan("a higher memory_limit_bytes", free)
    needed = int(_ROOM * free.peak_bytes)
    return _of_plan(f"memory_limit_bytes={needed:_} ({bytes_text(needed)} per device)", free)


def _on_more_devices(settings: Settings) -> Settings:
    assert isinstance(settings.devices, int)
    limit = make_request(settings).memory_limit_bytes
    return dataclasses.replace(settings, devices=2 * settings.devices, memory_limit_bytes=limit)


def _of_plan(words: str, plan: Plan | PipelinePlan | str | None) -> Relaxation:
    if plan is None or isinstance(plan, str):
        return Relaxation(words=words, is_tried=plan is not None)
    return Relaxation(words=words, step_s=plan.step_s, peak_bytes=plan.peak_bytes, ended_early=plan.ended_early)


def _key(given_up: Sequence[Wish]) -> frozenset[str]:
    return frozenset(wish.words for wish in given_up)


def _is_of_preset(rule: Rule) -> bool:
    """Whether `data_parallel` or a `zero` made a rule: only they speak of roles."""
    return bool(rule.asked_by) or (rule.glob == "*" and rule.role is not None)


def _preset_text(rules: Sequence[Rule]) -> str:
    """The call that made the rules."""
    names = {rule.asked_by.partition("(")[0] for rule in rules if rule.asked_by}
    axes = next((rule.layout.axes for rule in rules if isinstance(rule.layout, SplitBatch) and rule.layout.axes), None)
    return f"{max(names, default='data_parallel')}({', '.join(map(repr, axes or ()))})"


def _rule_text(rule: Rule) -> str:
    of = f" of the {rule.role}" if rule.role and rule.glob == "*" else ""
    return f"the constraint {rule.glob!r}{of}: {rule.layout!r}"
