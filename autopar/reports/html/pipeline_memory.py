"""The memory of a pipeline's meshes over the step, by the predicted clock.

In: a `PipelinePlan` that knows the parts of its stages' peaks. Out: bytes of one device of a mesh at equal intervals of the
step. The state and the sums lie there throughout; a microbatch keeps its residuals from the start of its forward to the end of
its backward, of its weight gradient where that is a task of its own; and tasks need theirs while they run. What can go wrong: a
split backward lets go of a part before its end, where each microbatch counts an equal share of what all keep at the most; and
of stages that share a mesh the plan knows what each needs at the mesh's peak, which for a task that does not run then is little.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.figures import meshes_of
from autopar.inter_op.candidates.pipeline_seconds import schedule_of, simulate_stages
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.schedules.instructions import Run
from autopar.schedules.timeline import Span

INTERVALS = 240


def memory_over_step(plan: PipelinePlan, mesh: int, *, intervals: int = INTERVALS) -> list[int]:
    """The most bytes of one device of a mesh in each of so many equal intervals of the work on microbatches."""
    schedule = schedule_of(plan)
    done = simulate_stages(schedule, [(stage.forward_s, stage.backward_s) for stage in plan.stages])
    stages = {stage.stage: stage for stage in meshes_of(plan)[mesh]}
    last = "weight_gradient" if "weight_gradient" in schedule.kinds else schedule.kinds[-1]
    changes = sorted(
        (time_s, change)
        for span in done.timeline.spans
        if isinstance(span.instruction, Run) and span.instruction.stage in stages
        for time_s, change in _changes(span, span.instruction, stages[span.instruction.stage], last)
    )
    now = float(sum(stage.state_bytes + stage.sum_bytes for stage in stages.values()))
    found, place = [], 0
    for number in range(1, intervals + 1):
        end_s, most = number * done.makespan_s / intervals, now
        while place < len(changes) and (changes[place][0] < end_s or number == intervals):
            now += changes[place][1]
            place += 1
            most = max(most, now)
        found.append(round(most))
    return found


def _changes(span: Span, run: Run, stage: StagePlan, last: str) -> Iterator[tuple[float, float]]:
    """When a task adds bytes, and when they go; at one instant, what goes makes room for what comes."""
    yield span.start_s, stage.working_bytes
    yield span.end_s, -stage.working_bytes
    is_split = last == "weight_gradient"
    each = stage.in_flight_bytes / max(1, stage.microbatches_in_flight) if is_split else stage.microbatch_bytes
    if run.kind == "forward":
        yield span.start_s, each
    if run.kind == last:
        yield span.end_s, -each
