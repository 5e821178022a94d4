"""Performs the instructions of one step: one thread per mesh, arrays in, arrays out.

In: a verified `InstructionList`, one callable per task, and a function that starts copying an array to another mesh. Out:
the arrays of the outputs. Each thread walks the instructions of its mesh in order, as its `MeshMachine` says; a receive waits
for the sender's array, nothing else waits. With one mesh everything runs in the calling thread.

What can go wrong: a mesh fails or the user presses Ctrl-C. Then every mesh stops before its next instruction, all threads
end before `run` raises, and every array that the step had made is let go. XLA reports some errors late: the results of a
program that failed, and of every program that reads them, hold the error until somebody waits. Therefore a task may return
one more small array, its witness. Each mesh waits for its witnesses when it has nothing more to start, and the first that
holds an error, in the order of the program, names the instruction that caused it. Without witnesses the outputs may still be
in computation when `run` returns, as always in JAX.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import jax

from autopar.errors import ArgumentError
from autopar.runtime.failures import Failure, report
from autopar.runtime.processes import wait_until_ready
from autopar.runtime.thread_settings import settings_here, under
from autopar.schedules.instructions import Free, Instruction, InstructionList, Receive, Run, Send, Value
from autopar.schedules.launch_order import Part
from autopar.schedules.machine import MeshMachine
from autopar.schedules.timeline import Span, Timeline

Array = Any  # whatever the callables pass to each other: jax.Array, or a group of them
Executable = Callable[[Sequence[Array]], Sequence[Array]]
Transfer = Callable[[Array, Value, int, int], Array]

WAKE = -1  # in place of a transfer's number: look whether the step is over
# Nobody waits longer without looking up: a mesh, should a second Ctrl-C prevent the first from waking it; the calling thread,
# because Python does not notice a signal that comes between its last look and a wait.
POLL_S = 0.5
# A thread that waits in XLA for another process cannot be woken up.
LEAVE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Places:
    """Where an instruction finds its arrays in its mesh's list: looked up once, since a task may have hundreds."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gone: tuple[int, ...]  # reads that do not exist afterwards


@dataclass
class _Worker:
    """One mesh during one step."""

    mesh: int
    arrays: list[Array]
    machine: MeshMachine
    inbox: SimpleQueue[tuple[int, Array]] = field(default_factory=SimpleQueue)
    arrivals: dict[int, Array] = field(default_factory=dict)
    spans: list[tuple[int, float, float]] = field(default_factory=list)
    witnesses: list[tuple[int, Array]] = field(default_factory=list)

    def clear(self) -> None:
        """Let go of every array."""
        self.arrays.clear()
        self.witnesses.clear()
        self.arrivals.clear()
        while not self.inbox.empty():
            self.inbox.get()


@dataclass
class _Step:
    """All meshes during one step. `over`: nothing more may start, because of a failure or an interrupt.

    `abandoned`: the calling thread was interrupted, nobody waits for what is under way.
    """

    workers: list[_Worker]
    wait: bool
    over: bool = False
    abandoned: bool = False
    turn: int = 0
    turned: threading.Condition = field(default_factory=threading.Condition)

    def is_turn(self, turn: int) -> bool:
        """Wait until all earlier instructions that other processes share have been launched; False if the step is over."""
        with self.turned:
            while self.turn != turn and not self.over:
                self.turned.wait(POLL_S)
        return not self.over

    def pass_turn(self) -> None:
        """The instruction whose turn it was has been launched."""
        with self.turned:
            self.turn += 1
            self.turned.notify_all()

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
        part: Part | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Prepare to run `program`.

        `callables[task](arrays)` returns the arrays that the task writes, in order, and maybe a witness: one more small array
        of the same program. `transfer(array, value, source_mesh, target_mesh)` starts a copy and returns the array on the
        target mesh; it is called in the source mesh's thread. Both are called from threads that see those of JAX's context
        managers around `run` that `thread_settings` names. `synchronous` waits for each task before the next one of its mesh.

        `part` is what this process does of a program that several run: inputs and outputs are those of its meshes, and
        `transfer` gets None in place of arrays that lie on none of them. `watch` is called now and then while threads work; it
        raises if another process has failed. Then threads that wait for that process are left behind.
        """
        needed = {i.task for i in program.instructions if isinstance(i, Run)}
        if missing := sorted(needed - set(callables)):
            raise ArgumentError(f"No callable is given for task {', '.join(map(repr, missing))}.")
        self._program = program
        self._callables = dict(callables)
        self._transfer = transfer
        self._synchronous = synchronous
        self._timeline: Timeline | None = None
        self._part = part or Part.whole(program)
        self._turn_of = {place: turn for turn, place in enumerate(self._part.turns)}
        self._watch = watch
        self._inputs = frozenset((mesh, value) for mesh, value in program.inputs if mesh in self._part.meshes)
        self._place_of: list[dict[Value, int]] = [{} for _ in range(program.num_meshes)]
        for mesh, value in program.inputs:
            self._place_of[mesh].setdefault(value, len(self._place_of[mesh]))
        self._places = [
            [_places(instruction, self._place_of[mesh]) for instruction in program.of(mesh)]
            for mesh in range(program.num_meshes)
        ]

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
                raise report(self._program, failures)
            if record:
                self._timeline = self._gather(workers)
            wanted = [(m, value) for m, value in self._program.outputs if m in self._part.meshes]
            return {(m, value): workers[m].arrays[self._place_of[m][value]] for m, value in wanted}
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
        given = set(inputs)
        wrong = [f"{value} on mesh {mesh} is missing" for mesh, value in sorted(self._inputs - given, key=str)]
        wrong += [f"{value} on mesh {mesh} is no input" for mesh, value in sorted(given - self._inputs, key=str)]
        if wrong:
            raise ArgumentError(
                "The inputs of this step are not the program's:\n" + "\n".join(f"  - {w}" for w in wrong)
            )
        workers = [
            _Worker(mesh, [None] * len(places), MeshMachine(self._program.of(mesh)))
            for mesh, places in enumerate(self._place_of)
        ]
        for mesh in self._part.meshes:
            for instruction in self._program.of(mesh):
                if isinstance(instruction, Receive) and instruction.number in self._part.remote:
                    workers[mesh].machine.arrived(instruction.number)
        for (mesh, value), array in inputs.items():
            workers[mesh].arrays[self._place_of[mesh][value]] = array
        return workers

    def _work(self, step: _Step) -> list[Failure]:
        """Run this process's meshes to their end. No thread is left when this returns or raises, unless `watch` raises."""
        if len(self._part.meshes) == 1 and self._watch is None:
            return self._drive(step, self._part.meshes[0])
        ended: SimpleQueue[list[Failure]] = SimpleQueue()

        settings = settings_here()

        def target(mesh: int) -> None:
            found_here: list[Failure] = []
            try:
                with under(settings):
                    found_here += self._drive(step, mesh)
            except BaseException as error:  # noqa: BLE001 - the calling thread waits until every mesh has said how it ended
                found_here.append(Failure(mesh, step.workers[mesh].machine.position, error))
                step.end()
            finally:
                ended.put(found_here)

        threads = [
            threading.Thread(target=target, args=(mesh,), name=f"autopar mesh {mesh}", daemon=True)
            for mesh in self._part.meshes
        ]
        found: list[list[Failure]] = []
        try:
            for thread in threads:
                thread.start()
            while len(found) < len(threads):
                with contextlib.suppress(Empty):
                    found.append(ended.get(timeout=POLL_S))
                    continue
                if self._watch is not None:
                    self._watch()
        finally:
            step.over = step.abandoned = True  # first and not by a call: a second Ctrl-C may come with any call
            if len(found) < len(threads):
                step.end()
            for thread in threads:
                if thread.is_alive():
                    thread.join(None if self._watch is None else LEAVE_S)
        return list(itertools.chain.from_iterable(found))

    def _drive(self, step: _Step, mesh: int) -> list[Failure]:
        """One mesh to its end: an instruction that failed, and one before it whose results turn out to hold an error."""
        failure = self._walk(step, mesh)
        failures = [] if failure is None else [failure]
        if failures:
            step.end()
        if not step.abandoned and not any(isinstance(f.error, KeyboardInterrupt) for f in failures):
            late = _late_failure(step.workers[mesh], None if self._watch is None else step)
            if late is not None:
                failures.append(late)
                step.end()
        return failures

    def _walk(self, step: _Step, mesh: int) -> Failure | None:
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
                turn = self._turn_of.get((mesh, position))
                if turn is not None and not step.is_turn(turn):
                    continue
                started = time.perf_counter()
                machine.start()
                self._perform(machine.instructions[position], self._places[mesh][position], step)
                machine.finish()
                if turn is not None:
                    step.pass_turn()
                worker.spans.append((position, started, time.perf_counter()))
        except BaseException as error:  # noqa: BLE001 - every failure of a mesh is raised by `run`
            if machine.state == "running":
                machine.fail()
            return Failure(mesh, machine.position, error)
        return None

    def _perform(self, instruction: Instruction, places: _Places, step: _Step) -> None:
        worker = step.workers[instruction.mesh]
        arrays = worker.arrays
        if isinstance(instruction, Run):
            self._call(instruction, places, worker, wait=step.wait)
        elif isinstance(instruction, Send):
            source, target = instruction.source_mesh, instruction.target_mesh
            array = self._transfer(arrays[places.reads[0]], instruction.value, source, target)
            if target in self._part.meshes:
                step.workers[target].inbox.put((instruction.number, array))
        elif isinstance(instruction, Receive):
            arrays[places.writes[0]] = self._received(instruction, worker)
            if step.wait:
                jax.block_until_ready(arrays[places.writes[0]])
        else:
            arrays[places.gone[0]] = None

    def _received(self, receive: Receive, worker: _Worker) -> Array:
        """What has arrived; what comes from a mesh of other processes alone is fetched by this side's half of the transfer."""
        if receive.number not in self._part.remote:
            return worker.arrivals.pop(receive.number)
        return self._transfer(None, receive.value, receive.source_mesh, receive.target_mesh)

    def _call(self, run: Run, places: _Places, worker: _Worker, *, wait: bool) -> None:
        """Donated arrays are let go before the call: they are not there afterwards, whatever happens."""
        arrays = worker.arrays
        arguments = [arrays[place] for place in places.reads]
        for place in places.gone:
            arrays[place] = None
        results = self._callables[run.task](arguments)
        wanted = len(places.writes)
        if len(results) == wanted + 1:
            worker.witnesses.append((worker.machine.position, results[wanted]))
        elif len(results) != wanted:
            raise ArgumentError(f"task {run.task!r} returned {len(results)} arrays, it writes {wanted}")
        if wait:
            jax.block_until_ready(results)
        for place, array in zip(places.writes, results, strict=False):
            arrays[place] = array

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


def _places(instruction: Instruction, place_of: dict[Value, int]) -> _Places:
    """Give every value its place when it first occurs."""

    def places(values: Iterable[Value]) -> tuple[int, ...]:
        return tuple(place_of.setdefault(value, len(place_of)) for value in values)

    if isinstance(instruction, Run):
        gone = (instruction.reads[position] for position in instruction.donated)
        return _Places(places(instruction.reads), places(instruction.writes), places(gone))
    place = places([instruction.value])
    return _Places(
        reads=place if isinstance(instruction, Send) else (),
        writes=place if isinstance(instruction, Receive) else (),
        gone=place if isinstance(instruction, Free) else (),
    )


def _late_failure(worker: _Worker, shared: _Step | None) -> Failure | None:
    """The first instruction of a mesh whose result holds an error; waits for all that the mesh has started.

    In a step that is shared with other processes, which may never do their part, not beyond the step's end.
    """
    for position, witness in worker.witnesses:
        try:
            if shared is not None and not wait_until_ready(witness, lambda: shared.abandoned):
                return None
            jax.block_until_ready(witness)
        except BaseException as error:  # noqa: BLE001 - every failure of a mesh is raised by `run`
            return Failure(worker.mesh, position, error)
    return None


def _accept(worker: _Worker) -> None:
    """Wait for one transfer to this mesh, or for a reason to look up."""
    try:
        number, array = worker.inbox.get(timeout=POLL_S)
    except Empty:
        return
    if number != WAKE:
        worker.arrivals[number] = array
        worker.machine.arrived(number)
