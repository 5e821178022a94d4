"""Orders the launches of several processes so that none waits for another in vain, and picks out one process's part.

In: an `InstructionList`, and for each mesh the processes that have devices of it. Out: the same instructions in another
global order, and the `Part` of one process. Some instructions are *shared*: a run on a mesh of several processes, and a
transfer between meshes that do not belong to one and the same process. A shared transfer is one program on both sides
(`autopar.runtime.resharding.exchange`).

A process launches its shared instructions in the global order, whichever of its threads they come from, and every shared
transfer is one event there: its receive follows its send at once. Then no process ever waits in vain. For take the first
instruction of the global order that is not done. All that it needs lies before it and is done, and each process that takes
part either has launched it or has nothing before it that is not done.

A shared transfer occupies the devices of both sides until both have come to it. So it is placed where its value is made,
before what the two meshes do next, by a simulated clock; at equal times the lower mesh comes first. The order therefore
follows from what each mesh does in its own order, and not from how the incoming list interleaves the meshes.

What can go wrong: a value has to arrive before its older version is let go, and letting go needs that transfer to happen
first. `ScheduleError` names the transfer.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.schedules.check_instructions import check_instructions
from autopar.schedules.instructions import Instruction, InstructionList, Receive, Run, Send, Value
from autopar.schedules.tasks import NOMINAL_DURATIONS

_DURATIONS: Mapping[str, int] = {str(kind): duration for kind, duration in NOMINAL_DURATIONS.items()}
Processes = Sequence[frozenset[int]]
"""For each mesh, the numbers of the processes that have devices of it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process does of a program.

    Attributes:
        meshes: The meshes of which the process has devices.
        turns: The shared instructions of the process in the order of their launches, as (mesh, position in its row).
        remote: Numbers of the transfers to its meshes from meshes of which it has no device.
    """

    meshes: tuple[int, ...]
    turns: tuple[tuple[int, int], ...]
    remote: frozenset[int]

    @classmethod
    def whole(cls, program: InstructionList) -> Part:
        """The part of a process that has all meshes to itself."""
        return cls(tuple(range(program.num_meshes)), (), frozenset())


def part_of(program: InstructionList, processes: Processes, process: int) -> Part:
    """The part of one process. The program must be in launch order."""
    meshes = tuple(mesh for mesh, those in enumerate(processes) if process in those)
    shared = shared_transfers(program, processes)
    remote = frozenset(
        i.number
        for i in program.instructions
        if isinstance(i, Send) and i.number in shared and i.source_mesh not in meshes and i.target_mesh in meshes
    )
    turns = []
    positions: dict[int, int] = defaultdict(int)
    for instruction in program.instructions:
        mesh = instruction.mesh
        if mesh in meshes and _is_launched_together(instruction, processes, shared=shared, remote=remote):
            turns.append((mesh, positions[mesh]))
        positions[mesh] += 1
    return Part(meshes, tuple(turns), remote)


def shared_transfers(program: InstructionList, processes: Processes) -> frozenset[int]:
    """The numbers of the transfers in which devices of several processes take part."""
    return frozenset(
        i.number
        for i in program.instructions
        if isinstance(i, Send) and len(processes[i.source_mesh] | processes[i.target_mesh]) > 1
    )


def _is_launched_together(
    instruction: Instruction, processes: Processes, *, shared: frozenset[int], remote: frozenset[int]
) -> bool:
    if isinstance(instruction, Run):
        return len(processes[instruction.mesh]) > 1
    if isinstance(instruction, Send):
        return instruction.number in shared
    return isinstance(instruction, Receive) and instruction.number in remote


def order_launches(program: InstructionList, processes: Processes) -> InstructionList:
    """Put the program in an order in which several processes can launch it; `ScheduleError` if there is none."""
    shared = shared_transfers(program, processes)
    ordered = dataclasses.replace(program, instructions=tuple(_sort(program, shared)))
    check_instructions(ordered)
    check_launch_order(ordered, processes)
    return ordered


def check_launch_order(program: InstructionList, processes: Processes) -> None:
    """Raise `ScheduleError` unless the receive of every shared transfer follows its send at once."""
    shared = shared_transfers(program, processes)
    for n, instruction in enumerate(program.instructions):
        if isinstance(instruction, Receive) and instruction.number in shared:
            before = program.instructions[n - 1] if n else None
            if not isinstance(before, Send) or before.number != instruction.number:
                raise ScheduleError(
                    f"Instruction {n}, `{instruction}` of mesh {instruction.mesh}, does not follow its send at once: meshes "
                    f"{instruction.source_mesh} and {instruction.target_mesh} are not of one process, and their processes would "
                    "launch it in different orders and wait for each other."
                )


def _sort(program: InstructionList, shared: frozenset[int]) -> list[Instruction]:
    """Instructions by simulated time, each behind those that must come first; a shared transfer is one event."""
    instructions = program.instructions
    sends = {i.number: n for n, i in enumerate(instructions) if isinstance(i, Send)}
    event = [
        sends[i.number] if isinstance(i, Receive) and i.number in shared else n for n, i in enumerate(instructions)
    ]
    after = _edges(instructions, event, shared=shared)
    missing: dict[int, int] = defaultdict(int)
    for targets in after.values():
        for target in targets:
            missing[target] += 1
    ranks = _ranks(instructions)
    ready = [(ranks[n], n) for n in dict.fromkeys(event) if not missing[n]]
    heapq.heapify(ready)
    receives = {i.number: i for i in instructions if isinstance(i, Receive)}
    found: list[Instruction] = []
    while ready:
        _, n = heapq.heappop(ready)
        one = instructions[n]
        found.append(one)
        if isinstance(one, Send) and one.number in shared:
            found.append(receives[one.number])
        for target in after[n]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (ranks[target], target))
    if len(found) < len(instructions):
        stuck = next(instructions[n] for n in event if missing[n] and isinstance(instructions[n], Send))
        raise ScheduleError(
            f"No order of launches suits all processes: `{stuck}` of mesh {stuck.mesh} has to wait for an older version of the "
            "value to be let go, which has to wait for the transfer. Put the two meshes into one process, or use another "
            "schedule."
        )
    return found


def _edges(
    instructions: Sequence[Instruction], event: Sequence[int], *, shared: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """For each event, those that must come after it.

    An instruction comes after the one before it on its mesh; a shared receive only after those that touch its value.
    """
    sends = {i.number: n for n, i in enumerate(instructions) if isinstance(i, Send)}
    after: dict[int, dict[int, None]] = defaultdict(dict)
    latest: dict[int, int] = {}
    touched: dict[tuple[int, Value], int] = {}
    arrived: dict[tuple[int, Value], int] = {}
    for n, instruction in enumerate(instructions):
        mesh = instruction.mesh
        if isinstance(instruction, Receive):
            key = (mesh, instruction.value)
            if key in touched:
                after[touched[key]][event[n]] = None
            if instruction.number in shared:
                arrived[key] = event[n]
                continue
            after[sends[instruction.number]][n] = None
        if mesh in latest:
            after[latest[mesh]][n] = None
        for value in _values_of(instruction):
            if (mesh, value) in arrived:
                after[arrived.pop((mesh, value))][n] = None
            touched[mesh, value] = n
        latest[mesh] = n
    return {n: tuple(target for target in targets if target != n) for n, targets in after.items()} | {
        n: () for n in range(len(instructions)) if n not in after
    }


def _values_of(instruction: Instruction) -> tuple[Value, ...]:
    return (*instruction.reads, *instruction.writes) if isinstance(instruction, Run) else (instruction.value,)


def _ranks(instructions: Sequence[Instruction]) -> list[tuple[float, bool, int]]:
    """For each instruction: when it is performed if transfers take no time, whether it is a run, and its mesh."""
    clock: dict[int, float] = defaultdict(float)
    sent: dict[int, float] = {}
    ranks = []
    for instruction in instructions:
        mesh = instruction.mesh
        if isinstance(instruction, Send):
            sent[instruction.number] = clock[mesh]
        elif isinstance(instruction, Receive):
            clock[mesh] = max(clock[mesh], sent[instruction.number])
        ranks.append((clock[mesh], isinstance(instruction, Run), mesh))
        if isinstance(instruction, Run):
            clock[mesh] += _DURATIONS.get(instruction.kind, 1)
    return ranks
