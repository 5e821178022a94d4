"""What the tasks of a planned stage need while they run, beyond what they are handed and hand on.

In: a `StageProgram` and its `Assignment`. Out: `TaskMemory`: what the prologue makes for the whole step, and for each task of the
loop its temporaries and what it sends. The tasks are those that the runtime gets (`task_cuts.py`), each reckoned like a step of
its own (`device_program.py`, `footprint.py`); in one executable the halves of a microbatch would share more. What can go wrong:
what goes wrong there; updates are not here, because the plan's own peak has them.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from autopar.catalogue import itemsize_of
from autopar.compat import Literal
from autopar.device_program import task_program
from autopar.footprint import footprint_of
from autopar.keeping import Kept, TaskKind
from autopar.mesh import LogicalMesh
from autopar.spmd import Assignment, Lowering
from autopar.stage_program import PROLOGUE, StageProgram
from autopar.task_cuts import TaskCut, Write, cut_into_tasks


@dataclasses.dataclass(frozen=True)
class TaskMemory:
    """Bytes per device. `once_bytes`: there while the loop runs. `working`: of each task, as long as it runs."""

    once_bytes: int
    working: tuple[Kept, ...]


def task_memory(program: StageProgram, assignment: Assignment, *, split_backward: bool) -> TaskMemory:
    """The memory of a stage's tasks, with the backward in one or two parts."""
    cuts = cut_into_tasks(program, assignment, Lowering(assignment), split_backward=split_backward, kept=frozenset())
    mesh, microbatches = assignment.mesh, program.cut.loop.plan.microbatches
    once = [write for cut in cuts if cut.name.startswith(PROLOGUE) for write in cut.writes]
    loop = [cut for cut in cuts if cut.in_loop]
    slices = [write for cut in loop for write in cut.writes if write.ref.kind == "slice"]
    once_bytes = sum(_bytes(write, mesh) for write in once) + microbatches * sum(
        _bytes(write, mesh) for write in slices
    )
    working = tuple(_working(cut, assignment, program.stage) for cut in loop)
    return TaskMemory(once_bytes, working)


def _working(cut: TaskCut, assignment: Assignment, stage: int) -> Kept:
    sent = sum(_bytes(write, assignment.mesh) for write in cut.writes if write.ref.kind == "send")
    kind = cast(TaskKind, cut.name.split()[0])
    return Kept(kind, stage, kind, sent + _temporary_bytes(cut, assignment))


def _temporary_bytes(cut: TaskCut, assignment: Assignment) -> int:
    """The most that is there at once of what is neither an argument nor a result."""
    program = task_program(
        assignment,
        cut.equations,
        reads={v: slot.layout for v, slot in cut.slots.items()},
        entries=cut.entries,
        writes=[(write.atom, write.path) for write in cut.writes],
    )
    footprint = footprint_of(program.block, program.values, elsewhere=frozenset(program.outputs))
    change = np.zeros(footprint.steps + 1, int)
    for span in footprint.spans:
        change[span.first] += program.values[span.value].bytes
        change[span.last + 1] -= program.values[span.value].bytes
    return int(np.cumsum(change).max())


def _bytes(write: Write, mesh: LogicalMesh) -> int:
    if isinstance(write.atom, Literal):
        return itemsize_of(write.atom.aval)
    shape = write.atom.aval.shape
    return write.path[-1].local_bytes(shape, itemsize_of(write.atom.aval), mesh)
