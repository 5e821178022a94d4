"""The search for a pipeline whose number of stages is open: from a traced step to the best `PlannedPipeline`.

In: a step, what the user wishes, the machine and its devices. Out: `SearchedPipeline`, or `OneStage` if stages do not pay.
The search over layers (`search.py`) chooses the stages, which are then planned as wholes (`plan_stages.py`), under every schedule
that fits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.forks.jobs import started_aside
from autopar.inter_op.attempts import bytes_held
from autopar.inter_op.candidates.timetables import Timetable, likely_microbatches
from autopar.inter_op.candidates.tuning import TUNING, Tuning
from autopar.inter_op.costs_by_kind import ALIKE, KindsInOrder
from autopar.inter_op.describe_pipeline import PlannedPipeline, bound_stages, describe_pipeline
from autopar.inter_op.dynamic_program.found import Found, NotFaster
from autopar.inter_op.dynamic_program.kinds import KindOfNodes
from autopar.inter_op.dynamic_program.submeshes import machine_shape
from autopar.inter_op.one_mesh import Promising
from autopar.inter_op.plan_pipeline import (
    PipelineWishes,
    alternative_of,
    in_flight_if_split,
    plan_in_other_schedules,
    plan_with_recomputation,
    schedule_for,
    share_memory,
    timetable_of,
)
from autopar.inter_op.plan_stage import KnownStages
from autopar.inter_op.plan_stages import StageRequest
from autopar.inter_op.search import search_stages
from autopar.intra_op.request import PlanRequest
from autopar.plan import Alternative
from autopar.program.step import TracedStep
from autopar.schedules.in_flight import InFlight
from autopar.solver.budget import LateError
from autopar.stages.chain import forward_chain
from autopar.stages.dependence import kept_for_backward
from autopar.stages.even_cuts import boundaries, choose_even_cuts
from autopar.stages.rejoin_scans import rejoin_scans
from autopar.stages.scan_stacks import every_layer
from autopar.stages.split_scans import SplitStep, split_scans
from autopar.stages.time_loops import make_loops


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SearchedPipeline:
    """A pipeline of several stages, and figures by the sum of layers.

    `one_stage_s`, `alone_s`, `alone_fits`: of a step in one stage on all devices, see `Found`. `by_layers_s`: of a microbatch in
    each stage. `promised_s`: of the step. `took_s`: seconds of the clock in which stages were planned as wholes.
    """

    pipeline: PlannedPipeline
    promised_s: float
    one_stage_s: float
    by_layers_s: tuple[float, ...]
    alone_s: Mapping[int, float]
    alone_fits: tuple[int, float] | None = None
    took_s: float = 0.0

    @classmethod
    def of(cls, pipeline: PlannedPipeline, found: Found, hoped: Found, since_s: float) -> SearchedPipeline:
        """Of the stages that were found, with what was known of one stage when others were hoped for.

        `since_s`: when planning of wholes began, by `time.perf_counter`.
        """
        return cls(
            took_s=time.perf_counter() - since_s,
            pipeline=pipeline,
            promised_s=found.choice.step_s,
            one_stage_s=hoped.one_stage_s,
            by_layers_s=tuple(stage.stage_s for stage in found.choice.stages),
            alone_s=hoped.alone_s,
            alone_fits=hoped.alone_fits,
        )

    @property
    def compared(self) -> tuple[Alternative, ...]:
        """All that was compared: the plan itself if nothing else was."""
        plan = self.pipeline.plan
        return plan.compared or (alternative_of(plan),)


@dataclasses.dataclass(frozen=True)
class OneStage:
    """One stage is best; `compared`: what several would take, if they had a time to beat; `promising`: how it may run.

    `several`: plans several stages after all, from the layers that are planned. It takes the seconds that they have to beat,
    those above which they are not planned as wholes, and whether there is another plan. It raises OutOfMemoryError, and LateError
    if there is one.
    """

    compared: tuple[Alternative, ...] = ()
    promising: Promising | None = None
    several: Callable[[float, float, bool], SearchedPipeline | OneStage] | None = None


def search_pipeline(
    traced: TracedStep,
    wishes: PipelineWishes,
    request: PlanRequest,
    *,
    devices: int,
    num_stages: int | None = None,
    beat_s: float | None = None,
    tuning: Tuning = TUNING,
    kinds: KindsInOrder = ALIKE,
) -> SearchedPipeline | OneStage:
    """The best pipeline with as many stages as pay. Raises what `plan_pipeline` raises.

    `num_stages`: the number of meshes, if it is given. `beat_s`: seconds of the step on one mesh, or in other stages; the search
    ends when these do not promise to take less, and raises LateError when the clock ends it. `kinds`: see `search_stages`.
    """
    request = dataclasses.replace(request, has_fallback=beat_s is not None)
    bound = functools.partial(bound_stages, traced, request, devices)
    with started_aside(bound, processes=request.processes) as find_bound_s:
        return _search(
            traced,
            wishes,
            request,
            find_bound_s,
            devices=devices,
            num_stages=num_stages,
            beat_s=beat_s,
            tuning=tuning,
            kinds=kinds,
        )


def _search(
    traced: TracedStep,
    wishes: PipelineWishes,
    request: PlanRequest,
    find_bound_s: Callable[[], float],
    *,
    devices: int,
    num_stages: int | None,
    beat_s: float | None,
    tuning: Tuning,
    kinds: KindsInOrder,
) -> SearchedPipeline | OneStage:
    likely_stages = num_stages or _usual_stages(request, devices, kinds)
    tables = wishes.timetables(traced, likely_stages, devices, tuning)
    larger = wishes.larger_timetables(traced, tables, tuning)
    start = _likely_start(traced, request, devices, likely_stages, [*tables, *larger], tuning)
    split = split_scans(traced, every_layer(traced))
    found = search_stages(
        make_loops(split, tables[0].microbatches),
        request,
        start=start,
        devices=devices,
        timetables=tables,
        larger=larger,
        num_stages=num_stages,
        shares={"auto": tuning.recomputed_shares, "none": (0.0,)}.get(wishes.recompute, (1.0,)),
        beat_s=beat_s,
        budget=request.budget.part(tuning.searched),
        tuning=tuning,
        kinds=kinds,
    )
    if isinstance(found, NotFaster):
        return OneStage(found.compared)
    wholes = Wholes(
        traced=traced, split=split, wishes=wishes, request=request, tables=tables, tuning=tuning, kinds=kinds.order
    )
    if len(found.sizes) > 1 or kinds.order:  # on several kinds of node a single stage is a pipeline as well
        return wholes.finish(find_bound_s, found, found)

    def several(beat_s: float, worth_s: float, has_fallback: bool) -> SearchedPipeline | OneStage:
        chosen = found.choose_several(beat_s)
        if isinstance(chosen, NotFaster) or chosen.choice.step_s > worth_s:
            return OneStage(chosen.compared)
        own = dataclasses.replace(request, has_fallback=has_fallback)
        again = dataclasses.replace(wholes, request=own, known=KnownStages())
        return again.finish(lambda: bound_stages(traced, request, devices), chosen, found)

    return OneStage(promising=_promising(found), several=several)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Wholes:
    """Plans chosen stages as wholes. `tables`: the timetables that are compared; `known`: stages that are planned already."""

    traced: TracedStep
    split: SplitStep
    wishes: PipelineWishes
    request: PlanRequest
    tables: Sequence[Timetable]
    tuning: Tuning
    kinds: Sequence[KindOfNodes]
    known: KnownStages = dataclasses.field(default_factory=KnownStages)

    def finish(self, find_bound_s: Callable[[], float], found: Found, hoped: Found) -> SearchedPipeline:
        """The chosen stages planned, in every schedule that fits; `hoped`: what was chosen before, one stage maybe."""
        if self.request.has_fallback:
            self.request.budget.require_time()
        searched = time.perf_counter()
        found, first = self.plan_best_number(found)
        others = plan_in_other_schedules(first, found.timetable, self.tables, self.request)
        planned = {found.timetable: first, **others}
        best = min(planned.values(), key=lambda one: one.plan.step_s)
        rows, bound_s = _all_compared(hoped.compared, planned), find_bound_s()
        plan = dataclasses.replace(best.plan, compared=rows, lower_bound_s=bound_s)
        if hoped.ended_early or found.ended_early:
            plan = dataclasses.replace(plan, ended_early=True, not_compared=(*plan.not_compared, "other stages"))
        return SearchedPipeline.of(dataclasses.replace(best, plan=plan), found, hoped, searched)

    def plan_best_number(self, found: Found) -> tuple[Found, PlannedPipeline]:
        """The chosen stages; or others, if these take longer than promised and those promise less, or do not fit as wholes.

        Stages whose work can be divided far more evenly are planned so first. Raises OutOfMemoryError if none fits, also of
        those that are chosen in less memory.
        """
        tried, best, too_large = list[Found](), None, None
        even = _even_out(found, self.tuning)
        for one in (*([even] if even else []), found, *found.others[: self.tuning.second_looks]):
            if best is not None and not self._may_be_faster(one, *best):
                break
            tried.append(one)
            try:
                planned = self.plan(one)
            except OutOfMemoryError as error:
                too_large = too_large or error
                continue
            except LateError:
                if best is None:
                    raise
                return best
            if best is None or planned.plan.step_s < best[1].plan.step_s:
                best = one, planned
        if best is None:
            assert too_large is not None
            return self._plan_in_less_memory(found, tried, too_large)
        return self._compare_with_less_memory(found, best, tried)

    def _compare_with_less_memory(
        self, found: Found, best: tuple[Found, PlannedPipeline], tried: Sequence[Found]
    ) -> tuple[Found, PlannedPipeline]:
        """The best stages, or those chosen in less of the memory, if these promise less than what the best ones take."""
        is_as_promised = best[1].plan.step_s <= (1 + self.tuning.squeezed) * found.choice.step_s
        if self.request.budget.is_over or is_as_promised:
            return best
        try:
            again = found.choose_within(self.tuning.smaller_rooms[0])
            if isinstance(again, NotFaster) or any(_is_same(again, one) for one in tried):
                return best
            if not self._may_be_faster(again, *best):
                return best
            planned = self.plan(again)
        except (OutOfMemoryError, LateError):
            return best
        return min(best, (again, planned), key=lambda one: one[1].plan.step_s)

    def _plan_in_less_memory(
        self, found: Found, tried: Sequence[Found], too_large: OutOfMemoryError
    ) -> tuple[Found, PlannedPipeline]:
        """Stages chosen again, in less of the memory: a sum of layers leaves things out. Raises `too_large` if none fits."""
        for room in self.tuning.smaller_rooms:
            if self.request.has_fallback:
                self.request.budget.require_time()
            try:
                again = found.choose_within(room)
                if isinstance(again, NotFaster):
                    break
                if not any(_is_same(again, one) for one in tried):
                    return again, self.plan(again)
            except OutOfMemoryError:
                continue
        raise too_large

    def _may_be_faster(self, other: Found, best: Found, planned: PlannedPipeline) -> bool:
        """Whether the best stages take longer than promised, and others promise less; there has to be time to plan them."""
        to_beat_s, worth = planned.plan.step_s, 1 + self.tuning.worth
        is_as_promised = to_beat_s <= worth * best.choice.step_s
        return not (is_as_promised or other.choice.step_s * worth >= to_beat_s or self.request.budget.is_over)

    def plan(self, found: Found) -> PlannedPipeline:
        """The chosen stages, planned as wholes in the chosen timetable."""
        schedule = schedule_for(found.timetable, len(found.sizes) // found.timetable.virtual_stages)
        split, loop, cuts = rejoin_scans(self.split, found.loop, found.cuts, found.shares)
        kinds = {kind.number: kind for kind in self.kinds}
        wanted = StageRequest(
            meshes=found.meshes,
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            in_flight=InFlight(schedule),
            cuts=cuts,
            loop=loop,
            split=split,
            shares=found.shares,
            known=self.known,
            also=in_flight_if_split(found.timetable, len(found.sizes)) if self.wishes.schedule == "auto" else (),
            kinds=tuple(kinds[number] for number in found.kinds) if kinds else (),
        )
        of_stage = share_memory(self.request, schedule)
        recompute = self.wishes.recompute
        staged = plan_with_recomputation(self.traced, wanted, of_stage, recompute, tuning=self.tuning)
        return describe_pipeline(self.traced, staged, schedule, self.request)


def _likely_start(
    traced: TracedStep,
    request: PlanRequest,
    devices: int,
    num_stages: int,
    tables: Sequence[Timetable],
    tuning: Tuning,
) -> int:
    """The number of microbatches in which layers are planned first: the usual one, or one whose stages have more room."""
    usual, limit = tables[0].microbatches, request.memory_limit_bytes
    if limit is None:
        return usual
    held = bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch")
    room_bytes = (devices * limit - held) / min(num_stages, max(tuning.layer_counts))
    counts = {one.microbatches for one in tables}
    return likely_microbatches(usual, counts, kept_bytes=kept_for_backward(traced), room_bytes=room_bytes)


def _promising(found: Found) -> Promising:
    """What is known of one stage on all devices, for those who plan it as one mesh."""
    return Promising(found.timetable.microbatches, found.meshes[0], found.shares[0] > 0, found.choice.step_s)


def _usual_stages(request: PlanRequest, devices: int, kinds: KindsInOrder) -> int:
    """As many as nodes, or kinds of node, and two at least."""
    return max(2, machine_shape(request.cluster, devices)[0], len(kinds.order))


def _all_compared(
    compared: Sequence[Alternative], planned: Mapping[Timetable, PlannedPipeline]
) -> tuple[Alternative, ...]:
    """A row for each timetable, of the plan where there is one; none if there is one timetable alone."""
    rows = {timetable_of(one): one for one in compared}
    rows |= {timetable: alternative_of(one.plan) for timetable, one in planned.items()}
    return tuple(rows[timetable] for timetable in sorted(rows)) if len(rows) > 1 else ()


def _even_out(found: Found, tuning: Tuning) -> Found | None:
    """Stages on as many devices that are cut between layers as well, so that all take about as long; None if little is gained.

    The sums know only whole layers, which may be several blocks of a model. Within a stage that they chose, time is taken to go
    with floating-point operations.
    """
    alike = zip(found.sizes, found.shares, found.kinds or found.sizes, strict=True)
    if len({*alike}) != 1 or found.timetable.virtual_stages > 1:
        return None
    stages, chain = found.choice.stages, forward_chain(found.loop)
    if boundaries(chain):
        return None
    bounds, work = (0, *found.cuts, len(chain)), list[float]()
    for stage, (first, end) in zip(stages, itertools.pairwise(bounds), strict=True):
        flops = sum(link.flops for link in chain[first:end])
        work += [stage.stage_s * link.flops / flops if flops else 0.0 for link in chain[first:end]]
    try:
        cuts = choose_even_cuts(chain, len(stages), work=work)
    except ArgumentError:
        return None
    slowest_s = max(sum(work[first:end]) for first, end in itertools.pairwise((0, *cuts, len(chain))))
    part = slowest_s / max(stage.stage_s for stage in stages)
    if part * (1 + tuning.worth) > 1:
        return None
    return dataclasses.replace(
        found, cuts=cuts, choice=dataclasses.replace(found.choice, step_s=part * found.choice.step_s), others=()
    )


def _is_same(one: Found, other: Found) -> bool:
    """Whether two choices are of the same stages in the same timetable."""
    one_cut, other_cut = (
        (found.timetable, found.cuts, found.sizes, found.shares, found.kinds) for found in (one, other)
    )
    return one_cut == other_cut and one.meshes == other.meshes
