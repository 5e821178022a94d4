"""`record`: measure the calls of a step while a block of code makes them.

In: a parallelized step, and the moments of `autopar.events`. Out: `Recorded`. Each call waits for what was under way before, and
is waited for, so that its seconds are its own. One call, the first whose programs have run before, is looked into: JAX's
profiler is on, and a pipeline measures every instruction. What can go wrong: the block makes one call alone, of programs that
never ran; that is said, and the seconds are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax

from autopar.api import ParallelStep
from autopar.cost_model.cluster_files import cluster_text
from autopar.cost_model.machine import Cluster
from autopar.errors import ArgumentError
from autopar.events import Moment, StepRun, observing
from autopar.execution.one_mesh import CompiledStep
from autopar.execution.pipeline import CompiledPipeline
from autopar.measuring.operations import operations_that_ran
from autopar.measuring.profile import NothingSeen, Profile, Seen, number_of
from autopar.measuring.stage_operations import TaskProgram, operations_of_tasks
from autopar.plan import Plan
from autopar.recording.recorded import ProgramOperation, Recorded, RecordedCall, RecordedOperation, RecordedSpan
from autopar.recording.run import RecordedRun
from autopar.schedules.instructions import Free, Receive, Run, Send
from autopar.schedules.timeline import Span, Timeline


@contextlib.contextmanager
def record(
    step: ParallelStep | CompiledStep | CompiledPipeline, *, details: int = 1, calls: int | None = None
) -> Iterator[RecordedRun]:
    """Measure the calls of a step in a `with` block, beside what its plan says.

    Args:
        step: what `parallelize` made, or compiled.
        details: how many calls are looked into, which slows these: by JAX's profiler, pipelines instruction by instruction
            too. The first call of a program is not one of them. 0: calls are timed alone.
        calls: how many calls are measured at the most; those behind them run as they would without. None: all.

    Yields:
        A `RecordedRun`, which has something to say when the block ends: print it.

    Raises:
        ArgumentError: `step` is something else, `details` is negative, or `calls` is not above zero.
    """
    if not isinstance(step, ParallelStep | CompiledStep | CompiledPipeline):
        raise ArgumentError(f"record takes a step that `parallelize` made, or compiled, not a {type(step).__name__}")
    if details < 0:
        raise ArgumentError(f"details={details} counts calls from 0")
    if calls is not None and calls < 1:
        raise ArgumentError(f"calls={calls} counts calls from 1; give a whole number, or None for all")
    recorder = _Recorder(step, details, calls)
    run = RecordedRun()
    with observing(recorder.on_moment):
        yield run
    run.recorded = recorder.recorded()
    run.why_not = f"nothing was recorded: {step.signature.name} was not called in the block, or by another object"


OTHER_PLAN = "calls with arguments of other shapes or types, which run under another plan"
"""What is missing of a recording whose step got other arguments, among them a state that is no longer weakly typed."""


@dataclasses.dataclass(eq=False)
class _Call:
    """A call under way."""

    run: StepRun
    is_detailed: bool
    profile: Profile | None = None
    began_s: float = 0.0


class _Recorder:
    """What is known so far of the calls of one step under one plan."""

    def __init__(self, step: ParallelStep | CompiledStep | CompiledPipeline, details: int, calls: int | None) -> None:
        self._step, self._details, self._most = step, details, calls
        self._name = step.signature.name
        self._compiled: CompiledStep | CompiledPipeline | None = None
        self._under_way: _Call | None = None
        self._calls: list[RecordedCall] = []
        self._spans: list[RecordedSpan] = []
        self._seen: list[tuple[int, Seen]] = []
        self._origins: dict[int, float] = {}
        self._profiles = True
        self._missing: dict[str, None] = {}

    def on_moment(self, moment: Moment) -> None:
        """Note what happens."""
        run = moment.about
        if not isinstance(run, StepRun) or len(self._calls) == self._most or not self._is_ours(run):
            return
        match moment.kind:
            case "step":
                self._begin(run, moment.values or ())
            case "launched":
                self._end(moment.values or ())
            case "failed":
                self._drop()
            case _:
                return

    def _is_ours(self, run: StepRun) -> bool:
        if isinstance(self._step, CompiledStep | CompiledPipeline):
            return run.compiled is self._step
        if run.name != self._name or not isinstance(run.compiled, CompiledStep | CompiledPipeline):
            return False
        if run.compiled.signature is not self._step.signature:
            return False
        if self._compiled is None:
            self._compiled = run.compiled
        if run.compiled is not self._compiled:
            self._missing[OTHER_PLAN] = None
        return run.compiled is self._compiled

    def _begin(self, run: StepRun, values: Sequence[object]) -> None:
        jax.block_until_ready([x for x in values if isinstance(x, jax.Array) and not x.is_deleted()])
        call = self._under_way = _Call(run, self._details > 0 and not run.is_first)
        run.wants_timeline = run.wants_timeline or (call.is_detailed and not isinstance(run.plan, Plan))
        if call.is_detailed and self._profiles:
            try:
                call.profile = Profile()
            except NothingSeen as error:
                self._give_up(str(error), run)
        call.began_s = time.perf_counter()

    def _end(self, results: Sequence[object]) -> None:
        call, self._under_way = self._under_way, None
        if call is None:
            return
        jax.block_until_ready([x for x in results if isinstance(x, jax.Array)])
        wall_s, number = time.perf_counter() - call.began_s, len(self._calls) + 1
        self._compiled = self._compiled or _compiled_of(call.run)
        self._calls.append(
            RecordedCall(number=number, wall_s=wall_s, is_first=call.run.is_first, is_detailed=call.is_detailed)
        )
        self._details -= call.is_detailed
        if call.profile is not None:
            try:
                seen = call.profile.end()
                if not call.profile.has_clock and not isinstance(call.run.plan, Plan):
                    raise NothingSeen("JAX's profiler does not tell its clock, without which no operation has a task")
                self._seen += [(number, one) for one in seen]
            except NothingSeen as error:
                self._give_up(str(error), call.run)
        if isinstance(call.run.timeline, Timeline):
            self._origins[number] = call.run.timeline.began_s
            self._spans += [span for one in call.run.timeline.spans if (span := _span(one, number)) is not None]

    def _drop(self) -> None:
        """End what a failed call began."""
        call, self._under_way = self._under_way, None
        if call is not None and call.profile is not None:
            with contextlib.suppress(NothingSeen):
                call.profile.end()

    def _give_up(self, words: str, run: StepRun) -> None:
        """Profile no further call; on one mesh there is nothing else to look into."""
        self._missing[f"the time of each operation: {words}"] = None
        self._profiles = False
        self._details = 0 if isinstance(run.plan, Plan) else self._details

    def recorded(self) -> Recorded | None:
        """All that was measured; None if that is nothing."""
        if not self._calls or self._compiled is None:
            return None
        if all(call.is_first for call in self._calls):
            self._missing[
                "what a call consists of: the only call was the first of its programs; call the step twice"
            ] = None
        program, operations = self._operations(self._compiled)
        devices = _devices_of(self._compiled)
        elsewhere = sum(one.process_index != jax.process_index() for one in devices)
        if elsewhere:
            self._missing[f"what {elsewhere} of {len(devices)} devices do, which other processes have"] = None
        cluster = self._step.cluster() if isinstance(self._step, ParallelStep) else None
        return Recorded(
            step=self._name,
            plan_text=self._compiled.plan.to_json(),
            cluster_text=_cluster_text(cluster),
            device_kind=devices[0].device_kind,
            jax_version=jax.__version__,
            calls=tuple(self._calls),
            spans=tuple(self._spans),
            program=tuple(program.values()),
            operations=tuple(operations),
            missing=tuple(self._missing),
        )

    def _operations(
        self, compiled: CompiledStep | CompiledPipeline
    ) -> tuple[dict[tuple[str, str], ProgramOperation], list[RecordedOperation]]:
        """What was seen of the step's own programs on its own devices, and what these operations are."""
        if not self._seen:
            return {}, []
        if isinstance(compiled, CompiledStep):
            places = _places_here(compiled.mesh)
            found = operations_that_ran(self._seen, compiled.as_text(), compiled.plan, places)
        else:
            found = operations_of_tasks(self._seen, self._spans, self._origins, _programs(compiled, self._spans))
        self._missing |= dict.fromkeys(found.missing)
        return found.program, found.operations


def _compiled_of(run: StepRun) -> CompiledStep | CompiledPipeline | None:
    return run.compiled if isinstance(run.compiled, CompiledStep | CompiledPipeline) else None


def _devices_of(compiled: CompiledStep | CompiledPipeline) -> list[jax.Device]:
    meshes = [compiled.mesh] if isinstance(compiled, CompiledStep) else [stage.device_mesh for stage in compiled.stages]
    return [device for mesh in meshes for device in mesh.devices.flat]


def _places_here(mesh: jax.sharding.Mesh) -> dict[int, int]:
    """The places in a mesh of the devices of this process, by the numbers that its profiler gives them."""
    here = jax.process_index()
    return {number_of(device): place for place, device in enumerate(mesh.devices.flat) if device.process_index == here}


def _programs(compiled: CompiledPipeline, spans: Sequence[RecordedSpan]) -> dict[str, TaskProgram]:
    """The programs of the tasks that ran on this process."""
    stages = compiled.stages
    return {
        str(name): TaskProgram(
            hlo_text=str(executable.as_text()),
            plan=compiled.plan.stages[name.stage].plan,
            mesh=stages[name.stage].mesh,
            places=_places_here(stages[name.stage].device_mesh),
        )
        for name, executable in compiled.executables({span.name for span in spans if span.transfer is None}).items()
    }


def _cluster_text(cluster: Cluster | None) -> str:
    """As a file; a cluster without tiers has none."""
    return (
        ""
        if cluster is None or not cluster.tiers
        else cluster_text(cluster, about="The cluster of a recorded run", sources={})
    )


def _span(span: Span, call: int) -> RecordedSpan | None:
    """A span of the driver's; None for what only forgets a value."""
    one, start_s, end_s = span.instruction, span.start_s, span.end_s
    match one:
        case Free():
            return None
        case Run():
            return RecordedSpan(
                call=call,
                mesh=one.mesh,
                kind=one.kind,
                start_s=start_s,
                end_s=end_s,
                stage=one.stage,
                microbatch=one.microbatch,
                name=one.task,
            )
        case Send() | Receive():
            return RecordedSpan(
                call=call,
                mesh=one.mesh,
                kind=type(one).__name__.lower(),
                start_s=start_s,
                end_s=end_s,
                name=str(one.value),
                transfer=one.number,
            )
