"""Measured beside predicted, part by part.

In: a recording. Out: a `Comparison`, rows of seconds per step. On one mesh the parts are compute, each kind of collective over
its axes, and what devices do neither in; seconds are means over the devices. In stages they are the work of the busiest mesh,
what it waits for others, what happens once per step, and of each stage the forward and backward of one microbatch, and its tasks
of a step in the parts of one mesh. The measured parts, those of stages and of kinds of collectives aside, add up to the call that
was looked into, which has a row: looking takes time. What can go wrong: XLA merges collectives and turns one kind into another;
kinds that were planned and did not run, or the other way round, have a row with one figure.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from autopar.errors import ArgumentError
from autopar.inter_op.candidates.pipeline_seconds import find_exposed_s, once_a_step_s, schedule_of, time_stages
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.plan import Plan
from autopar.recording.device_times import CollectiveRun, DeviceTimes, collective_runs, device_times
from autopar.recording.recorded import KERNEL, TASKS, Recorded, RecordedOperation, RecordedSpan

LOOKED_INTO = "the call that was looked into"
_COMPUTE, _WAITED, _NEITHER = "compute", "communication that is waited for", "neither"
_WORK, _BUBBLE, _SENT = "work of the busiest mesh", "bubble", "transfers that are waited for"
_ONCE, _SENT_ONCE, _HOST = (
    "once per step, such as the update",
    "transfers once per step",
    "before the first task and after the last",
)
_ADDING_UP = (_COMPUTE, _WAITED, _WORK, _BUBBLE, _SENT, _ONCE, _SENT_ONCE, _HOST, _NEITHER)
_Kind: TypeAlias = tuple[str, tuple[str, ...]]
"""A kind of collective, and the axes that it is over."""
_APART = 0.01
"""A call that differs by less takes as long."""


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
    return Comparison((whole, *_looked_into(recorded), *parts))


def _looked_into(recorded: Recorded) -> Iterator[ComparedPart]:
    """The call whose parts are measured, which is none of those whose seconds count if there are others."""
    looked_s = _looked_s(recorded)
    if looked_s is None:
        return
    more, number = looked_s / recorded.wall_s - 1, len(recorded.detailed)
    apart = f"; {abs(more):.0%} {'more' if more > 0 else 'less'} than the step" if abs(more) >= _APART else ""
    costs = ": looking takes time" if more >= _APART else ""
    yield ComparedPart(
        what=LOOKED_INTO,
        predicted_s=None,
        measured_s=looked_s,
        note=f"{'' if number == 1 else f'the mean of {number}: '}the parts below add up to it{apart}{costs}",
    )


def _looked_s(recorded: Recorded) -> float | None:
    """Mean seconds of the calls that were looked into; None if none was, or nothing was seen in them."""
    calls = [call.wall_s for call in recorded.calls if call.is_detailed]
    return statistics.fmean(calls) if calls and (recorded.spans or recorded.operations) else None


def parts_of_step(comparison: Comparison) -> tuple[ComparedPart, ...]:
    """The parts of a comparison that add up: predicted to the step, measured to the call that was looked into."""
    return tuple(part for part in comparison.parts if part.what in _ADDING_UP)


def _of_one_mesh(recorded: Recorded, plan: Plan) -> Iterator[ComparedPart]:
    by_call = [device_times(recorded, call) for call in recorded.detailed]
    devices = [device for call in by_call for device in call]

    def mean(value: Callable[[DeviceTimes], float]) -> float | None:
        return statistics.fmean(map(value, devices)) if devices else None

    yield ComparedPart(
        what=_COMPUTE, predicted_s=plan.compute_s, measured_s=mean(lambda one: one.compute_s), note="mean of devices"
    )
    yield ComparedPart(
        what=_WAITED,
        predicted_s=max(0.0, plan.comm_s - plan.hidden_s),
        measured_s=mean(lambda one: one.exposed_s),
    )
    yield from _collectives(recorded, plan, devices=len({one.device for one in devices}))
    looked_s = _looked_s(recorded)
    yield ComparedPart(
        what=_NEITHER,
        predicted_s=None,
        measured_s=mean(lambda one: max(one.idle_s, (looked_s or 0.0) - one.compute_s - one.exposed_s)),
        note="no operation runs: the host, or threads that wait for a core",
    )


def _collectives(recorded: Recorded, plan: Plan, *, devices: int, stage: int | None = None) -> Iterator[ComparedPart]:
    """A row for each kind over its axes, planned or run; on one mesh, or in a stage under its plan."""
    untold = {one.collective for one in recorded.program if one.opcode == KERNEL}
    planned: dict[_Kind, float] = {}
    for one in plan.collectives:
        key = one.kind, _ordered(one.axes, plan)
        planned[key] = planned.get(key, 0.0) + one.count * one.predicted_s
    ran: dict[_Kind, list[RecordedOperation]] = {}
    for execution in recorded.operations:
        operation = recorded.operation(execution)
        if operation.collective and (stage is None or recorded.stage(execution) == stage):
            ran.setdefault((operation.collective, _ordered(operation.axes, plan)), []).append(execution)
    whole: dict[_Kind, list[CollectiveRun]] = {}
    for run in (run for call in recorded.detailed for run in collective_runs(recorded, call, stage=stage)):
        whole.setdefault((run.operation.collective, _ordered(run.operation.axes, plan)), []).append(run)
    for kind, axes in dict.fromkeys((*planned, *ran)):
        own = ran.get((kind, axes), [])
        total_s = sum(one.seconds for one in own) / max(devices * len(recorded.detailed), 1)
        note = (
            "its kernels could not be told from others"
            if kind in untold
            else _collective_note(own, whole.get((kind, axes), []))
        )
        is_told = devices > 0 and kind not in untold
        where = "" if stage is None else f" in stage {stage}"
        yield ComparedPart(
            what=f"{kind} over {', '.join(axes) or 'some devices'}{where}",
            predicted_s=planned.get((kind, axes)),
            measured_s=total_s if is_told else None,
            note=note if devices else "",
        )


def _collective_note(own: Sequence[RecordedOperation], whole: Sequence[CollectiveRun]) -> str:
    """What is to be known of executions of a kind, `whole` of which are those in groups whose devices all are seen."""
    if not own:
        return "none ran: XLA made something else of them"
    counted = f"{len({(one.task, one.name) for one in own})} in the program{'s of its tasks' if own[0].task else ''}"
    if not whole:
        return f"{counted}; other processes have some of its devices"
    total_s, waited_s = sum(run.seconds * len(run.devices) for run in whole), sum(sum(run.waited_s) for run in whole)
    return f"{counted}, {waited_s / total_s:.0%} of it for the last device to come" if total_s else counted


def _ordered(axes: Iterable[str], plan: Plan) -> tuple[str, ...]:
    """Axes in the order of the mesh."""
    chosen = set(axes)
    return tuple(axis for axis in plan.axis_names if axis in chosen)


def _of_stages(recorded: Recorded, plan: PipelinePlan) -> Iterator[ComparedPart]:
    meshes = plan.num_stages // plan.virtual_stages
    schedule, seconds = schedule_of(plan), [(stage.forward_s, stage.backward_s) for stage in plan.stages]
    timed, exposed_s = time_stages(schedule, seconds), find_exposed_s(schedule, seconds, plan.transfers)
    last_s, work_s = max(stage.once_s for stage in plan.stages), max(timed.busy_s)
    steps = [_MeasuredStages(recorded, call, meshes) for call in recorded.detailed if recorded.spans]

    def mean(value: Callable[[_MeasuredStages], float]) -> float | None:
        return statistics.fmean(map(value, steps)) if steps else None

    yield ComparedPart(what=_WORK, predicted_s=work_s, measured_s=mean(lambda s: s.work_s))
    yield ComparedPart(
        what=_BUBBLE,
        predicted_s=timed.makespan_s - work_s,
        measured_s=mean(lambda s: s.bubble_s),
        note="the busiest mesh waits for others, and for the host to start its tasks",
    )
    yield ComparedPart(
        what=_SENT,
        predicted_s=exposed_s,
        measured_s=mean(lambda s: s.transfers_s),
        note="from when they are sent",
    )
    yield ComparedPart(what=_ONCE, predicted_s=last_s, measured_s=mean(lambda s: s.once_s))
    yield ComparedPart(
        what=_SENT_ONCE,
        predicted_s=once_a_step_s([0.0], plan.transfers),
        measured_s=mean(lambda s: s.sent_once_s),
    )
    looked_s = _looked_s(recorded)
    yield ComparedPart(
        what=_HOST,
        predicted_s=None,
        measured_s=None if looked_s is None else mean(lambda s: max(0.0, looked_s - s.lasts_s)),
        note="the host starts the call, and has its results",
    )
    yield from _tasks_of_stages(plan, steps)
    if recorded.operations:
        for stage in plan.stages:
            yield from _of_one_stage(recorded, plan, stage)


def _tasks_of_stages(plan: PipelinePlan, steps: Sequence[_MeasuredStages]) -> Iterator[ComparedPart]:
    """The tasks of each stage that run for one microbatch."""
    for stage in plan.stages:
        for kind, predicted_s in (("forward", stage.forward_s), ("backward", stage.backward_s)):
            measured_s = [s for one in steps if (s := one.task_s(stage.stage, kind)) is not None]
            if predicted_s:
                yield ComparedPart(
                    what=f"{kind} of stage {stage.stage}",
                    predicted_s=predicted_s,
                    measured_s=statistics.median(measured_s) if measured_s else None,
                    note="of one microbatch",
                )


def _of_one_stage(recorded: Recorded, plan: PipelinePlan, stage: StagePlan) -> Iterator[ComparedPart]:
    """What devices do in all tasks of a stage in one step; compute, what is waited for and neither add up to their seconds."""
    number = stage.stage
    devices = [one for call in recorded.detailed for one in device_times(recorded, call, stage=number)]
    if not devices:
        return
    where = f" in stage {number}"
    tasks_s = sum(span.seconds for span in recorded.spans if span.stage == number) / len(recorded.detailed)
    compute_s = statistics.fmean(one.compute_s for one in devices)
    exposed_s = statistics.fmean(one.exposed_s for one in devices)
    waited_s = max(0.0, stage.plan.comm_s - stage.plan.hidden_s)
    called_s = plan.num_microbatches * (stage.forward_s + stage.backward_s) + stage.once_s
    yield ComparedPart(
        what=f"{_COMPUTE}{where}",
        predicted_s=stage.plan.compute_s,
        measured_s=compute_s,
        note="mean of its devices, of all tasks of a step",
    )
    yield ComparedPart(what=f"{_WAITED}{where}", predicted_s=waited_s, measured_s=exposed_s)
    yield from _collectives(recorded, stage.plan, devices=len({one.device for one in devices}), stage=number)
    yield ComparedPart(
        what=f"{_NEITHER}{where}",
        predicted_s=max(0.0, called_s - stage.plan.compute_s - waited_s),
        measured_s=max(0.0, tasks_s - compute_s - exposed_s),
        note="calls of its tasks, and threads that wait for a core",
    )


class _MeasuredStages:
    """The parts of one measured step, which add up to what it lasts from the start of the first task to the end of the last.

    While microbatches pass, it is the work of the busiest mesh, and what that mesh waits. The rest happens once per step: it is
    what the mesh that ends last does then, and the transfers that this one waits for.
    """

    def __init__(self, recorded: Recorded, call: int, meshes: int) -> None:
        self._spans = [span for span in recorded.spans if span.call == call]
        tasks = [span for span in self._spans if span.kind in TASKS]
        busy = [sum(span.seconds for span in tasks if span.mesh == mesh) for mesh in range(meshes)]
        self.work_s = max(busy)
        begins_s, ends_s = min((t.start_s for t in tasks), default=0.0), max((t.end_s for t in tasks), default=0.0)
        first_s, last_s = (
            min((o.start_s for o in self._spans), default=0.0),
            max((o.end_s for o in self._spans), default=0.0),
        )
        self.lasts_s = last_s - first_s
        busiest = busy.index(self.work_s)
        waited_s = exposed_transfers_s(self._spans, busiest, until_s=ends_s)
        self.transfers_s = min(waited_s, ends_s - begins_s - self.work_s)
        self.bubble_s = max(0.0, ends_s - begins_s - self.work_s - self.transfers_s)
        once_s = self.lasts_s - (ends_s - begins_s)
        last = max(self._spans, key=lambda span: span.end_s).mesh
        sent_s = exposed_transfers_s(self._spans, last) - exposed_transfers_s(self._spans, last, until_s=ends_s)
        self.sent_once_s = min(max(0.0, sent_s), once_s)
        self.once_s = once_s - self.sent_once_s

    def task_s(self, stage: int, kind: str) -> float | None:
        """Median seconds of forward or backward of one microbatch, both halves if it is split; None if none ran here."""
        total: dict[int | None, float] = {}
        for span in self._spans:
            if span.stage == stage and span.kind in TASKS and (span.kind == "forward") == (kind == "forward"):
                total[span.microbatch] = total.get(span.microbatch, 0.0) + span.seconds
        return statistics.median(total.values()) if total else None


def exposed_transfers_s(spans: Sequence[RecordedSpan], mesh: int, *, until_s: float = math.inf) -> float:
    """Seconds in which a mesh waits for transfers that are under way, from their sends on or its own last instruction.

    `until_s`: a moment after which its waiting does not count.
    """
    sent = {span.transfer: span.end_s for span in spans if span.kind == "send"}
    waited, free_s = 0.0, 0.0
    for span in sorted((one for one in spans if one.mesh == mesh), key=lambda one: one.start_s):
        if span.kind == "receive":
            begins_s = max(free_s, sent.get(span.transfer, span.start_s))
            waited += max(0.0, min(span.end_s, until_s) - begins_s)
        free_s = span.end_s
    return waited
