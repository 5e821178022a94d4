"""Which task of a stage an operation belongs to: the prologue, a forward or backward of a microbatch, an update.

In: a `StageProgram` with the `Program` that was planned for it. Out: the task of each operation, by name. Most operations carry
their piece; what the program needed beside them, such as fan_outs, goes to the task that first reads its result. With
`split_backward` the part of a backward that the stage before waits for is a task of its own. What can go wrong: an
operation that nobody reads and nobody returns; it goes to the prologue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autopar.compat import Literal as JaxLiteral
from autopar.compat import Var
from autopar.program.loops import Loop, LoopEquation
from autopar.program.program import Atom, Equation, Program, fan_out_p
from autopar.stages.tasks.stage_program import PROLOGUE, StageProgram


@dataclasses.dataclass(frozen=True, eq=False)
class LoopedProgram:
    """A planned stage: operations around one loop over microbatches. `maker` and `users` (outside the loop) are by value."""

    stage: StageProgram
    program: Program
    loop: LoopEquation
    maker: Mapping[Var, Equation]
    users: Mapping[Var, Sequence[Equation]]

    @classmethod
    def of(cls, stage: StageProgram, program: Program) -> LoopedProgram:
        """Find the loop, and who makes and reads what."""
        loop = next(e for e in program.equations if isinstance(e, LoopEquation) and not e.task)
        maker = {v: e for part in (program, loop.regions[0]) for e in part.equations for v in e.outvars}
        users: dict[Var, list[Equation]] = {}
        for eqn in program.equations:
            for v in variables(eqn):
                users.setdefault(v, []).append(eqn)
        return cls(stage, program, loop, maker, users)

    @property
    def region(self) -> Program:
        """The loop's body."""
        return self.loop.regions[0]

    @property
    def counts(self) -> Loop:
        """How many of the loop's operands are constants and carries."""
        return self.loop.loop

    def sends(self) -> dict[int, Var]:
        """What goes to other stages, by output port."""
        return {
            i: atom
            for i, (port, atom) in enumerate(zip(self.stage.outputs, self.program.outvars, strict=True))
            if port.source == "received"
        }

    def before_fan_out(self, atom: Atom) -> Atom:
        """The value that a chain of fan_outs outside the loop copies."""
        while not isinstance(atom, JaxLiteral) and atom in self.maker and self.maker[atom].primitive is fan_out_p:
            atom = self.maker[atom].invars[0]
        return atom

    def before_copy(self, atom: Atom) -> Atom:
        """The value that the region's last fan_out for an output copies."""
        return atom if isinstance(atom, JaxLiteral) else self.maker[atom].invars[0]


def task_owners(shape: LoopedProgram, *, split_backward: bool) -> dict[Equation, str]:
    """The name of the task of each operation, the loop itself left out."""
    task_of = _outside(shape)
    inside = shape.region.equations[len(shape.region.invars) :]
    task_of |= {eqn: eqn.task for eqn in inside if eqn.task}
    return task_of | dict(_halves_of_backward(shape, task_of)) if split_backward else task_of


def update_level(task: str) -> int:
    """Which of the updates of a stage a task is; -1 for others."""
    return int(task.rpartition(".")[2]) if task.startswith("update ") else -1


def variables(eqn: Equation) -> list[Var]:
    """The operands that are not literals."""
    return [v for v in eqn.invars if not isinstance(v, JaxLiteral)]


def _outside(shape: LoopedProgram) -> dict[Equation, str]:
    """Of operations before and after the loop: one without a piece goes to whoever reads it first, or returns it."""
    task_of: dict[Equation, str] = {}
    late: set[Var] = set(shape.loop.outvars)
    untagged: list[Equation] = []
    for eqn in shape.program.equations:
        if eqn is shape.loop:
            continue
        if eqn.task:
            task_of[eqn] = eqn.task
            if eqn.task != PROLOGUE:
                late.update(eqn.outvars)
        elif any(v in late for v in variables(eqn)):
            untagged.append(eqn)
            late.update(eqn.outvars)
        else:
            task_of[eqn] = PROLOGUE
    for eqn in reversed(untagged):
        owners = [task_of[e] for v in eqn.outvars for e in shape.users.get(v, ()) if e in task_of]
        returned = [
            str(port.piece)
            for port, atom in zip(shape.stage.outputs, shape.program.outvars, strict=True)
            if atom in eqn.outvars and port.source != "received"
        ]
        task_of[eqn] = min((t for t in owners + returned if t != PROLOGUE), key=update_level, default=PROLOGUE)
    return task_of


def _halves_of_backward(shape: LoopedProgram, task_of: Mapping[Equation, str]) -> Iterator[tuple[Equation, str]]:
    """Backward into what the stage before waits for, the input gradients, and the rest, the weight gradients."""
    needed = {shape.before_copy(atom) for atom in _sent_atoms(shape)}
    for eqn in reversed(shape.region.equations):
        task = task_of.get(eqn, "")
        if task.startswith("backward "):
            first = any(v in needed for v in eqn.outvars)
            if first:
                needed.update(v for v in variables(eqn))
            kind = "input_gradient" if first else "weight_gradient"
            yield eqn, f"{kind} {task.removeprefix('backward ')}"


def _sent_atoms(shape: LoopedProgram) -> list[Atom]:
    """What the region returns for other stages."""
    return [
        shape.region.outvars[shape.loop.outvars.index(shape.before_fan_out(atom))] for atom in shape.sends().values()
    ]
