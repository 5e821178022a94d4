"""Describe where each mesh of a running step is: the instruction, its state, and the mesh that it waits for.

In: the state of a step, read from another thread than those that change it. Out: a line for each mesh, which is the same as long
as the mesh stands still. What can go wrong: a mesh moves on meanwhile, and its line is a moment old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.runtime.processes import is_ready
from autopar.runtime.step_state import A, MeshState, StepState
from autopar.schedules.instructions import Free, Instruction, Receive, Run, Send


def describe_standing(step: StepState[A], meshes: Sequence[int], whose: Callable[[int], str]) -> list[str]:
    """Return a line for each of these meshes. `whose` names the process of a mesh, in words that follow its number."""
    return [f"mesh {mesh}{whose(mesh)} {_describe(step.meshes[mesh], whose)}" for mesh in meshes]


def _describe(state: MeshState[A], whose: Callable[[int], str]) -> str:
    machine = state.machine
    position, count = machine.position, len(machine.instructions)
    pending = _pending(state)
    result = "" if pending is None else f"; the first result that is not there: instruction {pending + 1}, "
    if pending is not None:
        result += _name(machine.instructions[pending], whose)
    if position >= count:
        done = f"has launched all of its {count} instructions"
        return f"{done}{result or '; all results are there'}; latest events: {machine.history() or 'none'}"
    instruction, at = machine.instructions[position], f"instruction {position + 1} of {count}, "
    if machine.state != "waiting":
        doing = {"running": "performs", "failed": "failed at", "stopped": "was stopped before"}.get(
            machine.state, "did"
        )
    elif machine.ready() is None:
        doing = "waits for"
    else:
        doing = "waits for its turn among the processes to perform"
    name = f"{_name(instruction, whose)}{_describe_sources(machine.instructions, position, whose)}"
    return f"{doing} {at}{name}{result}; state {machine.state}; latest events: {machine.history() or 'none'}"


def _describe_sources(instructions: Sequence[Instruction], position: int, whose: Callable[[int], str]) -> str:
    """Name the meshes from which a task reads. A transfer may still be under way when the task that reads it is launched."""
    task = instructions[position]
    if not isinstance(task, Run):
        return ""
    received = [i for i in instructions[:position] if isinstance(i, Receive) and i.value in task.reads]
    meshes = sorted({receive.source_mesh for receive in received})
    listed = " and ".join(f"mesh {mesh}{whose(mesh)}" for mesh in meshes)
    return f", which reads what it receives from {listed}" if listed else ""


def _name(instruction: Instruction, whose: Callable[[int], str]) -> str:
    """Name an instruction with its stage and microbatch, or with the other mesh and its process."""
    match instruction:
        case Run():
            at = "" if instruction.microbatch is None else f", microbatch {instruction.microbatch}"
            return f"{instruction.kind.replace('_', ' ')} of stage {instruction.stage}{at} ({instruction.task})"
        case Send():
            return f"send `{instruction.value}` to mesh {instruction.target_mesh}{whose(instruction.target_mesh)}"
        case Receive():
            return f"receive `{instruction.value}` from mesh {instruction.source_mesh}{whose(instruction.source_mesh)}"
        case Free():
            return f"free `{instruction.value}`"


def _pending(state: MeshState[A]) -> int | None:
    """Return the index of the first instruction whose witness has not been computed; None if there is none."""
    return next((position for position, witness in tuple(state.witnesses) if not is_ready(witness)), None)
