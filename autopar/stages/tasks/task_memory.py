"""What the tasks of a planned stage need while they run, beyond what they are handed and hand on.

In: a `StageProgram` and its `Assignment`. Out: `TaskMemories`: what the prologue makes for the whole step, and for each task of
the loop its temporaries and what it sends. The tasks are those that the runtime gets (`cuts.py`), each reckoned like a step
of its own (`intra_op/memory/`); and the most that is there while a task runs that runs once per step. The plan's own peak does
not say that: it is of one program, in which an update can begin where backward has just made a gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from autopar.avals import Aval, itemsize_of
from autopar.compat import Literal, Var
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.memory.compilers import Compiler
from autopar.intra_op.memory.device_program import task_program
from autopar.intra_op.memory.footprint import footprint_of
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.program.step import TracedStep
from autopar.schedules.tasks import TaskKind
from autopar.stages.tasks.cuts import TaskCut, Write, cut_into_tasks
from autopar.stages.tasks.owners import loop_of
from autopar.stages.tasks.refs import InputRef, OutputRef, Ref, RowRef, SendRef, SliceRef
from autopar.stages.tasks.stage_program import StageProgram


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """Bytes per device. `once_bytes`: there while the loop runs. `working_bytes`: of each task, as long as it runs."""

    once_bytes: int
    working_bytes: Mapping[TaskKind, int]


_RECKONED = ("whole", "split", "outside_bytes")


class TaskMemories:
    """The memory of a stage's tasks, with a whole and with a split backward, reckoned when it is first asked for."""

    def __init__(self, program: StageProgram, assign: Callable[[], Assignment], compiler: Compiler) -> None:
        """Of a planned stage; `assign` makes its assignment."""
        self._program, self._assign, self._compiler = program, assign, compiler

    def __getstate__(self) -> dict[str, object]:
        """What a fork sends: what it has reckoned. The rest is left to whoever has the program (`of`)."""
        return {name: value for name, value in vars(self).items() if name in (*_RECKONED, "_compiler")}

    def of(self, program: StageProgram, assign: Callable[[], Assignment]) -> TaskMemories:
        """What a fork has sent, with the program and the assignment of this process."""
        there = TaskMemories(program, assign, self._compiler)
        vars(there).update((name, value) for name, value in vars(self).items() if name in _RECKONED)
        return there

    @functools.cached_property
    def _assignment(self) -> Assignment:
        return self._assign()

    @functools.cached_property
    def _cuts(self) -> tuple[TaskCut, ...]:
        """The tasks with a whole backward."""
        return cut_into_tasks(self._program, self._assignment, split_backward=False, kept=frozenset())

    @functools.cached_property
    def whole(self) -> TaskMemory:
        """The backward is one task."""
        return self._find(split_backward=False)

    @functools.cached_property
    def split(self) -> TaskMemory:
        """Input and weight gradients are two tasks."""
        return self._find(split_backward=True)

    def reckon_split(self) -> None:
        """Reckon the memory with a split backward now, where the assignment is at hand: a fork sends what it has reckoned."""
        _ = self.split

    def _find(self, *, split_backward: bool) -> TaskMemory:
        program, assignment = self._program, self._assignment
        if loop_of(assignment.program) is None:
            return TaskMemory(0, {})
        cuts = self._cuts
        if split_backward:
            cuts = cut_into_tasks(program, assignment, split_backward=True, kept=frozenset())
        mesh, microbatches = assignment.mesh, program.cut.loop.plan.microbatches
        once = [write for cut in cuts if cut.name.kind == "prologue" for write in cut.writes]
        loop = {cut.name.loop_kind: cut for cut in cuts if cut.name.loop_kind is not None}
        slices = [write for cut in loop.values() for write in cut.writes if isinstance(write.ref, SliceRef)]
        once_bytes = sum(_bytes_written(write, mesh) for write in once) + microbatches * sum(
            _bytes_written(write, mesh) for write in slices
        )
        known = self.whole.working_bytes if split_backward else {}
        working = {
            kind: known[kind] if kind in known and any(map(cut.equals, self._cuts)) else self._working_bytes(cut)
            for kind, cut in loop.items()
        }
        return TaskMemory(once_bytes, working)

    @functools.cached_property
    def outside_bytes(self) -> int | None:
        """The most that is there while the prologue or an update runs, beside what the stage is given; None without a loop.

        What an update returns takes the place of the leaf that it is given, if no later update reads that.
        """
        assignment = self._assignment
        if loop_of(assignment.program) is None:
            return None
        cuts = self._cuts
        last_read = {ref: at for at, cut in enumerate(cuts) for ref in cut.reads}
        there: dict[Ref, int] = {}
        most = 0
        for at, cut in enumerate(cuts):
            stays = [write for write in cut.writes if not isinstance(write.ref, SendRef)]
            made: dict[Ref, int] = {write.ref: self._bytes_of_all(write) for write in stays}
            if cut.name.in_loop:
                there |= self._received(cut) | made
                continue
            there = {r: size for r, size in there.items() if isinstance(r, OutputRef) or last_read.get(r, -1) >= at}
            there |= {ref: 0 if ref in taken_places(cut, self._program.step) else size for ref, size in made.items()}
            most = max(most, sum(there.values()) + self._temporary_bytes(cut))
        return most

    def _received(self, cut: TaskCut) -> dict[Ref, int]:
        """Bytes of what a task reads that other stages send in every microbatch."""
        inputs, mesh, microbatches = (
            self._program.inputs,
            self._assignment.mesh,
            self._program.cut.loop.plan.microbatches,
        )
        return {
            placed.ref: microbatches * _bytes(placed.aval, placed.layout, mesh)
            for placed in cut.operands.values()
            if isinstance(placed.ref, RowRef) and inputs[placed.ref.port].source == "received"
        }

    def _bytes_of_all(self, write: Write) -> int:
        """Bytes of a result, or of those of all microbatches."""
        size = _bytes_written(write, self._assignment.mesh)
        return size * self._program.cut.loop.plan.microbatches if write.ref.per_microbatch else size

    def _working_bytes(self, cut: TaskCut) -> int:
        """Temporaries, and what is gone as soon as it is sent."""
        mesh = self._assignment.mesh
        sent = sum(_bytes_written(write, mesh) for write in cut.writes if isinstance(write.ref, SendRef))
        return sent + self._temporary_bytes(cut)

    def _temporary_bytes(self, cut: TaskCut) -> int:
        """The most that is there at once of what is neither an argument nor a result."""
        reads: dict[Ref, tuple[list[Var], Layout]] = {}
        joined = {ref for ref in cut.reads if cut.comes_as_list(ref)}
        for v, placed in cut.operands.items():
            layout = placed.layout.prepend() if placed.ref in joined else placed.layout
            reads.setdefault(placed.ref, ([], layout))[0].append(v)
        program = task_program(
            self._assignment,
            cut.equations,
            reads=reads,
            joined=joined,
            entries=cut.entries,
            writes=[(write.atom, write.path) for write in cut.writes],
            compiler=self._compiler,
        )
        results = [write for write in cut.writes if not isinstance(write.atom, Literal)]
        number, taken = dict(zip(reads, program.inputs, strict=True)), taken_places(cut, self._program.step)
        footprint = footprint_of(
            program.block,
            program.values,
            elsewhere=frozenset(program.outputs),
            places={
                v: number[taken[write.ref]]
                for v, write in zip(program.outputs, results, strict=True)
                if write.ref in taken
            },
            unwritten=[
                v
                for v, write in zip(program.outputs, results, strict=True)
                if write.ref not in reads and write.ref not in taken
            ],
        )
        change = np.zeros(footprint.steps + 1, int)
        for span in footprint.with_own_memory([v.bytes for v in program.values]):
            change[span.first] += program.values[span.value].bytes
            change[span.last + 1] -= program.values[span.value].bytes
        return int(np.cumsum(change).max())


def taken_places(cut: TaskCut, step: TracedStep) -> dict[Ref, Ref]:
    """For each result of an update that takes the place of a leaf, that leaf."""
    donated = {ref.port: ref for ref in map(cut.reads.__getitem__, cut.donated) if isinstance(ref, InputRef)}
    found: dict[Ref, Ref] = {}
    for write in cut.writes:
        place = step.state_of_output[write.ref.port] if isinstance(write.ref, OutputRef) else None
        if place in donated:
            found[write.ref] = donated[place]
    return found


def _bytes_written(write: Write, mesh: LogicalMesh) -> int:
    return (
        _bytes(write.atom.aval, write.path[-1], mesh)
        if not isinstance(write.atom, Literal)
        else itemsize_of(write.atom.aval)
    )


def _bytes(aval: Aval, layout: Layout, mesh: LogicalMesh) -> int:
    return layout.local_bytes(aval.shape, itemsize_of(aval), mesh)
