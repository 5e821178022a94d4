"""What was recorded, as data.

In: what `recorder.py` measures. Out: frozen values with a JSON form. Times are seconds; those within a call count from its start.
What can go wrong: a platform that tells nothing of single operations; `missing` says so in words.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping

from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan

TASKS = ("forward", "backward", "input_gradient", "weight_gradient")
"""The kinds of span that run once for each microbatch."""
KERNEL = "kernel"
"""The opcode of what ran on a GPU and could not be led back to an operation of the program; its name is the kernel's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One call of the step.

    Attributes:
        number: in the order of the calls, from 1.
        wall_s: seconds from its start until its last result was there.
        is_first: the programs ran for the first time; those of a pipeline were compiled meanwhile.
        is_detailed: it was looked into, which takes time of its own.
    """

    number: int
    wall_s: float
    is_first: bool = False
    is_detailed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedSpan:
    """One instruction of a pipeline.

    Attributes:
        call: the number of the call.
        mesh: where it ran.
        kind: that of the task, or `send` or `receive`.
        start_s: when it began.
        end_s: when it ended.
        stage: of a task.
        microbatch: of a task; None if it runs once per step.
        name: the task, or the value that is sent.
        transfer: the number that a send and its receive share; None for tasks.
    """

    call: int
    mesh: int
    kind: str
    start_s: float
    end_s: float
    stage: int | None = None
    microbatch: int | None = None
    name: str = ""
    transfer: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOperation:
    """One operation of a compiled program.

    Attributes:
        name: what XLA calls it.
        opcode: of HLO, or `KERNEL`.
        collective: `all-reduce`, `all-gather`, ...; empty for compute.
        axes: the mesh axes whose devices take part in a collective; of groups that are no axes of the mesh, none.
        groups: the devices of each group of a collective, by their places in the mesh.
        bytes: of a collective what one device holds on the larger side; of compute what it reads and writes.
        flops: of the products in it, on one device.
        scope: the module that it comes from, such as `block_3/ffn/up`; empty if the program names none.
        task: of a pipeline, whose program it is of; empty on one mesh.
    """

    name: str
    opcode: str
    collective: str = ""
    axes: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0
    flops: float = 0.0
    scope: str = ""
    task: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedOperation:
    """One execution of an operation on one device.

    Attributes:
        call: the number of the call.
        name: of the `ProgramOperation`.
        device: its place in the mesh, row-major.
        start_s: when it began.
        end_s: when it ended.
        goes_on: it is a further kernel of the execution before it.
        task: of a pipeline, in which it ran; empty on one mesh.
        microbatch: of that task; None if it runs once per step.
    """

    call: int
    name: str
    device: int
    start_s: float
    end_s: float
    goes_on: bool = False
    task: str = ""
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """All that was measured of a step.

    Attributes:
        step: its name.
        plan_text: the plan, as its `to_json` wrote it.
        cluster_text: the cluster that it was priced for, as a cluster file.
        device_kind: of the devices.
        jax_version: that ran it.
        calls: every call of the plan.
        spans: of detailed calls of a pipeline.
        program: the operations of the program of one mesh, or of the programs of tasks; those that were seen to run.
        operations: of detailed calls.
        missing: what could not be measured, and why, in words.
    """

    step: str
    plan_text: str
    cluster_text: str
    device_kind: str
    jax_version: str
    calls: tuple[RecordedCall, ...]
    spans: tuple[RecordedSpan, ...] = ()
    program: tuple[ProgramOperation, ...] = ()
    operations: tuple[RecordedOperation, ...] = ()
    missing: tuple[str, ...] = ()

    @functools.cached_property
    def plan(self) -> Plan | PipelinePlan:
        """The plan that it ran under."""
        return plan_from_json(self.plan_text)

    @functools.cached_property
    def _by_name(self) -> Mapping[tuple[str, str], ProgramOperation]:
        return {(operation.task, operation.name): operation for operation in self.program}

    @functools.cached_property
    def _stage_and_mesh(self) -> Mapping[str, tuple[int | None, int]]:
        return {span.name: (span.stage, span.mesh) for span in self.spans if span.transfer is None}

    def operation(self, one: RecordedOperation) -> ProgramOperation:
        """The operation of the program that an execution is of."""
        return self._by_name[one.task, one.name]

    def stage(self, one: RecordedOperation) -> int | None:
        """The stage whose task an execution is of; None on one mesh."""
        return self._stage_and_mesh[one.task][0] if one.task else None

    def mesh(self, one: RecordedOperation) -> int:
        """The number of the mesh on which an execution was."""
        return self._stage_and_mesh[one.task][1] if one.task else 0

    @property
    def detailed(self) -> tuple[int, ...]:
        """The numbers of the calls that were looked into."""
        return tuple(call.number for call in self.calls if call.is_detailed)

    @property
    def timed(self) -> tuple[RecordedCall, ...]:
        """The calls whose seconds count: neither first nor looked into, if there are such."""
        later = tuple(call for call in self.calls if not call.is_first)
        return tuple(call for call in later if not call.is_detailed) or later or self.calls

    @property
    def wall_s(self) -> float:
        """Median seconds of the calls that count."""
        return statistics.median(call.wall_s for call in self.timed)
