"""Seconds of a pipeline's step from those of its stages and transfers.

In: a schedule, seconds of forward and backward per microbatch of each stage, and the transfers between stages. Out: the step's
time and its parts. A step is the makespan of the schedule (`time_stages`), what the stages wait for transfers (`find_exposed_s`),
and what they do once (`once_a_step_s`). Whoever plans, prices a plan again, draws it or holds it against a measurement asks here.
What can go wrong: transfers between stages that are no neighbours are not timed; one microbatch's are added.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline_plan import ONCE, PipelinePlan, TransferPlan, sent_once_s
from autopar.schedules.schedules import make_schedule
from autopar.schedules.simulate import Simulation, simulate_schedule
from autopar.schedules.step_time import PerStage, StepTime, time_step
from autopar.schedules.tasks import Schedule


def schedule_of(plan: PipelinePlan) -> Schedule:
    """The schedule of a plan."""
    return make_schedule(
        plan.schedule,
        num_meshes=plan.num_stages // plan.virtual_stages,
        num_microbatches=plan.num_microbatches,
        virtual_stages=plan.virtual_stages,
    )


def predict_step_s(plan: PipelinePlan) -> float:
    """Seconds of a step from the seconds of the plan's stages and transfers: `plan.step_s`, where these are as planned."""
    schedule, seconds = schedule_of(plan), [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    once_s = once_a_step_s([stage.once_s for stage in plan.stages], plan.transfers)
    return time_stages(schedule, seconds).makespan_s + find_exposed_s(schedule, seconds, plan.transfers) + once_s


def wait_for_transfers_s(plan: PipelinePlan) -> float:
    """Seconds of a step in which the meshes wait for what others send them: in its microbatches, and once at its end."""
    seconds = [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    return find_exposed_s(schedule_of(plan), seconds, plan.transfers) + sent_once_s(plan.transfers)


def once_a_step_s(stages_once_s: Sequence[float], transfers: Sequence[TransferPlan]) -> float:
    """Seconds of what all stages do once a step: they update their state at the same time, so the slowest counts, after the
    transfers of that kind.
    """
    return max(stages_once_s) + sent_once_s(transfers)


def find_exposed_s(
    schedule: Schedule, seconds: Sequence[tuple[float, float]], transfers: Sequence[TransferPlan]
) -> float:
    """Seconds by which the transfers of microbatches make a step longer than `time_stages` of the same seconds says.

    How much of them hides behind compute depends on the schedule: GPipe and eager 1F1B wait for those of one microbatch, if
    they are no longer than a microbatch's work, 1F1B for more. Transfers between stages that are no neighbours are no part of
    the chain that is timed; of these one microbatch's count. Those that are work of the mesh that sends hide behind nothing.
    """
    backward = "input_gradient" if "input_gradient" in schedule.kinds else "backward"
    run_s = dict(_task_seconds(schedule, seconds))
    alone_s, skipped_s = time_step(schedule, run_s).makespan_s, 0.0
    sent_s: dict[tuple[str, int], float] = {}
    for item in transfers:
        task = ("forward" if item.what == "forward" else backward, item.source)
        if item.what in ONCE:
            continue
        if item.is_work:
            run_s[task] += item.predicted_s
        elif item.target - item.source == (1 if item.what == "forward" else -1):
            sent_s[task] = item.predicted_s
        else:
            skipped_s += item.predicted_s
    return time_step(schedule, run_s, sent_s).makespan_s - alone_s + skipped_s


def time_stages(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> StepTime:
    """The time of a schedule with these seconds of (forward, backward) per stage, and transfers that take none.

    A split backward has two equal parts.
    """
    return time_step(schedule, _task_seconds(schedule, seconds))


def simulate_stages(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> Simulation:
    """The same, with the span of each task."""
    run_s = _task_seconds(schedule, seconds)
    return simulate_schedule(schedule, lambda run: run_s[run.kind, run.stage])


def _task_seconds(schedule: Schedule, seconds: Sequence[tuple[float, float]]) -> PerStage:
    """Seconds of each kind of task on each stage."""
    parts = 2 if "weight_gradient" in schedule.kinds else 1
    return {
        (kind, stage): forward_s if kind == "forward" else backward_s / parts
        for kind in schedule.kinds
        for stage, (forward_s, backward_s) in enumerate(seconds)
    }
