"""What changes while a step runs: the arrays and the position of each mesh, whose turn it is, and whether the step is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from autopar.runtime.tuning import TUNING
from autopar.schedules.machine import MeshMachine

A = TypeVar("A")
"""What tasks and transfers pass to each other: a `jax.Array`, or a group of them."""


@dataclass(kw_only=True)
class MeshState(Generic[A]):
    """One mesh during one step.

    Attributes:
        mesh: Its number.
        machine: Which instruction is next.
        arrays: What exists on the mesh, by the places of `autopar.runtime.places`.
        inbox: What arrives from other meshes, as (number of the transfer, array); None only wakes the mesh.
        arrivals: What has arrived and was not yet received, by the number of the transfer.
        spans: (index of the instruction, start, end) of what was performed, in seconds of `time.perf_counter`.
        witnesses: (index of the instruction, its witness) of the tasks that returned one.
    """

    mesh: int
    machine: MeshMachine
    arrays: dict[int, A] = field(default_factory=dict)
    inbox: SimpleQueue[tuple[int, A] | None] = field(default_factory=SimpleQueue)
    arrivals: dict[int, A] = field(default_factory=dict)
    spans: list[tuple[int, float, float]] = field(default_factory=list)
    witnesses: list[tuple[int, A]] = field(default_factory=list)

    def accept(self) -> None:
        """Wait for one transfer to this mesh, or for a reason to look up."""
        try:
            message = self.inbox.get(timeout=TUNING.poll_s)
        except Empty:
            return
        if message is not None:
            number, array = message
            self.arrivals[number] = array
            self.machine.arrived(number)

    def clear(self) -> None:
        """Let go of every array."""
        self.arrays.clear()
        self.witnesses.clear()
        self.arrivals.clear()
        while not self.inbox.empty():
            self.inbox.get()


@dataclass(kw_only=True)
class StepState(Generic[A]):
    """All meshes during one step.

    Attributes:
        meshes: One state per mesh.
        wait: Each task is waited for before the next instruction of its mesh, so that times can be measured.
        over: Nothing more may start, because of a failure or an interrupt.
        abandoned: The calling thread was interrupted; nobody waits for what is under way.
        turn: How many instructions that are shared with other processes have been launched.
    """

    meshes: list[MeshState[A]]
    wait: bool
    over: bool = False
    abandoned: bool = False
    turn: int = 0
    _turned: threading.Condition = field(default_factory=threading.Condition)

    def wait_for_turn(self, turn: int) -> bool:
        """Wait until all earlier instructions that other processes share have been launched; False if the step is over."""
        with self._turned:
            while self.turn != turn and not self.over:
                self._turned.wait(TUNING.poll_s)
        return not self.over

    def pass_turn(self) -> None:
        """Note that the instruction whose turn it was has been launched."""
        with self._turned:
            self.turn += 1
            self._turned.notify_all()

    def end(self) -> None:
        """Make every mesh find out before its next instruction, and wake those that wait."""
        self.over = True
        for mesh in self.meshes:
            mesh.inbox.put(None)

    def clear(self) -> None:
        """Let go of every array."""
        for mesh in self.meshes:
            mesh.clear()
