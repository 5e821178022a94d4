"""Measured beside predicted, part by part.

In: a recording. Out: a `Comparison`, rows of seconds per step. On one mesh the parts are compute, each kind of collective over
its axes, and what devices do neither in; seconds are means over the devices. In stages they are the work of the busiest mesh,
what it waits for others, what happens once per step, and of each stage the forward and backward of one microbatch. What can go
wrong: XLA merges collectives and turns one kind into another; kinds that were planned and did not run, or the other way round,
have a row with one figure.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from autopar.errors import ArgumentError
from autopar.inter_op.pipeline_seconds import find_exposed_s, once_a_step_s, schedule_of, time_stages
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording.device_times import CollectiveRun, DeviceTimes, collective_runs, device_times
from autopar.recording.recorded import KERNEL, ONCE, TASKS, Recorded, RecordedSpan


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedPart:
    """One part of a step.

    Attributes:
        what: the part.
        predicted_s: seconds per step that the plan says; of tasks of a stage, per microbatch. None: it says nothing of it.
        measured_s: the same as measured. None: it was not measured.
        note: what else is to be known of it.
    """

    what: str
    predicted_s: float | None
    measured_s: float | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if one is missing or nothing."""
        return self.measured_s / self.predicted_s if self.predicted_s and self.measured_s is not None else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The parts of a step, the whole first. Print it for a table."""

    parts: tuple[ComparedPart, ...]

    def __getitem__(self, what: str) -> ComparedPart:
        """The part of this name. Raises ArgumentError with the names there are."""
        for part in self.parts:
            if part.what == what:
                return part
        raise ArgumentError(f"no part {what!r} of a recorded step; there are {', '.join(p.what for p in self.parts)}")

    def __str__(self) -> str:
        """The table."""
        return str(importlib.import_module("autopar.recording.page").comparison_text(self))


def compare(recorded: Recorded) -> Comparison:
    """Every part of a recorded step beside what its plan says."""
    plan = recorded.plan
    timed = recorded.timed
    looked = " while it was looked into" if all(call.is_detailed for call in timed) else ""
    calls = f"the median of {len(timed)} calls" if len(timed) > 1 else "of one call"
    first = ", the first" if all(call.is_first for call in timed) else ""
    whole = ComparedPart(
        what="step", predicted_s=plan.step_s, measured_s=recorded.wall_s, note=f"{calls}{first}{looked}"
    )
    parts = _of_one_mesh(recorded, plan) if isinstance(plan, Plan) else _of_stages(recorded, plan)
    return Comparison((whole, *parts))


def _of_one_mesh(recorded: Recorded, plan: Plan) -> Iterator[ComparedPart]:
    by_call = [device_times(recorded, call) for call in recorded.detailed]
    devices = [device for call in by_call for device in call]
    runs = [run for call in recorded.detailed for run in collective_runs(recorded, call)]
    calls = max(len(by_call), 1)

    def mean(value: Callable[[DeviceTimes], float]) -> float | None:
        return statistics.fmean(map(value, devices)) if devices else None

    yield ComparedPart(
        what="compute", predicted_s=plan.compute_s, measured_s=mean(lambda one: one.compute_s), note="mean of devices"
    )
    yield ComparedPart(
        what="communication that is waited for",
        predicted_s=max(0.0, plan.comm_s - plan.hidden_s),
        measured_s=mean(lambda one: one.exposed_s),
    )
    untold = {one.collective for one in recorded.program if one.opcode == KERNEL}
    yield from _collectives(plan, runs, calls, len({one.device for one in devices}), untold=untold)
    yield ComparedPart(
        what="neither",
        predicted_s=None,
        measured_s=mean(lambda one: one.idle_s),
        note="no operation runs: the host, or threads that wait for a core",
    )


def _collectives(
    plan: Plan, runs: Sequence[CollectiveRun], calls: int, devices: int, *, untold: Collection[str]
) -> Iterator[ComparedPart]:
    """A row for each kind over its axes, planned or run; of the kinds `untold` kernels ran that are nobody's."""
    planned: dict[tuple[str, tuple[str, ...]], float] = {}
    for one in plan.collectives:
        key = one.kind, _ordered(one.axes, plan)
        planned[key] = planned.get(key, 0.0) + one.count * one.predicted_s
    ran: dict[tuple[str, tuple[str, ...]], list[CollectiveRun]] = {}
    for run in runs:
        ran.setdefault((run.operation.collective, _ordered(run.operation.axes, plan)), []).append(run)
    for kind, axes in dict.fromkeys((*planned, *ran)):
        own = ran.get((kind, axes), [])
        total_s = sum(run.seconds * len(run.devices) for run in own) / max(devices * calls, 1)
        waited_s = sum(sum(run.waited_s) for run in own) / max(devices * calls, 1)
        note = (
            "its kernels could not be told from others" if kind in untold else _collective_note(own, waited_s, total_s)
        )
        is_told = devices > 0 and kind not in untold
        yield ComparedPart(
            what=f"{kind} over {', '.join(axes) or 'some devices'}",
            predicted_s=planned.get((kind, axes)),
            measured_s=total_s if is_told else None,
            note=note if devices else "",
        )


def _collective_note(runs: Sequence[CollectiveRun], waited_s: float, total_s: float) -> str:
    if not runs:
        return "none ran: XLA made something else of them"
    share = f", {waited_s / total_s:.0%} of it for the last device to come" if total_s else ""
    return f"{len({run.operation.name for run in runs})} in the program{share}"


def _ordered(axes: Iterable[str], plan: Plan) -> tuple[str, ...]:
    """Axes in the order of the mesh."""
    chosen = set(axes)
    return tuple(axis for axis in plan.axis_names if axis in chosen)


def _of_stages(recorded: Recorded, plan: PipelinePlan) -> Iterator[ComparedPart]:
    meshes = plan.num_stages // plan.virtual_stages
    schedule, seconds = schedule_of(plan), [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    timed, exposed_s = time_stages(schedule, seconds), find_exposed_s(schedule, seconds, plan.transfers)
    once_s = once_a_step_s([stage.once_s for stage in plan.stages], plan.transfers)
    work_s = max(timed.busy_s)
    steps = [_MeasuredStages(recorded, call, meshes) for call in recorded.detailed if recorded.spans]

    def median(value: Callable[[_MeasuredStages], float]) -> float | None:
        return statistics.median(map(value, steps)) if steps else None

    def task_s(stage: int, kind: str) -> float | None:
        return median(lambda one: one.task_s(stage, kind))

    yield ComparedPart(what="work of the busiest mesh", predicted_s=work_s, measured_s=median(lambda s: s.work_s))
    yield ComparedPart(
        what="bubble",
        predicted_s=timed.makespan_s - work_s,
        measured_s=median(lambda s: s.bubble_s),
        note="the busiest mesh waits for others, and for the host to start its tasks",
    )
    yield ComparedPart(
        what="transfers that are waited for",
        predicted_s=exposed_s,
        measured_s=median(lambda s: s.transfers_s),
        note="from when they are sent",
    )
    yield ComparedPart(
        what="once per step, such as the update", predicted_s=once_s, measured_s=median(lambda s: s.once_s)
    )
    for stage in plan.stages:
        for kind, predicted_s in (("forward", stage.forward_s), ("backward", stage.backward_s)):
            if predicted_s:
                yield ComparedPart(
                    what=f"{kind} of stage {stage.stage}",
                    predicted_s=predicted_s,
                    measured_s=task_s(stage.stage, kind),
                    note="of one microbatch",
                )


class _MeasuredStages:
    """The parts of one measured step."""

    def __init__(self, recorded: Recorded, call: int, meshes: int) -> None:
        self._spans = [span for span in recorded.spans if span.call == call]
        tasks = [span for span in self._spans if span.kind in TASKS]
        busy = [sum(span.seconds for span in tasks if span.mesh == mesh) for mesh in range(meshes)]
        self.work_s = max(busy)
        self._busiest = busy.index(self.work_s)
        lasts_s = max(span.end_s for span in tasks) - min(span.start_s for span in tasks) if tasks else 0.0
        self.transfers_s = exposed_transfers_s(self._spans, self._busiest)
        self.bubble_s = max(0.0, lasts_s - self.work_s - self.transfers_s)
        once = [span for span in self._spans if span.kind in ONCE]
        self.once_s = max(sum(span.seconds for span in once if span.mesh == mesh) for mesh in range(meshes))

    def task_s(self, stage: int, kind: str) -> float:
        """Median seconds of forward or backward of one microbatch; both halves of a backward that is split."""
        total: dict[int | None, float] = {}
        for span in self._spans:
            if span.stage == stage and span.kind in TASKS and (span.kind == "forward") == (kind == "forward"):
                total[span.microbatch] = total.get(span.microbatch, 0.0) + span.seconds
        return statistics.median(total.values()) if total else 0.0


def exposed_transfers_s(spans: Sequence[RecordedSpan], mesh: int) -> float:
    """Seconds in which a mesh waits for transfers that are under way, from their sends on or its own last instruction."""
    sent = {span.transfer: span.end_s for span in spans if span.kind == "send"}
    waited, free_s = 0.0, 0.0
    for span in sorted((one for one in spans if one.mesh == mesh), key=lambda one: one.start_s):
        if span.kind == "receive":
            waited += max(0.0, span.end_s - max(free_s, sent.get(span.transfer, span.start_s)))
        free_s = span.end_s
    return waited
