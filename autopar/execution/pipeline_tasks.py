"""All tasks of a planned pipeline, and the task that makes each array.

In: the stages' programs, assignments and devices. Out: `PipelineTasks`: every executable by its name, and for each array between
tasks the task that makes it. What can go wrong: an accumulator has two makers, the prologue that starts it and the task that adds
to it. Its readers mean the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from autopar.compat import Var
from autopar.execution.stage_tasks import StageTask, make_stage_tasks
from autopar.intra_op.lowering.assignment import Assignment
from autopar.program.task_name import TaskName
from autopar.stages.tasks.refs import AccumulatorRef, Ref
from autopar.stages.tasks.stage_program import StageProgram

Item = tuple[int, Ref]
"""An array between tasks: the number of the stage, and the ref within the stage."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStage:
    """A stage with its layouts and its mesh of devices; `mesh` is the number of the mesh."""

    program: StageProgram
    assignment: Assignment
    device_mesh: jax.sharding.Mesh
    mesh: int


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineTasks:
    """The stages, their tasks by name, and the name of the task that makes an array."""

    stages: tuple[PlannedStage, ...]
    by_name: Mapping[TaskName, StageTask]
    makers: Mapping[Item, TaskName]

    def mesh_of(self, stage: int) -> int:
        """Return the number of the mesh that a stage runs on."""
        return self.stages[stage].mesh

    def maker_of(self, item: Item) -> StageTask:
        """Return the task that makes an array."""
        return self.by_name[self.makers[item]]


def make_pipeline_tasks(stages: Sequence[PlannedStage], *, split_backward: bool) -> PipelineTasks:
    """Make the tasks of all stages. With `split_backward` input gradients and weight gradients are two tasks."""
    tasks = {
        task.name: task
        for stage in stages
        for task in make_stage_tasks(
            stage.program,
            stage.assignment,
            stage.device_mesh,
            split_backward=split_backward,
            kept=_lent_on(stage.mesh, stages),
        )
    }
    return PipelineTasks(tuple(stages), tasks, _makers(tasks))


def _makers(tasks: Mapping[TaskName, StageTask]) -> dict[Item, TaskName]:
    makers: dict[Item, TaskName] = {}
    for name, task in tasks.items():
        for ref in task.writes:
            if name.kind == "prologue" and isinstance(ref, AccumulatorRef):
                makers.setdefault((name.stage, ref), name)
            else:
                makers[name.stage, ref] = name
    return makers


def _lent_on(mesh: int, stages: Sequence[PlannedStage]) -> frozenset[Var]:
    """Find the leaves that stages lend to updates on a mesh. The loop has read what it is lent before the updates run."""
    found: set[Var] = set()
    for program in (stage.program for stage in stages if stage.mesh == mesh):
        updates = [segment for segment in program.cut.of_stage(program.stage) if segment.name.kind == "update"]
        late = program.cut.loop.leaves_of([v for segment in updates for v in segment.reads])
        found |= {port.var for port in program.inputs if port.source == "lent" and port.var in late}
    return frozenset(found)
