"""How long a step takes and what it keeps alive, from durations instead of devices.

In: an `InstructionList`, seconds per task and per transfer, bytes per value. Out: a `Simulation`. The `MeshMachine`s that the
driver obeys say what may run; only the clock differs. A mesh executes in order. A task takes its seconds, every other
instruction none. A transfer occupies the link from its source to its target mesh, one after another per link and direction,
while both meshes go on. Only sums and maxima of the given durations are formed, so whole numbers and fractions give exact
results.

Memory on a mesh: inputs count from the start. What a task writes counts from the task's start. What it consumes counts until
its end, except for accumulators, which are written in place. A received copy counts from the moment it is sent. What can go
wrong: temporaries inside a task are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Free, InstructionList, Receive, Run, Send, Value
from autopar.schedules.machine import MeshMachine
from autopar.schedules.tasks import Schedule
from autopar.schedules.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step; tuples have one entry per mesh."""

    timeline: Timeline
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The waiting of the busiest mesh over its work: (p-1)/m for 1F1B with equal stages."""
        most_s = max(self.busy_s)
        return (self.makespan_s - most_s) / most_s


def simulate(
    program: InstructionList,
    *,
    run_s: Callable[[Run], float],
    transfer_s: Callable[[Send], float] = lambda send: 0,
    value_bytes: Callable[[Value], int] = lambda value: 1,
) -> Simulation:
    """Execute `program` by the clock.

    Args:
        program: It must have passed `check_instructions`, as everything that `emit` returns has.
        run_s: Seconds of a task.
        transfer_s: Seconds of a transfer.
        value_bytes: Bytes per device of a value.
    """
    meshes = range(program.num_meshes)
    state = _Clock(
        machines=[MeshMachine(program.of(mesh)) for mesh in meshes],
        now=[0 for _ in meshes],
        busy=[0 for _ in meshes],
        books=[[(0, 1, value) for home, value in program.inputs if home == mesh] for mesh in meshes],
        kept=set(program.inputs) - program.consumable,
    )
    progress = True
    while progress:
        progress = False
        for machine in state.machines:
            while (position := machine.ready()) is not None:
                machine.start()
                _perform(machine.instructions[position], state, run_s=run_s, transfer_s=transfer_s)
                machine.finish()
                progress = True
    assert all(machine.finished for machine in state.machines), "the program was not checked"
    spans = sorted(state.spans, key=lambda span: span.instruction.mesh)
    return Simulation(
        timeline=Timeline(program.num_meshes, tuple(spans)),
        makespan_s=max(state.now),
        busy_s=tuple(state.busy),
        peak_bytes=tuple(_peak(book, value_bytes) for book in state.books),
    )


def simulate_schedule(schedule: Schedule, run_s: Callable[[Run], float]) -> Simulation:
    """Execute the schedule on the plain chain of its stages, with transfers that take no time."""
    return simulate(make_chain(schedule).emit(), run_s=run_s)


@dataclass(kw_only=True)
class _Clock:
    """Per mesh: its machine, its time, its work so far, and when values came (+1) and went (-1).

    `kept` holds the inputs that survive the step, as long as no later version has taken their name.
    """

    machines: list[MeshMachine]
    now: list[float]
    busy: list[float]
    books: list[list[tuple[float, int, Value]]]
    kept: set[tuple[int, Value]]
    spans: list[Span] = field(default_factory=list)
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)
    arrival: dict[int, float] = field(default_factory=dict)


def _perform(
    instruction: Run | Send | Receive | Free,
    state: _Clock,
    *,
    run_s: Callable[[Run], float],
    transfer_s: Callable[[Send], float],
) -> None:
    mesh = instruction.mesh
    start = end = state.now[mesh]
    if isinstance(instruction, Run):
        end = start + run_s(instruction)
        state.busy[mesh] += end - start
        state.books[mesh] += _book(instruction, start, end, kept=state.kept)
        state.kept -= {(mesh, value) for value in instruction.writes}
    elif isinstance(instruction, Send):
        link = (mesh, instruction.target_mesh)
        begin = max(start, state.link_free.get(link, 0))
        state.link_free[link] = state.arrival[instruction.number] = begin + transfer_s(instruction)
        state.books[instruction.target_mesh].append((start, 1, instruction.value))
        state.machines[instruction.target_mesh].arrived(instruction.number)
    elif isinstance(instruction, Receive):
        end = max(start, state.arrival[instruction.number])
        state.kept.discard((mesh, instruction.value))
    else:
        state.books[mesh].append((start, -1, instruction.value))
    state.now[mesh] = end
    state.spans.append(Span(instruction, start, end))


def _book(run: Run, start: float, end: float, *, kept: set[tuple[int, Value]]) -> Iterator[tuple[float, int, Value]]:
    """What a task brings to its mesh and takes away. A donated value that is written again stays where it is."""
    donated = {run.reads[position] for position in run.donated}
    replaced = {value for value in run.writes if value in run.reads and (run.mesh, value) not in kept}
    yield from ((start, 1, value) for value in run.writes if value not in donated)
    yield from ((end, -1, value) for value in sorted((donated | replaced) - (donated & replaced), key=str))


def _peak(book: list[tuple[float, int, Value]], weight: Callable[[Value], int]) -> int:
    """Largest sum over time. At one instant, what goes makes room for what comes."""
    total = peak = 0
    for _, change, value in sorted(book, key=itemgetter(0, 1)):
        total += change * weight(value)
        peak = max(peak, total)
    return peak
