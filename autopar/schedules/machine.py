"""The state of one mesh while it executes its instructions: events in, next instruction out, no input or output.

The driver (`autopar.runtime.driver`) and the simulator (`autopar.schedules.simulate`) tell the machine what happened
(`arrived`, `start`, `finish`, `fail`, `stop`) and ask what is `ready`. The answer is the index of the instruction to perform
now, or None while the mesh has to wait for a transfer. Instructions go through the states of `TRANSITIONS`, strictly in
order; a receive becomes ready only when its transfer has arrived.

An event that the table does not allow is a mistake in the driver or the simulator. It raises with the latest events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from autopar.schedules.instructions import Instruction, Receive

State = Literal["waiting", "running", "done", "failed", "stopped"]
Event = Literal["start", "finish", "fail", "stop"]

TRANSITIONS: Mapping[tuple[State, Event], State] = {
    ("running", "fail"): "failed",
    ("running", "finish"): "done",
    ("running", "stop"): "stopped",
    ("waiting", "start"): "running",
    ("waiting", "stop"): "stopped",
}

HISTORY_LENGTH = 12


class MachineError(AssertionError):
    """An event that cannot happen in this state: a mistake of whoever drives the machine."""


class MeshMachine:
    """The instructions of one mesh. Instructions before `position` are done, those after it are waiting."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        """Stand in front of the first instruction."""
        self.instructions = instructions
        self.position = 0
        self.state: State = "waiting"
        self._expected = {i.number: n for n, i in enumerate(instructions) if isinstance(i, Receive)}
        self._missing = [i.number if isinstance(i, Receive) else None for i in instructions]
        self._arrived: set[int] = set()
        self._history: deque[tuple[str, int]] = deque(maxlen=HISTORY_LENGTH)

    @property
    def finished(self) -> bool:
        """All instructions are done."""
        return self.position == len(self.instructions)

    def ready(self) -> int | None:
        """Index of the instruction to perform now; None if there is none or its transfer has not arrived."""
        if self.state != "waiting" or self.position == len(self.instructions):
            return None
        number = self._missing[self.position]
        return self.position if number is None or number in self._arrived else None

    def arrived(self, number: int) -> None:
        """The transfer with this number has reached this mesh."""
        if number not in self._expected or number in self._arrived:
            why = "arrived before" if number in self._arrived else "is not for this mesh"
            raise self._impossible(f"arrived {number}: transfer {number} {why}")
        self._arrived.add(number)
        self._history.append(("arrived", number))

    def start(self) -> None:
        """The ready instruction is being performed."""
        if self.ready() is None:
            raise self._impossible("start: no instruction is ready")
        self._step("start")

    def finish(self) -> None:
        """The running instruction is done; the next one is waiting."""
        self._step("finish")
        self.position += 1
        if self.position < len(self.instructions):
            self.state = "waiting"

    def fail(self) -> None:
        """The running instruction has failed; nothing more can start."""
        self._step("fail")

    def stop(self) -> None:
        """Another mesh has failed, or the step was interrupted; nothing more can start."""
        self._step("stop")

    def history(self) -> str:
        """The latest events, oldest first, each with the number of its instruction or transfer."""
        return ", ".join(f"{event} {number}" for event, number in tuple(self._history))

    def _step(self, event: Event) -> None:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise self._impossible(f"{event}: not possible while {self.state}")
        self._history.append((event, self.position))
        self.state = state

    def _impossible(self, what: str) -> MachineError:
        place = f"at instruction {self.position} of {len(self.instructions)}"
        if not self.finished:
            place += f", `{self.instructions[self.position]}`"
        history = self.history() or "none"
        return MachineError(f"impossible event {what}; {place}, state {self.state}; latest events: {history}")
