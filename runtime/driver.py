"""Performs the instructions of one step: one thread per mesh, arrays in, arrays out.

In: a verified `InstructionList`, one callable per task, and a function that starts copying an array to another mesh. Out:
the arrays of the outputs; they may still be in computation, as always in JAX. Each thread walks the instructions of its
mesh in order, as its `MeshMachine` says; a receive waits for the sender's array, nothing else waits. With one mesh
everything runs in the calling thread.

What can go wrong: a mesh fails or the user presses Ctrl-C. Then every mesh stops before its next instruction, all threads
end before `run` raises, and every array that the step had made is let go. XLA reports some errors late, when a result is
used; `synchronous=True` waits for each task, so that the error names the instruction that caused it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import jax

from autopar.errors import ArgumentError, PipelineError
from autopar.runtime.instructions import Free, Instruction, InstructionList, Receive, Run, Send, Value
from autopar.runtime.machine import MeshMachine
from autopar.runtime.timeline import Span, Timeline

Array = Any  # whatever the callables pass to each other: jax.Array, or a group of them
Executable = Callable[[Sequence[Array]], Sequence[Array]]
Transfer = Callable[[Array, Value, int, int], Array]

WAKE = -1  # in place of a transfer's number: look whether the step is over
POLL_S = 0.5  # and a mesh that waits looks by itself, should a second Ctrl-C fall between the first and the waking


@dataclass(frozen=True)
class _Failure:
    """An exception on a mesh, and how many of its instructions were done before."""

    mesh: int
    position: int
    error: BaseException


@dataclass
class _Worker:
    """One mesh during one step."""

    mesh: int
    arrays: dict[Value, Array]
    machine: MeshMachine
    inbox: SimpleQueue[tuple[int, Array]] = field(default_factory=SimpleQueue)
    arrivals: dict[int, Array] = field(default_factory=dict)
    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def clear(self) -> None:
        """Let go of every array."""
        self.arrays.clear()
        self.arrivals.clear()
        while not self.inbox.empty():
            self.inbox.get()


@dataclass
class _Step:
    """All meshes during one step. `over`: nothing more may start, because of a failure or an interrupt."""

    workers: list[_Worker]
    wait: bool
    over: bool = False

    def end(self) -> None:
        """Let every mesh find out before its next instruction, and wake up those that wait."""
        self.over = True
        for worker in self.workers:
            worker.inbox.put((WAKE, None))


class Driver:
    """Runs one program again and again. Holds no thread and no array between two runs."""

    def __init__(
        self,
        program: InstructionList,
        callables: Mapping[str, Executable],
        transfer: Transfer,
        *,
        synchronous: bool = False,
    ) -> None:
        """Prepare to run `program`.

        `callables[task](arrays)` returns the arrays that the task writes, in order. `transfer(array, value, source_mesh,
        target_mesh)` starts a copy and returns the array on the target mesh; it is called in the source mesh's thread.
        Both are called from threads that do not see the caller's JAX context managers, so tasks should be compiled.
        """
        needed = {i.task for i in program.instructions if isinstance(i, Run)}
        if missing := sorted(needed - set(callables)):
            raise ArgumentError(f"No callable is given for task {', '.join(map(repr, missing))}.")
        self._program = program
        self._callables = dict(callables)
        self._transfer = transfer
        self._synchronous = synchronous
        self._timeline: Timeline | None = None

    def run(self, inputs: Mapping[tuple[int, Value], Array], *, record: bool = False) -> dict[tuple[int, Value], Array]:
        """One step. Returns the outputs by (mesh, value).

        Inputs that the program may consume are let go after their last use; to free their memory during the step, pass a
        mapping that nobody else holds. `record` measures a timeline, for which every task is waited for.

        Raises `PipelineError` if a mesh fails, with the original exception as its cause.
        """
        step = _Step(self._workers(inputs), wait=record or self._synchronous)
        del inputs
        workers = step.workers
        try:
            failures = self._work(step)
            if failures:
                raise self._error(failures)
            if record:
                self._timeline = self._gather(workers)
            return {(mesh, value): workers[mesh].arrays[value] for mesh, value in self._program.outputs}
        finally:
            for worker in workers:
                worker.clear()

    def timeline(self) -> Timeline:
        """The measured timeline of the last run with `record=True`."""
        if self._timeline is None:
            raise ArgumentError("No timeline was recorded: call run(..., record=True) first.")
        return self._timeline

    def _workers(self, inputs: Mapping[tuple[int, Value], Array]) -> list[_Worker]:
        """Each mesh with its inputs; all missing and unknown ones are reported at once."""
        expected = set(self._program.inputs)
        wrong = [f"{value} on mesh {mesh} is missing" for mesh, value in sorted(expected - set(inputs), key=str)]
        wrong += [f"{value} on mesh {mesh} is no input" for mesh, value in sorted(set(inputs) - expected, key=str)]
        if wrong:
            raise ArgumentError(
                "The inputs of this step are not the program's:\n" + "\n".join(f"  - {w}" for w in wrong)
            )
        workers = [_Worker(mesh, {}, MeshMachine(self._program.of(mesh))) for mesh in range(self._program.num_meshes)]
        for (mesh, value), array in inputs.items():
            workers[mesh].arrays[value] = array
        return workers

    def _work(self, step: _Step) -> list[_Failure]:
        """Run all meshes to their end. No thread is left when this returns or raises."""
        if len(step.workers) == 1:
            failure = self._drive(step, 0)
            return [] if failure is None else [failure]
        failures: SimpleQueue[_Failure | None] = SimpleQueue()

        def target(mesh: int) -> None:
            failure = self._drive(step, mesh)
            if failure is not None:
                step.end()
            failures.put(failure)

        threads = [
            threading.Thread(target=target, args=(worker.mesh,), name=f"autopar mesh {worker.mesh}", daemon=True)
            for worker in step.workers
        ]
        found: list[_Failure | None] = []
        try:
            for thread in threads:
                thread.start()
            found += [failures.get() for _ in threads]
        finally:
            step.over = True  # first and not by a call: a second Ctrl-C may come with any call
            if not found:
                step.end()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        return [failure for failure in found if failure is not None]

    def _drive(self, step: _Step, mesh: int) -> _Failure | None:
        """One mesh, from its first instruction to its last, or to the first failure anywhere."""
        worker = step.workers[mesh]
        machine = worker.machine
        try:
            while not machine.finished:
                if step.over:
                    machine.stop()
                    break
                position = machine.ready()
                if position is None:
                    _accept(worker)
                    continue
                started = time.perf_counter()
                machine.start()
                self._perform(machine.instructions[position], step)
                machine.finish()
                worker.spans.append((position, started, time.perf_counter()))
        except BaseException as error:  # noqa: BLE001 - every failure of a mesh is raised by `run`
            if machine.state == "running":
                machine.fail()
            return _Failure(mesh, machine.position, error)
        return None

    def _perform(self, instruction: Instruction, step: _Step) -> None:
        worker = step.workers[instruction.mesh]
        arrays = worker.arrays
        if isinstance(instruction, Run):
            self._call(instruction, arrays, wait=step.wait)
        elif isinstance(instruction, Send):
            target = instruction.target_mesh
            array = self._transfer(arrays[instruction.value], instruction.value, instruction.source_mesh, target)
            step.workers[target].inbox.put((instruction.number, array))
        elif isinstance(instruction, Receive):
            arrays[instruction.value] = worker.arrivals.pop(instruction.number)
            if step.wait:
                jax.block_until_ready(arrays[instruction.value])
        else:
            assert isinstance(instruction, Free)
            del arrays[instruction.value]

    def _call(self, run: Run, arrays: dict[Value, Array], *, wait: bool) -> None:
        """Donated arrays are let go before the call, so that the callable holds the only reference."""
        arguments = [arrays[value] for value in run.reads]
        for position in run.donated:
            del arrays[run.reads[position]]
        try:
            results = self._callables[run.task](arguments)
        finally:
            arguments.clear()
        if len(results) != len(run.writes):
            raise ArgumentError(f"task {run.task!r} returned {len(results)} arrays, it writes {len(run.writes)}")
        if wait:
            jax.block_until_ready(results)
        arrays.update(zip(run.writes, results, strict=True))

    def _error(self, failures: Sequence[_Failure]) -> BaseException:
        """The earliest failure in the global order, in the user's words; arrays in its frames are let go."""
        for failure in failures:
            _clear_frames(failure.error)
        first = min(failures, key=lambda failure: self._global_index(failure))
        if isinstance(first.error, KeyboardInterrupt):
            return first.error
        error = PipelineError(self._describe(first))
        error.__cause__ = first.error
        return error

    def _global_index(self, failure: _Failure) -> int:
        row = self._program.of(failure.mesh)
        instruction = row[min(failure.position, len(row) - 1)]
        return next(n for n, other in enumerate(self._program.instructions) if other is instruction)

    def _describe(self, failure: _Failure) -> str:
        row = self._program.of(failure.mesh)
        instruction = row[min(failure.position, len(row) - 1)]
        index = self._global_index(failure)
        where = f"instruction {index} of {len(self._program.instructions)}, `{instruction}`"
        if isinstance(instruction, Run):
            at = "" if instruction.microbatch is None else f", microbatch {instruction.microbatch}"
            what = f"Stage {instruction.stage}{at}: the {instruction.kind.replace('_', ' ')} failed"
        elif isinstance(instruction, Free):
            what = f"Freeing {instruction.value} failed"
        else:
            what = f"Moving {instruction.value} from mesh {instruction.source_mesh} to {instruction.target_mesh} failed"
        summary = str(failure.error).strip().split("\n")[0]
        return (
            f"{what} on mesh {failure.mesh} ({where}): {type(failure.error).__name__}: {summary}\n"
            "All meshes were stopped, and the step can be called again; arrays that it was given to consume may be gone."
        )

    def _gather(self, workers: Sequence[_Worker]) -> Timeline:
        begin = min((spans[0][1] for spans in (worker.spans for worker in workers) if spans), default=0.0)
        return Timeline(
            num_meshes=len(workers),
            spans=tuple(
                Span(worker.machine.instructions[position], started - begin, ended - begin)
                for worker in workers
                for position, started, ended in worker.spans
            ),
        )


def _accept(worker: _Worker) -> None:
    """Wait for one transfer to this mesh, or for a reason to look up."""
    try:
        number, array = worker.inbox.get(timeout=POLL_S)
    except Empty:
        return
    if number != WAKE:
        worker.arrivals[number] = array
        worker.machine.arrived(number)


def _clear_frames(error: BaseException | None) -> None:
    """Tracebacks keep the locals of their frames alive, and with them arrays."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
