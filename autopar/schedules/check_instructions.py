"""Proves, before anything runs, that a list of instructions keeps exact books of what exists on each mesh.

In: an `InstructionList`. Out: nothing, or a `ScheduleError` that shows the instructions around the culprit with an arrow.
Every value is produced before it is read, freed exactly once, and never used afterwards. In the global order every receive
follows its send. So meshes that execute their parts in order, with sends that do not wait, reach the end: the earliest
instruction that is left can always go.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value

CONTEXT_LINES = 6


def check_instructions(program: InstructionList) -> None:
    """Raise `ScheduleError` unless the books of every mesh balance and every receive follows its send."""
    live: list[set[Value]] = [set() for _ in range(program.num_meshes)]
    for mesh, value in program.inputs:
        if value in live[mesh]:
            raise ScheduleError(f"Input {value} is listed twice for mesh {mesh}.")
        live[mesh].add(value)
    kept = set(program.inputs) - program.consumable
    sent: dict[int, Send] = {}
    for n, instruction in enumerate(program.instructions):
        here = live[instruction.mesh]
        if isinstance(instruction, Run):
            problem = _check_run(instruction, here, kept=kept)
        elif isinstance(instruction, Send):
            problem = _check_send(instruction, here, sent=sent)
        elif isinstance(instruction, Receive):
            problem = _check_receive(instruction, here, sent=sent, kept=kept)
        else:
            problem = _check_free(instruction, here, kept=kept)
        if problem:
            raise ScheduleError(_show(program, n, problem))
    _check_end(program, live, sent=sent, kept=kept)


def _check_run(run: Run, here: set[Value], *, kept: set[tuple[int, Value]]) -> str | None:
    for value in run.reads:
        if value not in here:
            return f"{value} does not exist on mesh {run.mesh}: not produced yet, or freed or donated before"
    for position in run.donated:
        value = run.reads[position]
        if (run.mesh, value) in kept:
            return f"{value} is donated, and it is an input that must survive the step"
        here.discard(value)
    for value in run.writes:
        if value in here and value not in run.reads:
            return f"{value} still exists on mesh {run.mesh} and would be overwritten"
        here.add(value)
        kept.discard((run.mesh, value))
    return None


def _check_send(send: Send, here: set[Value], *, sent: dict[int, Send]) -> str | None:
    if send.value not in here:
        return f"{send.value} does not exist on mesh {send.mesh}: not produced yet, or freed or donated before"
    if send.target_mesh == send.source_mesh:
        return "a mesh does not send to itself"
    if send.number in sent:
        return f"transfer {send.number} was sent before"
    sent[send.number] = send
    return None


def _check_receive(
    receive: Receive, here: set[Value], *, sent: dict[int, Send], kept: set[tuple[int, Value]]
) -> str | None:
    send = sent.pop(receive.number, None)
    if send is None:
        return f"transfer {receive.number} has not been sent, or was received before"
    if (send.value, send.source_mesh, send.target_mesh) != (receive.value, receive.source_mesh, receive.target_mesh):
        return f"transfer {receive.number} was `{send}` of mesh {send.mesh}"
    if receive.value in here and (receive.mesh, receive.value) not in kept:
        return f"{receive.value} still exists on mesh {receive.mesh} and would be overwritten"
    here.add(receive.value)
    kept.discard((receive.mesh, receive.value))
    return None


def _check_free(free: Free, here: set[Value], *, kept: set[tuple[int, Value]]) -> str | None:
    if free.value not in here:
        return f"{free.value} does not exist on mesh {free.mesh}: not produced yet, or freed or donated before"
    if (free.mesh, free.value) in kept:
        return f"{free.value} is an input that must survive the step"
    here.discard(free.value)
    return None


def _check_end(
    program: InstructionList, live: Sequence[set[Value]], *, sent: dict[int, Send], kept: set[tuple[int, Value]]
) -> None:
    """At the end the outputs exist, the inputs that had to survive exist, and nothing else does."""
    for number, send in sent.items():
        raise ScheduleError(f"Transfer {number}, `{send}` of mesh {send.mesh}, is never received.")
    left = {(mesh, value) for mesh, values in enumerate(live) for value in values}
    for mesh, value in program.outputs:
        if (mesh, value) not in left:
            raise ScheduleError(f"Output {value} does not exist on mesh {mesh} after the last instruction.")
    for mesh, value in sorted(left - set(program.outputs) - kept, key=str):
        raise ScheduleError(f"{value} is never freed on mesh {mesh}.")


def _show(program: InstructionList, n: int, problem: str) -> str:
    """The culprit among its neighbours, with an arrow."""
    lines = str(program).splitlines()
    first = max(0, n - CONTEXT_LINES)
    shown = (
        [f"   {line}" for line in lines[first:n]] + [f"-> {lines[n]}"] + [f"   {line}" for line in lines[n + 1 : n + 3]]
    )
    return f"Instruction {n} cannot run: {problem}.\n" + "\n".join(shown)
