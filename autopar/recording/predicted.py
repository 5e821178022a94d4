"""A pipeline's step as its plan predicts it, in the spans in which a measured one is recorded.

In: a plan. Out: `RecordedSpan`s by the schedule's simulated clock, with what happens once per step behind them. What can go
wrong: a schedule with more spans than a picture has room for; whoever draws counts them.
"""

from __future__ import annotations

from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, schedule_of, simulate_stages
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.recorded import RecordedSpan
from autopar.schedules.instructions import Run


def predicted_spans(plan: PipelinePlan) -> list[RecordedSpan]:
    """The tasks of a step, and what each mesh does once; all of call 0."""
    schedule, seconds = schedule_of(plan), [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    simulated, exposed_s = simulate_stages(schedule, seconds), find_exposed_s(schedule, seconds, plan.transfers)
    found = [
        RecordedSpan(
            call=0,
            mesh=one.mesh,
            kind=one.kind,
            start_s=span.start_s,
            end_s=span.end_s,
            stage=one.stage,
            microbatch=one.microbatch,
            name=one.task,
        )
        for span in simulated.timeline.spans
        if isinstance(one := span.instruction, Run) and span.end_s > span.start_s
    ]
    starts = dict.fromkeys((stage.mesh for stage in plan.stages), simulated.makespan_s + exposed_s)
    for stage in plan.stages:
        start_s = starts[stage.mesh]
        starts[stage.mesh] = start_s + stage.once_s
        found.append(
            RecordedSpan(
                call=0,
                mesh=stage.mesh,
                kind="epilogue",
                start_s=start_s,
                end_s=start_s + stage.once_s,
                stage=stage.stage,
                name=f"update {stage.stage}",
            )
        )
    return found
