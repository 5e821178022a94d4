"""The state of a running step: the arrays and the position of each mesh, the turn, and whether the step is over."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from autopar.runtime.tuning import TUNING
from autopar.schedules.machine import MeshMachine

A = TypeVar("A")
"""A value that tasks and transfers pass on: a `jax.Array`, or a group of them."""


@dataclass(kw_only=True)
class MeshState(Generic[A]):
    """The state of one mesh during one step.

    Attributes:
        mesh: The number of the mesh.
        machine: Knows the next instruction.
        arrays: The arrays that exist on the mesh, by the places of `autopar.runtime.places`.
        inbox: The transfers that arrive, as (number of the transfer, array). None only wakes the mesh.
        arrivals: The arrays that have arrived and are not received yet, by the number of the transfer.
        spans: (index, start, end) of each instruction performed, in seconds of `time.perf_counter`.
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
        """Wait for a transfer to this mesh, or for a wake-up."""
        try:
            message = self.inbox.get(timeout=TUNING.poll_s)
        except Empty:
            return
        if message is not None:
            number, array = message
            self.arrivals[number] = array
            self.machine.arrived(number)

    def clear(self) -> None:
        """Release every array."""
        self.arrays.clear()
        self.witnesses.clear()
        self.arrivals.clear()
        while not self.inbox.empty():
            self.inbox.get()


@dataclass(kw_only=True)
class StepState(Generic[A]):
    """The state of all meshes during one step.

    Attributes:
        meshes: One state per mesh.
        wait: Each task is waited for before the next instruction of its mesh, so that times can be measured.
        over: No instruction may start any more, because of a failure or an interrupt.
        abandoned: The calling thread was interrupted. Nobody waits for the instructions under way.
        turn: The number of launched instructions that other processes share.
    """

    meshes: list[MeshState[A]]
    wait: bool
    over: bool = False
    abandoned: bool = False
    turn: int = 0
    _turned: threading.Condition = field(default_factory=threading.Condition)

    def wait_for_turn(self, turn: int) -> bool:
        """Wait until all earlier instructions that other processes share are launched. Returns False if the step is over."""
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
        """End the step: every mesh stops before its next instruction, and those that wait are woken."""
        self.over = True
        for mesh in self.meshes:
            mesh.inbox.put(None)

    def clear(self) -> None:
        """Release every array."""
        for mesh in self.meshes:
            mesh.clear()
