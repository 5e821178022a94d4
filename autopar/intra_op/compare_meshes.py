"""The meshes of one request, compared: which are looked at, which are left, and which is best.

In: a traced step, a request, what is known from other ways to run the step (`SharedSearch`). Out: the `PlannedStep` on the best
mesh, or `Beaten`. Meshes are looked at one after the other, or by several processes side by side, those of fewest axes first.
Each is left as soon as its bound says that it cannot beat the best plan so far, of this way or another. A mesh of three axes or
more is only looked at if what it may gain repays the search, and, in a large program, if one of two axes is the best so far. What
can go wrong: nothing fits the memory; the error names the largest tensors and the ways out. The time is over; the plan says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import TypeAlias, cast

from autopar.errors import ConstraintError, OutOfMemoryError
from autopar.forks.jobs import run_side_by_side
from autopar.intra_op.choices.allowed_values import asks_for_layouts
from autopar.intra_op.choices.least_work import find_work
from autopar.intra_op.mesh_search import MeshSearch
from autopar.intra_op.out_of_memory import NothingFits, no_way_there, out_of_memory
from autopar.intra_op.request import PlannedStep, PlanRequest, distinct_meshes
from autopar.intra_op.restore import PackedStep, pack, unpack
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.intra_op.worth import Worth
from autopar.layouts.mesh import LogicalMesh
from autopar.plan import Candidate
from autopar.program.step import TracedStep
from autopar.progress import Progress, report
from autopar.solver.budget import SECONDS_PER_UNIT, Budget, Flag, LateError, Least
from autopar.solver.outcomes import CutOff, NotSearched, Unfinished, Unreachable

Ended: TypeAlias = NothingFits | CutOff | NotSearched | Unreachable | Unfinished
"""How the search of a mesh ends without a plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Looked:
    """What was found on a mesh; a fork sends a `PlannedStep` packed. `choice_s`: no choice is faster, whatever the memory.

    `is_whole`: more work would find nothing else.
    """

    evenly_divided_s: float
    at_least_s: float
    least_s: float
    excess: float
    choice_s: float
    outcome: PlannedStep | PackedStep | Ended | None
    is_whole: bool = True


class MeshComparison:
    """The meshes of one request: what was found on each."""

    def __init__(self, traced: TracedStep, request: PlanRequest, shared: SharedSearch) -> None:
        self.traced, self.request, self.shared = traced, request, shared
        self.best: PlannedStep | PackedStep | None = None
        self.failures: list[NothingFits] = []
        self.unreached: dict[LogicalMesh, Unreachable | Unfinished] = {}
        self.candidates: list[Candidate] = []
        self.not_compared: list[LogicalMesh] = []
        self.found_s: list[float] = []
        self.unlimited_s: list[float] = []
        self.more_axes_help = self._is_bound_lost = False
        self._untouched: set[LogicalMesh] = set()
        self._took = 1, 0.0
        self._fastest, self._step_per_choice = Least(shared.best_s), math.inf
        self._has_plan, self._is_planned_here = Flag(is_raised=math.isfinite(shared.best_s)), False
        self.equations = sum(1 for _ in traced.program.walk())
        self.worth = Worth(self.equations, request.tuning)

    def run(self) -> PlannedStep | Beaten:
        """The best plan, with all that was compared."""
        self.shared.excess = math.inf
        self.note_first()
        meshes = waiting = distinct_meshes(self.request, is_free=not asks_for_layouts(self.traced.program))
        self._untouched = set(meshes)
        while waiting:
            now = waiting[: self._together()]
            if math.isfinite(self.shared.best_s):
                now = next((some for some in (now, now[:1]) if not self._is_too_late(some)), [])
            if not now:
                self.not_compared += waiting
                break
            if self._is_far_too_large():
                break
            waiting = waiting[len(now) :]
            self._look_at([mesh for mesh in now if self._may_win(mesh)])
        if self.best is not None:
            return self._describe(self.best, meshes)
        is_too_large = bool(self.failures) and self.shared.has_other_ways
        if math.isfinite(self.shared.best_s) and not is_too_large:
            return Beaten(min(self.found_s, default=None), min(self._bound_s(mesh) for mesh in meshes))
        raise self._error()

    def _describe(self, best: PlannedStep | PackedStep, meshes: Sequence[LogicalMesh]) -> PlannedStep:
        planned = best if isinstance(best, PlannedStep) else unpack(best, self.traced, self.request)
        work_s = self._work_s()
        least_s = min(max(self.shared.least_s.get(mesh, 0.0), work_s) for mesh in meshes)
        names = tuple(f"mesh {mesh.shape}" for mesh in self.not_compared)
        plan = dataclasses.replace(
            planned.plan,
            candidates=tuple(self.candidates),
            unlimited_s=min(planned.plan.step_s, *self.unlimited_s),
            lower_bound_s=min(planned.plan.step_s, least_s),
            ended_early=bool(names),
            not_compared=names,
        )
        return dataclasses.replace(planned, plan=plan)

    def _together(self) -> int:
        """How many meshes to look at side by side: one of a small step, which is not worth a fork."""
        is_small = self.equations < self.request.tuning.side_by_side
        return 1 if is_small and self.shared.is_bounded else self.request.processes

    def note_first(self) -> None:
        """If this is the first way, note that it is."""
        if self.shared.is_bounded and self.shared.first is None:
            self.shared.first = self.traced

    def _work_s(self) -> float:
        """Seconds of the work of the first way, found once there is a plan, which is not to wait for them."""
        shared, request = self.shared, self.request
        if not shared.work_s and shared.first is not None:
            alone = request.catalogues.of(LogicalMesh.of((1,)), request.cluster, request.options)
            largest = max(request.meshes, key=lambda mesh: mesh.size)
            shared.work_s = find_work(shared.first.program, alone).on_one_mesh_s(largest.size) + self._call_s()
        return shared.work_s

    def _is_too_late(self, meshes: Sequence[LogicalMesh]) -> bool:
        """Whether the time is over, or will be before these are looked at: that takes as long as for those before, or more.

        Graphs grow with the axes, and a mesh of which the clock ends the search has cost time for nothing.
        """
        axes = max(len(mesh.shape) for mesh in meshes) - self._took[0]
        more = self.request.tuning.axis_factor ** max(0, axes)
        return self.request.budget.is_over or self.request.budget.seconds_left < more * self._took[1]

    def _is_far_too_large(self) -> bool:
        """Whether what was looked at is so much too large that other meshes will hardly help, but other ways may: by its
        temporaries, or as nothing fitted a large program on several meshes."""
        in_vain = len(self.failures) if self.worth.is_large else 0
        is_far = bool(self.failures) and self.shared.excess > self.request.tuning.far
        return self.shared.has_other_ways and (is_far or in_vain >= self.request.tuning.in_vain)

    def _bound_s(self, mesh: LogicalMesh) -> float:
        return max(self.shared.at_least_s.get(mesh, 0.0), self.shared.evenly_divided_s) + self._call_s()

    def _call_s(self) -> float:
        """Seconds that every step takes to be called, which the objective leaves out."""
        return self.request.cluster.dispatch_s(len(self.traced.inputs))

    def _may_win(self, mesh: LogicalMesh) -> bool:
        """Whether to look at a mesh at all; notes it as a candidate if not."""
        best_s, bound_s, tuning = self.shared.best_s, self._bound_s(mesh), self.request.tuning
        is_settled = self._is_beaten(mesh)
        if self._is_optional(mesh) and math.isinf(best_s):
            is_settled = is_settled or self._is_rather_left()
        elif self._is_optional(mesh) and not is_settled:
            gain_s, bounding_s = best_s - bound_s, tuning.bound_s_per_equation * self.equations - tuning.quick_s
            may_help = self.more_axes_help or self.equations <= tuning.bounded
            is_promising = not self.worth.is_large or (may_help and not self.worth.leaves(best_s, bound_s))
            is_settled = not (is_promising and self.worth.repays(gain_s, bounding_s))
        if is_settled:
            self._is_bound_lost = self._is_bound_lost or mesh not in self.shared.least_s
            self.candidates.append(Candidate(mesh.shape, None, bound_s))
        return not is_settled

    def _needs_bound(self, evenly_divided_s: float) -> bool:
        """Whether a bound that holds for all ways matters: in a large step no longer where a mesh has that of its work alone.

        It is the least of all. A mesh of many axes that nobody has looked at will have it, for want of promise.
        """
        best_s = min(self.shared.best_s, self._fastest.value)
        waits = any(len(mesh.shape) >= self.request.tuning.merged_axes for mesh in self._untouched)
        is_left = waits and self.worth.leaves(best_s, evenly_divided_s + self._call_s())
        return self.shared.is_bounded and not (self.worth.is_large and (self._is_bound_lost or is_left))

    def _is_rather_left(self) -> bool:
        """Whether an optional mesh is left, as nothing has fitted: for other ways, as it will not help, or as the time is over.

        The last two are no proof.
        """
        is_far = self.shared.excess > self.request.tuning.far and not all(each.is_settled for each in self.failures)
        return bool(self.failures) and (self.shared.has_other_ways or is_far or self.request.budget.is_late)

    def _is_optional(self, mesh: LogicalMesh) -> bool:
        """Whether a mesh has so many axes that it is only worth looking at if it may save much."""
        has_many = len(mesh.shape) >= self.request.tuning.merged_axes and len(self.request.meshes) > 1
        return has_many and bool(self.candidates)

    def _is_beaten(self, mesh: LogicalMesh) -> bool:
        """Whether the bound says that a mesh is not worth planning."""
        return self._bound_s(mesh) >= self.worth.planning_s(self.shared.best_s)

    def _look_at(self, meshes: Sequence[LogicalMesh]) -> None:
        """Bound meshes, and plan those that their bounds do not rule out, side by side."""
        started = time.perf_counter()
        self._untouched.difference_update(meshes)
        if meshes:
            report(Progress(at=f"mesh {' and '.join(str(mesh.shape) for mesh in meshes)}"))
        found = run_side_by_side(
            [functools.partial(self._search, mesh) for mesh in meshes],
            processes=self.request.processes,
            pack=_pack,
            unpack=lambda _, looked: cast(_Looked | None, looked),
            may_give_up=self._may_give_up,
            given_up=None,
        )
        if meshes and math.isinf(self.shared.best_s) and not any(found):  # a fork had a plan, and is gone with it
            self._has_plan = Flag()
            found = [self._search(meshes[0]), *found[1:]]
        outcomes = [looked.outcome for looked in found if looked is not None]
        fastest_s = min(
            (one.plan.step_s for one in outcomes if isinstance(one, PlannedStep | PackedStep)), default=math.inf
        )
        for mesh, looked in zip(meshes, found, strict=True):
            if looked is None:
                self.not_compared.append(mesh)
                continue
            self._note(mesh, looked, fastest_s)
            self._report()
        if meshes:
            self._took = max(len(mesh.shape) for mesh in meshes), time.perf_counter() - started

    def _report(self) -> None:
        """Say how far the search of all ways is."""
        shared, planned, left = self.shared, self.candidates[-1:], self.request.budget.seconds_left
        is_planned = any(candidate.step_s is not None for candidate in planned)
        shared.bounded += 1
        shared.proven += is_planned
        shared.dropped += not is_planned
        report(
            Progress(
                bounded=shared.bounded,
                dropped=shared.dropped,
                proven=shared.proven,
                best_s=shared.best_s if math.isfinite(shared.best_s) else None,
                bound_s=shared.evenly_divided_s or None,
                seconds_left=left if math.isfinite(left) else None,
            )
        )

    def _search(self, mesh: LogicalMesh) -> _Looked | None:
        """What is found on a mesh; None if the time was over before there was anything.

        Raises LateError instead if the caller has another plan to fall back on, and there is none here.
        """
        shared, request = self.shared, self.request
        if request.has_fallback and math.isinf(shared.best_s):
            request.budget.require_time()
            looked = self._search_in_time(mesh, request)
            if not isinstance(looked.outcome, PlannedStep):
                request.budget.require_time()  # the clock may be why there is no plan
            return looked
        if math.isinf(shared.best_s):  # a plan late is better than none, and one in another way better than a late one
            work = request.tuning.first_work if shared.has_other_ways or not self._is_hurried else math.inf
            late = request.budget.clocked(work=work, once=self._has_plan) if self._is_hurried else Budget(work=work)
            request = dataclasses.replace(request, budget=late)
        if mesh in (failed := shared.in_vain.get(self.traced, {})):
            return cast(_Looked, failed[mesh])
        try:
            looked = self._search_in_time(mesh, request)
        except LateError:
            return None
        return dataclasses.replace(looked, is_whole=not request.budget.is_over)

    def _search_in_time(self, mesh: LogicalMesh, request: PlanRequest) -> _Looked:
        """Bound a mesh, and plan it unless its bound rules it out. Raises LateError if the clock ends that before a plan."""
        shared = self.shared
        search = MeshSearch(self.traced, mesh, request, is_whole=shared.is_bounded)
        evenly_divided_s = shared.evenly_divided_s or search.evenly_divided_s()
        at_least_s, least_s = shared.at_least_s.get(mesh, 0.0), 0.0
        if math.isfinite(shared.best_s) and self._needs_bound(evenly_divided_s):
            at_least_s, least_s = self._bound(search, at_least_s)
        bound_s = max(at_least_s, evenly_divided_s) + self._call_s()
        is_beaten, most_work = bound_s >= self.worth.planning_s(shared.best_s), math.inf
        if self._is_optional(mesh) and math.isfinite(shared.best_s):
            search_s = request.tuning.search_s_per_equation * self.equations - request.tuning.quick_s
            gain_s = shared.best_s - bound_s
            is_small_gain = self.worth.is_large and gain_s < request.tuning.least_gain * shared.best_s
            is_beaten = is_beaten or is_small_gain or not self.worth.repays(gain_s, search_s)
            most_work = (request.tuning.quick_s + request.tuning.repaid_in_steps * gain_s) / SECONDS_PER_UNIT
        cutoff_s = self.worth.choosing_s(shared.best_s - self._call_s(), self._step_per_choice)
        plan = functools.partial(
            search.plan, rival_s=self._rival_s, has_other_ways=shared.has_other_ways, is_tight=self._is_tight
        )
        outcome = None if is_beaten else plan(cutoff_s, most_work=most_work)
        if isinstance(outcome, PlannedStep):
            self._has_plan.lift()
            self._fastest.tell(outcome.plan.step_s)
            self._is_planned_here = True
            if outcome.plan.step_s < shared.best_s:
                report(Progress(best_s=outcome.plan.step_s), is_news=True)
        at_least_s = max(at_least_s, search.bound_s)
        with contextlib.suppress(LateError):  # a bound is no longer worth it
            if not least_s and self._needs_bound(evenly_divided_s):
                at_least_s, least_s = self._bound(search, at_least_s)
        return _Looked(
            evenly_divided_s=evenly_divided_s,
            at_least_s=at_least_s,
            least_s=least_s,
            excess=search.excess,
            choice_s=search.choice_s + self._call_s(),
            outcome=outcome,
        )

    @property
    def _is_tight(self) -> bool:
        """Whether to look at the bound on memory first: where that ruled out earlier ways, and where there is no other one."""
        shared = self.shared
        is_last = shared.is_bounded and not shared.has_other_ways
        return math.isinf(shared.best_s) and (is_last or (shared.is_exceeded and self.worth.is_large))

    def _rival_s(self) -> float:
        """Below what a choice without a limit is worth a search within the memory, beside what other meshes have found."""
        return self.worth.limiting_s(self._fastest.value) - self._call_s()

    def _bound(self, search: MeshSearch, at_least_s: float) -> tuple[float, float]:
        """See `at_least_s`, which may be known, and `least_s` of `SharedSearch`: what bounds every step bounds the objective."""
        if self.shared.first is self.traced:
            least_s = search.least_s(self.shared.best_s)
            return max(at_least_s, least_s - self._call_s()), least_s
        if not at_least_s:
            self.request.budget.require_time()
            at_least_s = search.at_least_s
        return at_least_s, 0.0

    def _may_give_up(self) -> bool:
        """Whether the time is over and this process has a plan, so that it need not wait for those of others."""
        has_plan = self._is_planned_here or math.isfinite(self.shared.best_s)
        return self._is_hurried and has_plan and self.request.budget.is_late

    @property
    def _is_hurried(self) -> bool:
        """Whether the clock may end the search for a first plan with what it has met; of a stage nobody asks for so little."""
        return self.shared.is_bounded

    def _note(self, mesh: LogicalMesh, looked: _Looked, fastest_s: float) -> None:
        """Take over what was found. A mesh that another one of its row beats counts as not planned: its search may have ended
        there. `fastest_s`: of the row."""
        shared = self.shared
        shared.evenly_divided_s = shared.evenly_divided_s or looked.evenly_divided_s
        at_least_s = looked.at_least_s
        if isinstance(looked.outcome, PlannedStep | PackedStep):  # the objective that is bounded may exceed its step
            at_least_s = min(at_least_s, looked.outcome.plan.step_s - self._call_s())
        shared.at_least_s.setdefault(mesh, at_least_s)
        shared.least_s.setdefault(mesh, looked.least_s)
        shared.excess = min(shared.excess, looked.excess or math.inf)
        is_fastest = isinstance(looked.outcome, PlannedStep | PackedStep) and looked.outcome.plan.step_s <= fastest_s
        is_beaten = looked.choice_s >= fastest_s and not is_fastest
        if looked.outcome is None or is_beaten or self._is_beaten(mesh):
            self.candidates.append(Candidate(mesh.shape, None, self._bound_s(mesh)))
            return
        match looked.outcome:
            case PlannedStep(plan=plan) | PackedStep(plan=plan):
                self.candidates.append(Candidate(mesh.shape, plan.step_s))
                self.found_s.append(plan.step_s)
                self.unlimited_s.append(plan.unlimited_s)
                if not looked.excess and looked.choice_s > self._call_s():
                    per_choice = (plan.step_s - self._call_s()) / (looked.choice_s - self._call_s())
                    self._step_per_choice = min(self._step_per_choice, per_choice)
                if plan.step_s < shared.best_s * (1 - 1e-9):
                    self.more_axes_help = len(mesh.shape) > 1
                    self.best = looked.outcome
                    shared.best_s = plan.step_s
            case NothingFits() as failure:
                self.failures.append(failure)
                shared.is_exceeded = shared.is_exceeded or failure.tried_bytes is None
                if looked.is_whole:
                    shared.in_vain.setdefault(self.traced, {})[mesh] = looked
                self.candidates.append(Candidate(mesh.shape, None))
            case CutOff(lower_bound_s) | NotSearched(lower_bound_s):
                self.candidates.append(Candidate(mesh.shape, None, max(lower_bound_s, self._bound_s(mesh))))
            case Unreachable() | Unfinished() as ended:
                self.unreached[mesh] = ended

    def _error(self) -> ConstraintError | OutOfMemoryError:
        if self.failures:
            limit, rules = self.request.memory_limit_bytes, self.request.constraints.rules
            return out_of_memory(self.failures, memory_limit_bytes=limit, is_constrained=bool(rules))
        return no_way_there(self.unreached, self.request.options.kinds)


def _pack(looked: _Looked | None) -> _Looked | None:
    """What a fork sends."""
    if looked is None:
        return None
    outcome = looked.outcome
    return dataclasses.replace(looked, outcome=pack(outcome) if isinstance(outcome, PlannedStep) else outcome)
