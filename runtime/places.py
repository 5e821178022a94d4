"""The places of the arrays of a program's instructions, looked up once per program, since a task may have hundreds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.schedules.instructions import Free, Instruction, InstructionList, Receive, Run, Send, Value


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one instruction's arrays among those of its mesh. `gone`: reads that do not exist after it."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gone: tuple[int, ...]


class PlaceTable:
    """The place of every value on every mesh, and the places of every instruction."""

    def __init__(self, program: InstructionList) -> None:
        """Give each value of a mesh a place when it first occurs, inputs first."""
        self.of_value: tuple[dict[Value, int], ...] = tuple({} for _ in range(program.num_meshes))
        for mesh, value in program.inputs:
            self.of_value[mesh].setdefault(value, len(self.of_value[mesh]))
        self.of_instruction: tuple[tuple[Places, ...], ...] = tuple(
            tuple(_find_places(instruction, self.of_value[mesh]) for instruction in program.of(mesh))
            for mesh in range(program.num_meshes)
        )


def _find_places(instruction: Instruction, place_of: dict[Value, int]) -> Places:
    def places(values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(place_of.setdefault(value, len(place_of)) for value in values)

    if isinstance(instruction, Run):
        gone = (instruction.reads[position] for position in instruction.donated)
        return Places(places(instruction.reads), places(instruction.writes), places(gone))
    place = places([instruction.value])
    return Places(
        reads=place if isinstance(instruction, Send) else (),
        writes=place if isinstance(instruction, Receive) else (),
        gone=place if isinstance(instruction, Free) else (),
    )
