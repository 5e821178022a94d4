"""Which task of a stage an operation belongs to: the prologue, a forward or backward of a microbatch, an update.

In: a `StageProgram` with the `Program` that was planned for it. Out: the task of each operation, by name. Most operations carry
their task; those that the program needed beside them, such as fan_outs, go to the task that first reads their result. With
`split_backward` the part of a backward that the stage before waits for is a task of its own. What can go wrong: an
operation that nobody reads and nobody returns; it goes to the prologue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autopar.compat import Literal, Var
from autopar.program.loops import LoopEquation, Nested
from autopar.program.program import Atom, Equation, Program, fan_out_p, operands_of
from autopar.program.task_name import TaskName
from autopar.stages.tasks.stage_program import StageProgram


def loop_of(program: Program) -> LoopEquation | None:
    """The loop over microbatches of a stage's program; None if it has nothing to do in forward and backward."""
    return next((eqn for eqn in program.equations if isinstance(eqn, LoopEquation) and eqn.task is None), None)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LoopedProgram:
    """A planned stage: operations around one loop over microbatches. `maker` and `users` (outside the loop) are by value."""

    stage: StageProgram
    program: Program
    loop: LoopEquation
    maker: Mapping[Atom, Equation]
    users: Mapping[Var, Sequence[Equation]]

    @classmethod
    def of(cls, stage: StageProgram, program: Program) -> LoopedProgram:
        """Find the loop, and who makes and reads what."""
        loop = loop_of(program)
        assert loop is not None, "a stage without a loop over microbatches has no tasks"
        maker: dict[Atom, Equation] = {
            v: e for part in (program, loop.regions[0]) for e in part.equations for v in e.outvars
        }
        users: dict[Var, list[Equation]] = {}
        for eqn in program.equations:
            for v in operands_of(eqn):
                users.setdefault(v, []).append(eqn)
        return cls(stage=stage, program=program, loop=loop, maker=maker, users=users)

    @property
    def region(self) -> Program:
        """The loop's body."""
        return self.loop.regions[0]

    @property
    def body(self) -> Nested:
        """The loop's body, with what fills its inputs and where its results go."""
        return self.loop.nested[0]

    def sends(self) -> dict[int, Atom]:
        """What goes to other stages, by output port."""
        return {
            i: atom
            for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True))
            if port.source == "received"
        }

    def before_fan_out(self, atom: Atom) -> Atom:
        """The value that a chain of fan_outs outside the loop copies."""
        while not isinstance(atom, Literal) and atom in self.maker and self.maker[atom].primitive is fan_out_p:
            atom = self.maker[atom].invars[0]
        return atom

    def before_copy(self, atom: Atom) -> Atom:
        """The value that the region's last fan_out for an output copies."""
        return atom if isinstance(atom, Literal) else self.maker[atom].invars[0]


def task_owners(shape: LoopedProgram, *, split_backward: bool) -> dict[Equation, TaskName]:
    """The task of each operation, the loop itself left out."""
    task_of = _outside(shape)
    inside = shape.region.equations[len(shape.region.invars) :]
    task_of |= {eqn: eqn.task for eqn in inside if eqn.task is not None}
    return task_of | dict(_halves_of_backward(shape, task_of)) if split_backward else task_of


def _outside(shape: LoopedProgram) -> dict[Equation, TaskName]:
    """Of operations before and after the loop: one without a task goes to whoever reads it first, or returns it."""
    prologue = TaskName("prologue", shape.stage.stage)
    task_of: dict[Equation, TaskName] = {}
    late: set[Var] = set(shape.loop.outvars)
    untagged: list[Equation] = []
    for eqn in shape.program.equations:
        if eqn is shape.loop:
            continue
        if eqn.task is not None:
            task_of[eqn] = eqn.task
            if eqn.task.kind != "prologue":
                late.update(eqn.outvars)
        elif any(v in late for v in operands_of(eqn)):
            untagged.append(eqn)
            late.update(eqn.outvars)
        else:
            task_of[eqn] = prologue
    for eqn in reversed(untagged):
        owners = {task_of[e] for v in eqn.outvars for e in shape.users.get(v, ()) if e in task_of}
        owners |= {
            port.maker
            for port, atom in zip(shape.stage.outputs, shape.program.outvars, strict=True)
            if atom in eqn.outvars and port.source != "received" and port.maker is not None
        }
        task_of[eqn] = min((name for name in owners if name.kind != "prologue"), default=prologue)
    return task_of


def _halves_of_backward(
    shape: LoopedProgram, task_of: Mapping[Equation, TaskName]
) -> Iterator[tuple[Equation, TaskName]]:
    """Backward into what the stage before waits for, the input gradients, and the rest, the weight gradients."""
    needed = {shape.before_copy(atom) for atom in _sent_atoms(shape)}
    for eqn in reversed(shape.region.equations):
        name = task_of.get(eqn)
        if name is not None and name.kind == "backward":
            is_needed = any(v in needed for v in eqn.outvars)
            if is_needed:
                needed.update(operands_of(eqn))
            yield eqn, TaskName("input_gradient" if is_needed else "weight_gradient", name.stage)


def _sent_atoms(shape: LoopedProgram) -> list[Atom]:
    """What the region returns for other stages."""
    return [
        shape.region.outvars[shape.loop.outvars.index(shape.before_fan_out(atom))] for atom in shape.sends().values()
    ]
