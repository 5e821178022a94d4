"""What a step executes: runs, sends, receives and frees, in one global order for the whole cluster.

A compiler describes each executable once as a `TaskSpec`, which reads and writes named slots. `autopar.schedules.emit`
makes an `InstructionList` of them, whose instructions speak of `Value`s, that is, of a slot at one microbatch. Each
instruction belongs to one mesh. A mesh executes its own instructions in order (`InstructionList.of`); sends do not wait for
their receiver. The global order is one valid order for a single worker, and the one in which several processes must issue
their transfers: `Send.number` and `Receive.number` count along it.

What can go wrong: a name has one meaning at a time. An accumulator is read and written under the same name, so an
instruction's value is the latest version in the global order. `autopar.schedules.check_instructions` verifies a list before
it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.schedules.tasks import TaskKind

SpecKind = TaskKind | Literal["prologue", "epilogue"]


@dataclass(frozen=True, slots=True)
class Value:
    """One array by name; `microbatch` is None for what exists once per step, such as a parameter or an accumulator."""

    name: str
    microbatch: int | None = None

    def __str__(self) -> str:
        """The name, with the microbatch after an @."""
        return self.name if self.microbatch is None else f"{self.name}@{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Slot:
    """What a task reads or writes.

    In a task that runs once, a slot that is per microbatch stands for the values of all microbatches in order.
    """

    name: str
    per_microbatch: bool


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One executable of a mesh: run for every microbatch of its stage, or once before or after the schedule.

    A slot that is not per microbatch and is both read and written is an accumulator.

    Attributes:
        name: Unique among all specs.
        mesh: Where it runs.
        kind: The kind of task in the schedule, or "prologue" or "epilogue" for a task that runs once.
        stage: The stage; in a prologue or epilogue it only serves messages.
        inputs: The slots that it reads, in the order of its arguments.
        outputs: The slots that it writes, in the order of its results.
        donated: Positions of `inputs` whose arrays the executable consumes.
    """

    name: str
    mesh: int
    kind: SpecKind
    stage: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Call the executable `task`; `donated` lists positions of `reads` whose values do not exist afterwards."""

    mesh: int
    task: str
    kind: SpecKind
    stage: int
    microbatch: int | None
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    donated: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The task with what it reads and writes; donated values carry an exclamation mark."""
        reads = " ".join(f"{value}!" if n in self.donated else f"{value}" for n, value in enumerate(self.reads))
        at = "" if self.microbatch is None else f"@{self.microbatch}"
        return f"run {self.task}{at}: {reads or '-'} -> {' '.join(map(str, self.writes)) or '-'}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start copying a value to another mesh, without waiting."""

    value: Value
    source_mesh: int
    target_mesh: int
    number: int

    @property
    def mesh(self) -> int:
        """Where the instruction is executed."""
        return self.source_mesh

    def __str__(self) -> str:
        """The value and where it goes."""
        return f"send {self.value} to mesh {self.target_mesh} (transfer {self.number})"


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the send with the same number; the value exists on this mesh afterwards."""

    value: Value
    source_mesh: int
    target_mesh: int
    number: int

    @property
    def mesh(self) -> int:
        """Where the instruction is executed."""
        return self.target_mesh

    def __str__(self) -> str:
        """The value and where it comes from."""
        return f"receive {self.value} from mesh {self.source_mesh} (transfer {self.number})"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a value: nothing reads it on this mesh any more."""

    value: Value
    mesh: int

    def __str__(self) -> str:
        """The value."""
        return f"free {self.value}"


Instruction = Run | Send | Receive | Free


@dataclass(frozen=True, kw_only=True)
class InstructionList:
    """One step. `inputs` and `outputs` are (mesh, value). Of the inputs, only `consumable` ones may be freed or donated."""

    num_meshes: int
    instructions: tuple[Instruction, ...]
    inputs: tuple[tuple[int, Value], ...]
    outputs: tuple[tuple[int, Value], ...]
    consumable: frozenset[tuple[int, Value]]

    def of(self, mesh: int) -> tuple[Instruction, ...]:
        """What one mesh executes, in order."""
        return self._projections[mesh]

    @cached_property
    def _projections(self) -> tuple[tuple[Instruction, ...], ...]:
        rows: list[list[Instruction]] = [[] for _ in range(self.num_meshes)]
        for instruction in self.instructions:
            rows[instruction.mesh].append(instruction)
        return tuple(map(tuple, rows))

    def __str__(self) -> str:
        """One instruction per line, in the global order."""
        digits = len(str(max(0, len(self.instructions) - 1)))
        return "\n".join(f"{n:>{digits}} mesh {i.mesh}: {i}" for n, i in enumerate(self.instructions)) + "\n"
