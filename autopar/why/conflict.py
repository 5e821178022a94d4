"""Why nothing fits the memory: the smallest set of wishes that leave no plan, and what giving each of them up would cost.

In: the settings and the traced step for which no plan was found, and the error. Out: `Conflict`. A wish is a constraint, or an
argument that the user gave and that could be left open. Wishes conflict if no plan fits that keeps them all, whatever the others
say; the set is the smallest if there are few wishes, and otherwise one from which none can be left out. Each relaxation is tried,
and its price is that of the plan found. What can go wrong: a search that ends before it has found the plan there is; a relaxation
is then said to be not enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.errors import OutOfMemoryError
from autopar.explain.units import bytes_text
from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.constraints import Constraints, Rule
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.settings import Settings, make_request
from autopar.why.question import solve

FEW_WISHES = 3
"""Of so many wishes every set is tried."""
_ROOM = 1.25
"""A limit above a plan's own peak by this factor has room for what XLA may need beyond the prediction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user fixed, in words; `field` of the settings is left open if it is given up, or `rule` left out."""

    words: str
    field: str = ""
    open_value: object = "auto"
    rule: Rule | None = None

    def given_up(self, settings: Settings) -> Settings:
        """The settings without this wish."""
        if self.rule is None:
            return dataclasses.replace(settings, **{self.field: self.open_value})  # type: ignore[arg-type]
        constraints = settings.constraints
        rules = tuple(one for one in constraints.rules if one is not self.rule)
        return dataclasses.replace(settings, constraints=Constraints(rules, constraints.without))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Something to give up: in words, and the plan there is then; None if that alone is not enough."""

    words: str
    step_s: float | None
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why nothing fits.

    Attributes:
        limit_bytes: the memory limit per device.
        wishes: the wishes that leave no plan within it; none if no plan fits whatever is given up.
        tensors: the largest that are alive together, in words.
        relaxations: what was tried, the fastest plan first.
    """

    limit_bytes: int
    wishes: tuple[str, ...]
    tensors: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]


def find_conflict(settings: Settings, traced: TracedStep, error: OutOfMemoryError) -> Conflict:
    """The smallest conflict of a step that fits no memory, and the cheapest ways out."""
    wishes = _conflicting(settings, traced, _wishes(settings))
    relaxations = [_relaxation(f"without {wish.words}", wish.given_up(settings), traced) for wish in wishes]
    relaxations.append(_with_more_memory(settings, traced, error))
    if isinstance(settings.devices, int) and settings.meshes == "auto":
        relaxations.append(_relaxation(f"devices={2 * settings.devices}", _on_more_devices(settings), traced))
    limit = make_request(settings).memory_limit_bytes
    return Conflict(
        limit_bytes=limit or 0,
        wishes=tuple(wish.words for wish in wishes),
        tensors=error.tensors,
        relaxations=tuple(sorted(relaxations, key=lambda one: (one.step_s is None, one.step_s or 0.0))),
    )


def _wishes(settings: Settings) -> list[Wish]:
    """What the user fixed and could leave open."""
    found = [Wish(words=_rule_text(rule), rule=rule) for rule in settings.constraints.rules]
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


def _conflicting(settings: Settings, traced: TracedStep, wishes: Sequence[Wish]) -> list[Wish]:
    """A smallest set of wishes that leaves no plan, the others given up."""
    if len(wishes) <= FEW_WISHES:
        sets = itertools.chain.from_iterable(itertools.combinations(wishes, size) for size in range(len(wishes)))
        return list(next((kept for kept in sets if not _has_plan(settings, traced, wishes, kept)), wishes))
    kept = list(wishes)
    for wish in wishes:
        fewer = [one for one in kept if one is not wish]
        if not _has_plan(settings, traced, wishes, fewer):
            kept = fewer
    return kept


def _has_plan(settings: Settings, traced: TracedStep, wishes: Sequence[Wish], kept: Sequence[Wish]) -> bool:
    for wish in wishes:
        if wish not in kept:
            settings = wish.given_up(settings)
    return not isinstance(solve(settings, traced), str)


def _relaxation(words: str, settings: Settings, traced: TracedStep) -> Relaxation:
    found = solve(settings, traced)
    return _of_plan(words, None if isinstance(found, str) else found)


def _with_more_memory(settings: Settings, traced: TracedStep, error: OutOfMemoryError) -> Relaxation:
    """The lowest limit that is known to do."""
    needed = error.needed_bytes
    if needed is None:
        free = solve(dataclasses.replace(settings, memory_limit_bytes=2**60), traced)
        needed = None if isinstance(free, str) else int(_ROOM * free.peak_bytes)
    if needed is None:
        return _of_plan("a higher memory_limit_bytes", None)
    words = f"memory_limit_bytes={needed:_} ({bytes_text(needed)} per device)"
    return _relaxation(words, dataclasses.replace(settings, memory_limit_bytes=needed), traced)


def _on_more_devices(settings: Settings) -> Settings:
    assert isinstance(settings.devices, int)
    limit = make_request(settings).memory_limit_bytes
    return dataclasses.replace(settings, devices=2 * settings.devices, memory_limit_bytes=limit)


def _of_plan(words: str, plan: Plan | PipelinePlan | None) -> Relaxation:
    if plan is None:
        return Relaxation(words=words, step_s=None, peak_bytes=None)
    return Relaxation(words=words, step_s=plan.step_s, peak_bytes=plan.peak_bytes)


def _rule_text(rule: Rule) -> str:
    of = f" of the {rule.role}" if rule.role and rule.glob == "*" else ""
    origin = f" (from {rule.asked_by.partition('(')[0]})" if rule.asked_by else ""
    return f"the constraint {rule.glob!r}{of}: {rule.layout!r}{origin}"
