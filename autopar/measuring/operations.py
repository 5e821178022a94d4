"""What was seen of programs, as recorded operations: every kernel has a place, and what is not known of it is said.

In: executions as the profiler has seen them, the text of the program, the plan. Out: `OperationsThatRan`. Executions that name
another module are left out; those that name none are the program's, since a call runs no other. What can go wrong: kernels that
cannot be led back to operations of the program. They are recorded under their own names, those of NCCL as collectives and others
as compute, and a sentence tells their share.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from autopar.explain.units import seconds_text
from autopar.hlo.text import Computation, parse_module
from autopar.measuring.kernels import collective_of_kernel, instructions_of
from autopar.measuring.profile import Seen
from autopar.measuring.program import module_name, operations_of
from autopar.plan import Plan
from autopar.recording.recorded import KERNEL, ProgramOperation, RecordedOperation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occasion:
    """Once that a program ran.

    Attributes:
        call: the number of the call.
        origin_s: the moment from which the seconds of the call count.
        task: of a pipeline; empty on one mesh.
        microbatch: of the task; None if it runs once per step.
    """

    call: int
    origin_s: float
    task: str = ""
    microbatch: int | None = None


Ran = tuple[Occasion, Seen, str | None]
"""When a program ran, what was seen of it, and the operation's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationsThatRan:
    """The operations by task and name, their executions, and what is not known, in words."""

    program: dict[tuple[str, str], ProgramOperation]
    operations: list[RecordedOperation]
    missing: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanOfProgram:
    """What ran of one program; `strange` is what the profiler names as the program's, and the program does not name."""

    program: dict[tuple[str, str], ProgramOperation]
    operations: list[RecordedOperation]
    strange: list[Seen]


def operations_that_ran(
    seen: Sequence[tuple[int, Seen]], hlo_text: str, plan: Plan, places: Mapping[int, int]
) -> OperationsThatRan:
    """What ran of a program that each call runs once.

    Args:
        seen: the numbers of calls, with what was seen of them.
        hlo_text: of the program.
        plan: of the program.
        places: in the mesh, by the numbers of devices.
    """
    module = module_name(hlo_text)
    origins: dict[int, float] = {}
    for call, one in seen:
        origins[call] = min(one.start_s, origins.get(call, one.start_s))
    own = [
        (Occasion(call=call, origin_s=origins[call]), one)
        for call, one in seen
        if one.device in places and one.module in (module, "")
    ]
    return told_of([ran_of_program(own, hlo_text, plan, places)])


def ran_of_program(
    own: Sequence[tuple[Occasion, Seen]], hlo_text: str, plan: Plan, places: Mapping[int, int]
) -> RanOfProgram:
    """What ran of one program, given what was seen of it alone, on each occasion."""
    known, computations = operations_of(hlo_text, plan.mesh_shape, plan.axis_names), parse_module(hlo_text)
    instructions = {name for computation in computations.values() for name in computation.instructions}
    kernels = [(occasion, one) for occasion, one in own if one.kernel]
    ran: list[Ran] = [(occasion, one, one.name) for occasion, one in own if not one.kernel and one.name in known]
    ran += _of_kernels(kernels, computations)
    found = [(occasion, one, _operation(one, name, known, occasion.task)) for occasion, one, name in ran]
    operations = [
        RecordedOperation(
            call=occasion.call,
            name=operation.name,
            device=places[one.device],
            start_s=one.start_s - occasion.origin_s,
            end_s=one.end_s - occasion.origin_s,
            goes_on=goes_on,
            task=occasion.task,
            microbatch=occasion.microbatch,
        )
        for (occasion, one, operation), goes_on in zip(found, _go_on(ran), strict=True)
    ]
    return RanOfProgram(
        program={(operation.task, operation.name): operation for _, _, operation in found},
        operations=operations,
        strange=[one for _, one in own if not one.kernel and one.name not in instructions],
    )


def told_of(programs: Sequence[RanOfProgram]) -> OperationsThatRan:
    """What ran of programs together, and what is not known of it, in words."""
    program = _named_below_the_root({key: operation for one in programs for key, operation in one.program.items()})
    operations = [operation for one in programs for operation in one.operations]
    strange = [seen for one in programs for seen in one.strange]
    missing = (*_missing(program, operations), *(_left_out(strange) if operations and strange else ()))
    return OperationsThatRan(program=program, operations=operations, missing=missing)


def _named_below_the_root(program: dict[tuple[str, str], ProgramOperation]) -> dict[tuple[str, str], ProgramOperation]:
    """The operations with modules named as below the model itself, as in plans, if all are in it: flax names the model too."""
    scopes = {one.scope for one in program.values() if one.scope}
    roots = {scope.partition("/")[0] for scope in scopes}
    if len(roots) != 1 or len(scopes) == 1:
        return program
    return {key: dataclasses.replace(one, scope=one.scope.partition("/")[2]) for key, one in program.items()}


def _of_kernels(kernels: Sequence[tuple[Occasion, Seen]], program: Mapping[str, Computation]) -> Iterator[Ran]:
    """The kernels of each occasion on each device in order, with the names of their operations."""
    ordered = sorted(kernels, key=lambda one: (one[0].call, one[1].device, one[1].start_s))
    for (occasion, _), group in itertools.groupby(ordered, key=lambda one: (one[0], one[1].device)):
        own = [one for _, one in group]
        yield from zip(itertools.repeat(occasion), own, instructions_of(own, program), strict=False)


def _operation(one: Seen, name: str | None, known: Mapping[str, ProgramOperation], task: str) -> ProgramOperation:
    """The operation of the program; a kernel's own if it is not known, and of a loop its copy of whether it goes on."""
    if name is None:
        found = ProgramOperation(name=one.kernel, opcode=KERNEL, collective=collective_of_kernel(one.kernel))
    else:
        found = known.get(name) or ProgramOperation(name=name, opcode=name.split(".")[0])
    return dataclasses.replace(found, task=task) if task else found


def _go_on(ran: Sequence[Ran]) -> Iterator[bool]:
    """Whether each is another kernel of the operation of the one before, such as a fill of memory for a product."""
    yield from (False for _ in ran[:1])
    for (occasion, before, name), (next_occasion, one, next_name) in itertools.pairwise(ran):
        same = (occasion, before.device, name, before.graph) == (next_occasion, one.device, next_name, one.graph)
        yield same and name is not None and bool(one.kernel)


def _missing(
    program: Mapping[tuple[str, str], ProgramOperation], operations: Sequence[RecordedOperation]
) -> Iterator[str]:
    if not operations:
        yield "the time of each operation: the profiler's names are not those of the compiled program"
    unknown_s = sum(one.seconds for one in operations if program[one.task, one.name].opcode == KERNEL)
    if unknown_s:
        share = unknown_s / sum(one.seconds for one in operations)
        yield (
            f"which operations of the program {seconds_text(unknown_s)} of kernels ({share:.1%}) ran for; they are recorded "
            "under the kernels' own names"
        )


def _left_out(strange: Sequence[Seen]) -> Iterator[str]:
    """What a profiler names as the program's, and the program does not name."""
    total_s = sum(one.end_s - one.start_s for one in strange)
    yield f"{seconds_text(total_s)} of operations that the compiled program does not name, such as {strange[0].name}"
