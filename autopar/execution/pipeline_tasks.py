"""All tasks of a planned pipeline, and which of them makes what.

In: the stages' programs, assignments and devices. Out: `PipelineTasks`: every executable by its name, and for each array between
tasks the task that makes it. What can go wrong: an accumulator has two makers, the prologue that starts it and the task that adds
to it; those that read it mean the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax

from autopar.compat import Var
from autopar.execution.stage_tasks import StageTask, stage_tasks
from autopar.intra_op.lowering.assignment import Assignment
from autopar.stages.tasks.cuts import Ref
from autopar.stages.tasks.stage_program import PROLOGUE, StageProgram

Item = tuple[int, Ref]
"""An array between tasks: the stage, and the ref there."""
_MADE_ONCE = (PROLOGUE, "update")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStage:
    """A stage with its layouts and the mesh of devices that it runs on, `mesh` its number."""

    program: StageProgram
    assignment: Assignment
    device_mesh: jax.sharding.Mesh
    mesh: int


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A task of some stage."""

    stage: int
    task: StageTask

    @property
    def kind(self) -> str:
        """What kind of work it does: prologue, forward, backward, weight_gradient or update."""
        return self.task.name.split()[0]

    @property
    def in_loop(self) -> bool:
        """Whether it runs for every microbatch."""
        return self.kind not in _MADE_ONCE


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineTasks:
    """The stages, their tasks by unique names, and the name of the task that makes an array."""

    stages: tuple[PlannedStage, ...]
    nodes: Mapping[str, Node]
    makers: Mapping[Item, str]

    def mesh_of(self, stage: int) -> int:
        """The number of the mesh that a stage runs on."""
        return self.stages[stage].mesh


def pipeline_tasks(stages: Sequence[PlannedStage], *, split_backward: bool) -> PipelineTasks:
    """The tasks of all stages; `split_backward`: input gradients and weight gradients are two tasks."""
    nodes = {
        task.name: Node(number, task)
        for number, stage in enumerate(stages)
        for task in stage_tasks(
            stage.program,
            stage.assignment,
            stage.device_mesh,
            split_backward=split_backward,
            kept=_lent_on(stage.mesh, stages),
        )
    }
    return PipelineTasks(tuple(stages), nodes, _makers(nodes))


def _makers(nodes: Mapping[str, Node]) -> dict[Item, str]:
    def made(names: Iterable[str], *, starts: bool) -> dict[Item, str]:
        return {
            (nodes[name].stage, ref): name
            for name in names
            for ref in nodes[name].task.writes
            if (ref.kind == "accumulator" and nodes[name].kind == PROLOGUE) == starts
        }

    return made(nodes, starts=True) | made(nodes, starts=False)


def _lent_on(mesh: int, stages: Sequence[PlannedStage]) -> frozenset[Var]:
    """Leaves that updates on a mesh are lent by any stage; what the loop is lent it has read before the updates."""
    found: set[Var] = set()
    for program in (stage.program for stage in stages if stage.mesh == mesh):
        updates = [piece for piece in program.cut.of_stage(program.stage) if piece.name.kind == "update"]
        late = program.cut.loop.leaves_of([v for piece in updates for v in piece.reads])
        found |= {port.var for port in program.inputs if port.source == "lent" and port.var in late}
    return frozenset(found)
