"""A pipeline on given meshes, in the best timetable: numbers of microbatches, schedules and virtual stages compared.

In: a traced step, what the user fixed, devices. Out: the pipeline with the least predicted step. The usual timetable is planned
first. The seconds of its stages give estimates of all others: the simulator accounts for the schedule, `timetables.py` for the
number of microbatches, even division for virtual stages. While a timetable promises to be better than the best plan, it is
planned. A second number of microbatches always is, if the number is left open, so that latencies are known. What can go wrong:
an estimate that is too high hides a better timetable; the table of what was compared says which figures are estimates.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar.errors import ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError, warn
from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, once_a_step_s, time_stages
from autopar.inter_op.candidates.timetables import Timetable, latency_share, seconds_at
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.describe_pipeline import PlannedPipeline, bound_stages
from autopar.inter_op.plan_pipeline import PipelineWishes, alternative_of, plan_in_other_schedules, plan_pipeline
from autopar.intra_op.request import PlanRequest
from autopar.pipeline_plan import ONCE, PipelinePlan, TransferPlan
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.schedules.schedules import interleaves, make_schedule
from autopar.stages.chain import forward_chain
from autopar.stages.even_cuts import find_indivisible_work, warn_of_indivisible_work
from autopar.stages.scan_stacks import cuts_for_stages
from autopar.stages.split_scans import split_scans
from autopar.stages.time_loops import make_divided_loop


def plan_best_pipeline(
    traced: TracedStep,
    wishes: PipelineWishes,
    request: PlanRequest,
    *,
    devices: int,
    seeks_room: bool = True,
    tuning: Tuning = TUNING,
) -> PlannedPipeline:
    """The best plan of a pipeline on these devices. Raises ArgumentError, ConstraintError, OutOfMemoryError and others.

    `seeks_room`: where the usual number of microbatches does not fit, larger ones are tried.
    """
    started = time.perf_counter()
    tables = [t for t in wishes.timetables(traced, wishes.num_stages, devices, tuning) if _is_possible(t, wishes)]
    more = wishes.larger_timetables(traced, tables, tuning) if seeks_room else ()
    comparison = _Comparison(
        traced,
        wishes,
        request,
        devices=devices,
        tables=tables,
        larger=[t for t in (*tables, *more) if _is_possible(t, wishes)] if seeks_room else [],
        tuning=tuning,
    )
    try:
        best = comparison.run()
    except UnsupportedProgramError as error:
        if wishes.num_microbatches != "auto" or tables[0].microbatches == 1:
            raise
        warn(f"the stages run with one microbatch, one after the other: {error}")
        uncut = dataclasses.replace(wishes, num_microbatches=1)
        return plan_best_pipeline(traced, uncut, request, devices=devices, seeks_room=seeks_room, tuning=tuning)
    if wishes.following is None:
        cut, split = best.staged.cut, best.staged.split
        warn_of_indivisible_work(forward_chain(cut.loop), cut.num_stages, divided=any(split.cuts))
    bound_s, seconds = bound_stages(traced, request, devices), time.perf_counter() - started
    return dataclasses.replace(best, plan=dataclasses.replace(best.plan, planning_s=seconds, lower_bound_s=bound_s))


def _is_possible(timetable: Timetable, wishes: PipelineWishes) -> bool:
    """Whether the meshes can interleave the microbatches; if the user fixed both, `make_schedule` says what is wrong."""
    is_asked_for = wishes.schedule != "auto" and wishes.num_microbatches != "auto"
    return is_asked_for or not interleaves(timetable.schedule) or timetable.microbatches % wishes.num_stages == 0


class _Comparison:
    """What is planned and what is not, of timetables in order of preference.

    `larger`: those that are tried where the first of `tables` does not fit, as far as they have more microbatches.
    """

    def __init__(
        self,
        traced: TracedStep,
        wishes: PipelineWishes,
        request: PlanRequest,
        *,
        devices: int,
        tables: Sequence[Timetable],
        larger: Sequence[Timetable],
        tuning: Tuning,
    ) -> None:
        self._traced, self._wishes, self._request = traced, wishes, request
        self._devices, self._tables, self._tuning = devices, tuple(tables), tuning
        first = tables[0]
        self._larger = sorted(
            t
            for t in larger
            if (t.schedule, t.virtual_stages) == (first.schedule, first.virtual_stages)
            and t.microbatches > first.microbatches
        )
        self._planned: dict[Timetable, PlannedPipeline] = {}
        self._failed: dict[Timetable, Exception] = {}

    def run(self) -> PlannedPipeline:
        """The best plan. Raises the first timetable's error if no other one has a plan either."""
        self._plan_one_that_fits()
        chosen = self._most_promising() or self._second_count()
        while chosen is not None and not self._request.budget.is_over:
            self._plan(chosen)
            chosen = self._most_promising() or self._second_count()
        best = min(self._planned.values(), key=lambda one: one.plan.step_s)
        compared = tuple(self._alternative(t) for t in sorted(self._tables)) if len(self._tables) > 1 else ()
        left = () if chosen is None else (f"{chosen.schedule} in {chosen.microbatches} microbatches",)
        plan = dataclasses.replace(best.plan, compared=compared, ended_early=bool(left), not_compared=left)
        return dataclasses.replace(best, plan=plan)

    def _plan_one_that_fits(self) -> None:
        """Plan the first timetable; if the memory is too small, one with more microbatches, which need less."""
        first, fewest = self._tables[0], 0.0
        for timetable in (first, *self._larger):
            if timetable.microbatches < fewest:
                continue
            self._plan(timetable)
            if self._planned:
                self._tables = tuple(dict.fromkeys((*self._tables, *self._planned)))
                return
            error = self._failed[timetable]
            if not isinstance(error, OutOfMemoryError | ConstraintError) or self._request.budget.is_over:
                break
            fewest = timetable.microbatches * self._tuning.roomier * self._excess(error)
        raise self._failed[first]

    def _excess(self, error: OutOfMemoryError | ConstraintError) -> float:
        """How many times the memory was needed, at least 1. Not all of it shrinks as microbatches grow in number."""
        needed, limit = getattr(error, "needed_bytes", None), self._request.memory_limit_bytes
        return max(1.0, needed / limit) if needed and limit else 1.0

    def _plan(self, timetable: Timetable) -> None:
        """Plan the stages, and what they take in other schedules."""
        wishes = self._wishes
        try:
            if wishes.virtual_stages == "auto" and timetable.virtual_stages > 1:
                self._refuse_too_few_layers(timetable)
            planned = plan_pipeline(
                self._traced, wishes, timetable, self._request, devices=self._devices, tuning=self._tuning
            )
        except (ArgumentError, ConstraintError, OutOfMemoryError, UnsupportedProgramError) as error:
            self._failed[timetable] = error
            return
        self._planned[timetable] = planned
        self._planned |= plan_in_other_schedules(planned, timetable, self._open(), self._request)

    def _refuse_too_few_layers(self, timetable: Timetable) -> None:
        """Raise ArgumentError if one operation is too much work for one of this many stages."""
        chunks = self._wishes.num_stages * timetable.virtual_stages
        split = split_scans(self._traced, cuts_for_stages(self._traced, chunks))
        chain = forward_chain(make_divided_loop(split, timetable.microbatches))
        if find_indivisible_work(chain, chunks, divided=any(split.cuts)) is not None:
            raise ArgumentError(
                f"the step has too few layers of equal work for {chunks} stages, {timetable.virtual_stages} on each of "
                f"{self._wishes.num_stages} meshes: use schedule='1f1b' or 'zb-h1', with one stage per mesh, or fewer "
                f"num_stages; virtual_stages={timetable.virtual_stages} plans unequal stages all the same"
            )

    def _open(self) -> list[Timetable]:
        return [t for t in self._tables if t not in self._planned and t not in self._failed]

    def _most_promising(self) -> Timetable | None:
        """The timetable with the least estimate among those that are not planned, if that is worth it."""
        least_s = min(one.plan.step_s for one in self._planned.values())
        estimates = {t: self._estimate_s(t) for t in self._open()}
        best = min(estimates, key=lambda t: estimates[t], default=None)
        return best if best is not None and estimates[best] < least_s * (1 - self._tuning.worth) else None

    def _second_count(self) -> Timetable | None:
        """The best timetable with the number of microbatches next to the only one that is planned."""
        counts = {t.microbatches for t in (*self._planned, *self._failed)}
        others = [t for t in self._open() if t.microbatches not in counts]
        if len(counts) > 1 or not others:
            return None
        (count,) = counts
        return min(others, key=lambda t: (abs(math.log(t.microbatches / count)), self._estimate_s(t)))

    def _alternative(self, timetable: Timetable) -> Alternative:
        if timetable in self._planned:
            return alternative_of(self._planned[timetable].plan)
        error = self._failed.get(timetable)
        return Alternative(
            num_stages=self._wishes.num_stages * timetable.virtual_stages,
            num_microbatches=timetable.microbatches,
            schedule=timetable.schedule,
            virtual_stages=timetable.virtual_stages,
            estimate_s=None if error else self._estimate_s(timetable),
            obstacle=Alternative.obstacle_of(error) if error else "",
        )

    def _estimate_s(self, timetable: Timetable) -> float:
        """Seconds that a step would take in a timetable that is not planned."""
        count, chunks, meshes = timetable.microbatches, timetable.virtual_stages, self._wishes.num_stages
        like = min({t.virtual_stages for t in self._planned}, key=lambda v: abs(v - chunks))
        known = self._plans_with(like)
        seconds = seconds_at({m: task_seconds(one) for m, one in known.items()}, count, share=self._share())
        nearest = known[min(known, key=lambda m: abs(math.log(m / count)))].plan
        may_do_without = self._wishes.recompute == "auto" and count > nearest.num_microbatches
        if nearest.recompute and not may_do_without:
            again = np.array([[0.0, share, 0.0] for share in nearest.recomputed_shares])
            seconds = seconds + again * seconds[:, :1]
        if chunks != like:
            seconds = np.tile(seconds.reshape(like, meshes, 3).sum(axis=0) / chunks, (chunks, 1))
        schedule = make_schedule(timetable.schedule, num_meshes=meshes, num_microbatches=count, virtual_stages=chunks)
        splits = "weight_gradient" in schedule.kinds
        each = [(forward_s, backward_s + splits * split_s) for forward_s, backward_s, split_s in seconds.tolist()]
        sent = _transfers_at(nearest, count, stages=meshes * chunks)
        once_s = once_a_step_s([stage.once_s for stage in nearest.stages], nearest.transfers)
        return time_stages(schedule, each).makespan_s + find_exposed_s(schedule, each, sent) + once_s

    def _plans_with(self, virtual_stages: int) -> dict[int, PlannedPipeline]:
        """The plans with this number of virtual stages, by the number of microbatches."""
        return {t.microbatches: one for t, one in self._planned.items() if t.virtual_stages == virtual_stages}

    def _share(self) -> float:
        """The part of a stage's seconds that is latency, if several numbers of microbatches are planned; else 0."""
        for like in {t.virtual_stages for t in self._planned}:
            known = self._plans_with(like)
            share = latency_share({m: task_seconds(one).sum() for m, one in known.items()}, next(iter(known)))
            if share is not None:
                return float(share)
        return 0.0


def _transfers_at(plan: PipelinePlan, count: int, *, stages: int) -> list[TransferPlan]:
    """The transfers of a plan's microbatches if there were `count` of these; in other stages those of a neighbour on average."""
    part = min(1.0, plan.num_microbatches / count)
    sent = [dataclasses.replace(t, predicted_s=t.predicted_s * part) for t in plan.transfers if t.what not in ONCE]
    if stages == plan.num_stages or not sent:
        return sent
    found = []
    for what, step in (("forward", 1), ("backward", -1)):
        mean_s = sum(t.predicted_s for t in sent if t.what == what) / max(1, plan.num_stages - 1)
        like = next((t for t in sent if t.what == what), None)
        if like is not None:
            ends = [(s, s + 1)[::step] for s in range(stages - 1)]
            found += [dataclasses.replace(like, source=a, target=b, predicted_s=mean_s) for a, b in ends]
    return found


def task_seconds(planned: PlannedPipeline) -> np.ndarray:
    """Seconds per microbatch, an array (stage, 3): forward, backward, what backward takes longer where it is split.

    They leave out the forward work that backward does again.
    """
    stages, shares = planned.staged.stages, planned.plan.recomputed_shares
    each = zip(stages, shares, strict=True)
    return np.array([[one.forward_s, one.backward_s - share * one.forward_s, one.split_s] for one, share in each])
