"""What a planned stage keeps on each of its devices, by how long: for the whole step, or as long as a microbatch is in flight.

In: a `StageProgram`, its plan and assignment. Out: `StageMemory`. The plan's own peak is that of one executable, in which a
microbatch leaves little between forward and backward: XLA makes again what costs little. Tasks are executables of their own,
which hand whole arrays to each other. Which those are, the planned stage says; how many microbatches of each are there at once,
the schedule (`schedules/in_flight.py`); what a task needs beside them, `task_memory.py`. What can go wrong: an array between two
stages on one mesh, which lies there as its maker made it; it counts as its reader wants it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from autopar.avals import itemsize_of
from autopar.compat import Literal, Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.memory.compilers import XLA_CPU, Compiler
from autopar.plan import Plan
from autopar.program.loops import Filled, LoopEquation
from autopar.program.program import Atom, Equation, operands_of
from autopar.program.task_name import TaskName
from autopar.schedules.in_flight import InFlight, Kept
from autopar.schedules.tasks import TaskKind
from autopar.stages.tasks.owners import LoopedProgram, loop_of, task_owners
from autopar.stages.tasks.stage_program import StageProgram
from autopar.stages.tasks.task_memory import TaskMemories, TaskMemory

WHOLE: dict[TaskKind, TaskKind] = {"input_gradient": "backward", "weight_gradient": "backward"}
"""What the halves of a split backward are parts of."""
KINDS = get_args(TaskKind)
"""In the order in which a microbatch goes through them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes per device.

    `peak_bytes`: with one microbatch in flight. Of it, `kept_bytes`: weights, optimizer state and what comes from other stages
    once a step; `late_bytes`: of that, what earlier stages make when their loop is over; `accumulator_bytes`: what the
    microbatches add up.
    `received_bytes`: what a microbatch gets from the forward of other stages. `passing`: what tasks hand to the tasks of this
    stage, as if the backward were split; `stage` is its number. `tasks`: what the tasks need while they run.
    """

    peak_bytes: int
    kept_bytes: int
    late_bytes: int = 0
    accumulator_bytes: int
    received_bytes: int
    stage: int
    passing: tuple[Kept, ...]
    tasks: TaskMemories

    def standing_bytes(self, in_flight: InFlight) -> int:
        """What is there while the loop over microbatches runs, whatever is in flight.

        The loops of earlier stages end after this one's, unless its weight gradients wait.
        """
        tasks = self._tasks(in_flight)
        late = 0 if "weight_gradient" in tasks.working_bytes else self.late_bytes
        return self.kept_bytes - late + tasks.once_bytes

    def looping(self, in_flight: InFlight) -> tuple[Kept, ...]:
        """What comes and goes while it runs: what tasks are handed, and each task's own as long as the task runs."""
        working = [Kept(kind, self.stage, kind, size) for kind, size in self._tasks(in_flight).working_bytes.items()]
        return (*self.handed_on(in_flight), *working)

    @property
    def outside_bytes(self) -> int:
        """The most that is there while a task runs that runs once per step; of a stage without a loop, its one executable's."""
        outside = self.tasks.outside_bytes
        return self.peak_bytes if outside is None else self.kept_bytes + outside

    def _tasks(self, in_flight: InFlight) -> TaskMemory:
        return self.tasks.split if in_flight.is_split else self.tasks.whole

    def flying_bytes(self, in_flight: InFlight) -> int:
        """The most that microbatches keep at once between tasks: residuals, and cotangents that wait for weight gradients."""
        kept = [one for one in self.handed_on(in_flight) if is_flying(one)]
        return in_flight.most_bytes(self.stage, kept)

    def move_to(self, stage: int, senders: Mapping[int, int]) -> StageMemory:
        """The memory of an equal stage; `senders`: for each stage that sends to this one, that which sends to the other."""
        passing = tuple(dataclasses.replace(one, source=senders[one.source]) for one in self.passing)
        return dataclasses.replace(self, stage=stage, passing=passing)

    def handed_on(self, in_flight: InFlight) -> tuple[Kept, ...]:
        """What tasks hand to the tasks of this stage; a backward that is one task hands nothing to itself."""
        if in_flight.is_split:
            return self.passing
        return tuple(
            dataclasses.replace(one, maker=WHOLE.get(one.maker, one.maker), reader=WHOLE.get(one.reader, one.reader))
            for one in self.passing
            if one.source != self.stage or one.maker == "forward"
        )

    def each_text(self, in_flight: InFlight | None) -> str:
        """What each microbatch in flight keeps, for an error."""
        text = f"{self.residual_bytes:,} bytes each"
        if in_flight is None or not in_flight.is_split:
            return text
        return f"{text}, and cotangents that wait for their weight gradients {self.cotangent_bytes:,}"

    def bytes_of_calls(self) -> dict[str, int]:
        """For each kind of task of a microbatch, the bytes of a device that a call hands on or is handed, by the stage's tasks.

        Sums of gradients are not among them: a loop over microbatches in one program reads and writes them as well. Split halves
        of a backward hand cotangents to each other.
        """
        found: dict[str, int] = {"forward": 0, "input_gradient": 0, "weight_gradient": 0}
        for one in self.passing:
            found[one.reader] += one.bytes
            if one.source == self.stage:
                found[one.maker] += one.bytes
        found["backward"] = found["input_gradient"] + found["weight_gradient"] - 2 * self.cotangent_bytes
        return found

    @property
    def residual_bytes(self) -> int:
        """What a microbatch in flight keeps between forward and backward."""
        return sum(one.bytes for one in self.passing if one.maker == "forward" and one.reader != "forward")

    @property
    def late_residual_bytes(self) -> int:
        """Of it, what a split backward keeps until the weight gradient."""
        return sum(one.bytes for one in self.passing if one.maker == "forward" and one.reader == "weight_gradient")

    @property
    def cotangent_bytes(self) -> int:
        """What a split backward keeps of a microbatch between input gradient and weight gradient."""
        return sum(one.bytes for one in self.passing if one.maker != "forward" and one.reader == "weight_gradient")

    @property
    def looped_bytes(self) -> int:
        """What is there as long as the loop runs: sums over microbatches, and what is made once, such as weights in 16 bits."""
        return max(self.accumulator_bytes, self.tasks.whole.once_bytes)

    @property
    def passing_bytes(self) -> int:
        """What comes and goes within a task: in the plan's one executable, or in that of the task that takes most."""
        in_plan = self.peak_bytes - self.kept_bytes - self.looped_bytes - self.residual_bytes
        return max(0, in_plan, *self.tasks.whole.working_bytes.values())

    @property
    def within_bytes(self) -> int:
        """What comes and goes where forward and backward of a microbatch are in one task, as in the plan's one executable.

        Its peak says that, unless it is elsewhere in the step. What tasks hand to each other is there too then.
        """
        standing, passing = self.peak_bytes - self.kept_bytes, self.passing_bytes
        if standing - self.looped_bytes > passing:
            return standing - self.looped_bytes
        return min(passing + self.residual_bytes, max(passing, standing - self.accumulator_bytes))

    @property
    def beside_bytes(self) -> int:
        """What the plan's one executable has at its peak beside weights, optimizer state and `within_bytes`."""
        return max(0, self.peak_bytes - self.kept_bytes - self.within_bytes)


def is_flying(one: Kept) -> bool:
    """Whether it waits for the backward of its microbatch: a residual, or a cotangent for a weight gradient."""
    return (one.maker == "forward" and one.reader != "forward") or one.reader == "weight_gradient"


def stage_memory(
    program: StageProgram, plan: Plan, assignment: Assignment, *, compiler: Compiler = XLA_CPU
) -> StageMemory:
    """The memory of a planned stage whose tasks this compiler compiles."""
    microbatches = program.cut.loop.plan.microbatches
    ports = list(zip(program.inputs, plan.inputs, strict=False))
    received = sum(
        value.bytes_per_device // microbatches
        for port, value in ports
        if port.source == "received" and port.maker is not None and port.maker.kind == "forward"
    )
    kept = sum(value.bytes_per_device for port, value in ports if port.source != "received")
    late = sum(
        value.bytes_per_device
        for port, value in ports
        if port.source == "exchanged" and port.maker is not None and port.maker.stage < program.stage
    )
    loop = loop_of(assignment.program)
    return StageMemory(
        peak_bytes=plan.peak_bytes,
        kept_bytes=kept,
        late_bytes=late,
        accumulator_bytes=0 if loop is None else _accumulators(loop, assignment),
        received_bytes=received,
        stage=program.stage,
        passing=() if loop is None else _passing(program, plan, assignment),
        tasks=TaskMemories(program, lambda: assignment, compiler),
    )


def _passing(program: StageProgram, plan: Plan, assignment: Assignment) -> tuple[Kept, ...]:
    """What tasks hand to the tasks of a stage, those with the same maker and reader together."""
    total: dict[tuple[TaskKind, int, TaskKind], int] = {}
    for one in _Passing(LoopedProgram.of(program, assignment.program), plan, assignment).found():
        key = (one.maker, one.source, one.reader)
        total[key] = total.get(key, 0) + one.bytes
    return tuple(Kept(*key, size) for key, size in total.items())


def _accumulators(loop: LoopEquation, assignment: Assignment) -> int:
    """Bytes of what the loop over microbatches adds up."""
    (body,) = loop.nested
    return sum(
        assignment.entry_layout(e).local_bytes(e.var.aval.shape, itemsize_of(e.var.aval), assignment.mesh)
        for e in body.entries_filled(Filled.CARRY)
    )


def split_in_flight(early: np.ndarray, late: np.ndarray, cotangents: np.ndarray, *, is_full: bool) -> np.ndarray:
    """Bytes of a microbatch in flight in ZB-H1, where each of p meshes has up to p in flight; no less than on the worst mesh.

    Mesh i has at once p - i microbatches of what the input gradient alone reads (`early`), p of what the weight gradient reads
    (`late`), and i + 1 of `cotangents`; so the first mesh or the last one has most, and most per microbatch if p = 2.
    `is_full`: there are p microbatches. Of fewer, a mesh may have all of everything.
    """
    share = 0.5 if is_full else 1.0
    return np.asarray(late + np.maximum(early, cotangents) + share * np.minimum(early, cotangents))


class _Passing:
    """Finds what the tasks of a stage's loop are handed, by other tasks of the stage and by other stages."""

    def __init__(self, shape: LoopedProgram, plan: Plan, assignment: Assignment) -> None:
        self.shape, self.plan, self.assignment = shape, plan, assignment
        self.maker: dict[Var, tuple[TaskKind, Equation]] = {}
        self.reader: dict[Var, TaskKind] = {}

    def found(self) -> Iterator[Kept]:
        """Of one microbatch, each once."""
        received = dict(self._received())
        self._follow()
        stage = self.shape.stage.stage
        for v, reader in self.reader.items():
            if v in received:
                yield dataclasses.replace(received[v], reader=reader)
            elif v in self.maker and self.maker[v][0] != reader:
                kind, eqn = self.maker[v]
                layout = self.assignment.result_layouts(eqn)[eqn.outvars.index(v)]
                size = layout.local_bytes(v.aval.shape, itemsize_of(v.aval), self.assignment.mesh)
                yield Kept(kind, stage, reader, size)

    def _received(self) -> Iterator[tuple[Var, Kept]]:
        """What other stages make, by the name that it has in the loop; `reader` is yet to be found."""
        shape, microbatches = self.shape, self.shape.stage.cut.loop.plan.microbatches
        numbers: dict[Atom, int] = {v: i for i, v in enumerate(shape.program.invars[: len(shape.stage.inputs)])}
        for entry in shape.body.entries:
            atom = entry.atom
            number = numbers.get(shape.before_fan_out(atom)) if not isinstance(atom, Literal) else None
            port = None if number is None else shape.stage.inputs[number]
            if number is not None and port is not None and port.source == "received" and port.maker is not None:
                kind = _half(port.maker)
                size = self.plan.inputs[number].bytes_per_device // microbatches
                yield entry.head.outvars[0], Kept(kind, port.maker.stage, kind, size)

    def _follow(self) -> None:
        """The task that makes each value, and the last one that reads it, or hands it on to another stage."""
        task_of = task_owners(self.shape, split_backward=True)
        for eqn in self.shape.region.equations:
            kind = task_of[eqn].loop_kind if eqn in task_of else None
            if kind is not None:
                self.maker.update((v, (kind, eqn)) for v in eqn.outvars)
                self._read(operands_of(eqn), kind)
        for number, atom in self.shape.sends().items():
            maker = self.shape.stage.outputs[number].maker
            source = self.shape.before_copy(
                self.shape.region.outvars[self.shape.loop.outvars.index(self.shape.before_fan_out(atom))]
            )
            if maker is not None and isinstance(source, Var) and source not in self.maker:
                self._read([source], _half(maker))

    def _read(self, values: Sequence[Var], kind: TaskKind) -> None:
        self.reader.update((v, max(self.reader.get(v, kind), kind, key=KINDS.index)) for v in values)


def _half(maker: TaskName) -> TaskKind:
    """The task that makes what a segment of the loop sends, if the backward is split."""
    return "forward" if maker.kind == "forward" else "input_gradient"
