"""What the arguments of `parallelize` mean together: which kind of plan a step gets.

In: `Settings` and a traced step. Out: the step planned on one mesh (`PlannedStep`) or in stages (`PlannedPipeline`). A given plan
is restored. A step that follows another one in stages gets its stages, a step with several meshes gets a pipeline on them, and
any other step one mesh, or stages if these are left open and are faster. What can go wrong: wishes that exclude each other; each
error names the argument and what it may be.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from time import perf_counter
from typing import TypeAlias

import jax

from autopar.arguments import Leader
from autopar.cost_model.hardware import Cluster
from autopar.errors import ArgumentError, AutoparError, OutOfMemoryError
from autopar.inter_op.compare_timetables import plan_best_pipeline
from autopar.inter_op.describe_pipeline import PlannedPipeline, RestoredPipeline
from autopar.inter_op.given_stages import plan_given_stages
from autopar.inter_op.one_mesh import plan_on_one_mesh
from autopar.inter_op.one_or_stages import plan_one_or_stages
from autopar.inter_op.plan_on_kinds import has_kinds, plan_on_kinds
from autopar.inter_op.plan_pipeline import PipelineWishes, restore_pipeline
from autopar.intra_op.choices.least_work import find_flops
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.restore import restore, restore_known
from autopar.layouts.mesh import LogicalMesh
from autopar.microbatches.counts import cut_by, cut_into_microbatches, loop_over_microbatches, microbatch_counts
from autopar.microbatches.named_phases import NamedPhases
from autopar.microbatches.statistics import mark_statistics, warn_of_corrections
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan
from autopar.plan_cache.recall import Recalled, Ways, recall_or_search
from autopar.program.step import TracedStep, fewer_examples, require_examples
from autopar.progress import LOGGER, searching
from autopar.runtime.meetings import LIMIT_S, group_of
from autopar.runtime.shared_plan import SharedPlan
from autopar.settings import (
    Settings,
    choose_cluster,
    choose_one_mesh,
    count_devices,
    count_meshes,
    describe_question,
    is_cluster_assumed,
    list_devices,
    make_request,
    most_devices,
    plan_to_follow,
)
from autopar.solver.budget import LeftError
from autopar.stages.dependence import takes_gradients
from autopar.stages.follow import Following
from autopar.stages.recompute_layers import Repeated

Found: TypeAlias = PlannedStep | PlannedPipeline
"""A step with its plan, as a search finds it."""
Made: TypeAlias = Found | RestoredPipeline
"""The same, or as it is restored."""
Planned: TypeAlias = Made | Recalled[Made]
"""A step with its plan, ready to be compiled."""


def decide(settings: Settings, traced: TracedStep) -> Planned:
    """The plan for a step: the given one, or the best of what the settings leave open.

    Raises ArgumentError, ConstraintError, OutOfMemoryError, PlanError, UnsupportedProgramError.
    """
    _check_size(settings)
    marked = mark_statistics(traced) if settings.batch_statistics == "microbatch" else traced
    planned: Planned
    if settings.plan is not None:
        planned = _restore(settings, marked, settings.plan)
    else:
        try:
            planned = recall_or_search(settings, marked, _ways(settings, traced, marked))
        except (OutOfMemoryError, LeftError) as error:
            error.asked = settings, traced
            raise
    if marked is not traced and planned.plan.num_microbatches > 1:
        warn_of_corrections(traced)
    planned.plan.know_question(settings, traced, is_cluster_assumed=is_cluster_assumed(settings))
    return planned


def _ways(settings: Settings, traced: TracedStep, marked: TracedStep) -> Ways[Made]:
    """How a step gets its plan. `marked`: the step with the statistics of a batch marked, as far as they may be estimates."""

    def search(own: Settings) -> Made:
        found = _search_timed(own, marked)
        found.plan.know_question(own, traced, is_cluster_assumed=is_cluster_assumed(own))
        return found

    return Ways(
        search=search,
        restore=functools.partial(_restore, settings, marked),
        restore_kept=functools.partial(_restore_kept, settings, marked),
        name_phases=_name_phases,
    )


def _check_size(settings: Settings) -> None:
    """Raises ArgumentError if the cluster has fewer devices than are asked for."""
    devices, most = count_devices(settings), most_devices(settings)
    if devices > most:
        name = choose_cluster(settings).name
        raise ArgumentError(
            f"cluster {name!r} has at most {most} devices, not {devices}: ask for fewer, or name a cluster that joins such "
            "machines by a network"
        )


def _search_timed(settings: Settings, traced: TracedStep) -> Found:
    """The best plan, with the seconds that all of the search took."""
    started = perf_counter()
    with searching():
        found = _search(settings, traced)
    flops, at_peak_s = _work_at_peak(settings, traced, found.plan)
    seconds = perf_counter() - started
    if isinstance(found, PlannedPipeline):
        in_stages = dataclasses.replace(found.plan, planning_s=seconds, flops=flops, at_peak_s=at_peak_s)
        return dataclasses.replace(found, plan=in_stages)
    plan = dataclasses.replace(found.plan, planning_s=seconds, flops=flops, at_peak_s=at_peak_s)
    return dataclasses.replace(found, plan=plan)


def _work_at_peak(settings: Settings, traced: TracedStep, plan: Plan | PipelinePlan) -> tuple[float, float]:
    """Operations of a step's contractions, and the seconds that they would take at the peak of the plan's devices."""
    request = make_request(settings)

    def work_on(cluster: Cluster) -> tuple[float, float]:
        alone = request.catalogues.of(LogicalMesh.of((1,)), cluster, request.options)
        return find_flops(traced.program, alone)

    counts = plan.devices_by_kind()
    if "" in counts:
        flops, alone_s = work_on(request.cluster)
        return flops, alone_s / plan.num_devices
    works = [(count, *work_on(request.cluster.of_kind(kind))) for kind, count in counts.items()]
    return works[0][1], 1 / sum(count / alone_s for count, _, alone_s in works if alone_s) if works[0][2] else 0.0


def _search(settings: Settings, traced: TracedStep) -> Found:
    """The best plan of what the settings leave open."""
    leader, meshes, devices = plan_to_follow(settings), count_meshes(settings), count_devices(settings)
    _require_a_batch(settings, traced, leader)
    if isinstance(leader, PipelinePlan):
        return plan_best_pipeline(
            traced, _wish_to_follow(settings, traced, leader), make_request(settings), devices=devices
        )
    if meshes > 1:
        return _plan_given_stages(traced, _wish(settings, meshes), make_request(settings), devices)
    _refuse_wishes_for_stages(settings)
    request = make_request(settings, choose_one_mesh(settings))
    if _leaves_stages_open(settings) and devices > 1 and max(microbatch_counts(traced)) > 1:
        wish = _wish(settings, meshes)

        def plan(own: PlanRequest, count: int) -> Found:
            return plan_one_or_stages(traced, wish, own, devices=count)

        return (
            plan_on_kinds(traced, wish, request, plan) if has_kinds(request, wish, devices) else plan(request, devices)
        )
    planned = plan_on_one_mesh(
        traced,
        request,
        num_microbatches=settings.num_microbatches,
        recompute=settings.recompute,
        devices=devices,
    )
    assert isinstance(planned, PlannedStep), "there is nothing that it has to beat"
    return planned


def _plan_given_stages(traced: TracedStep, wish: PipelineWishes, request: PlanRequest, devices: int) -> Found:
    def plan(own: PlanRequest, count: int) -> Found:
        return plan_given_stages(traced, wish, own, devices=count)

    if not has_kinds(request, wish, devices):
        return plan(request, devices)
    return plan_on_kinds(traced, wish, request, plan, num_stages=wish.num_stages)


def meet_to_plan(settings: Settings, traced: TracedStep, name: str) -> SharedPlan | None:
    """Wait until every process that has devices of the step asks for the same plan; None if there is one such process.

    Raises PlanError on all of them if they do not, before any of them searches.
    """
    group = group_of(functools.partial(list_devices, settings))
    return None if group is None else SharedPlan.meet(group, describe_question(settings, traced, name))


def decide_together(settings: Settings, traced: TracedStep, shared: SharedPlan | None) -> Planned:
    """As `decide`, the same on every process that has met to plan: the first plans, the others take over its plan."""
    _refuse_wishes_beside_the_plan(settings)
    if shared is None:
        return decide(settings, traced)
    own: list[Planned] = []

    def plan() -> str:
        found = decide(settings, traced)
        own.append(found.whole if isinstance(found, Recalled) else found)  # what others take over is what runs here
        return own[0].plan.to_json()

    text = shared.make(plan, within_s=LIMIT_S + (settings.planning_seconds or 0))
    return own[0] if own else decide(dataclasses.replace(settings, plan=plan_from_json(text)), traced)


def decide_for_fewer_examples(
    settings: Settings, traced: TracedStep, name: str, *, earlier: Sequence[Planned], error: AutoparError
) -> Planned:
    """The plan for a batch that the settings cannot divide, if an earlier one was larger, as before the last of an epoch.

    The state stays where the earlier plan has it. Constraints on the batch are left out, and there are as many microbatches as
    divide it.
    Raises `error` if there is no such plan, and says what to do if there is none for this size.
    """
    counts = [(counts, one) for one in earlier if (counts := fewer_examples(traced, one.traced)) is not None]
    if not counts:
        raise error
    (now, before), like = counts[-1]
    own = _without_the_batch(settings, traced, _Earlier(like.plan, settings))
    said = "%s is planned again for %d examples, which what was asked for batches of %d does not divide"
    LOGGER.warning(said, name, now, before)
    try:
        return decide_together(own, traced, meet_to_plan(own, traced, name))
    except AutoparError as second:
        raise type(error)(
            f"{error} Earlier calls had {before} examples. If this is the last batch of an epoch, drop it (drop_remainder=True "
            f"or drop_last=True in the loader), or pad it to {before} examples that have no weight in the loss. Without "
            f"constraints on the batch: {second}"
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class _Earlier:
    """An earlier plan of the same step, to be followed."""

    plan: Plan | PipelinePlan
    settings: Settings

    def last_plan(self) -> Plan | PipelinePlan:
        """The plan."""
        return self.plan

    def jax_devices(self) -> list[jax.Device]:
        """The devices that it runs on."""
        return list_devices(self.settings)

    def cluster(self) -> Cluster:
        """What the planner assumes of the machine."""
        return choose_cluster(self.settings)


def _without_the_batch(settings: Settings, traced: TracedStep, leader: Leader) -> Settings:
    """The settings for a step that follows another one, in whose plan its state has layouts, and whose batch has none."""
    rules, asked = tuple(rule for rule in settings.constraints.rules if rule.is_on_results), settings.num_microbatches
    count = asked if asked == "auto" else max(count for count in microbatch_counts(traced) if count <= asked)
    return dataclasses.replace(
        settings,
        follow=leader,
        meshes="auto",
        num_stages="auto",
        virtual_stages="auto",
        num_microbatches=count,
        constraints=dataclasses.replace(settings.constraints, rules=rules),
    )


def _restore(settings: Settings, traced: TracedStep, plan: Plan | PipelinePlan) -> Made:
    """A given plan, without a search. Raises PlanError if it is for another step."""
    if isinstance(plan, PipelinePlan):
        return restore_pipeline(traced, plan, make_request(settings))
    count_meshes(settings)  # refuses numbers of stages that contradict each other
    cut = cut_into_microbatches(_repeat_layers(traced, plan), plan.num_microbatches)
    return restore(cut, plan, make_request(settings, choose_one_mesh(settings)))


def _restore_kept(settings: Settings, traced: TracedStep, plan: Plan | PipelinePlan, phases: str | None) -> Made:
    """A plan that a search has found for this very question; `phases`: those that `_name_phases` named then."""
    named = None if phases is None else NamedPhases.from_json(phases)
    if isinstance(plan, PipelinePlan):
        return restore_pipeline(traced, plan, make_request(settings), phases=named)
    step, count = _repeat_layers(traced, plan), plan.num_microbatches
    cut = cut_into_microbatches(step, count) if named is None else loop_over_microbatches(step, named.find(step))
    return restore_known(cut, plan, make_request(settings, choose_one_mesh(settings)))


def _repeat_layers(traced: TracedStep, plan: Plan) -> TracedStep:
    """The step with the forward work that backward does again, as a plan says."""
    return Repeated(plan.recomputed_layers, plan.keeps_named).apply(traced) if plan.recompute else traced


def _name_phases(planned: Made) -> str | None:
    """The phases by which the microbatches of a planned step are cut, in words; None if it has none."""
    cut = planned.phases if isinstance(planned, PlannedPipeline) else cut_by(planned.traced)
    return None if cut is None else NamedPhases.of(cut).to_json()


def _refuse_wishes_beside_the_plan(settings: Settings) -> None:
    """Raise ArgumentError for wishes that a given plan does not meet. A plan that was searched under the same ones meets them."""
    plan = settings.plan
    if plan is None:
        return
    schedule, virtual_stages = settings.schedule, settings.virtual_stages  # which say nothing of one mesh
    if isinstance(plan, PipelinePlan):
        shapes = [stage.plan.mesh_shape for stage in plan.stages[: plan.num_stages // plan.virtual_stages]]
        schedule, virtual_stages = plan.schedule, plan.virtual_stages
        words = f"{len(shapes)} meshes of {', '.join(map(str, shapes))}, schedule {schedule!r}, {virtual_stages} stages per mesh"
    else:
        shapes, words = [plan.mesh_shape], f"one mesh of {plan.mesh_shape}"
    asked = [] if settings.meshes == "auto" else [mesh.shape for mesh in settings.meshes]
    all_asked = asked * count_meshes(settings) if len(asked) == 1 else asked
    wishes: dict[str, tuple[object, bool]] = {
        "mesh_shape": (asked[0] if len(asked) == 1 else asked, not asked or all_asked == shapes),
        "num_stages": (settings.num_stages, settings.num_stages in ("auto", len(shapes))),
        "num_microbatches": (settings.num_microbatches, settings.num_microbatches in ("auto", plan.num_microbatches)),
        "schedule": (settings.schedule, settings.schedule in ("auto", schedule)),
        "virtual_stages": (settings.virtual_stages, settings.virtual_stages in ("auto", virtual_stages)),
        "recompute": (settings.recompute, settings.recompute != "none" or not plan.recompute),
    }
    wrong = [f"{name}={wish!r}" for name, (wish, is_met) in wishes.items() if not is_met]
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: the plan has {words}, {plan.num_microbatches} microbatches and recompute={plan.recompute}. "
            "Leave out what it does not have, which takes the plan as it is; or leave out plan=, which searches"
        )


def _wish(settings: Settings, num_meshes: int) -> PipelineWishes:
    """A pipeline on this number of meshes, with what the settings fix of it."""
    meshes: tuple[LogicalMesh, ...] | None = None if settings.meshes == "auto" else settings.meshes
    return PipelineWishes(
        num_stages=num_meshes,
        num_microbatches=settings.num_microbatches,
        schedule=settings.schedule,
        virtual_stages=settings.virtual_stages,
        stage_meshes=meshes * num_meshes if meshes is not None and len(meshes) == 1 else meshes,
        recompute=settings.recompute,
    )


def _wish_to_follow(settings: Settings, traced: TracedStep, leader: PipelinePlan) -> PipelineWishes:
    """A pipeline on the stages of another one; forward only, if the step takes no gradients."""
    if settings.meshes != "auto" or settings.num_stages != "auto" or settings.virtual_stages not in ("auto", 1):
        raise ArgumentError(
            f"follow= takes over the stages of the step that it follows, {leader.num_stages} of them: leave out num_stages, "
            "virtual_stages and mesh_shape, or plan the step without follow= and bring the state with step.gather(state)"
        )
    following = Following.of(leader)
    following.check(traced)
    return PipelineWishes(
        num_stages=len(following.meshes),
        num_microbatches=settings.num_microbatches,
        schedule="inference" if settings.schedule == "auto" and not takes_gradients(traced) else settings.schedule,
        virtual_stages=following.virtual_stages,
        stage_meshes=following.meshes,
        recompute=settings.recompute,
        following=following,
    )


def _leaves_stages_open(settings: Settings) -> bool:
    return settings.num_stages == "auto" and settings.meshes == "auto" and settings.follow is None


def _require_a_batch(settings: Settings, traced: TracedStep, leader: Plan | PipelinePlan | None) -> None:
    """Raise ArgumentError if stages or microbatches are asked for and the step has no examples."""
    stages = max(leader.num_stages if isinstance(leader, PipelinePlan) else 1, count_meshes(settings))
    if stages > 1:
        wish = f"num_stages={stages}" if settings.num_stages != "auto" else f"a step in {stages} stages"
        require_examples(traced, wish, at_least=2)
    elif settings.num_microbatches not in ("auto", 1):
        require_examples(traced, f"num_microbatches={settings.num_microbatches}", at_least=1)


def _refuse_wishes_for_stages(settings: Settings) -> None:
    """Raise ArgumentError for wishes that one mesh cannot meet."""
    if settings.virtual_stages not in ("auto", 1):
        raise ArgumentError(
            f"virtual_stages={settings.virtual_stages} are stages of each mesh of a pipeline: give num_stages, the number of "
            "meshes"
        )
    if settings.schedule != "auto" and (settings.num_stages == 1 or settings.meshes != "auto"):
        raise ArgumentError(
            f"schedule={settings.schedule!r} is for pipeline stages: give num_stages=2 or more, or one mesh shape per stage"
        )
