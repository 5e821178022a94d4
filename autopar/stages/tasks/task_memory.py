"""What the tasks of a planned stage need while they run, beyond what they are handed and hand on.

In: a `StageProgram` and its `Assignment`. Out: `TaskMemories`: what the prologue makes for the whole step, and for each task of
the loop its temporaries and what it sends. The tasks are those that the runtime gets (`cuts.py`), each reckoned like a step
of its own (`intra_op/memory/`). Updates are not here, because the plan's own peak has them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from autopar.avals import itemsize_of
from autopar.compat import Literal
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.memory.compilers import Compiler
from autopar.intra_op.memory.device_program import task_program
from autopar.intra_op.memory.footprint import footprint_of
from autopar.layouts.mesh import LogicalMesh
from autopar.schedules.tasks import TaskKind
from autopar.stages.tasks.cuts import TaskCut, Write, cut_into_tasks
from autopar.stages.tasks.owners import loop_of
from autopar.stages.tasks.refs import SendRef, SliceRef
from autopar.stages.tasks.stage_program import StageProgram


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """Bytes per device. `once_bytes`: there while the loop runs. `working_bytes`: of each task, as long as it runs."""

    once_bytes: int
    working_bytes: Mapping[TaskKind, int]


class TaskMemories:
    """The memory of a stage's tasks, with a whole and with a split backward, reckoned when it is first asked for."""

    def __init__(self, program: StageProgram, assignment: Assignment, compiler: Compiler) -> None:
        """Of a planned stage."""
        self._program, self._assignment, self._compiler = program, assignment, compiler

    @functools.cached_property
    def whole(self) -> TaskMemory:
        """The backward is one task."""
        return self._find(split_backward=False)

    @functools.cached_property
    def split(self) -> TaskMemory:
        """Input and weight gradients are two tasks."""
        return self._find(split_backward=True)

    def _find(self, *, split_backward: bool) -> TaskMemory:
        program, assignment = self._program, self._assignment
        if loop_of(assignment.program) is None:
            return TaskMemory(0, {})
        cuts = cut_into_tasks(program, assignment, split_backward=split_backward, kept=frozenset())
        mesh, microbatches = assignment.mesh, program.cut.loop.plan.microbatches
        once = [write for cut in cuts if cut.name.kind == "prologue" for write in cut.writes]
        loop = {cut.name.loop_kind: cut for cut in cuts if cut.name.loop_kind is not None}
        slices = [write for cut in loop.values() for write in cut.writes if isinstance(write.ref, SliceRef)]
        once_bytes = sum(_bytes(write, mesh) for write in once) + microbatches * sum(
            _bytes(write, mesh) for write in slices
        )
        return TaskMemory(once_bytes, {kind: self._working_bytes(cut) for kind, cut in loop.items()})

    def _working_bytes(self, cut: TaskCut) -> int:
        """Temporaries, and what is gone as soon as it is sent."""
        sent = sum(_bytes(write, self._assignment.mesh) for write in cut.writes if isinstance(write.ref, SendRef))
        return sent + self._temporary_bytes(cut)

    def _temporary_bytes(self, cut: TaskCut) -> int:
        """The most that is there at once of what is neither an argument nor a result."""
        program = task_program(
            self._assignment,
            cut.equations,
            reads={v: placed.layout for v, placed in cut.operands.items()},
            entries=cut.entries,
            writes=[(write.atom, write.path) for write in cut.writes],
            compiler=self._compiler,
        )
        results = [write for write in cut.writes if not isinstance(write.atom, Literal)]
        donated = {placed.ref for placed in cut.operands.values()}
        footprint = footprint_of(
            program.block,
            program.values,
            elsewhere=frozenset(program.outputs),
            unwritten=[v for v, write in zip(program.outputs, results, strict=True) if write.ref not in donated],
        )
        change = np.zeros(footprint.steps + 1, int)
        for span in footprint.with_own_memory([v.bytes for v in program.values]):
            change[span.first] += program.values[span.value].bytes
            change[span.last + 1] -= program.values[span.value].bytes
        return int(np.cumsum(change).max())


def _bytes(write: Write, mesh: LogicalMesh) -> int:
    if isinstance(write.atom, Literal):
        return itemsize_of(write.atom.aval)
    shape = write.atom.aval.shape
    return write.path[-1].local_bytes(shape, itemsize_of(write.atom.aval), mesh)
