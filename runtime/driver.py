"""Performs the instructions of one step: one thread per mesh, arrays in, arrays out.

In: a verified `InstructionList`, one callable per task, and a function that starts copying an array to another mesh. Out:
the arrays of the outputs. With one mesh everything runs in the calling thread.

What can go wrong: a mesh fails, or the user presses Ctrl-C. Then every mesh stops before its next instruction, all threads
end before `run` raises, and every array that the step had made is released. Tasks without witnesses
(`autopar.runtime.performer`) may still be in computation when `run` returns, as always in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic

from autopar.errors import ArgumentError
from autopar.runtime.failures import Failure, describe_failures
from autopar.runtime.mesh_threads import run_in_threads
from autopar.runtime.performer import Executable, Performer, Transfer
from autopar.runtime.places import PlaceTable
from autopar.runtime.standing import describe_standing
from autopar.runtime.step_state import A, MeshState, StepState
from autopar.schedules.instructions import InstructionList, Receive, Run, Value
from autopar.schedules.launch_order import Part
from autopar.schedules.machine import MeshMachine
from autopar.schedules.timeline import Span, Timeline


class Driver(Generic[A]):
    """Runs one program again and again. It holds no thread and no array between two runs."""

    def __init__(
        self,
        program: InstructionList,
        callables: Mapping[str, Executable[A]],
        transfer: Transfer[A],
        *,
        part: Part | None = None,
        watch: Callable[[], None] | None = None,
        lines: Callable[[str], str] = lambda task: "",
    ) -> None:
        """Prepare to run `program`.

        The callables and `transfer` are called from threads that see those of JAX's context managers around `run` that
        `thread_settings` names; `transfer` in the thread of the source mesh.

        Args:
            program: The instructions of one step.
            callables: For each task, a function from the arrays that it reads to those that it writes, in order, and maybe
                a witness: one more small array of the same program.
            transfer: Takes (array, value, source mesh, target mesh), starts a copy, and returns the array on the target
                mesh. It gets None in place of arrays that lie on no mesh of this process.
            part: The meshes of this process, if several run the program. Inputs and outputs are those of its meshes.
            watch: Called now and then while threads work; raises if another process has failed. Then threads that wait for
                that process are left behind.
            lines: Returns the lines of the user's program that a task comes from. Called when the task has failed.
        """
        needed = {i.task for i in program.instructions if isinstance(i, Run)}
        if missing := sorted(needed - set(callables)):
            raise ArgumentError(f"No callable is given for task {', '.join(map(repr, missing))}.")
        self._program = program
        self._part = part or Part.whole(program)
        self._watch = watch
        self._lines = lines
        self._timeline: Timeline | None = None
        self._running: StepState[A] | None = None
        self._inputs = frozenset((mesh, value) for mesh, value in program.inputs if mesh in self._part.meshes)
        self._places = PlaceTable(program)
        self._performer = Performer(
            executables=dict(callables),
            transfer=transfer,
            places=self._places,
            part=self._part,
            turns=[
                {position: turn for turn, (at, position) in enumerate(self._part.turns) if at == mesh}
                for mesh in range(program.num_meshes)
            ],
            is_watched=watch is not None,
        )

    def run(self, inputs: Mapping[tuple[int, Value], A], *, record: bool = False) -> dict[tuple[int, Value], A]:
        """Run one step.

        Args:
            inputs: An array for each (mesh, value) of the program's inputs. The driver releases those that the program may
                consume after their last use. To free their memory during the step, pass a mapping that nobody else holds.
            record: Measure a timeline. The driver then waits for every task.

        Returns:
            The outputs by (mesh, value).

        Raises:
            PipelineError: A mesh failed; the original exception is the cause.
        """
        step = self._running = StepState(meshes=self._make_states(inputs), wait=record)
        del inputs
        try:
            failures = self._drive_all(step)
            if failures:
                raise describe_failures(self._program, failures, self._lines)
            if record:
                self._timeline = self._make_timeline(step)
            return {
                (mesh, value): step.meshes[mesh].arrays[self._places.of_value[mesh][value]]
                for mesh, value in self._program.outputs
                if mesh in self._part.meshes
            }
        finally:
            self._running = None
            step.clear()

    def standing(self, whose: Callable[[int], str] = lambda mesh: "") -> list[str]:
        """Describe where each mesh of this process is. Another thread calls this during `run`; `whose` names a mesh's process."""
        step = self._running
        return [] if step is None else describe_standing(step, self._part.meshes, whose)

    def timeline(self) -> Timeline:
        """Return the timeline of the last run with `record=True`."""
        if self._timeline is None:
            raise ArgumentError("No timeline was recorded: call run(..., record=True) first.")
        return self._timeline

    def _drive_all(self, step: StepState[A]) -> list[Failure]:
        if len(self._part.meshes) == 1 and self._watch is None:
            return self._performer.drive(step, self._part.meshes[0])
        return run_in_threads(self._performer.drive, step, self._part.meshes, watch=self._watch)

    def _make_states(self, inputs: Mapping[tuple[int, Value], A]) -> list[MeshState[A]]:
        """Make the state of each mesh, with its inputs."""
        self._check_inputs(inputs)
        states: list[MeshState[A]] = [
            MeshState(mesh=mesh, machine=MeshMachine(self._program.of(mesh)))
            for mesh in range(self._program.num_meshes)
        ]
        for mesh in self._part.meshes:
            for instruction in self._program.of(mesh):
                if isinstance(instruction, Receive) and instruction.number in self._part.remote:
                    states[mesh].machine.arrived(instruction.number)
        for (mesh, value), array in inputs.items():
            states[mesh].arrays[self._places.of_value[mesh][value]] = array
        return states

    def _check_inputs(self, inputs: Mapping[tuple[int, Value], A]) -> None:
        """Report all missing and unknown inputs at once."""
        given = set(inputs)
        wrong = [f"{value} on mesh {mesh} is missing" for mesh, value in sorted(self._inputs - given, key=str)]
        wrong += [f"{value} on mesh {mesh} is no input" for mesh, value in sorted(given - self._inputs, key=str)]
        if wrong:
            listed = "\n".join(f"  - {line}" for line in wrong)
            raise ArgumentError(f"The inputs of this step are not the program's:\n{listed}")

    def _make_timeline(self, step: StepState[A]) -> Timeline:
        begin = min((mesh.spans[0][1] for mesh in step.meshes if mesh.spans), default=0.0)
        spans = tuple(
            Span(mesh.machine.instructions[position], started - begin, ended - begin)
            for mesh in step.meshes
            for position, started, ended in mesh.spans
        )
        return Timeline(len(step.meshes), spans, begin)
