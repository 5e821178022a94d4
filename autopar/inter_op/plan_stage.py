"""One stage, planned within the memory that its microbatches in flight leave.

In: a `StageJob`. Out: a `StagedStage`: planned, or taken from an equal stage. What was planned in one memory is known
(`KnownStages`) to whoever plans other stages of the same step: the same stage in the same memory is not planned again. What can
go wrong: a stage that does not fit is named with its bytes. If it may do more forward work again, the others are planned too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

from autopar.errors import OutOfMemoryError
from autopar.inter_op.stage_seconds import StagedStage, price_stage
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.restore import restore
from autopar.plan import Plan, ValuePlan
from autopar.schedules.in_flight import InFlight
from autopar.schedules.schedules import keeps_least
from autopar.solver.budget import Budget
from autopar.stages.tasks.equal_stages import key_of_stage, match_senders
from autopar.stages.tasks.mesh_memory import peak_bytes
from autopar.stages.tasks.ports import Port, StagePorts
from autopar.stages.tasks.stage_program import StageProgram

Planner: TypeAlias = Callable[[StageProgram, PlanRequest], PlannedStep]
"""Plans the program of a stage, or of a layer as if it were one, on the best of the request's meshes.

Raises ConstraintError, OutOfMemoryError.
"""


def plan_program(program: StageProgram, request: PlanRequest) -> PlannedStep:
    """The `Planner` in use: the intra-operator pass."""
    return plan_step(program.step, request)


class StagesTooLargeError(OutOfMemoryError):
    """Some stages do not fit, which may do more forward work again; the others are known.

    Attributes:
        stages: their numbers.
    """

    def __init__(self, failed: Mapping[int, OutOfMemoryError]) -> None:
        first = next(iter(failed.values()))
        super().__init__(
            str(first),
            needed_bytes=first.needed_bytes,
            bound_bytes=first.bound_bytes,
            tensors=first.tensors,
            is_settled=first.is_settled,
        )
        self.stages = frozenset(failed)


@dataclasses.dataclass(frozen=True, eq=False)
class StageJob:
    """A stage to plan: its program, a number that equal stages share, and its own meshes, constraints and memory limit.

    `may_repeat_more`: whether it may do more forward work again, should it not fit.
    """

    program: StageProgram
    kind: int
    request: PlanRequest
    may_repeat_more: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedWithin:
    """A planned stage, and the bytes per device within which its program was planned; None without a limit."""

    stage: StagedStage
    room: int | None


class KnownStages:
    """Stages of one step that have been planned, by what decides their plan."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._kinds: dict[Hashable, int] = {}
        self._stages: dict[Hashable, StagedStage] = {}
        self._outcomes: dict[Hashable, StagedStage] = {}

    def kind_of(self, ports: StagePorts, nodes: str = "") -> int:
        """A number that equal stages on equal nodes share, and others do not. `nodes`: their kind, in a mixed cluster."""
        return self._kinds.setdefault((ports.microbatches, key_of_stage(ports), nodes), len(self._kinds))

    def find(self, job: StageJob, room: int | None) -> StagedStage | None:
        """The plan of an equal stage within the same bytes, if one was made; of no stage under constraints, which name leaves."""
        stage = self._stages.get(self._key(job, room))
        return None if stage is None or job.request.constraints.rules else _move(stage, job)

    def outcome(self, job: StageJob, place: Hashable) -> StagedStage | None:
        """What planning an equal stage at the same place of a schedule came to, in however few bytes."""
        stage = self._outcomes.get((self._key(job, None), place))
        return None if stage is None or job.request.constraints.rules else _move(stage, job)

    def keep(self, job: StageJob, planned: PlannedWithin, place: Hashable = None) -> None:
        """Note a stage that was planned, at this place of a schedule."""
        self._stages[self._key(job, planned.room)] = planned.stage
        self._outcomes[self._key(job, None), place] = planned.stage

    def _key(self, job: StageJob, room: int | None) -> Hashable:
        return job.kind, job.request.meshes, job.request.memory_limit_bytes, room


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StagePlanning:
    """How each stage is planned. `memory_rounds`: see `Tuning`. `also`: see `StageRequest`.

    A job's memory limit is a stage's equal part of its mesh. Where a mesh has several stages, a stage is held to `limits`
    instead, by its number: None, or none at all, leaves it all of the mesh, as if the others could make room.
    """

    planner: Planner
    in_flight: InFlight | None
    memory_rounds: int
    known: KnownStages
    limits: Sequence[int | None] = ()
    also: tuple[InFlight, ...] = ()

    def plan(self, job: StageJob) -> PlannedWithin:
        """Plan one stage within what its microbatches in flight leave of the memory. Raises OutOfMemoryError."""
        program, limit = job.program, self._limit(job)
        count = 1 if self.in_flight is None else self.in_flight.microbatches[program.stage]
        room, stage = self._first_room(job), None
        for _ in range(self.memory_rounds):
            try:
                stage = self._plan_within(job, room)
            except OutOfMemoryError as error:
                if stage is not None:
                    break
                beside = 0 if limit is None or room is None else limit - room
                raise OutOfMemoryError(
                    f"stage {program.stage} of {program.cut.num_stages}, with {count} microbatches in flight: {error}",
                    needed_bytes=None if error.needed_bytes is None else error.needed_bytes + beside,
                    bound_bytes=None if error.bound_bytes is None else error.bound_bytes + beside,
                    tensors=error.tensors,
                    is_settled=error.is_settled,
                ) from None
            if limit is None or stage.peak_bytes <= limit:
                return PlannedWithin(stage, room)
            room = limit - (stage.peak_bytes - stage.memory.peak_bytes)
            if room <= 0:
                break
        assert stage is not None
        is_leanest = self.in_flight is None or keeps_least(self.in_flight.schedule.name)
        part = f", its part of a mesh with {self._chunks} stages" if self._chunks > 1 else ""
        others = " or more devices" if is_leanest else ", more devices, or the 1f1b schedule, which keeps less"
        raise OutOfMemoryError(
            f"stage {program.stage} of {program.cut.num_stages} needs {stage.peak_bytes:,} bytes per device, the limit is "
            f"{limit:,}{part}: {count} microbatches in flight keep {stage.memory.each_text(self.in_flight)}. Use more "
            f"microbatches, fewer stages{others}.",
            needed_bytes=stage.peak_bytes,
        )

    def try_plan(self, job: StageJob) -> PlannedWithin | OutOfMemoryError:
        """As `plan`; the error of a stage that may do more forward work again."""
        try:
            return self.plan(job)
        except OutOfMemoryError as error:
            if not job.may_repeat_more:
                raise
            return error

    def plan_leader(self, job: StageJob) -> PlannedWithin | OutOfMemoryError:
        """As `try_plan`, with all that will be asked of it: who gets it from a fork would have to make its assignment anew."""
        planned = self.try_plan(job)
        if isinstance(planned, PlannedWithin) and any(self._may_fit(planned.stage, job, other) for other in self.also):
            planned.stage.memory.tasks.reckon_split()
        return planned

    @staticmethod
    def _may_fit(stage: StagedStage, job: StageJob, in_flight: InFlight) -> bool:
        """Whether a stage fits with so many microbatches in flight, if its tasks need nothing else."""
        limit, memory = job.request.memory_limit_bytes, stage.memory
        return limit is None or memory.kept_bytes - memory.late_bytes + memory.flying_bytes(in_flight) <= limit

    def _plan_within(self, job: StageJob, room: int | None) -> StagedStage:
        """The stage within so many bytes, however many its microbatches in flight take beside them."""
        known = self.known.find(job, room)
        if known is not None:
            return self._in_flight(known)
        limit = job.request.memory_limit_bytes
        planned = self.planner(job.program, dataclasses.replace(job.request, memory_limit_bytes=room))
        plan = dataclasses.replace(planned.plan, memory_limit_bytes=limit)
        return self._in_flight(price_stage(job.program, plan, planned.assignment, cluster=job.request.cluster))

    def find_known(self, job: StageJob) -> StagedStage | None:
        """What planning a stage would come to, if that is known at once."""
        known = self.known.outcome(job, self._place(job)) or self.known.find(job, self._first_room(job))
        return None if known is None else self._if_it_fits(known, job)

    def keep(self, job: StageJob, planned: PlannedWithin) -> None:
        """Note what planning a stage came to."""
        self.known.keep(job, planned, self._place(job))

    def _place(self, job: StageJob) -> Hashable:
        """What decides how many bytes a stage may take, beside its mesh: whose stage it is, in which schedule."""
        schedule = None if self.in_flight is None else self.in_flight.schedule
        row = () if schedule is None else (schedule.name, schedule.num_meshes, schedule.virtual_stages)
        return row, job.program.stage, self._limit(job)

    def plan_like(self, job: StageJob, planned: Sequence[StagedStage]) -> StagedStage | None:
        """The plan of an earlier stage that equals this one, if it fits here too."""
        for stage in planned:
            moved = _move(stage, job) if stage.mesh in job.request.meshes else None
            fitting = None if moved is None else self._if_it_fits(moved, job)
            if fitting is not None:
                return fitting
        return None

    def _if_it_fits(self, stage: StagedStage, job: StageJob) -> StagedStage | None:
        limit, stage = self._limit(job), self._in_flight(stage)
        return stage if limit is None or stage.peak_bytes <= limit else None

    def _in_flight(self, stage: StagedStage) -> StagedStage:
        """A stage with as many microbatches as are in flight at its place."""
        if self.in_flight is None:
            return stage
        return dataclasses.replace(stage, peak_bytes=peak_bytes([stage.memory], self.in_flight))

    @property
    def _chunks(self) -> int:
        return 1 if self.in_flight is None else self.in_flight.schedule.virtual_stages

    def _limit(self, job: StageJob) -> int | None:
        """What the stage's own peak may be."""
        if self._chunks == 1:
            return job.request.memory_limit_bytes
        return self.limits[job.program.stage] if self.limits else None

    def _first_room(self, job: StageJob) -> int | None:
        """Within how many bytes a stage's program is planned first: its limit, or all that its mesh has."""
        limit, whole = self._limit(job), job.request.memory_limit_bytes
        return limit if limit is not None or whole is None else whole * self._chunks


def take_over(planned: PlannedWithin, job: StageJob) -> PlannedWithin:
    """A stage that a fork has planned, with the program that this process has of it."""
    stage, memory = planned.stage, planned.stage.memory
    assign = functools.cache(functools.partial(_assign, job, stage.plan))
    memory = dataclasses.replace(memory, tasks=memory.tasks.of(job.program, assign))
    return dataclasses.replace(
        planned, stage=dataclasses.replace(stage, program=job.program, assign=assign, memory=memory)
    )


def _move(stage: StagedStage, job: StageJob) -> StagedStage | None:
    """A planned stage in the place of one that equals it; None if the stages that send to the two do not correspond."""
    senders = match_senders(stage.program.ports, job.program.ports)
    if senders is None:
        return None
    plan = _rename_leaves(stage.plan, job.program.ports)
    return dataclasses.replace(
        stage,
        program=job.program,
        plan=plan,
        assign=functools.partial(_assign, job, plan),
        memory=stage.memory.move_to(job.program.stage, senders),
    )


def _assign(job: StageJob, plan: Plan) -> Assignment:
    request = dataclasses.replace(job.request, budget=Budget())  # what was found counts, however late it is
    return restore(job.program.step, plan, request).assignment


def _rename_leaves(plan: Plan, ports: StagePorts) -> Plan:
    """The plan of an equal stage, with the names of these inputs and outputs; constants keep theirs."""

    def rename(values: Sequence[ValuePlan], named: Sequence[Port]) -> tuple[ValuePlan, ...]:
        paths = [*map(ports.path, named), *(value.path for value in values[len(named) :])]
        return tuple(dataclasses.replace(value, path=path) for value, path in zip(values, paths, strict=True))

    return dataclasses.replace(
        plan, inputs=rename(plan.inputs, ports.inputs), outputs=rename(plan.outputs, ports.outputs)
    )
