"""Perform the instructions of one mesh, from the first to the last, or until something fails anywhere.

A mesh walks its instructions in order, as its `MeshMachine` says. A receive waits for the sender's array; nothing else waits.

What can go wrong: XLA reports some errors late. The results of a program that failed, and of every program that reads them,
hold the error until somebody waits for them. Therefore a task may return one more small array, its witness. Each mesh waits
for its witnesses when it has nothing more to start, and the first that holds an error, in the order of the program, names
the instruction that caused it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

import jax

from autopar.errors import ArgumentError
from autopar.events import reach
from autopar.runtime.failures import Failure
from autopar.runtime.places import Places, PlaceTable
from autopar.runtime.processes import wait_until_ready
from autopar.runtime.step_state import A, MeshState, StepState
from autopar.schedules.instructions import Instruction, Receive, Run, Send, Value
from autopar.schedules.launch_order import Part

Executable: TypeAlias = Callable[[Sequence[A]], Sequence[A]]
"""Takes the arrays that a task reads; returns those that it writes, in order, and maybe a witness."""
Transfer: TypeAlias = Callable[[A | None, Value, int, int], A]
"""Takes an array, its value, and the source and target mesh; starts a copy and returns the array on the target mesh."""


@dataclass(frozen=True, kw_only=True)
class Performer(Generic[A]):
    """Performs the instructions of a program. It keeps nothing of a step.

    Attributes:
        executables: One per task of the program.
        transfer: Starts a copy to another mesh.
        places: The places of the arrays of each instruction.
        part: What this process does of the program.
        turns: For each mesh, the turn of each instruction that is shared with other processes, by its index.
        is_watched: Other processes take part. They may never do what this one waits for.
    """

    executables: Mapping[str, Executable[A]]
    transfer: Transfer[A]
    places: PlaceTable
    part: Part
    turns: Sequence[Mapping[int, int]]
    is_watched: bool

    def drive(self, step: StepState[A], mesh: int) -> list[Failure]:
        """Run one mesh to its end. Returns the failures: an instruction, and an earlier one whose results hold an error."""
        failure = self._walk(step, mesh)
        failures = [] if failure is None else [failure]
        if failures:
            step.end()
        if not step.abandoned and not any(isinstance(f.error, KeyboardInterrupt) for f in failures):
            late = self._find_late_failure(step, mesh)
            if late is not None:
                failures.append(late)
                step.end()
        return failures

    def _walk(self, step: StepState[A], mesh: int) -> Failure | None:
        state, places, turns = step.meshes[mesh], self.places.of_instruction[mesh], self.turns[mesh]
        machine, clock = state.machine, time.perf_counter
        try:
            while not machine.finished:
                if step.over:
                    machine.stop()
                    break
                position = machine.ready()
                if position is None:
                    state.accept()
                    continue
                turn = turns.get(position)
                if turn is not None and not step.wait_for_turn(turn):
                    continue
                started = clock()
                machine.start()
                self._perform(machine.instructions[position], places[position], state, step)
                machine.finish()
                if turn is not None:
                    step.pass_turn()
                state.spans.append((position, started, clock()))
        except BaseException as error:  # noqa: BLE001 - every failure of a mesh is raised by `Driver.run`
            if machine.state == "running":
                machine.fail()
            return Failure(mesh, machine.position, error)
        return None

    def _perform(self, instruction: Instruction, places: Places, state: MeshState[A], step: StepState[A]) -> None:
        arrays = state.arrays
        if isinstance(instruction, Run):
            self._call(instruction, places, state, wait=step.wait)
            return
        reach("instruction", instruction)
        if isinstance(instruction, Send):
            source, target = instruction.source_mesh, instruction.target_mesh
            array = self.transfer(arrays[places.reads[0]], instruction.value, source, target)
            if target in self.part.meshes:
                step.meshes[target].inbox.put((instruction.number, array))
        elif isinstance(instruction, Receive):
            arrays[places.writes[0]] = self._receive(instruction, state)
            if step.wait:
                jax.block_until_ready(arrays[places.writes[0]])
        else:
            del arrays[places.gone[0]]

    def _receive(self, receive: Receive, state: MeshState[A]) -> A:
        """Return the array that has arrived. If only other processes have the mesh, this half of the transfer fetches it."""
        if receive.number not in self.part.remote:
            return state.arrivals.pop(receive.number)
        return self.transfer(None, receive.value, receive.source_mesh, receive.target_mesh)

    def _call(self, run: Run, places: Places, state: MeshState[A], *, wait: bool) -> None:
        """Call a task. Donated arrays are released before the call, because they do not exist after it, even if it fails."""
        arrays = state.arrays
        arguments = [arrays[place] for place in places.reads]
        reach("instruction", run, arguments)
        for place in places.gone:
            del arrays[place]
        results = self.executables[run.task](arguments)
        wanted = len(places.writes)
        if len(results) == wanted + 1:
            state.witnesses.append((state.machine.position, results[wanted]))
        elif len(results) != wanted:
            raise ArgumentError(f"task {run.task!r} returned {len(results)} arrays, it writes {wanted}")
        if wait:
            jax.block_until_ready(results)
        for place, array in zip(places.writes, results, strict=False):
            arrays[place] = array

    def _find_late_failure(self, step: StepState[A], mesh: int) -> Failure | None:
        """Find the first instruction of a mesh whose result holds an error. Waits for all that the mesh has started.

        If other processes take part, it waits no longer than the step lasts.
        """
        for position, witness in step.meshes[mesh].witnesses:
            try:
                if self.is_watched and not wait_until_ready(witness, lambda: step.abandoned):
                    return None
                jax.block_until_ready(witness)
            except BaseException as error:  # noqa: BLE001 - every failure of a mesh is raised by `Driver.run`
                return Failure(mesh, position, error)
        return None
