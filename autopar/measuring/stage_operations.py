"""What was seen of a pipeline's programs, each execution led back to its task and microbatch.

In: executions as the profiler has seen them, the spans of the tasks, the programs of the tasks. Out: `OperationsThatRan`. Each
task has a module of its own, whose name the profiler gives, and it is waited for. So an execution is of that task of its module,
or of its device's mesh if it names no module, during which it began. Executions of other modules, such as those that cut arrays
for a transfer, are left out. What can go wrong: an execution that began in no such task, or one whose operations began in
several; a sentence tells how many seconds these are, and they are left out. A thread that lost its core may tell the end of an
operation after the task has ended; the operation had ended then.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autopar.explain.units import seconds_text
from autopar.measuring.operations import Occasion, OperationsThatRan, ran_of_program, told_of
from autopar.measuring.profile import Seen
from autopar.measuring.program import module_name
from autopar.plan import Plan
from autopar.recording.recorded import RecordedSpan


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskProgram:
    """The program of a task.

    Attributes:
        hlo_text: of the program.
        plan: of its stage.
        mesh: the number of the mesh that it runs on.
        places: in that mesh, by the numbers of this process's devices.
    """

    hlo_text: str
    plan: Plan
    mesh: int
    places: Mapping[int, int]


def operations_of_tasks(
    seen: Sequence[tuple[int, Seen]],
    spans: Sequence[RecordedSpan],
    origins: Mapping[int, float],
    programs: Mapping[str, TaskProgram],
) -> OperationsThatRan:
    """What ran of the tasks of a pipeline.

    Args:
        seen: the numbers of calls, with what was seen of them.
        spans: of the calls.
        origins: the moment from which the seconds of the spans count, by the numbers of calls.
        programs: by the tasks.
    """
    tasks = {module_name(program.hlo_text): task for task, program in programs.items()}
    mesh_of = {device: program.mesh for program in programs.values() for device in program.places}
    holders = _Holders(spans, origins)
    own: dict[str, list[tuple[Occasion, Seen]]] = {task: [] for task in programs}
    lost: list[Seen] = []
    for call, ones in _executions(
        [(c, one) for c, one in seen if one.device in mesh_of and one.module in (*tasks, "")]
    ):
        task = tasks.get(ones[0].module, "")
        found = [holders.of(call, mesh_of[one.device], one.start_s, task) for one in ones]
        span = found[0]
        if span is None or any(other is not span for other in found):
            lost += ones
            continue
        occasion = Occasion(call=call, origin_s=origins[call], task=span.name, microbatch=span.microbatch)
        ends_s = origins[call] + span.end_s
        own[span.name] += [(occasion, dataclasses.replace(one, end_s=min(one.end_s, ends_s))) for one in ones]
    told = told_of(
        [
            ran_of_program(ones, programs[task].hlo_text, programs[task].plan, programs[task].places)
            for task, ones in own.items()
        ]
    )
    return dataclasses.replace(told, missing=(*told.missing, *_left_out(lost))) if lost else told


def _executions(seen: Sequence[tuple[int, Seen]]) -> Iterator[tuple[int, list[Seen]]]:
    """What was seen of each execution of a program, as far as the profiler tells executions apart; else each by itself."""
    by_run: dict[tuple[int, str, str], list[Seen]] = {}
    for call, one in seen:
        if one.run and one.module:
            by_run.setdefault((call, one.module, one.run), []).append(one)
        else:
            yield call, [one]
    for (call, _, _), ones in by_run.items():
        yield call, ones


class _Holders:
    """The tasks of each mesh in each call, in the order in which they ran; none overlap, as each is waited for."""

    def __init__(self, spans: Sequence[RecordedSpan], origins: Mapping[int, float]) -> None:
        self._origins = origins
        self._spans: dict[tuple[int, int], list[RecordedSpan]] = {}
        for span in sorted(spans, key=lambda span: span.start_s):
            if span.transfer is None:
                self._spans.setdefault((span.call, span.mesh), []).append(span)

    def of(self, call: int, mesh: int, moment_s: float, task: str) -> RecordedSpan | None:
        """The span of a mesh's task at a moment, if it is of `task` or that is empty; None if there is none."""
        spans, at_s = self._spans.get((call, mesh), []), moment_s - self._origins[call]
        number = bisect.bisect_right(spans, at_s, key=lambda span: span.start_s) - 1
        if number < 0 or at_s > spans[number].end_s or (task and spans[number].name != task):
            return None
        return spans[number]


def _left_out(lost: Sequence[Seen]) -> Iterator[str]:
    total_s = sum(one.end_s - one.start_s for one in lost)
    name = lost[0].name or lost[0].kernel
    yield f"to which task {seconds_text(total_s)} of operations belong, such as {name}: they began in none, or in several"
